"""One file's header against its bytes: what the format's own library writes is read, anything else is refused."""

import json
import struct
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from nybble.service.checkpoints.files import AHEAD_BYTES, TensorFiles
from nybble.service.checkpoints.safetensors_file import DTYPES, ReadAhead, SafetensorsFile
from nybble.service.errors import CheckpointError


def raw(path: Path, header: Any, data: bytes, length: int | None = None) -> Path:
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    path.write_bytes(struct.pack("<Q", len(text) if length is None else length) + text + data)
    return path


def of(**fields: Any) -> dict[str, Any]:
    return {"a": {"dtype": "U8", "shape": [4], "data_offsets": [0, 4]} | fields}


@pytest.mark.parametrize("dtype", DTYPES.values(), ids=str)
@pytest.mark.parametrize("shape", [(), (0,), (1,), (3, 5), (2, 0, 4)], ids=str)
def test_every_type_and_shape_comes_back(tmp_path: Path, dtype: torch.dtype, shape: tuple[int, ...]) -> None:
    value = torch.randint(0, 2, shape).to(dtype)
    save_file({"a": value, "b": torch.ones(3)}, tmp_path / "m.safetensors")
    file = SafetensorsFile(tmp_path / "m.safetensors")
    found = file.read(file.entries["a"], "a")
    assert found.dtype is dtype and found.shape == value.shape
    assert torch.equal(found.flatten().view(torch.uint8), value.flatten().view(torch.uint8))


def test_more_than_one_block_and_first_rows(tmp_path: Path) -> None:
    value = torch.arange(5_000_000, dtype=torch.int32).view(1000, 5000)
    save_file({"a": value}, tmp_path / "m.safetensors")
    file = SafetensorsFile(tmp_path / "m.safetensors")
    entry = file.entries["a"]
    assert torch.equal(file.read(entry, "a"), value)
    assert torch.equal(file.read(entry, "a", drop=True), value), "bytes given back can be read again"
    assert torch.equal(file.read(entry, "a", rows=7), value[:7])
    assert torch.equal(file.read(entry, "a", rows=2000), value)


@pytest.mark.parametrize(
    ("header", "data", "length", "why"),
    [
        (of(), b"1234", 10**15, "a header of 1000000000000000 bytes does not fit"),
        (of(), b"1234", 1, "a header of 1 bytes does not fit"),
        (b"\xff{}", b"", None, "its header is no JSON"),
        (b"[1]", b"", None, "its header is no JSON object"),
        (b'{"a": 1, "a": 2}', b"", None, "'a' is there twice"),
        (b"[" * 100_000, b"", None, "its header is no JSON"),
        ({"a": 5}, b"", None, "describes a as 5"),
        ({"a": {"dtype": "U8"}}, b"", None, "describes a as"),
        (of(shape=[-4]), b"1234", None, "describes a as"),
        (of(shape=[4.0]), b"1234", None, "describes a as"),
        (of(data_offsets=[4, 0]), b"1234", None, "describes a as"),
        (of(data_offsets=[0, 4, 8]), b"1234", None, "describes a as"),
        (of(shape=[5]), b"1234", None, r"a, U8 \[5\], cannot be 4 bytes long"),
        (of(dtype="F16"), b"1234", None, r"a, F16 \[4\], cannot be 4 bytes long"),
        (of(), b"123", None, "its tensors end at byte"),
        (of(), b"12345", None, "its tensors end at byte"),
        (of(data_offsets=[1, 5]), b"12345", None, "a begins at byte"),
        (of() | {"b": of()["a"]}, b"1234", None, "b begins at byte"),
    ],
    ids=lambda v: v if isinstance(v, str) else "",
)
def test_a_header_that_does_not_fit_is_refused(
    tmp_path: Path, header: Any, data: bytes, length: int | None, why: str
) -> None:
    with pytest.raises(
        CheckpointError, match=f"not a complete safetensors file .*{why}.*fetch the file again"
    ):
        SafetensorsFile(raw(tmp_path / "m.safetensors", header, data, length))


@pytest.mark.parametrize("shape", [[0, 10**30], [2**63, 0], [0, 2**40, 2**40]], ids=str)
def test_a_dimension_beyond_all_bounds_is_refused_also_beside_a_0(tmp_path: Path, shape: list[int]) -> None:
    header = {"a": {"dtype": "F32", "shape": shape, "data_offsets": [0, 0]}}
    with pytest.raises(CheckpointError, match="its header describes a as"):
        SafetensorsFile(raw(tmp_path / "m.safetensors", header, b""))


def test_a_folder_in_place_of_the_file_is_named(tmp_path: Path) -> None:
    (tmp_path / "model.safetensors").mkdir()
    with pytest.raises(CheckpointError, match="model.safetensors: given something else than a file"):
        SafetensorsFile(tmp_path / "model.safetensors")


def test_a_type_of_another_kind_is_refused_when_it_is_read(tmp_path: Path) -> None:
    file = SafetensorsFile(raw(tmp_path / "m.safetensors", of(dtype="F4", shape=[8]), b"1234"))
    with pytest.raises(CheckpointError, match="tensor a: given type F4, accepted BOOL"):
        file.read(file.entries["a"], "a")


def test_a_file_cut_while_it_is_open(tmp_path: Path) -> None:
    path = raw(tmp_path / "m.safetensors", of(), b"1234")
    file = SafetensorsFile(path)
    path.write_bytes(path.read_bytes()[:-2])
    with pytest.raises(CheckpointError, match="tensor a: the file ends 2 bytes early"):
        file.read(file.entries["a"], "a")


class TestReadAhead:
    def _ahead(self, sizes: dict[str, int], window: int) -> tuple[ReadAhead, list[str]]:
        started: list[str] = []

        def read(name: str) -> torch.Tensor:
            started.append(name)
            return torch.tensor(sizes[name])

        return ReadAhead(list(sizes), sizes.__getitem__, read, window), started

    def test_everything_is_read_once_and_in_order(self) -> None:
        sizes = {str(i): i for i in range(50)}
        ahead, started = self._ahead(sizes, window=60)
        assert [int(ahead.take(name)) for name in sizes] == list(sizes.values())
        assert sorted(started, key=int) == list(sizes)
        assert ahead.take("0") is None, "a second time it is the caller's business"
        ahead.close()

    def test_no_more_than_the_window_is_ahead(self) -> None:
        ahead, started = self._ahead({"a": 40, "b": 40, "c": 40, "d": 500, "e": 1}, window=100)
        ahead.close()  # waits for what runs
        assert set(started) <= {"a", "b"}

    def test_one_larger_than_the_window_still_comes(self) -> None:
        ahead, _ = self._ahead({"a": 500, "b": 500}, window=100)
        assert [int(ahead.take(n)) for n in "ab"] == [500, 500]
        ahead.close()

    def test_out_of_order_and_unknown_names_are_left_to_the_caller(self) -> None:
        ahead, _ = self._ahead({"a": 60, "b": 60, "c": 60}, window=70)
        assert ahead.take("c") is None and ahead.take("x") is None
        assert [int(ahead.take(n)) for n in "ab"] == [60, 60]
        ahead.close()

    def test_what_goes_wrong_is_raised_where_it_is_taken(self) -> None:
        def read(name: str) -> torch.Tensor:
            raise CheckpointError(f"{name} is gone")

        ahead = ReadAhead(["a"], lambda name: 1, read, 10)
        with pytest.raises(CheckpointError, match="a is gone"):
            ahead.take("a")
        ahead.close()


def test_expected_tensors_are_the_same_tensors(tmp_path: Path) -> None:
    tensors = {f"t{i}": torch.randn(100, i) for i in range(1, 30)}
    save_file(tensors, tmp_path / "model.safetensors")
    files = TensorFiles(tmp_path)
    files.expect([*reversed(tensors), "not there"])
    assert all(torch.equal(files.tensor(name), value) for name, value in tensors.items())
    assert files.unread() == [] and AHEAD_BYTES < 2**30
    files.close()
