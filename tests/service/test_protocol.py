"""nybble.service.engine.protocol: messages survive the pipe."""

from __future__ import annotations

import pickle
import subprocess
import sys
from typing import Any

import pytest

from nybble.service.engine.protocol import (
    Abort,
    Add,
    EngineStats,
    Outputs,
    Request,
    SamplingParams,
    StepOutput,
    Token,
)

STATS = EngineStats(
    started=3, finished={"stop": 1}, gemm_samples={("cpu", "decode"): (1e-5, 2e-5)}, kv_usage_ratio=0.5
)


@pytest.mark.parametrize(
    "message",
    [
        Token(5),
        Token(5, -0.5, ((5, -0.5), (6, -1.0))),
        StepOutput("r", (Token(1), Token(2)), "stop", None, 1.5, 7),
        StepOutput("r", error="gone", finish_reason="error"),
        STATS,
        Outputs((StepOutput("r"),), STATS),
        Outputs((), EngineStats()),
        Add(Request("r", (1, 2), SamplingParams(max_tokens=3, logit_bias=((1, -2.0),)), 9.5)),
        Abort("r", "stop"),
    ],
    ids=lambda message: type(message).__name__,
)
def test_messages_survive_the_pipe(message: Any) -> None:
    assert pickle.loads(pickle.dumps(message)) == message


def test_the_protocol_needs_neither_torch_nor_http() -> None:
    program = (
        "import sys, nybble.service.engine.protocol; "
        "print(sorted({'torch', 'fastapi', 'pydantic', 'uvicorn', 'numpy'} & set(sys.modules)))"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert done.stdout == "[]\n"
