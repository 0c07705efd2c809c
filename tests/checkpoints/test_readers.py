"""Real quantisers' files, read and compared with what transformers computes from them.

Each folder's reference.json holds logits and greedy tokens of the exactly dequantised model in float32.
"""

import json
from pathlib import Path

import pytest
import torch
from model_folders import DATA, folders, prompts
from transformers import AutoConfig, AutoModelForCausalLM

from nybble.kernels.linear.reference import dequantize
from nybble.kernels.packing import W4A16Weight
from nybble.service.checkpoints import open_checkpoint

FOLDERS = folders()
LOGIT_TOLERANCE = 2e-3


def _model(folder: Path) -> torch.nn.Module:
    """transformers' own float32 model, filled through the reader; every tensor of the folder must be used."""
    config = AutoConfig.from_pretrained(folder)
    del config.quantization_config
    config.dtype = torch.float32
    model = AutoModelForCausalLM.from_config(config, attn_implementation="eager", dtype=torch.float32)
    state = {}
    with open_checkpoint(folder) as checkpoint:
        for name, module in model.named_modules():
            if isinstance(module, torch.nn.Linear) and not (name == "lm_head" and config.tie_word_embeddings):
                n, k = module.weight.shape
                weight = checkpoint.linear(name, n, k)
                state[f"{name}.weight"] = (
                    dequantize(weight) if isinstance(weight, W4A16Weight) else weight.float()
                )
                if module.bias is not None:
                    state[f"{name}.bias"] = checkpoint.bias(name).float()
        rest = [name for name, _ in model.named_parameters() if name not in state]
        state |= {name: checkpoint.tensor(name).float() for name in rest}
        assert checkpoint.unread() == []
    missing, unexpected = model.load_state_dict(state, strict=False)
    assert not unexpected and set(missing) <= {"lm_head.weight"}
    return model.eval()


@pytest.mark.parametrize("folder", FOLDERS, ids=lambda f: f.name)
def test_dequantised_model_gives_the_reference(folder: Path) -> None:
    model = _model(folder)
    for prompt in prompts(folder):
        ids = torch.tensor([prompt["input_ids"]])
        with torch.inference_mode():
            logits = model(ids).logits[0, -1]
            greedy = model.generate(
                ids,
                attention_mask=torch.ones_like(ids),
                do_sample=False,
                max_new_tokens=40,
                eos_token_id=-1,
                pad_token_id=0,
            )
        error = (logits[prompt["top20_ids"]] - torch.tensor(prompt["top20_logits"])).abs().max().item()
        assert error < LOGIT_TOLERANCE
        assert greedy[0, ids.shape[1] :].tolist() == prompt["greedy_ids"]


@pytest.mark.parametrize("folder", FOLDERS, ids=lambda f: f.name)
def test_act_order_is_kept_only_where_it_is_real(folder: Path) -> None:
    config = json.loads((folder / "config.json").read_text())
    quantization = config["quantization_config"]
    groups = quantization.get("config_groups") or {"": {}}
    expected = quantization.get("desc_act") or any(
        (g.get("weights") or {}).get("actorder") == "group" for g in groups.values()
    )
    hidden, wide = config["hidden_size"], config["intermediate_size"]
    with open_checkpoint(folder) as checkpoint:
        weights = [checkpoint.linear(f"model.layers.{i}.mlp.down_proj", hidden, wide) for i in range(2)]
    assert all((w.g_idx is not None) == bool(expected) for w in weights)


def test_progress_counts_every_byte_once() -> None:
    calls: list[tuple[int, int]] = []
    with open_checkpoint(
        DATA / "llama-ct-g32", lambda done, total: calls.append((done, total))
    ) as checkpoint:
        for name in checkpoint.names():
            checkpoint.tensor(name)
        checkpoint.tensor("model.norm.weight")
        total = checkpoint.total_bytes
    assert [c[0] for c in calls] == sorted({c[0] for c in calls})
    assert calls[-1] == (total, total)
    file_bytes = (DATA / "llama-ct-g32" / "model.safetensors").stat().st_size
    assert 0.98 * file_bytes < total < file_bytes


def test_a_tensor_outlives_the_checkpoint() -> None:
    with open_checkpoint(DATA / "llama-ct-g32") as checkpoint:
        norm = checkpoint.tensor("model.norm.weight")
    assert norm.shape == (256,) and torch.isfinite(norm.float()).all()
