"""The saved prepacked form: the same numbers with the weights themselves unread, and never one of other weights."""

import json
import os
import shutil
from pathlib import Path

import pytest
import torch
from model_folders import DATA
from safetensors.torch import load_file, save_file

from nybble.kernels.linear import W4A16Linear
from nybble.kernels.linear.cpu import block_rows
from nybble.kernels.target import cpu_target
from nybble.service.checkpoints import open_checkpoint
from nybble.service.checkpoints.prepacked import prepack, prepacked_layout
from nybble.service.checkpoints.quantize import QuantizeOptions, quantize
from nybble.service.engine.load import build_engine
from nybble.service.engine.protocol import EngineConfig
from nybble.service.errors import CheckpointError

LAYOUT = prepacked_layout(cpu_target(), torch.bfloat16)
pytestmark = pytest.mark.skipif(block_rows() == 0, reason="this torch build's int4 CPU layout is not known")
# fused and biased, four norms and tied, packed with a head of its own
FOLDERS = ["qwen2-gptq-g128", "gemma3-ct-g32", "phi3-ct-g32"]


@pytest.fixture(params=FOLDERS)
def folder(request, tmp_path: Path) -> Path:
    shutil.copytree(DATA / request.param, tmp_path / "m")
    return tmp_path / "m"


def engine(folder: Path, **config):
    defaults = {"dtype": "bfloat16", "device": "cpu", "kv_cache_bytes": 16 << 20, "threads": 1}
    return build_engine(EngineConfig(str(folder), **(defaults | config)))


def states(made) -> dict[str, torch.Tensor]:
    found = {}
    for kind, layers in made._runner.model.linears.items():
        for i, layer in enumerate(layers):
            if isinstance(layer, W4A16Linear):
                found |= {f"{kind}.{i}.{name}": t for name, t in layer.saved().items()}
                found[f"{kind}.{i}.bias"] = torch.zeros(0) if layer.bias is None else layer.bias
    return found


def test_the_engine_is_the_same_either_way(folder: Path, caplog) -> None:
    caplog.set_level("INFO", "nybble")
    plain = states(engine(folder))
    assert "prepacked" not in caplog.text
    assert prepack(folder) == folder / "prepacked" / f"{LAYOUT}.safetensors"
    fast = states(engine(folder))
    assert f"{LAYOUT}.safetensors: loading weights as they were prepacked" in caplog.text
    assert set(plain) == set(fast) and all(torch.equal(plain[name], fast[name]) for name in plain)


def test_the_weights_themselves_are_not_read(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    prepack(folder)
    read: list[str] = []
    with open_checkpoint(folder) as checkpoint:
        peek = checkpoint._files.peek
        monkeypatch.setattr(checkpoint._files, "peek", lambda name, *a: read.append(name) or peek(name, *a))
        monkeypatch.setattr("nybble.service.engine.load.open_checkpoint", lambda *a, **k: checkpoint)
        engine(folder)
    assert read and not [
        name for name in read if name.endswith(("qweight", "weight_packed", "scales", "weight_scale"))
    ]


@pytest.mark.parametrize("change", ["config", "header", "newer", "layout", "float32"])
def test_one_that_does_not_belong_is_left_alone(folder: Path, change: str, caplog) -> None:
    caplog.set_level("INFO", "nybble")
    path = prepack(folder)
    weights = folder / "model.safetensors"
    if change == "config":
        config = json.loads((folder / "config.json").read_text())
        (folder / "config.json").write_text(json.dumps(config | {"rms_norm_eps": 2e-5}))
    elif change == "header":
        save_file(load_file(weights), weights, metadata={"format": "pt", "note": "again"})
        os.utime(weights, (0, 0))
    elif change == "newer":
        os.utime(weights, (2e9, 2e9))
    elif change == "layout":
        path.rename(path.with_name("cpu_int4-7-bfloat16.safetensors"))
    engine(folder, dtype="float32" if change == "float32" else "bfloat16")
    assert "loading weights as they were prepacked" not in caplog.text
    assert ("made from other weights" in caplog.text) == (change in ("config", "header", "newer"))


def test_a_damaged_one_is_passed_over_with_one_warning(folder: Path, caplog) -> None:
    path = prepack(folder)
    path.write_bytes(path.read_bytes()[:-1])
    engine(folder)
    found = [r for r in caplog.records if "prepacked" in r.getMessage()]
    assert len(found) == 1 and "not a complete safetensors file" in found[0].getMessage()


def test_weights_changed_in_place_are_noticed_whatever_their_time(folder: Path, caplog) -> None:
    prepack(folder)
    weights = folder / "model.safetensors"
    told = weights.stat()
    tensors = load_file(weights)
    name = next(n for n in tensors if n.endswith(("qweight", "weight_packed")))
    start = weights.read_bytes().index(tensors[name].numpy().tobytes()[:64])
    with weights.open("r+b") as file:
        file.seek(start)
        file.write(bytes(64))
    os.utime(weights, ns=(told.st_atime_ns, told.st_mtime_ns))
    engine(folder)
    assert "made from other weights" in caplog.text


@pytest.mark.parametrize(
    "configs", ["5", "{", "[1]", '{"a": 1}', '{"a": {"k": "x", "n": 1, "group_size": 32, "symmetric": true}}']
)
def test_metadata_of_another_kind_is_passed_over(folder: Path, configs: str, caplog) -> None:
    path = prepack(folder)
    with open_checkpoint(folder) as checkpoint:
        fingerprint = checkpoint.fingerprint
    metadata = {"format": "pt", "layout": LAYOUT, "fingerprint": fingerprint, "configs": configs}
    save_file(load_file(path), path, metadata=metadata)
    engine(folder)
    assert "the saved layers are not used" in caplog.text


def test_a_link_that_leads_nowhere_beside_it_is_no_matter(folder: Path, caplog) -> None:
    caplog.set_level("INFO", "nybble")
    prepack(folder)
    (folder / "other.safetensors").symlink_to(folder / "nowhere")
    engine(folder)
    assert "loading weights as they were prepacked" in caplog.text


def test_one_of_other_shapes_is_an_error_with_words(folder: Path) -> None:
    path = prepack(folder)
    with open_checkpoint(folder) as checkpoint:
        fingerprint = checkpoint.fingerprint
    from safetensors import safe_open

    with safe_open(path, "pt") as file:
        metadata = file.metadata()
    tensors = load_file(path)
    name = next(name for name in tensors if name.endswith("packed"))
    save_file(tensors | {name: tensors[name][1:].contiguous()}, path, metadata=metadata)
    assert metadata["fingerprint"] == fingerprint
    with pytest.raises(CheckpointError, match="as it was prepacked: saved packed: given torch.uint8"):
        engine(folder)


def test_numbers_that_are_not_finite_are_refused(folder: Path) -> None:
    path = prepack(folder)
    from safetensors import safe_open

    with safe_open(path, "pt") as file:
        metadata = file.metadata()
    tensors = load_file(path)
    name = next(name for name, t in tensors.items() if t.is_floating_point())
    tensors[name].view(-1)[5] = float("nan")
    save_file(tensors, path, metadata=metadata)
    with pytest.raises(CheckpointError, match=f"{name} as it was prepacked.*not finite"):
        engine(folder)


def test_dense_copies_are_made_from_the_weights(folder: Path) -> None:
    prepack(folder)
    assert engine(folder, dense_copies="enabled").info.memory.dense_layers > 0


def test_quantize_saves_it(folder_16_bit: Path, tmp_path: Path) -> None:
    quantize(folder_16_bit, tmp_path / "out", QuantizeOptions(calibrate=False, prepack=True), progress=False)
    assert [p.name for p in (tmp_path / "out" / "prepacked").iterdir()] == [f"{LAYOUT}.safetensors"]
    with open_checkpoint(tmp_path / "out") as checkpoint:
        checkpoint.use_prepacked(LAYOUT)
        assert checkpoint.has_saved("model.layers.1.gate_up") and not checkpoint.has_saved(
            "model.layers.2.qkv"
        )
