"""The engine process over its pipe, with a real model."""

import multiprocessing
import os
import signal
import time
from pathlib import Path

import pytest

from nybble.service.engine.process import main
from nybble.service.engine.protocol import (
    Abort,
    Add,
    EngineConfig,
    EngineInfo,
    Failed,
    Loading,
    Outputs,
    Request,
    SamplingParams,
    Shutdown,
)

MODEL = Path(__file__).parents[1] / "data" / "llama-ct-g32"
TIMEOUT_S = 60


class EngineProcess:
    def __init__(self, **config):
        context = multiprocessing.get_context("spawn")
        self.pipe, theirs = context.Pipe()
        fields = {"lm_head": "keep", "threads": 1, "kv_cache_bytes": 16 << 20, "device": "cpu"} | config
        self.process = context.Process(
            target=main, args=(theirs, EngineConfig(fields.pop("model", str(MODEL)), **fields)), daemon=True
        )
        self.process.start()
        theirs.close()

    def receive(self):
        assert self.pipe.poll(TIMEOUT_S), "the engine process said nothing"
        return self.pipe.recv()

    def receive_until(self, kind):
        seen = []
        while not isinstance(message := self.receive(), kind):
            seen.append(message)
        return message, seen

    def exit_code(self):
        self.process.join(TIMEOUT_S)
        return self.process.exitcode


@pytest.fixture
def engine():
    engine = EngineProcess()
    yield engine
    engine.pipe.close()
    engine.process.kill()
    engine.process.join()


def request(name, count=5):
    return Add(
        Request(name, (10, 11, 12), SamplingParams(count, temperature=0.0, ignore_eos=True), time.monotonic())
    )


def cpu_seconds(pid):
    fields = Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def test_a_life(engine):
    info, before = engine.receive_until(EngineInfo)
    assert info.architecture == "LlamaForCausalLM"
    assert before and all(isinstance(m, Loading) for m in before)
    assert before[-1].done_bytes == before[-1].total_bytes > 0
    ready = engine.receive()
    assert ready.outputs == () and ready.stats.started == 0 and ready.stats.jit_compiles == {}

    engine.pipe.send(request("a"))
    outputs = [engine.receive() for _ in range(5)]
    assert [o.outputs[0].finish_reason for o in outputs] == [None] * 4 + ["length"]
    assert outputs[0].outputs[0].scheduled_s is not None
    assert outputs[-1].stats.finished == {"length": 1}

    # Idle: no message, no CPU time.
    used = cpu_seconds(engine.process.pid)
    time.sleep(1.0)
    assert not engine.pipe.poll(0)
    assert cpu_seconds(engine.process.pid) - used <= 0.02

    # An abort that leaves nothing to do still brings the gauges to 0.
    engine.pipe.send(request("b", 400))
    engine.receive()
    engine.pipe.send(Abort("b"))
    while (last := engine.receive()).stats is None or last.stats.running:
        assert isinstance(last, Outputs)
    assert last.stats.finished == {"length": 1, "abort": 1} and last.stats.kv_usage_ratio == 0

    # Ctrl-C reaches the whole process group: it is the API process's to act on.
    os.kill(engine.process.pid, signal.SIGINT)
    engine.pipe.send(request("c", 1))
    assert engine.receive().outputs[0].request_id == "c"

    engine.pipe.send(Shutdown())
    assert engine.exit_code() == 0


def test_it_ends_when_the_other_side_is_gone(engine):
    engine.receive_until(EngineInfo)
    engine.pipe.send(request("a", 2000))
    engine.receive()
    engine.pipe.close()
    assert engine.exit_code() == 0


def test_a_model_that_cannot_be_served_is_the_users_to_mend(tmp_path):
    (tmp_path / "config.json").write_text('{"architectures": ["LlamaForCausalLM"]}')
    engine = EngineProcess(model=str(tmp_path))
    failure, _ = engine.receive_until(Failed)
    assert failure.user_error and "quantization_config" in failure.message
    assert engine.exit_code() == 0


def test_settings_that_cannot_be_honoured_are_the_users_to_mend():
    engine = EngineProcess(kv_cache_bytes=1 << 50)
    failure, _ = engine.receive_until(Failed)
    assert failure.user_error and "not enough memory" in failure.message
