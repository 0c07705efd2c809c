import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

from nybble.kernels.linear.reference import dequantize
from nybble.kernels.packing import W4A16Weight
from nybble.service.checkpoints import open_checkpoint
from nybble.service.checkpoints import quantize as quantize_module
from nybble.service.checkpoints.calibration import TEXT, importance, text_tokens
from nybble.service.checkpoints.quantize import FolderSource, QuantizeOptions, quantize
from nybble.service.errors import CheckpointError, ConfigError

DATA = Path(__file__).parents[1] / "data"
DOWN = "model.layers.1.mlp.down_proj"
PLAIN = QuantizeOptions(calibrate=False)


def _linears(folder: Path) -> dict[str, tuple[int, int]]:
    names = load_file(folder / "model.safetensors")
    return {n.removesuffix(".weight"): tuple(t.shape) for n, t in names.items() if n.endswith("_proj.weight")}


@pytest.mark.parametrize("group_size", [32, 64, 128])
@pytest.mark.parametrize("symmetric", [True, False], ids=["symmetric", "asymmetric"])
def test_folder_is_read_back(folder_16_bit: Path, tmp_path: Path, group_size: int, symmetric: bool) -> None:
    dst = tmp_path / "out"
    quantize(folder_16_bit, dst, QuantizeOptions(group_size, symmetric, calibrate=False), progress=False)
    original = load_file(folder_16_bit / "model.safetensors")
    linears = _linears(folder_16_bit)
    with open_checkpoint(dst) as checkpoint:
        for module, (n, k) in linears.items():
            weight = checkpoint.linear(module, n, k)
            assert isinstance(weight, W4A16Weight)
            assert (weight.group_size, weight.symmetric, weight.scales.dtype) == (
                group_size,
                symmetric,
                torch.bfloat16,
            )
            w = original[f"{module}.weight"].float()
            assert (dequantize(weight) - w).norm() < 0.2 * w.norm()
        for name in set(original) - {f"{module}.weight" for module in linears}:
            assert torch.equal(checkpoint.tensor(name), original[name])
        assert checkpoint.unread() == []


def test_gguf_is_read_back(gguf_file: Path, folder_16_bit: Path, tmp_path: Path) -> None:
    quantize(gguf_file, tmp_path / "out", progress=False)
    original = load_file(folder_16_bit / "model.safetensors")
    with open_checkpoint(tmp_path / "out") as checkpoint:
        for module, (n, k) in _linears(folder_16_bit).items():
            w = original[f"{module}.weight"].float()
            assert (dequantize(checkpoint.linear(module, n, k)) - w).norm() < 0.2 * w.norm()
        assert checkpoint.tensor("model.embed_tokens.weight").dtype == torch.float32, (
            "Q8_0 is not exact in 16 bits"
        )


def test_side_files_are_kept_byte_for_byte(folder_16_bit: Path, tmp_path: Path) -> None:
    quantize(folder_16_bit, tmp_path / "out", PLAIN, progress=False)
    for name in ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja", "generation_config.json"):
        assert (tmp_path / "out" / name).read_bytes() == (folder_16_bit / name).read_bytes()


def test_config_keeps_everything_and_says_how_it_was_quantised(folder_16_bit: Path, tmp_path: Path) -> None:
    quantize(folder_16_bit, tmp_path / "out", PLAIN, progress=False)
    before, after = (json.loads((f / "config.json").read_text()) for f in (folder_16_bit, tmp_path / "out"))
    quantization = after.pop("quantization_config")
    assert after == before
    assert quantization["ignore"] == ["lm_head"] and quantization["format"] == "pack-quantized"
    group = quantization["config_groups"]["group_0"]
    assert group["targets"] == ["Linear"] and group["weights"]["group_size"] == 32


def test_shards(folder_16_bit: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    quantize(folder_16_bit, tmp_path / "one", PLAIN, progress=False)
    monkeypatch.setattr(quantize_module, "SHARD_BYTES", 100_000)
    quantize(folder_16_bit, tmp_path / "many", PLAIN, progress=False)
    files = sorted(p.name for p in (tmp_path / "many").glob("*.safetensors"))
    assert len(files) > 2 and files[-1] == f"model-{len(files):05}-of-{len(files):05}.safetensors"
    with open_checkpoint(tmp_path / "one") as one, open_checkpoint(tmp_path / "many") as many:
        assert one.names() == many.names()
        assert all(torch.equal(one.tensor(name), many.tensor(name)) for name in one.names())


def test_files_are_as_readable_as_any_new_file(folder_16_bit: Path, tmp_path: Path) -> None:
    quantize(folder_16_bit, tmp_path / "out", PLAIN, progress=False)
    (tmp_path / "new").touch()
    modes = {path.stat().st_mode & 0o777 for path in (tmp_path / "out").iterdir()}
    assert modes == {(tmp_path / "new").stat().st_mode & 0o777}


def test_float32_source_becomes_bf16(folder_16_bit: Path, tmp_path: Path) -> None:
    source = tmp_path / "source"
    shutil.copytree(folder_16_bit, source)
    save_file(
        {n: t.float() for n, t in load_file(folder_16_bit / "model.safetensors").items()},
        source / "model.safetensors",
    )
    config = json.loads((source / "config.json").read_text()) | {"dtype": "float32"}
    (source / "config.json").write_text(json.dumps(config))
    quantize(source, tmp_path / "out", PLAIN, progress=False)
    assert json.loads((tmp_path / "out" / "config.json").read_text())["dtype"] == "bfloat16"
    with open_checkpoint(tmp_path / "out") as checkpoint:
        assert checkpoint.tensor("model.norm.weight").dtype == torch.bfloat16
        assert checkpoint.linear(DOWN, 128, 256).scales.dtype == torch.bfloat16


def test_importance_equals_what_a_whole_model_sees(folder_16_bit: Path) -> None:
    model = AutoModelForCausalLM.from_pretrained(
        folder_16_bit, dtype=torch.float32, attn_implementation="eager"
    )
    ids = text_tokens(folder_16_bit)[:, :128]
    expected: dict[str, torch.Tensor] = {}
    for name, module in model.named_modules():
        if name.endswith("_proj"):
            module.register_forward_pre_hook(
                lambda m, args, name=name: expected.update({name: args[0].flatten(0, -2).square().mean(0)})
            )
    with torch.inference_mode():
        expected["lm_head"] = (
            model(ids, output_hidden_states=True).hidden_states[-1].flatten(0, -2).square().mean(0)
        )
    source = FolderSource(folder_16_bit)
    read: list[str] = []
    found = importance(source.config, source.tensor, set(expected) - {"lm_head"}, ids, read.append)
    assert sorted(read) == sorted(source.names()), "each tensor is read once"
    assert found.keys() == expected.keys()
    for name, value in expected.items():
        torch.testing.assert_close(found[name], value, rtol=1e-4, atol=1e-7)


def test_calibration_lowers_the_error_of_the_outputs(folder_16_bit: Path, tmp_path: Path) -> None:
    source = FolderSource(folder_16_bit)
    ids = text_tokens(folder_16_bit)
    h = importance(source.config, source.tensor, {DOWN}, ids, lambda name: None)[DOWN]
    w = source.tensor(f"{DOWN}.weight").float()
    error = {}
    for calibrate in (True, False):
        quantize(
            folder_16_bit, tmp_path / str(calibrate), QuantizeOptions(calibrate=calibrate), progress=False
        )
        with open_checkpoint(tmp_path / str(calibrate)) as checkpoint:
            error[calibrate] = ((dequantize(checkpoint.linear(DOWN, 128, 256)) - w).square() * h).sum().item()
    assert error[True] < error[False]


def test_head_importance_is_noted(folder_16_bit: Path, tmp_path: Path) -> None:
    quantize(folder_16_bit, tmp_path / "out", progress=False)
    quantize(folder_16_bit, tmp_path / "plain", PLAIN, progress=False)
    source = FolderSource(folder_16_bit)
    h = importance(source.config, source.tensor, {DOWN}, text_tokens(folder_16_bit), lambda name: None)[
        "lm_head"
    ]
    with open_checkpoint(tmp_path / "out") as checkpoint:
        torch.testing.assert_close(checkpoint.head_importance(128), h, rtol=1e-3, atol=0)
        with pytest.raises(CheckpointError, match="nybble.json: lm_head_importance: accepted 64 numbers"):
            checkpoint.head_importance(64)
    with open_checkpoint(tmp_path / "plain") as checkpoint:
        assert torch.equal(checkpoint.head_importance(128), torch.ones(128)), (
            "the square of a final norm of ones"
        )
        assert checkpoint.head_importance(64) is None
        assert "model.norm.weight" in checkpoint.unread()


def test_calibration_text_is_plain_english_of_a_few_windows(folder_16_bit: Path) -> None:
    assert TEXT.isascii() and text_tokens(folder_16_bit).shape[0] >= 2


class TestRefusals:
    def test_group_size_that_does_not_fit_a_module(self, folder_16_bit: Path, tmp_path: Path) -> None:
        source = tmp_path / "source"
        shutil.copytree(folder_16_bit, source)
        tensors = load_file(source / "model.safetensors")
        tensors[f"{DOWN}.weight"] = torch.zeros(128, 96, dtype=torch.bfloat16)
        save_file(tensors, source / "model.safetensors")
        with pytest.raises(
            CheckpointError, match=rf"module {DOWN}: K=96 .* group_size 64; accepted for this module: 32"
        ):
            quantize(source, tmp_path / "out", QuantizeOptions(64), progress=False)
        assert not (tmp_path / "out").exists()

    def test_filled_destination(self, folder_16_bit: Path, tmp_path: Path) -> None:
        (tmp_path / "out").mkdir()
        (tmp_path / "out" / "mine").write_text("keep")
        with pytest.raises(CheckpointError, match="already exists and is not an empty folder"):
            quantize(folder_16_bit, tmp_path / "out", PLAIN, progress=False)
        assert [p.name for p in (tmp_path / "out").iterdir()] == ["mine"]

    def test_empty_destination_is_filled(self, folder_16_bit: Path, tmp_path: Path) -> None:
        (tmp_path / "out").mkdir()
        quantize(folder_16_bit, tmp_path / "out", PLAIN, progress=False)
        assert (tmp_path / "out" / "model.safetensors").exists()

    def test_source_that_is_not_there(self, tmp_path: Path) -> None:
        with pytest.raises(CheckpointError, match="no such file or folder"):
            quantize(tmp_path / "no", tmp_path / "out", progress=False)

    def test_source_that_is_quantised_already(self, folder_16_bit: Path, tmp_path: Path) -> None:
        quantize(folder_16_bit, tmp_path / "out", PLAIN, progress=False)
        with pytest.raises(CheckpointError, match="already quantised .*compressed-tensors"):
            quantize(tmp_path / "out", tmp_path / "again", progress=False)

    def test_weight_that_is_not_finite(self, folder_16_bit: Path, tmp_path: Path) -> None:
        source = tmp_path / "source"
        shutil.copytree(folder_16_bit, source)
        tensors = load_file(source / "model.safetensors")
        tensors[f"{DOWN}.weight"][3, 5] = float("nan")
        save_file(tensors, source / "model.safetensors")
        with pytest.raises(CheckpointError, match=f"module {DOWN}: .* not finite"):
            quantize(source, tmp_path / "out", PLAIN, progress=False)
        assert sorted(p.name for p in tmp_path.iterdir()) == ["source"]

    def test_model_transformers_does_not_know(self, folder_16_bit: Path, tmp_path: Path) -> None:
        source = tmp_path / "source"
        shutil.copytree(folder_16_bit, source)
        config = json.loads((source / "config.json").read_text()) | {"model_type": "unheard_of"}
        (source / "config.json").write_text(json.dumps(config))
        with pytest.raises(CheckpointError, match="transformers cannot build this model.*calibrate=False"):
            quantize(source, tmp_path / "out", progress=False)

    @pytest.mark.parametrize(
        ("change", "says"),
        [
            ({"intermediate_size": 512}, "tensor .* accepted .* by config.json"),
            ({"num_attention_heads": 3}, "num_attention_heads 3 is no multiple of num_key_value_heads 2"),
            ({"vocab_size": 512}, r"model.embed_tokens.weight: given \[1024, 128\], accepted \[512, 128\]"),
            ({"architectures": ["MixtralForCausalLM"]}, r"architectures is .*accepted one of \['Gemma2"),
            ({"num_local_experts": 8}, "field not understood: num_local_experts"),
            ({"tie_word_embeddings": False}, "no tensor lm_head.weight, which LlamaForCausalLM"),
            ({"num_hidden_layers": 3}, r"no tensor model.layers.2.self_attn.q_proj.weight"),
            ({"num_hidden_layers": 1}, r"model.layers.1.* does not use"),
        ],
        ids=[
            "size",
            "heads",
            "vocabulary",
            "architecture",
            "experts",
            "untied",
            "more layers",
            "fewer layers",
        ],
    )
    def test_config_that_does_not_fit_the_weights(
        self, folder_16_bit: Path, tmp_path: Path, change: dict[str, Any], says: str
    ) -> None:
        shutil.copytree(folder_16_bit, tmp_path / "src")
        config = json.loads((tmp_path / "src" / "config.json").read_text())
        (tmp_path / "src" / "config.json").write_text(json.dumps(config | change))
        with pytest.raises((CheckpointError, ConfigError), match=says):
            quantize(tmp_path / "src", tmp_path / "out", progress=False)
        assert [path.name for path in tmp_path.iterdir()] == ["src"]

    @pytest.mark.parametrize(
        ("name", "change", "says"),
        [
            (
                f"{DOWN}.weight",
                lambda t: t.flatten(),
                rf"{DOWN}.weight: given \[32768\], accepted \[128, 256\]",
            ),
            (
                f"{DOWN}.weight",
                lambda t: t[None],
                rf"{DOWN}.weight: given \[1, 128, 256\], accepted \[128, 256\]",
            ),
            ("model.norm.weight", lambda t: t[:64], r"model.norm.weight: given \[64\], accepted \[128\]"),
            ("model.embed_tokens.weight", lambda t: t * float("nan"), "not finite"),
            (
                f"{DOWN}.bias",
                lambda t: torch.ones(128),
                f"{DOWN}.bias, which LlamaForCausalLM .* does not use",
            ),
            (f"{DOWN}.qweight", lambda t: torch.ones(4), f"already quantised .tensor {DOWN}.qweight"),
            (f"{DOWN}.weight", lambda t: None, f"no tensor {DOWN}.weight, which LlamaForCausalLM"),
        ],
        ids=["1-D", "3-D", "norm", "nan", "bias", "quantised", "missing"],
    )
    @pytest.mark.parametrize("calibrate", [True, False], ids=["calibrated", "plain"])
    def test_what_serve_would_refuse(
        self, folder_16_bit: Path, tmp_path: Path, name: str, change: Any, says: str, calibrate: bool
    ) -> None:
        shutil.copytree(folder_16_bit, tmp_path / "src")
        tensors = load_file(tmp_path / "src" / "model.safetensors")
        tensors[name] = change(tensors.get(name))
        kept = {key: value.contiguous() for key, value in tensors.items() if value is not None}
        save_file(kept, tmp_path / "src" / "model.safetensors")
        with pytest.raises(CheckpointError, match=says):
            quantize(tmp_path / "src", tmp_path / "out", QuantizeOptions(calibrate=calibrate), progress=False)
        assert [path.name for path in tmp_path.iterdir()] == ["src"]

    def test_a_bias_that_is_zero_throughout_is_no_matter(self, folder_16_bit: Path, tmp_path: Path) -> None:
        shutil.copytree(folder_16_bit, tmp_path / "src")
        tensors = load_file(tmp_path / "src" / "model.safetensors") | {f"{DOWN}.bias": torch.zeros(128)}
        save_file(tensors, tmp_path / "src" / "model.safetensors")
        quantize(tmp_path / "src", tmp_path / "out", PLAIN, progress=False)

    @pytest.mark.parametrize(
        ("file", "method"), [("quantize_config.json", "gptq"), ("quant_config.json", "awq")]
    )
    def test_settings_in_a_file_of_their_own(
        self, folder_16_bit: Path, tmp_path: Path, file: str, method: str
    ) -> None:
        shutil.copytree(folder_16_bit, tmp_path / "src")
        (tmp_path / "src" / file).write_text('{"bits": 4, "group_size": 128}')
        with pytest.raises(CheckpointError, match=f"already quantised .*{file}: {method}.*serve it as it is"):
            quantize(tmp_path / "src", tmp_path / "out", PLAIN, progress=False)

    def test_tokenizer_of_another_model(self, folder_16_bit: Path) -> None:
        config = json.loads((folder_16_bit / "config.json").read_text())
        read = load_file(folder_16_bit / "model.safetensors").__getitem__
        with pytest.raises(CheckpointError, match="gives token 5000, config.json's vocab_size is 1024"):
            importance(config, read, [DOWN], torch.tensor([[5000]]), lambda name: None)

    def test_destination_that_cannot_be_made(self, folder_16_bit: Path, tmp_path: Path) -> None:
        (tmp_path / "file").touch()
        with pytest.raises(CheckpointError, match="file/out: cannot be made from"):
            quantize(folder_16_bit, tmp_path / "file" / "out", PLAIN, progress=False)

    def test_group_size_is_checked(self) -> None:
        with pytest.raises(ValueError, match="group_size: given 48, accepted 32, 64, 128"):
            QuantizeOptions(group_size=48)


def test_an_interrupted_run_leaves_nothing(
    folder_16_bit: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def interrupt(*args: Any) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(quantize_module, "_write_config", interrupt)
    with pytest.raises(KeyboardInterrupt):
        quantize(folder_16_bit, tmp_path / "out", PLAIN, progress=False)
    assert list(tmp_path.iterdir()) == []


def test_of_two_runs_at_once_one_wins(
    folder_16_bit: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_config = quantize_module._write_config
    nested: list[bool] = []

    def second_run_first(*args: Any) -> None:
        if not nested:
            nested.append(True)
            quantize(folder_16_bit, tmp_path / "out", PLAIN, progress=False)
        write_config(*args)

    monkeypatch.setattr(quantize_module, "_write_config", second_run_first)
    with pytest.raises(CheckpointError, match="another run filled this folder in the meantime"):
        quantize(folder_16_bit, tmp_path / "out", PLAIN, progress=False)
    assert [p.name for p in tmp_path.iterdir()] == ["out"]
    open_checkpoint(tmp_path / "out").close()


def _changed(folder: Path, dst: Path, name: str, change: Any) -> Path:
    shutil.copytree(folder, dst)
    tensors = load_file(dst / "model.safetensors")
    tensors[name] = change(tensors[name])
    save_file(tensors, dst / "model.safetensors")
    return dst


@pytest.mark.parametrize("name", ["model.embed_tokens.weight", "model.norm.weight", f"{DOWN}.weight"])
def test_fp8_without_scales_is_refused(folder_16_bit: Path, tmp_path: Path, name: str) -> None:
    src = _changed(folder_16_bit, tmp_path / "src", name, lambda t: t.to(torch.float8_e4m3fn))
    with pytest.raises(CheckpointError, match=f"{name}: given float8_e4m3fn, accepted bfloat16"):
        quantize(src, tmp_path / "out", PLAIN, progress=False)


def test_numbers_that_are_not_finite_are_refused(folder_16_bit: Path, tmp_path: Path) -> None:
    name = "model.norm.weight"
    src = _changed(folder_16_bit, tmp_path / "src", name, lambda t: t * float("inf"))
    with pytest.raises(CheckpointError, match=f"{name} holds values that are not finite"):
        quantize(src, tmp_path / "out", PLAIN, progress=False)


@pytest.mark.parametrize("key", ["quantization_config", "compression_config"])
def test_settings_of_another_kind_are_refused(folder_16_bit: Path, tmp_path: Path, key: str) -> None:
    src = shutil.copytree(folder_16_bit, tmp_path / "src")
    config = json.loads((src / "config.json").read_text())
    (src / "config.json").write_text(json.dumps(config | {key: "x"}))
    with pytest.raises(CheckpointError, match=f"{key}: given 'x', accepted none, or an object"):
        quantize(src, tmp_path / "out", PLAIN, progress=False)


def test_a_weight_without_rows_is_refused(folder_16_bit: Path, tmp_path: Path) -> None:
    src = _changed(folder_16_bit, tmp_path / "src", f"{DOWN}.weight", lambda t: t[:0])
    with pytest.raises(CheckpointError, match=rf"module {DOWN}: given a weight \[0, 256\]"):
        quantize(src, tmp_path / "out", PLAIN, progress=False)


@pytest.mark.parametrize("value", [10**400, -1, True, "1"], ids=["huge", "negative", "true", "text"])
def test_notes_of_another_kind_are_refused(tmp_path: Path, value: Any) -> None:
    folder = shutil.copytree(DATA / "llama-ct-g32", tmp_path / "m")
    (folder / "nybble.json").write_text(json.dumps({"lm_head_importance": [value] * 64}))
    with open_checkpoint(folder) as checkpoint:
        with pytest.raises(CheckpointError, match="lm_head_importance: accepted 64 numbers from 0 to"):
            checkpoint.head_importance(64)
