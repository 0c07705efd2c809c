"""Damaged folders: every one ends in an error with words or gives the right answer, and an engine beside it goes on.

What no reader can see: a changed bit inside a weight's own bytes that leaves a finite number. There the damage must stay
where it is: every other tensor is read as it was.
"""

import json
import random
import shutil
import struct
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from model_folders import DATA, prompts
from safetensors.torch import load_file, save_file

from nybble.kernels.attention import CacheShape, Span
from nybble.kernels.attention.sdpa import SdpaAttention
from nybble.service.checkpoints import open_checkpoint
from nybble.service.engine.load import build_engine
from nybble.service.engine.protocol import EngineConfig, Request, SamplingParams
from nybble.service.errors import CheckpointError, ConfigError
from nybble.service.models import Batch, load, read_config

FOLDERS = ["llama-ct-g32", "llama-gptq-asym-g32", "mistral-awq-g32", "gemma3-ct-g32"]
ROUNDS = 12
CPU = torch.device("cpu")
WEIGHTS = "model.safetensors"


def logits(folder: Path) -> torch.Tensor:
    """Of one prompt, in float32, from a folder as `serve` reads it."""
    with open_checkpoint(folder) as checkpoint:
        config = read_config(checkpoint.config, folder)
        attention = SdpaAttention()
        model = load(config, checkpoint, attention, torch.float32, CPU, 64)
        unread = checkpoint.unread()
    if unread:
        raise CheckpointError(f"{folder}: tensors that are not used: {unread}")
    attention.allocate(CacheShape(config.layers, 4, 16, config.kv_heads, config.head_dim, torch.float32), CPU)
    ids = torch.tensor(prompts(folder)[0]["input_ids"][:40])
    with torch.inference_mode():
        return model.forward(Batch(ids, torch.arange(len(ids)), [Span(len(ids), len(ids), [0, 1, 2, 3])]))


def header_bytes(path: Path) -> int:
    return 8 + struct.unpack("<Q", path.read_bytes()[:8])[0]


def flip_header_bits(folder: Path, rng: random.Random) -> None:
    path = folder / WEIGHTS
    data = bytearray(path.read_bytes())
    for _ in range(rng.choice((1, 1, 2, 8))):
        data[rng.randrange(header_bytes(path))] ^= 1 << rng.randrange(8)
    path.write_bytes(data)


def truncate(folder: Path, rng: random.Random) -> None:
    path = folder / WEIGHTS
    data = path.read_bytes()
    path.write_bytes(
        data[: rng.choice((rng.randrange(len(data)), rng.randrange(header_bytes(path)), len(data) - 1))]
    )


def lengthen(folder: Path, rng: random.Random) -> None:
    with (folder / WEIGHTS).open("ab") as file:
        file.write(rng.randbytes(rng.choice((1, 2, 4096))))


def rename_tensor(folder: Path, rng: random.Random) -> None:
    tensors = load_file(folder / WEIGHTS)
    name = rng.choice(sorted(tensors))
    other = rng.choice(
        (
            name + "_",
            name.replace("layers.0", "layers.7"),
            name.replace("proj", "projection"),
            "x",
            name.upper(),
        )
    )
    tensors[other] = tensors.pop(name)
    save_file(tensors, folder / WEIGHTS)


def drop_tensor(folder: Path, rng: random.Random) -> None:
    tensors = load_file(folder / WEIGHTS)
    del tensors[rng.choice(sorted(tensors))]
    save_file(tensors, folder / WEIGHTS)


def reshape_tensor(folder: Path, rng: random.Random) -> None:
    tensors = load_file(folder / WEIGHTS)
    name = rng.choice([name for name, t in sorted(tensors.items()) if t.dim() == 2])
    value = tensors[name]
    tensors[name] = rng.choice(
        (value.t(), value[:-1], value.flatten(), value.double(), value.view(torch.uint8))
    ).contiguous()
    save_file(tensors, folder / WEIGHTS)


def flip_json_bytes(folder: Path, rng: random.Random) -> None:
    """Of what the weights mean. A digit that becomes another digit is a valid file of another model: not flipped."""
    path = folder / rng.choice(("config.json", "generation_config.json", "tokenizer_config.json"))
    data = bytearray(path.read_bytes())
    at = rng.choice(
        [i for i, byte in enumerate(data) if not chr(byte).isdigit() and chr(byte) not in "-+.e \n"]
    )
    data[at] ^= 1 << rng.randrange(8)
    path.write_bytes(data)


def retype_field(folder: Path, rng: random.Random) -> None:
    path = folder / "config.json"
    config = json.loads(path.read_text())
    target = config
    if rng.random() < 0.5:
        target = config["quantization_config"]
        if "config_groups" in target and rng.random() < 0.7:
            target = target["config_groups"]["group_0"]["weights"]
    target[rng.choice(sorted(target))] = rng.choice(("x", [], [1], {"a": 1}, -1, 10**30, float("nan")))
    path.write_text(json.dumps(config))


MUTATIONS: list[Callable[[Path, random.Random], None]] = [
    flip_header_bits, truncate, lengthen, rename_tensor, drop_tensor, reshape_tensor, flip_json_bytes, retype_field,
]  # fmt: skip


@pytest.fixture(scope="module")
def neighbour():
    """An engine of an undamaged model, in this very process."""
    return build_engine(
        EngineConfig(
            str(DATA / "llama-ct-g32"),
            dtype="float32",
            device="cpu",
            lm_head="keep",
            kv_cache_bytes=16 << 20,
            threads=1,
        )
    )


def answer(engine, name: str) -> list[int]:
    prompt = prompts(DATA / "llama-ct-g32")[0]
    engine.add(
        Request(name, tuple(prompt["input_ids"]), SamplingParams(8, temperature=0.0, ignore_eos=True), 0.0)
    )
    tokens = []
    while engine.has_work:
        tokens += [t.token_id for out in engine.step() for t in out.tokens]
    assert tokens == prompt["greedy_ids"][:8]
    return tokens


@pytest.fixture(scope="module", params=FOLDERS)
def whole(request) -> tuple[Path, torch.Tensor]:
    folder = DATA / request.param
    return folder, logits(folder)


@pytest.mark.parametrize("mutate", MUTATIONS, ids=lambda f: f.__name__)
def test_an_error_with_words_or_the_right_answer(whole, neighbour, mutate, tmp_path) -> None:
    folder, expected = whole
    refused = 0
    for seed in range(ROUNDS):
        damaged = tmp_path / str(seed)
        shutil.copytree(folder, damaged)
        mutate(damaged, random.Random(f"{folder.name} {mutate.__name__} {seed}"))
        try:
            found = logits(damaged)
        except (CheckpointError, ConfigError) as error:
            refused += 1
            assert len(error.message) > 30 and "\n" not in error.message, error.message
        except ValueError as error:
            assert "no linear kernel" in str(error)
        else:
            torch.testing.assert_close(found, expected, rtol=0, atol=1e-4, msg=f"seed {seed}: a wrong answer")
    assert refused, "the damage was never noticed"
    answer(neighbour, f"{folder.name}-{mutate.__name__}")


@pytest.mark.parametrize("seed", range(8))
def test_a_bit_inside_a_weight_stays_where_it_is(whole, seed: int, tmp_path: Path) -> None:
    folder, _ = whole
    rng = random.Random(seed)
    damaged = tmp_path / "m"
    shutil.copytree(folder, damaged)
    path = damaged / WEIGHTS
    data = bytearray(path.read_bytes())
    data[rng.randrange(header_bytes(path), len(data))] ^= 1 << rng.randrange(8)
    path.write_bytes(data)
    with open_checkpoint(folder) as good, open_checkpoint(damaged) as bad:
        changed = [
            name
            for name in good.names()
            if not torch.equal(good.tensor(name).view(torch.uint8), bad.tensor(name).view(torch.uint8))
        ]
    assert len(changed) == 1
    try:
        assert torch.isfinite(logits(damaged)).all()
    except CheckpointError as error:
        assert changed[0] in error.message
