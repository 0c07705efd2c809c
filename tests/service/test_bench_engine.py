"""nybble bench decode, prefill and serve, on a tiny model: that they run, and that their figures add up."""

import json

import pytest
from typer.testing import CliRunner

from nybble.service.bench_engine import EngineBench, _shares, decode, engine_of, prefill, step_bytes
from nybble.service.bench_serve import _row, _Stream
from nybble.service.cli import UsageError, app

TINY = ["--shape", "tiny", "--device", "cpu", "--threads", "1", "--tokens", "6"]


def tiny(**fields):
    return EngineBench(
        **({"shape": "tiny", "device": "cpu", "threads": 1, "tokens": 6, "contexts": (64,)} | fields)
    )


@pytest.mark.parametrize("head", ["keep", "int8", "int4"])
def test_a_step_is_split_into_parts_that_make_it_up(head):
    with engine_of(tiny(batches=(1, 3), lm_head=head)) as engine:
        row = decode(engine, 3, 64, 6, rate=1e10)
        again = decode(engine, 1, 64, 6, rate=1e10)
        assert not engine.has_work
    assert row.batch == 3 and row.tokens_per_s == pytest.approx(3 / row.tpot_ms * 1e3)
    assert set(row.parts_ms) == {"gemm cpu", "attention", "head", "rest", "launch"}
    assert all(ms >= 0 for ms in row.parts_ms.values()) and row.parts_ms["gemm cpu"] > 0
    assert 0 < row.host_ms < row.tpot_ms
    assert again.limit_ms < row.limit_ms


def test_a_batch_runs_side_by_side_from_its_first_timed_step(monkeypatch):
    """Prompts longer than a step may compute beside streams: they come from the prefix cache, and none ends too soon."""
    with engine_of(tiny(batches=(5,), contexts=(200,))) as engine:
        rows, launch = [], engine.runner.launch

        def recorded(step):
            rows.append((len(step.decode), len(step.prefill), sorted(s.computed for s in step.decode)))
            return launch(step)

        monkeypatch.setattr(engine.runner, "launch", recorded)
        decode(engine, 5, 200, 6, rate=1e10)
    timed = rows[-6 - 8 - 1 :]
    assert [row[:2] for row in timed[:-1]] == [(5, 0)] * 14
    assert all(200 - 16 <= n <= 200 + 16 for row in timed[3:9] for n in row[2])


def test_a_batch_begins_together_where_a_step_has_fewer_rows_than_its_prompts():
    """Each prompt costs one row when all are asked for, not what its last block holds: 24 x 16 rows are 24 steps."""
    with engine_of(tiny(batches=(24,), contexts=(64,), prefill_tokens=16)) as engine:
        begun, launch = [], engine.runner.launch

        def recorded(step):
            begun.append(len(step.prefill))
            assert all(c.count == 1 for c in step.prefill if c.sequence.left > 1)
            return launch(step)

        engine.runner.launch = recorded
        decode(engine, 24, 59, 6, rate=1e10)
    start = begun.index(max(begun))
    assert max(begun) == 16 and sum(begun[start:]) == 24


def test_kernels_that_overlap_are_counted_once():
    spans = [("nybble_skinny_w4a16", 0.0, 10.0), ("reduce_splits", 8.0, 13.0), ("x", 20.0, 21.0)]
    assert _shares(spans) == {"gemm int4": 10.0, "attention": 3.0, "rest": 1.0}


def test_the_bytes_of_a_step_are_those_it_reads():
    # Blocks: 2 layers of K 128/256, N as below, 4 bits and a scale of 2 bytes (float32 here) per 128.
    sizes = {}
    for head in ("keep", "int8", "int4"):
        with engine_of(tiny(lm_head=head)) as engine:
            sizes[head] = step_bytes(engine, 1, 100)
            assert step_bytes(engine, 2, 100) - sizes[head] in (
                100 * 2 * 2 * 2 * 32 * 2,
                100 * 512 + 32 * 128 * 2,
            )
            model = engine.runner.model
            blocks = model.nbytes - model.embedding.nbytes - (0 if head == "keep" else model.head.nbytes)
            if head == "keep":
                assert sizes[head] == blocks + 512 * 128 * 2 + 100 * 512
    assert sizes["keep"] - sizes["int8"] == 512 * 128 * 2 - (512 * 128 + 512 * 2)
    assert sizes["int4"] < sizes["int8"] + 32 * 128 * 2


def test_a_prompt_is_timed_beside_the_librarys_gemms():
    with engine_of(tiny(contexts=(100,))) as engine:
        row = prefill(engine, 100)
    assert row.tokens_per_s == pytest.approx(100 / row.ttft_ms * 1e3)
    assert 0 < row.library_ms


def test_no_prompt_is_timed_behind_what_an_earlier_one_left_in_the_cache():
    with engine_of(tiny(contexts=(32, 64))) as engine:
        for tokens in (32, 64, 64):
            prefill(engine, tokens)
        assert engine.stats().cached_prompt_tokens == 0


def test_what_the_cache_cannot_hold_is_said(tmp_path):
    result = CliRunner().invoke(app, ["bench", "decode", *TINY, "--batches", "1", "--contexts", "10,0"])
    assert isinstance(result.exception, UsageError) and "--contexts='10,0'" in result.exception.message


@pytest.mark.parametrize("command", ["decode", "prefill"])
def test_the_commands_print_a_table_and_write_json(command, tmp_path):
    output = tmp_path / "out.json"
    arguments = ["bench", command, *TINY, "--batches", "1,2", "--contexts", "32", "--output", str(output)]
    result = CliRunner().invoke(app, arguments)
    assert result.exit_code == 0, result.output
    assert "random weights in the shape of tiny" in result.output
    found = json.loads(output.read_text())
    assert len(found["rows"]) == (2 if command == "decode" else 1)
    assert found["bench"]["shape"] == "tiny"


def test_streams_over_http_beside_the_engine(tmp_path, monkeypatch):
    monkeypatch.setenv("NYBBLE_LOG_LEVEL", "error")  # meant for a server of the user's
    monkeypatch.setenv("NYBBLE_API_KEY", "0123456789abcdef")
    output = tmp_path / "out.json"
    arguments = ["bench", "serve", *TINY, "--batches", "1,3", "--contexts", "16", "--output", str(output)]
    result = CliRunner().invoke(app, arguments)
    assert result.exit_code == 0, result.output
    rows = json.loads(output.read_text())["rows"]
    assert [r["streams"] for r in rows] == [1, 3]
    assert all(r["tokens_per_s"] > 0 and r["engine_tokens_per_s"] > 0 and r["ttft_p50_ms"] > 0 for r in rows)


def test_a_rate_counts_while_all_streams_run():
    # Two streams of 5 tokens a second; the second begins and ends a second later.
    found = [
        _Stream(0.0, tuple(1 + 0.2 * i for i in range(11)), 11),
        _Stream(0.0, tuple(2 + 0.2 * i for i in range(11)), 11),
    ]
    row = _row(2, found, 12.5)
    assert row.tokens_per_s == pytest.approx(10) and row.lost == pytest.approx(0.2)
    assert row.ttft_p50_ms == 1000 and row.gap_p50_ms == pytest.approx(200)
