"""Compiled programs on disk: whole or not at all, checked when read, and no cache is no obstacle."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from pathlib import Path

import pytest

from nybble.kernels.native import cache as cache_module
from nybble.kernels.native.cache import CodeCache, pack_entry, unpack_entry, write_entry

KEY, OTHER = "ab" * 32, "cd" * 32
CODE = bytes(range(256)) * 5
# Another process: the cache's file alone, without torch.
ALONE = f"""
import importlib.util, sys
spec = importlib.util.spec_from_file_location("cache", {str(Path(cache_module.__file__))!r})
cache = importlib.util.module_from_spec(spec)
sys.modules["cache"] = cache
spec.loader.exec_module(cache)
from pathlib import Path
"""


def run_alone(code: str, *arguments: str) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "-c", ALONE + code, *arguments],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def the_file(folder: Path) -> Path:
    (path,) = folder.iterdir()
    return path


@pytest.mark.parametrize("code", [b"", b"x", CODE], ids=["empty", "one byte", "real"])
def test_what_is_stored_is_found(tmp_path: Path, code: bytes) -> None:
    cache = CodeCache(tmp_path / "made/when/needed")
    assert cache.find("k-gfx1151", KEY) is None
    stored = cache.store("k-gfx1151", KEY, code)
    assert stored is not None and stored.name.startswith("k-gfx1151-ab")
    assert CodeCache(tmp_path / "made/when/needed").find("k-gfx1151", KEY) == code
    assert stored.stat().st_mode & 0o777 == 0o644


DAMAGE = {
    "truncated": (lambda entry: entry[:-1], "were written"),
    "cut in its header": (lambda entry: entry[:20], "a header alone"),
    "empty": (lambda entry: b"", "0 bytes"),
    "too long": (lambda entry: entry + b"x", "were written"),
    "a bit flipped": (lambda entry: entry[:-1] + bytes([entry[-1] ^ 1]), "have changed"),
    "not an entry": (lambda entry: b"#!/bin/sh\n" * 20, "not an entry"),
    "of another program": (lambda entry: pack_entry(OTHER, CODE), "another program"),
}


@pytest.mark.parametrize("damage", DAMAGE)
def test_a_damaged_entry_is_removed_and_made_again(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, damage: str
) -> None:
    cache = CodeCache(tmp_path)
    cache.store("k", KEY, CODE)
    path = the_file(tmp_path)
    change, says = DAMAGE[damage]
    path.write_bytes(change(path.read_bytes()))
    assert cache.find("k", KEY) is None
    assert not path.exists()
    assert str(path) in caplog.text and says in caplog.text
    cache.store("k", KEY, CODE)
    assert cache.find("k", KEY) == CODE


def test_every_byte_of_the_header_counts() -> None:
    entry = pack_entry(KEY, CODE)
    header = len(entry) - len(CODE)
    for at in range(header):
        with pytest.raises(ValueError):
            unpack_entry(KEY, entry[:at] + bytes([entry[at] ^ 0x80]) + entry[at + 1 :])


def test_shared_folders_come_first_and_are_never_written(tmp_path: Path) -> None:
    shared, own = tmp_path / "shared", tmp_path / "own"
    CodeCache(shared).store("k", KEY, b"from the image")
    cache = CodeCache(own, (tmp_path / "absent", shared))
    cache.store("k", KEY, b"own")
    assert cache.find("k", KEY) == b"from the image"
    the_file(shared).unlink()
    assert cache.find("k", KEY) == b"own"
    assert not any(shared.iterdir())


def test_no_folder_keeps_nothing() -> None:
    cache = CodeCache()
    assert cache.store("k", KEY, CODE) is None
    assert cache.find("k", KEY) is None


def test_an_unwritable_folder_costs_one_warning(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    (tmp_path / "file").write_text("a file is no folder, not even for root")
    cache = CodeCache(tmp_path / "file/kernels")
    for key in (KEY, OTHER):
        assert cache.store("k", key, CODE) is None
        assert cache.find("k", key) is None
    warnings = [record for record in caplog.records if "are not kept" in record.message]
    assert len(warnings) == 1


def test_a_full_disk_leaves_nothing_half_written(tmp_path: Path) -> None:
    """A limit on file size fails a write in its middle as a full disk does."""
    process = run_alone(
        "import resource, signal\n"
        "signal.signal(signal.SIGXFSZ, signal.SIG_IGN)\n"
        "resource.setrlimit(resource.RLIMIT_FSIZE, (500, 500))\n"
        "print(cache.CodeCache(Path(sys.argv[1])).store('k', 'ab' * 32, b'x' * 5000))",
        str(tmp_path),
    )
    out, err = process.communicate(timeout=60)
    assert process.returncode == 0, err
    assert out.strip() == "None" and "are not kept" in err
    assert not any(tmp_path.iterdir())


def test_interrupted_writing_leaves_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupt(*_: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(os, "replace", interrupt)
    with pytest.raises(KeyboardInterrupt):
        write_entry(tmp_path / "k.bin", KEY, CODE)
    assert not any(tmp_path.iterdir())


def test_what_killed_processes_left_is_swept(tmp_path: Path) -> None:
    old, young = tmp_path / "k-1.bin.a.partial", tmp_path / "k-1.bin.b.partial"
    for path in (old, young):
        path.write_bytes(b"half")
    long_ago = time.time() - 2 * 24 * 3600
    os.utime(old, (long_ago, long_ago))
    CodeCache(tmp_path).store("k", KEY, CODE)
    assert not old.exists() and young.exists()


WRITER = """
import time
me, folder, rounds = sys.argv[1], Path(sys.argv[2]), int(sys.argv[3])
kept = cache.CodeCache(folder)
codes = {who.encode() * (20_000 + 1000 * int(who)) for who in "1234"}
mine = next(code for code in codes if code.startswith(me.encode()))
key = "ab" * 32
kept.store("k", key, mine)
for _ in range(rounds):
    found = kept.find("k", key)
    assert found in codes, f"{me} read {found and len(found)} bytes that nobody wrote"
    kept.store("k", key, mine)
"""


def test_processes_share_a_folder(tmp_path: Path) -> None:
    """Four write one key with different codes while reading it: all ever see one whole entry."""
    processes = [run_alone(WRITER, who, str(tmp_path), "200") for who in "1234"]
    for process in processes:
        _, err = process.communicate(timeout=120)
        assert process.returncode == 0, err
        assert "of no use" not in err
    assert len(list(tmp_path.iterdir())) == 1


def test_a_killed_writer_harms_nobody(tmp_path: Path) -> None:
    for _ in range(5):
        process = run_alone(WRITER, "1", str(tmp_path), "1000000")
        while not list(tmp_path.glob("*.bin")):
            time.sleep(0.01)
        time.sleep(0.02)
        process.kill()
        process.communicate()
        code = CodeCache(tmp_path).find("k", KEY)
        assert code is not None and set(code) == {ord("1")}
