"""Folders: sharded, incomplete, damaged, and where a model name leads."""

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import huggingface_hub
import pytest
import torch
from huggingface_hub.errors import LocalEntryNotFoundError
from safetensors.torch import load_file, save_file

from nybble.service.checkpoints import open_checkpoint, resolve
from nybble.service.errors import CheckpointError
from nybble.service.models import read_config

DATA = Path(__file__).parents[1] / "data" / "llama-ct-g32"


@pytest.fixture
def sharded(tmp_path: Path) -> Path:
    """The small Llama in two shards with an index."""
    tensors = load_file(DATA / "model.safetensors")
    names = sorted(tensors)
    weight_map = {}
    for i, part in enumerate((names[: len(names) // 2], names[len(names) // 2 :]), start=1):
        file = f"model-{i:05}-of-00002.safetensors"
        save_file({name: tensors[name] for name in part}, tmp_path / file)
        weight_map |= dict.fromkeys(part, file)
    (tmp_path / "model.safetensors.index.json").write_text(
        json.dumps({"metadata": {}, "weight_map": weight_map})
    )
    shutil.copy(DATA / "config.json", tmp_path)
    return tmp_path


def test_sharded_equals_single(sharded: Path) -> None:
    with open_checkpoint(sharded) as parts, open_checkpoint(DATA) as whole:
        assert parts.names() == whole.names() and parts.total_bytes == whole.total_bytes
        assert all(torch.equal(parts.tensor(name), whole.tensor(name)) for name in whole.names())


def test_missing_shard(sharded: Path) -> None:
    (sharded / "model-00002-of-00002.safetensors").unlink()
    with pytest.raises(
        CheckpointError, match="model-00002-of-00002.safetensors: this file is missing.*fetch"
    ):
        open_checkpoint(sharded)


@pytest.mark.parametrize("keep", [0, 5, 1000, -1], ids=["empty", "no header", "cut header", "last byte"])
def test_truncated_shard(sharded: Path, keep: int) -> None:
    path = sharded / "model-00001-of-00002.safetensors"
    path.write_bytes(path.read_bytes()[:keep])
    with pytest.raises(
        CheckpointError, match="model-00001.*not a complete safetensors file.*fetch the file again"
    ):
        open_checkpoint(sharded)


def test_pointer_file_in_place_of_a_shard(sharded: Path) -> None:
    pointer = "version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 1\n"
    (sharded / "model-00001-of-00002.safetensors").write_text(pointer)
    with pytest.raises(CheckpointError, match="not a complete safetensors file"):
        open_checkpoint(sharded)


def test_index_names_a_tensor_its_file_lacks(sharded: Path) -> None:
    index = sharded / "model.safetensors.index.json"
    content = json.loads(index.read_text())
    content["weight_map"]["model.extra.weight"] = "model-00001-of-00002.safetensors"
    index.write_text(json.dumps(content))
    with pytest.raises(CheckpointError, match="model-00001.*the index says it holds model.extra.weight"):
        open_checkpoint(sharded)


def test_a_file_that_the_index_does_not_name_is_not_there(sharded: Path) -> None:
    """Left over from another version: its tensors count for nothing, even under names that are expected."""
    save_file(
        {"model.norm.weight": torch.zeros(256), "stray": torch.zeros(1)}, sharded / "model-old.safetensors"
    )
    (sharded / "adapter.safetensors").write_bytes(b"not even complete")
    with open_checkpoint(sharded) as parts, open_checkpoint(DATA) as whole:
        assert parts.names() == whole.names()
        assert torch.equal(parts.tensor("model.norm.weight"), whole.tensor("model.norm.weight"))


def test_a_tensor_that_the_index_gives_to_another_file_is_read_from_there(sharded: Path) -> None:
    first = sharded / "model-00001-of-00002.safetensors"
    tensors = load_file(first) | {"model.norm.weight": torch.zeros(256)}
    save_file(tensors, first)
    with open_checkpoint(sharded) as parts, open_checkpoint(DATA) as whole:
        assert torch.equal(parts.tensor("model.norm.weight"), whole.tensor("model.norm.weight"))


def test_an_index_beats_a_whole_file_beside_it(sharded: Path) -> None:
    save_file({"model.norm.weight": torch.zeros(256)}, sharded / "model.safetensors")
    with open_checkpoint(sharded) as parts, open_checkpoint(DATA) as whole:
        assert parts.names() == whole.names()


def test_a_whole_file_beats_an_index_all_of_whose_files_are_gone(sharded: Path) -> None:
    for path in sharded.glob("model-0*.safetensors"):
        path.unlink()
    shutil.copy(DATA / "model.safetensors", sharded)
    with open_checkpoint(sharded) as found, open_checkpoint(DATA) as whole:
        assert found.names() == whole.names()


def test_an_index_of_pickles_is_refused(sharded: Path) -> None:
    (sharded / "model.safetensors.index.json").write_text('{"weight_map": {"a": "pytorch_model.bin"}}')
    with pytest.raises(CheckpointError, match="accepted a .safetensors file \\(pickles are never opened\\)"):
        open_checkpoint(sharded)


@pytest.mark.parametrize(
    "text", ["{", "[]", '{"weight_map": {}}', '{"weight_map": {"a": "../a.safetensors"}}']
)
def test_bad_index(sharded: Path, text: str) -> None:
    (sharded / "model.safetensors.index.json").write_text(text)
    with pytest.raises(CheckpointError, match="model.safetensors.index.json"):
        open_checkpoint(sharded)


@pytest.mark.parametrize(
    "name", ["a\0.safetensors", "\ud800.safetensors", "a" * 5000 + ".safetensors"], ids=ascii
)
def test_an_index_of_names_that_no_file_can_have(sharded: Path, name: str) -> None:
    (sharded / "model.safetensors.index.json").write_text(json.dumps({"weight_map": {"x": name}}))
    with pytest.raises(CheckpointError, match="x is said to be in .{1,90}; accepted a file name") as error:
        open_checkpoint(sharded)
    str(error.value).encode()


def test_shards_without_an_index(sharded: Path) -> None:
    (sharded / "model.safetensors.index.json").unlink()
    with pytest.raises(CheckpointError, match="2 safetensors files .* without model.safetensors.index.json"):
        open_checkpoint(sharded)


def test_one_file_of_another_name(tmp_path: Path) -> None:
    shutil.copy(DATA / "config.json", tmp_path)
    shutil.copy(DATA / "model.safetensors", tmp_path / "gptq_model-4bit-32g.safetensors")
    with open_checkpoint(tmp_path) as checkpoint:
        assert checkpoint.has_tensor("model.norm.weight")


def test_pickles_are_named_and_not_opened(tmp_path: Path) -> None:
    shutil.copy(DATA / "config.json", tmp_path)
    (tmp_path / "pytorch_model.bin").write_bytes(b"not even a pickle")
    with pytest.raises(CheckpointError, match=r"pickled \(pytorch_model.bin\), which is never opened"):
        open_checkpoint(tmp_path)


def test_folder_without_weights(tmp_path: Path) -> None:
    shutil.copy(DATA / "config.json", tmp_path)
    with pytest.raises(CheckpointError, match=r"no \*.safetensors file"):
        open_checkpoint(tmp_path)


def test_16_bit_folder_says_how_to_quantise(write: Any) -> None:
    with pytest.raises(
        CheckpointError, match="no quantization_config, so these are 16-bit weights.*nybble quantize .* DST"
    ):
        open_checkpoint(write(None, {"a": torch.zeros(1)}))


def test_unknown_quant_method_lists_the_known_ones(write: Any) -> None:
    with pytest.raises(
        CheckpointError, match="given 'bitsandbytes', accepted compressed-tensors, gptq, awq, auto-round"
    ):
        open_checkpoint(write({"quant_method": "bitsandbytes"}, {"a": torch.zeros(1)}))


@pytest.mark.parametrize("text", ["", "{", "[1]"], ids=["empty", "cut", "list"])
def test_bad_config_json(tmp_path: Path, text: str) -> None:
    (tmp_path / "config.json").write_text(text)
    with pytest.raises(CheckpointError, match="config.json"):
        open_checkpoint(tmp_path)


def test_a_closed_checkpoint_says_so() -> None:
    checkpoint = open_checkpoint(DATA)
    checkpoint.close()
    with pytest.raises(CheckpointError, match="already closed"):
        checkpoint.tensor("model.norm.weight")
    with open_checkpoint(DATA) as checkpoint, pytest.raises(CheckpointError, match="no tensor model.nothing"):
        checkpoint.tensor("model.nothing")


class TestResolve:
    def test_folder(self) -> None:
        assert resolve(str(DATA)) == DATA

    def test_home_folder(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setenv("HOME", str(tmp_path))
        shutil.copytree(DATA, tmp_path / "m")
        assert resolve("~/m") == tmp_path / "m"

    def test_folder_without_config(self, tmp_path: Path) -> None:
        with pytest.raises(CheckpointError, match="no config.json in this folder"):
            resolve(str(tmp_path))

    @pytest.fixture
    def cache(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
        monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
        return tmp_path / "cache" / "nybble" / "gguf"

    def test_gguf_file_is_converted_once(
        self, gguf_file: Path, cache: Path, tmp_path: Path, caplog: Any
    ) -> None:
        caplog.set_level("INFO", "nybble")
        shutil.copy(gguf_file, tmp_path / "m.gguf")
        first = resolve(str(tmp_path / "m.gguf"), progress=False)
        assert first.parent == cache and first.name.startswith("m-") and (first / "tokenizer.json").is_file()
        assert (
            "converting once into" in caplog.text
            and "Q8_0 layers dequantised and rounded to int4 anew" in caplog.text
        )
        made = (first / "model.safetensors").stat().st_mtime_ns
        assert resolve(str(tmp_path), progress=False) == first, "a folder that holds just this file"
        assert (first / "model.safetensors").stat().st_mtime_ns == made
        (tmp_path / "m.gguf").touch()
        assert resolve(str(tmp_path / "m.gguf"), progress=False) != first, "another file under the same name"

    def test_a_folder_of_several_ggufs(self, tmp_path: Path) -> None:
        for name in "ab":
            (tmp_path / f"{name}.gguf").write_bytes(b"GGUF")
        with pytest.raises(CheckpointError, match=r"2 GGUF files \(a.gguf, b.gguf ...\); give one of them"):
            resolve(str(tmp_path))

    def test_a_file_that_is_no_gguf(self, tmp_path: Path) -> None:
        (tmp_path / "m.bin").write_bytes(b"PK\x03\x04 a pickle in a zip file")
        with pytest.raises(CheckpointError, match="m.bin: a file that is no GGUF file; accepted"):
            resolve(str(tmp_path / "m.bin"))

    def test_a_damaged_gguf(self, tmp_path: Path, cache: Path) -> None:
        (tmp_path / "m.gguf").write_bytes(b"GGUF")
        with pytest.raises(CheckpointError, match="m.gguf: not a complete GGUF file"):
            resolve(str(tmp_path / "m.gguf"))
        assert not list(cache.glob("*")), "nothing half-made"

    def test_one_gguf_of_a_hub_repository(
        self, gguf_file: Path, cache: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        asked = []

        def download(repo: str, file: str) -> str:
            asked.append((repo, file))
            return str(gguf_file)

        monkeypatch.setattr(huggingface_hub, "hf_hub_download", download)
        assert resolve("org/name/sub/m-Q8_0.gguf", progress=False).parent == cache
        assert asked == [("org/name", "sub/m-Q8_0.gguf")]

    @pytest.mark.parametrize("name", ["nothing", "./no/folder", "/no/folder", "a/b/c", ""])
    def test_neither_folder_nor_hub_id(self, name: str) -> None:
        with pytest.raises(
            CheckpointError,
            match="no such folder; accepted a folder, a GGUF file, a hub id such as org/name, or `demo`|no config.json",
        ):
            resolve(name)

    @pytest.mark.parametrize(
        "name",
        [
            "org/na..me",
            "org/name@../x",
            "org/name/../x.gguf",
            "a/" + "b" * 5000,
            "~nouser",
            "~nouser/m",
            "a\0b",
        ],
        ids=lambda name: name[:20].replace("\0", "0"),
    )
    def test_a_name_that_nothing_could_have(self, name: str) -> None:
        with pytest.raises(CheckpointError, match="accepted a folder, a GGUF file, a hub id") as error:
            resolve(name)
        assert len(str(error.value)) < 500

    @pytest.mark.parametrize("name", ["above/model", "above", "above/model/m.gguf", "m.gguf"])
    def test_what_this_user_may_not_read(
        self, name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """As a folder of a home is to the user of the container that it is mounted into."""
        (tmp_path / "above/model").mkdir(parents=True)
        (tmp_path / "m.gguf").touch()
        for closed in ("above", "m.gguf"):
            (tmp_path / closed).chmod(0)
        # Folders of pytest are for their owner alone: by its whole name root's could not be looked for.
        monkeypatch.chdir(tmp_path)
        me = os.geteuid()
        os.seteuid(me or 10001)
        try:
            with pytest.raises(CheckpointError, match=rf"{name}: user {me or 10001}, .*chmod -R a\+rX"):
                resolve(name)
        finally:
            os.seteuid(me)
            (tmp_path / "above").chmod(0o700)

    def test_hub_that_cannot_be_reached(self, monkeypatch: pytest.MonkeyPatch) -> None:
        def offline(*args: object, **kwargs: object) -> str:
            raise LocalEntryNotFoundError(
                "cannot find the snapshot in the cache, and outgoing traffic is disabled"
            )

        monkeypatch.setattr(huggingface_hub, "snapshot_download", offline)
        with pytest.raises(
            CheckpointError,
            match="org/name: no such folder here, and the hub did not give it.*HF_HUB_OFFLINE",
        ):
            resolve("org/name")

    def test_hub_snapshot_asks_for_no_pickles(self, monkeypatch: pytest.MonkeyPatch) -> None:
        asked: dict[str, Any] = {}

        def snapshot(repo: str, **kwargs: Any) -> str:
            asked.update(kwargs, repo=repo)
            return str(DATA)

        monkeypatch.setattr(huggingface_hub, "snapshot_download", snapshot)
        assert resolve("org/name@v1.0") == DATA
        assert asked["repo"] == "org/name" and asked["revision"] == "v1.0"
        kept = list(
            huggingface_hub.utils.filter_repo_objects(
                ["config.json", "model.safetensors", "tokenizer.model", "merges.txt", "chat_template.jinja", "a.bin",
                 "pytorch_model.pt", "original/params.json", "consolidated.safetensors", "modeling.py"],
                allow_patterns=asked["allow_patterns"],
                ignore_patterns=asked["ignore_patterns"],
            )
        )  # fmt: skip
        assert kept == [
            "config.json",
            "model.safetensors",
            "tokenizer.model",
            "merges.txt",
            "chat_template.jinja",
        ]

    def test_offline_a_model_comes_from_the_cache_alone(self, tmp_path: Path) -> None:
        """Hugging Face's cache as its library lays it out; nothing is asked of the network."""
        repo = tmp_path / "hub" / "models--org--name"
        commit = "0123456789abcdef0123456789abcdef01234567"
        shutil.copytree(DATA, repo / "snapshots" / commit)
        (repo / "refs").mkdir()
        (repo / "refs" / "main").write_text(commit)
        environment = os.environ | {"HF_HUB_OFFLINE": "1", "HF_HOME": str(tmp_path)}
        environment.pop("HF_HUB_CACHE", None)
        script = (
            "from nybble.service.checkpoints import resolve\n"
            "from nybble.service.errors import CheckpointError\n"
            "print(resolve('org/name'))\n"
            "try:\n    resolve('org/other')\nexcept CheckpointError as error:\n    print(error.message)"
        )
        run = subprocess.run(
            [sys.executable, "-c", script], env=environment, capture_output=True, text=True, check=True
        )
        found, refused = run.stdout.splitlines()
        assert found == str(repo / "snapshots" / commit)
        assert refused.startswith("org/other: no such folder here, and the hub did not give it")


@pytest.mark.parametrize("leaf", ["qweight", "weight_packed"])
def test_quantised_weights_whose_settings_are_missing(write: Any, leaf: str) -> None:
    """Not 16-bit weights: what is missing is the file that says how they were quantised."""
    folder = write(None, {f"model.layers.0.mlp.down_proj.{leaf}": torch.ones(8, 8, dtype=torch.int32)})
    with pytest.raises(
        CheckpointError, match=f"{leaf} is quantised, but nothing says how; .*quantize_config.json"
    ):
        open_checkpoint(folder)


@pytest.mark.parametrize("name", ["model.safetensors", "config.json", "generation_config.json"])
def test_a_pipe_in_place_of_a_file_is_not_waited_for(tmp_path: Path, name: str) -> None:
    folder = shutil.copytree(DATA, tmp_path / "m")
    (folder / name).unlink(missing_ok=True)
    os.mkfifo(folder / name)
    with pytest.raises(CheckpointError, match=f"{name}: .*(something else than a file|no file, but a pipe)"):
        with open_checkpoint(folder) as checkpoint:
            read_config(checkpoint.config, folder)
