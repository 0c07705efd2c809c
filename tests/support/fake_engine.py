"""An engine process without a model: deterministic tokens, delays, faults on command.

The answer to a prompt is known: reply() of the prompt's last tokens. EngineConfig carries no test switches, so the
behaviour is chosen through the prompt: its first token may be one of the COMMANDS, made with command_prompt().
"""

from __future__ import annotations

import os
import signal
import struct
import time
from collections import Counter
from dataclasses import dataclass, field
from multiprocessing.connection import Connection
from multiprocessing.reduction import ForkingPickler
from pathlib import Path

from nybble.service.engine.protocol import (
    Abort,
    Add,
    EngineConfig,
    EngineInfo,
    EngineStats,
    Failed,
    KernelReport,
    Loading,
    MemoryReport,
    Outputs,
    Request,
    RouteReport,
    Shutdown,
    StepOutput,
    Token,
)

MAX_MODEL_LEN = 256
VOCAB_SIZE = 512
EOS = 2
STEP_S = 0.002
MAX_RUNNING = 8
# Token ids beyond the tiny tokenizer's vocabulary, as the first token of a prompt.
CRASH_AFTER_3, ERROR_AFTER_3, SLOW, EOS_AFTER_5, HANG_AFTER_3, NO_MEMORY_AFTER_3, IN_PIECES = range(500, 507)

# Files whose presence in the model folder changes how the engine starts.
USER_ERROR, CRASH_AT_START, SLOW_LOAD, IGNORE_SHUTDOWN, HANG_IN_LOAD = (
    "fake-user-error",
    "fake-crash-at-start",
    "fake-slow-load",
    "fake-ignore-shutdown",
    "fake-hang-in-load",
)


def reply(prompt: tuple[int, ...], seed: int | None, count: int) -> list[int]:
    """The tokens a request gets: the prompt repeated (special and command tokens left out), shifted by the seed."""
    plain = [token for token in prompt if 3 <= token < 400] or [100]
    shift = seed or 0
    return [plain[(i + shift) % len(plain)] for i in range(count)]


@dataclass
class Sequence:
    request: Request
    done: int = 0
    scheduled: bool = False
    next_s: float = 0.0

    @property
    def command(self) -> int:
        return self.request.prompt[0]


@dataclass
class Fake:
    connection: Connection
    sequences: dict[str, Sequence] = field(default_factory=dict)
    started: int = 0
    finished: Counter = field(default_factory=Counter)
    prompt_tokens: int = 0
    generation_tokens: int = 0
    steps: int = 0

    def stats(self) -> EngineStats:
        running = sum(1 for sequence in self.sequences.values() if sequence.scheduled)
        return EngineStats(
            started=self.started,
            finished=dict(self.finished),
            running=running,
            waiting=len(self.sequences) - running,
            prompt_tokens=self.prompt_tokens,
            generation_tokens=self.generation_tokens,
            kv_usage_ratio=running / MAX_RUNNING,
            steps=self.steps,
            gemm_calls={("cpu", "decode"): self.steps * 10},
            gemm_samples={("cpu", "decode"): (5e-5,)} if self.steps % 4 == 1 else {},
        )

    def take(self, message: object) -> None:
        if isinstance(message, Add):
            self.sequences[message.request.request_id] = Sequence(message.request)
            self.started += 1
            self.prompt_tokens += len(message.request.prompt)
        elif isinstance(message, Abort):
            if self.sequences.pop(message.request_id, None) is not None:
                self.finished[message.reason] += 1
                self.connection.send(Outputs((), self.stats()))

    def step(self) -> None:
        outputs = []
        for sequence in list(self.sequences.values())[:MAX_RUNNING]:
            output = self.advance(sequence)
            if output is not None:
                outputs.append(output)
            if output is not None and output.finish_reason:
                del self.sequences[sequence.request.request_id]
                self.finished[output.finish_reason] += 1
        self.steps += 1
        if any(sequence.command == IN_PIECES for sequence in self.sequences.values()):
            self.send_in_pieces(Outputs(tuple(outputs), self.stats()))
        else:
            self.connection.send(Outputs(tuple(outputs), self.stats()))

    def send_in_pieces(self, message: object) -> None:
        """As a full pipe delivers it: the reader meets a message whose end has not been written yet."""
        pickled = bytes(ForkingPickler.dumps(message))
        # multiprocessing's framing of fewer than 2 GiB.
        framed = struct.pack("!i", len(pickled)) + pickled
        for piece in (framed[:2], framed[2:10], framed[10:]):
            os.write(self.connection.fileno(), piece)
            time.sleep(0.02)

    def advance(self, sequence: Sequence) -> StepOutput | None:
        request, sampling = sequence.request, sequence.request.sampling
        first = not sequence.scheduled
        sequence.scheduled = True
        if sequence.command == CRASH_AFTER_3 and sequence.done == 3:
            os.kill(os.getpid(), signal.SIGKILL)
        if sequence.command == ERROR_AFTER_3 and sequence.done == 3:
            return StepOutput(request.request_id, (), "error", "logits are not finite")
        if sequence.command == SLOW:
            if time.monotonic() < sequence.next_s:
                return None
            sequence.next_s = time.monotonic() + 0.05
        if sequence.command == HANG_AFTER_3 and sequence.done == 3:
            time.sleep(600)
        if sequence.command == NO_MEMORY_AFTER_3 and sequence.done == 3:
            raise RuntimeError("HIP out of memory. Tried to allocate 2.00 GiB")
        if sampling.max_tokens == 0:
            return StepOutput(request.request_id, (), "length", prompt_logprobs=self.scores(request))
        token_id = reply(request.prompt, sampling.seed, sequence.done + 1)[-1]
        if sequence.command == EOS_AFTER_5 and sequence.done == 5 and not sampling.ignore_eos:
            token_id = EOS
        sequence.done += 1
        self.generation_tokens += 1
        reason = None
        full = len(request.prompt) + sequence.done >= MAX_MODEL_LEN
        if token_id in (*sampling.stop_token_ids, *([] if sampling.ignore_eos else [EOS])):
            reason = "stop"
        elif sequence.done >= sampling.max_tokens or full:
            reason = "length"
        return StepOutput(
            request.request_id,
            (self.token(token_id, sampling.logprobs, -0.25 - (sampling.seed or 0) / 1024),),
            reason,
            scheduled_s=time.monotonic() if first else None,
            prompt_logprobs=self.scores(request) if first else (),
        )

    @staticmethod
    def token(token_id: int, logprobs: int | None, logprob: float) -> Token:
        if logprobs is None:
            return Token(token_id)
        top = tuple((100 + i, -0.5 - i if i < 3 else float("-inf")) for i in range(logprobs))
        return Token(token_id, logprob, top)

    @classmethod
    def scores(cls, request: Request) -> tuple[Token, ...]:
        """A prompt's token at position i has the log-probability -i."""
        count = request.sampling.prompt_logprobs
        if count is None:
            return ()
        return tuple(cls.token(token, count, -float(i)) for i, token in enumerate(request.prompt) if i)


def main(connection: Connection, config: EngineConfig) -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    folder = Path(config.model)
    if (folder / USER_ERROR).exists():
        connection.send(Failed("config.json: model_type 'banana' is not supported", user_error=True))
        raise SystemExit(1)
    if (folder / CRASH_AT_START).exists():
        os._exit(7)
    for done in range(0, 101, 25):
        connection.send(Loading("weights", done * 10_000, 1_000_000))
        time.sleep(0.3 if (folder / SLOW_LOAD).exists() else 0)
        if done == 50 and (folder / HANG_IN_LOAD).exists():
            time.sleep(600)
    connection.send(info(config))
    fake = Fake(connection)
    try:
        while True:
            while connection.poll(None if not fake.sequences else 0):
                message = connection.recv()
                if isinstance(message, Shutdown):
                    if (folder / IGNORE_SHUTDOWN).exists():
                        time.sleep(60)
                    return
                fake.take(message)
            fake.step()
            time.sleep(STEP_S)
    except (EOFError, BrokenPipeError, ConnectionResetError):
        return
    except RuntimeError as error:  # as the engine process reports what it cannot go on after
        connection.send(Failed(f"{type(error).__name__}: {error}", user_error=False))
        raise SystemExit(1) from None


def info(config: EngineConfig) -> EngineInfo:
    return EngineInfo(
        model=config.model,
        architecture="FakeForCausalLM",
        dtype="bfloat16",
        device="cpu",
        target="cpu",
        max_model_len=MAX_MODEL_LEN,
        vocab_size=VOCAB_SIZE,
        eos_token_ids=(EOS,),
        kv_blocks=64,
        block_size=16,
        max_running=MAX_RUNNING,
        load_seconds=0.1,
        memory=MemoryReport(
            10_000_000, {"weights": 1_000_000, "kv_cache": 500_000}, 300_000, 400_000, "enabled"
        ),
        kernels=(
            KernelReport(
                "qkv",
                30,
                960,
                576,
                32,
                True,
                "cpu",
                "first that fits",
                {"skinny": "no GPU"},
                (RouteReport(1, None, "cpu", "at any M", None),),
                345_600,
            ),
        ),
        selfcheck={"cpu": True, "general": True},
    )
