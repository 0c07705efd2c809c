"""The engine: add requests, step, take tokens. A plain class; service/engine/process.py puts it into a process."""

from __future__ import annotations

import logging
import traceback
from collections import Counter
from dataclasses import dataclass
from time import perf_counter

import torch

from nybble.kernels.linear import RECORDER
from nybble.kernels.native import JIT_RECORDER
from nybble.service.engine.kv_blocks import BlockPool
from nybble.service.engine.pacing import Pacer, Rows
from nybble.service.engine.protocol import (
    EngineConfig,
    EngineInfo,
    EngineStats,
    Request,
    StepOutput,
    Token,
)
from nybble.service.engine.runner import Flight, Runner
from nybble.service.engine.scheduler import Scheduler, Step
from nybble.service.engine.sequence import Sequence

log = logging.getLogger(__name__)

_NOT_FINITE = "the model's logits are not finite numbers for this prompt: the answer was stopped"
_NO_MEMORY = (
    "the device ran out of memory for this request: ask for less at once, or give the KV cache less of it"
)


# Steps until one is launched ahead again, after there was no memory for it: asking in vain takes milliseconds.
_AHEAD_AGAIN = 256


@dataclass(frozen=True, slots=True)
class _Launched:
    """A step on its way through the device. before: how far its sequences were computed; the rows of one that is no longer
    in there are dropped. started_s: when the call of Engine.step that launched it began."""

    step: Step
    flight: Flight
    before: dict[Sequence, int]
    rows: list[Rows]
    started_s: float


class Engine:
    """Continuous batching over one model.

        add(request) ... step() -> outputs ... abort(id)

    On a device that works by itself, `step` launches the step after before it returns: while its caller sends the outputs
    away and takes new requests, the device is busy. Where that step needs nothing of this one's tokens but their ids, it is
    launched even before these have arrived, and takes the ids on the device, prompts' rows beside them: see Scheduler.follow.
    What it computed for a request that turns out to have ended is dropped.

    Nothing a request carries can raise out of `step`: what cannot be served ends that request alone, with
    finish_reason "error" and a sentence.
    """

    def __init__(self, runner: Runner, info: EngineInfo, config: EngineConfig) -> None:
        self.info = info
        self.gemm_sample_every = config.gemm_sample_every
        self._runner = runner
        self._scheduler = Scheduler(
            BlockPool(info.kv_blocks),
            info.block_size,
            info.max_running,
            Pacer(config.prefill_tokens, config.prefill_tokens_busy, runner.times),
            config.prefix_cache,
        )
        self._launched: _Launched | None = None
        self._collected_s = 0.0
        self._steps_ahead = 0
        self._ahead_from = 0
        self._out_of_memory = 0
        self._failed_in_a_row = 0
        self._sequences: dict[str, Sequence] = {}
        self._refused: list[StepOutput] = []
        self._finished: Counter[str] = Counter()
        self._started = 0
        self._told = (0, 0, 0, 0)
        self._prompt_tokens = 0
        self._generation_tokens = 0
        self._nonfinite = 0
        self._steps = 0
        self._overhead_seconds = 0.0

    @property
    def runner(self) -> Runner:
        return self._runner

    @property
    def prefill_tokens(self) -> int:
        """Most prompt rows of a step, for now."""
        return self._scheduler.pacer.most

    @property
    def has_work(self) -> bool:
        return bool(self._sequences or self._refused)

    def add(self, request: Request) -> None:
        """Queue a request. One that can never run is answered by the next step's outputs."""
        self._started += 1
        problem = self._problem(request)
        if problem is not None:
            self._finished["error"] += 1
            self._refused.append(StepOutput(request.request_id, finish_reason="error", error=problem))
            return
        sequence = Sequence(request, self.info.eos_token_ids)
        self._sequences[request.request_id] = sequence
        self._prompt_tokens += sequence.prompt_len
        self._scheduler.add(sequence)

    def abort(self, request_id: str, reason: str = "abort") -> None:
        """Forget a request and free its blocks; an id that is not running is ignored, since it may just have ended."""
        sequence = self._sequences.pop(request_id, None)
        if sequence is not None:
            self._scheduler.remove(sequence)
            self._finished[reason] += 1
        if not self._sequences:
            # Nobody waits for it; read after a pause, it would count as a step that took as long.
            self._launched = None

    def step(self) -> tuple[StepOutput, ...]:
        """Run one step for everything that is running."""
        started = perf_counter()
        forward_before = self._runner.forward_seconds
        outputs, self._refused = self._refused, []
        launched, self._launched = self._launched or self._launch(outputs, started), None
        if launched is not None:
            if self._runner.runs_ahead:
                self._launched = self._launch_ahead(launched, started)
            outputs += self._finish_step(launched)
        if not self._sequences:
            self._launched = None  # nobody waits for it
        elif self._launched is None and self._runner.runs_ahead:
            self._launched = self._launch(outputs, started)
        self._steps += 1
        self._overhead_seconds += perf_counter() - started - (self._runner.forward_seconds - forward_before)
        return tuple(outputs)

    def _launch(self, outputs: list[StepOutput], started: float) -> _Launched | None:
        """The next step, started; None when there is nothing to run or no memory to run it. A request that has to end
        for lack of memory is added to outputs."""
        step = self._scheduler.schedule()
        if not step:
            return None
        launched = self._about_to_launch(step, started)
        try:
            launched.flight.extend(self._runner.launch(step))
        except Exception as error:
            outputs += self._survive(error, launched)
            return None
        return launched

    def _launch_ahead(self, last: _Launched, started: float) -> _Launched | None:
        """The step after `last`, started before the host has last's tokens; None where it has to wait for them."""
        if self._steps < self._ahead_from or len(last.flight) > 1:
            return None
        step = self._scheduler.follow(last.step, self.info.max_model_len)
        if step is None:
            return None
        launched = self._about_to_launch(step, started)
        try:
            launched.flight.extend(self._runner.launch(step, after=last.flight))
        except Exception as error:
            self._put_back(error, launched)
            self._ahead_from = self._steps + _AHEAD_AGAIN
            return None
        self._steps_ahead += 1
        return launched

    def _about_to_launch(self, step: Step, started: float) -> _Launched:
        every = self.gemm_sample_every
        RECORDER.sampling = every > 0 and self._steps % every == 0
        rows = [Rows(c.count, c.sequence.computed) for c in step.prefill]
        before = {s: s.computed for s in (*step.decode, *(c.sequence for c in step.prefill))}
        return _Launched(step, [], before, rows, started)

    def _finish_step(self, launched: _Launched) -> list[StepOutput]:
        outputs: list[StepOutput] = []
        try:
            results = self._runner.collect(launched.flight)
        except Exception as error:
            if self._launched is not None:  # it goes on from this one
                self._reset(self._launched)
                self._launched = None
            outputs = self._survive(error, launched)
            self._collected_s = perf_counter()  # what that took is no step's time
            return outputs
        self._failed_in_a_row = 0
        self._observe(launched)
        results = [r for r in results if r.sequence in launched.before and self._runs(r.sequence)]
        failed = {r.sequence for r in results if r.token is None}
        ahead = {} if self._launched is None else self._launched.before
        for sequence in launched.before:
            # One that was aborted meanwhile is gone, and its blocks with it.
            if self._runs(sequence) and sequence not in failed:
                self._scheduler.commit(sequence, ahead.get(sequence, sequence.computed))
        for sequence, token, redrawn in results:
            outputs.append(self._advance(sequence, token))
            if redrawn:
                self._drop_ahead(sequence)
        return outputs

    def _observe(self, launched: _Launched) -> None:
        """Tell the pacer what a step took: as long as its streams waited after the last one, scheduling included."""
        now = perf_counter()
        seconds = now - max(launched.started_s, self._collected_s)
        self._collected_s = now
        streams = launched.step.decode
        positions = sum(launched.before.get(s, s.computed) for s in streams)
        growth = launched.step.growth
        self._scheduler.pacer.observe(seconds, len(streams), launched.rows, positions, growth)

    def _drop_ahead(self, sequence: Sequence) -> None:
        """What was launched ahead went on from another token than the sequence has: its row is computed again."""
        computed = None if self._launched is None else self._launched.before.pop(sequence, None)
        if computed is not None:
            sequence.computed = computed

    def _runs(self, sequence: Sequence) -> bool:
        return self._sequences.get(sequence.id) is sequence

    def _put_back(self, error: Exception, launched: _Launched) -> None:
        """After a step that failed for lack of memory: as if it had not been launched. Raises any other error."""
        if not _is_out_of_memory(error):
            raise error
        self._out_of_memory += 1
        log.warning("out of memory in a step of %d requests: %s", len(launched.before), str(error)[:200])
        # The frames of the failed call still hold its tensors.
        traceback.clear_frames(error.__traceback__)
        self._runner.release_memory()
        self._reset(launched)

    def _reset(self, launched: _Launched) -> None:
        """What a step was to compute is not computed."""
        for sequence, computed in launched.before.items():
            if self._runs(sequence):
                sequence.computed = computed

    def _survive(self, error: Exception, launched: _Launched) -> list[StepOutput]:
        """After a step that failed for lack of memory: put it back, and ask for less from now on.

        The youngest request makes room: it goes back to the queue, and fewer run together until one has finished. One that
        is alone gets smaller chunks; when they are as small as can be, it is tried once more and then ends with an error.
        """
        self._put_back(error, launched)
        scheduler = self._scheduler
        if not scheduler.running:
            return []
        youngest = scheduler.running[-1]
        if len(scheduler.running) > 1:
            scheduler.preempt(youngest)
            scheduler.limit = len(scheduler.running)
            return []
        rows = sum(r.count for r in launched.rows)
        if rows > self.info.block_size:
            scheduler.pacer.most = max(rows // 2, self.info.block_size)
            return []
        # What the allocator has given back may be enough.
        self._failed_in_a_row += 1
        if self._failed_in_a_row == 1:
            return []
        first = youngest.scheduled_s if youngest.output_len == 0 else None
        self._finish(youngest, "error")
        return [StepOutput(youngest.id, finish_reason="error", error=_NO_MEMORY, scheduled_s=first)]

    @property
    def stats_due(self) -> bool:
        """Whether the last snapshot no longer says where every request is."""
        return self._places() != self._told

    def _places(self) -> tuple[int, int, int, int]:
        s = self._scheduler
        return self._started, self._finished.total(), len(s.running), len(s.waiting)

    def stats(self) -> EngineStats:
        """A consistent snapshot; takes the GEMM samples gathered since the last one."""
        scheduler = self._scheduler
        self._told = self._places()
        jit = JIT_RECORDER.counts()
        return EngineStats(
            started=self._started,
            finished=dict(self._finished),
            running=len(scheduler.running),
            waiting=len(scheduler.waiting),
            prompt_tokens=self._prompt_tokens,
            generation_tokens=self._generation_tokens,
            cached_prompt_tokens=scheduler.hits_tokens,
            prefix_queries_tokens=scheduler.queries_tokens,
            preemptions=scheduler.preemptions,
            nonfinite=self._nonfinite,
            out_of_memory=self._out_of_memory,
            kv_usage_ratio=scheduler.pool.usage_ratio,
            steps=self._steps,
            steps_ahead=self._steps_ahead,
            step_overhead_seconds=self._overhead_seconds,
            jit_compiles=jit.compiles,
            jit_cache_hits=jit.cache_hits,
            jit_compile_seconds=jit.seconds,
            gemm_calls=dict(RECORDER.calls),
            gemm_samples=RECORDER.take_samples(),
            gemm_latest=RECORDER.take_latest(),
            graph_fallbacks=dict(self._runner.fallbacks),
        )

    def _problem(self, request: Request) -> str | None:
        """Why a request can never run, or None. The API checks first; this keeps the engine alive regardless."""
        limit = self.info.max_model_len
        if request.request_id in self._sequences:
            return f"request id {request.request_id!r} is already running"
        if not request.prompt:
            return "the prompt is empty: accepted at least 1 token"
        most = limit if request.sampling.max_tokens == 0 else limit - 1
        if len(request.prompt) > most:
            return f"the prompt has {len(request.prompt)} tokens: accepted at most {most} (context {limit})"
        ids = (*request.prompt, *(i for i, _ in request.sampling.logit_bias))
        if min(ids) < 0 or max(ids) >= self.info.vocab_size:
            return f"token ids {min(ids)}..{max(ids)}: accepted 0..{self.info.vocab_size - 1}"
        least = 1 if request.sampling.prompt_logprobs is None else 0
        if request.sampling.max_tokens < least:
            return f"max_tokens is {request.sampling.max_tokens}: accepted at least {least}"
        return None

    def _advance(self, sequence: Sequence, token: Token | None) -> StepOutput:
        first = sequence.scheduled_s if sequence.output_len == 0 else None
        cached = (sequence.cached or 0) if sequence.output_len == 0 else 0
        if token is None:
            self._nonfinite += 1
            self._scheduler.discard(sequence)
            self._finish(sequence, "error")
            return StepOutput(sequence.id, finish_reason="error", error=_NOT_FINITE, scheduled_s=first)
        scored = tuple(sequence.scored or ()) if sequence.output_len == 0 else ()
        if sequence.request.sampling.max_tokens == 0:
            self._finish(sequence, "length")
            return StepOutput(sequence.id, finish_reason="length", scheduled_s=first, prompt_logprobs=scored)
        sequence.append(token.token_id)
        self._generation_tokens += 1
        reason = sequence.finish_reason(self.info.max_model_len)
        if reason is not None:
            self._finish(sequence, reason)
        return StepOutput(
            sequence.id,
            (token,),
            reason,
            scheduled_s=first,
            cached_tokens=cached,
            prompt_logprobs=scored,
        )

    def _finish(self, sequence: Sequence, reason: str) -> None:
        del self._sequences[sequence.id]
        self._scheduler.remove(sequence)
        self._finished[reason] += 1


def _is_out_of_memory(error: Exception) -> bool:
    """Also torch's CPU allocator, which raises a plain RuntimeError."""
    if isinstance(error, (torch.OutOfMemoryError, MemoryError)):
        return True
    return isinstance(error, RuntimeError) and "can't allocate memory" in str(error)
