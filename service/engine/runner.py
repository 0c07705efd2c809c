"""One step on the device: rows in, tokens out."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from time import perf_counter
from typing import NamedTuple

import torch

from nybble.kernels.attention import Span
from nybble.kernels.attention.paged import PagedAttention
from nybble.kernels.linear import RECORDER
from nybble.service.engine.graphs import Capture, StepGraphs
from nybble.service.engine.inputs import CAPTURED_PROMPT_ROWS, FreshInputs, Limits, StaticInputs
from nybble.service.engine.pacing import LONGEST_STEP, PassTime, PassTimes
from nybble.service.engine.protocol import Token
from nybble.service.engine.sampler import Draft, draw, score, warm
from nybble.service.engine.scheduler import Chunk, Step
from nybble.service.engine.sequence import Sequence
from nybble.service.models import Batch, Decoder

_STEPS_PER_THREAD_COUNT = 8
# Rows of a scored prompt whose logits exist at one time: a chunk's would be larger than the workspace.
_SCORED_ROWS = 16
_EAGER_SAMPLE_EVERY_S = 5.0
_MEASURED_CONTEXT = 4096  # positions of a stream, at most
# Of a fixed batch; fewer when they take longer than this together.
_MEASURED_PASSES, _MEASURED_S = 5, 0.05


# Sequences whose last row was computed, and their next tokens on the way from the device.
Flight = list[tuple[list[Sequence], Draft]]


class Result(NamedTuple):
    """token: None where the logits were not finite. redrawn: it is another than a step launched ahead has read."""

    sequence: Sequence
    token: Token | None
    redrawn: bool


class Runner:
    """Runs a step's decode rows and its prefill chunks as one forward pass, which reads the weights once, where the
    attention back end takes both; otherwise as two. On the paged cache of a GPU shapes are fixed and steps are captured, prompts
    too: Python takes longer to launch the kernels of a short prompt than the device to run them.

    limits   needed where the model's attention is paged
    capture  how steps are captured there; None: not at all

    runs_ahead: whether `launch` returns before the device is done, so that the host has time for other things; a test
    may say so of a CPU. forward_seconds adds up the time inside the model, where it runs ahead with the wait for its
    tokens, so that the engine can tell its own overhead.
    """

    def __init__(
        self,
        model: Decoder,
        device: torch.device,
        limits: Limits | None = None,
        capture: Capture | None = None,
    ) -> None:
        self.model = model
        self.device = device
        self.runs_ahead = device.type != "cpu"
        self.forward_seconds = 0.0
        self.graphs: dict[str, StepGraphs] = {}
        if capture is not None:
            self.graphs = {kind: StepGraphs(kind, capture) for kind in ("prefill", "mixed", "decode")}
        # What passes take here, measured where steps are captured.
        self.times: PassTimes | None = None
        self._eager_sample_s = {"prefill": 0.0, "decode": 0.0}
        self._static: StaticInputs | None = None
        if isinstance(model.attention, PagedAttention):
            assert limits is not None
            self._limits = limits
            self._static = StaticInputs(limits, model.attention.shape.block_size, device)
        self._inputs = self._static or FreshInputs(device)

    @property
    def fallbacks(self) -> Mapping[str, int]:
        """Reason -> numbers of rows, of decode, of prompts and of both, that run eagerly because of it."""
        return sum((graphs.fallbacks for graphs in self.graphs.values()), Counter())

    @torch.inference_mode()
    def launch(self, step: Step, after: Flight | None = None) -> Flight:
        """Start a step. Sequences count its rows as computed from here on.

        after: the flight that `step` follows (see Scheduler.follow); its tokens are taken on the device, before the host
        has them.
        """
        flight: Flight = []
        rows = [Chunk(s, 1) for s in step.decode]
        on_device = None if after is None else _token_ids(after, step.decode)
        if rows and step.prefill and self._fit_together(step):
            return [self._pass("mixed", rows + step.prefill, on_device, streams=len(rows))]
        if rows:
            flight.append(self._pass("decode", rows, on_device))
        if step.prefill:
            flight.append(self._pass("prefill", step.prefill))
        return flight

    def _fit_together(self, step: Step) -> bool:
        if not self.model.attention.mixes_rows or self._static is None:
            return self.model.attention.mixes_rows
        return self._static.holds(len(step.decode) + sum(chunk.count for chunk in step.prefill))

    @torch.inference_mode()
    def collect(self, flight: Flight) -> list[Result]:
        """The next token of every sequence that got one. Waits for the device."""
        started = perf_counter()
        results = []
        for done, draft in flight:
            pairs = zip(done, draft.tokens(), strict=True)
            results += [Result(*pair, row in draft.redrawn) for row, pair in enumerate(pairs)]
        if self.runs_ahead:
            self.forward_seconds += perf_counter() - started
        return results

    def release_memory(self) -> None:
        """Give back what the allocator keeps for later; after an allocation failed."""
        if self.device.type == "cuda":
            torch.cuda.empty_cache()

    def warm_up(self) -> None:
        """Run what requests will run, before they come. Uses blocks that are free then.

        With static shapes that is every prefill shape and every decode batch size: what is to be compiled is compiled, what
        is to be captured is captured. Otherwise one row, for lazy initialisation.
        """
        with torch.inference_mode():
            if self._static is None:
                row = torch.zeros(1, dtype=torch.int64, device=self.device)
                logits = self.model.forward(Batch(row, row, [Span(1, 1, [0])]))
                if self.runs_ahead:  # a CPU has nothing to compile there, and its steps are timed
                    warm(logits)
            else:
                self._warm_up(self._static)
        RECORDER.reset()

    def _warm_up(self, static: StaticInputs) -> None:
        RECORDER.sampling = False
        # The largest first: its memory serves all others.
        for rows in reversed(static.fixed("prefill")):
            self._prepare(static, "prefill", rows)
        for rows in reversed(static.fixed("decode")):
            self._prepare(static, "decode", rows)
        self._prepare_mixed(static)
        warm(self.model.forward(static.fixed("decode")[1]))

    def _prepare_mixed(self, static: StaticInputs) -> None:
        """Passes of prompts beside streams, the shortest first, as far as they are short enough for that. Where steps are
        captured, what they take is measured: see PassTimes."""
        timed = bool(self.graphs and static.fixed("mixed"))
        decode: dict[int, float] = {}
        per_position = 0.0
        for rows in static.fixed("decode") if timed else ():
            # What positions cost is taken from the largest, which comes last.
            context = min(_MEASURED_CONTEXT, self._longest_context(2)) if rows == static.buckets[-1] else 0
            time = self._pass_time(static, "decode", rows, context)
            decode[rows], per_position = time.seconds, time.per_position / rows
        mixed: dict[int, PassTime] = {}
        for rows in static.fixed("mixed"):
            self._prepare(static, "mixed", rows)
            if not timed:
                continue
            mixed[rows] = self._pass_time(static, "mixed", rows, self._longest_context(rows))
            if mixed[rows].seconds > LONGEST_STEP * max(decode.values()):
                break
        if timed:
            self.times = PassTimes(decode, mixed, static.rungs[-1], per_position)

    def _pass_time(self, static: StaticInputs, kind: str, rows: int, context: int) -> PassTime:
        seconds = self._seconds(static, kind, rows)
        more = self._seconds(static, kind, rows, context) - seconds if context else 0.0
        return PassTime(seconds, max(0.0, more) / max(context, 1))

    def _prepare(self, static: StaticInputs, kind: str, rows: int) -> None:
        """Run a fixed batch once, and capture it where that is done."""
        RECORDER.phase = _phase(kind)
        batch = static.fixed(kind)[rows]

        def forward() -> torch.Tensor:
            return self.model.forward(batch)

        def fill(problem: int) -> None:
            self._fill(static, kind, rows, problem)

        if self.graphs and (kind == "decode" or rows <= CAPTURED_PROMPT_ROWS):
            self.graphs[kind].prepare(rows, forward, fill)
        else:
            fill(0)
            forward()

    def _seconds(self, static: StaticInputs, kind: str, rows: int, context: int = 0) -> float:
        """What a fixed batch takes, replayed where it is captured: the fastest of a few passes."""
        self._fill(static, kind, rows, 0, context)
        best = total = 0.0
        for _ in range(_MEASURED_PASSES):
            self._wait()
            started = perf_counter()
            self._replay(kind, static.fixed(kind)[rows])
            self._wait()
            seconds = perf_counter() - started
            best = min(best or seconds, seconds)
            total += seconds
            if total > _MEASURED_S:
                break
        return best

    def _wait(self) -> None:
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)

    def _fill(self, static: StaticInputs, kind: str, rows: int, problem: int, context: int = 0) -> None:
        """The problem-th test problem into a fixed batch; context: positions before it, see _fill_prompt."""
        if kind == "decode" and context:
            static.decode(*self._long_problem(rows, context))
        elif kind == "decode":
            static.decode(*self._decode_problem(rows, problem, self._prompt_blocks(2)))
        else:
            self._fill_prompt(static, kind, rows, problem, context)

    def _fill_prompt(self, static: StaticInputs, kind: str, rows: int, problem: int, context: int) -> None:
        """A prompt of up to `rows` tokens, beside a stream where it is "mixed", in blocks 0, 1, ... as far as there are any.
        The `context` positions before it, a multiple of the block size, lie in any blocks there are: what is computed is of
        no use then, but takes as long."""
        size, streams = self._block_size, int(kind == "mixed")
        count = min(rows - streams, self._prompt_room(streams))
        own = range(-(-count // size))
        behind = [i % self._limits.kv_blocks for i in range(context // size)]
        ids = [self._token(i + problem) for i in range(streams + count)]
        positions = [0] * streams + list(range(context, context + count))
        spans = [Span(1, 1, [len(own)])] * streams + [Span(count, context + count, behind + [*own])]
        wanted = [*range(streams), streams + count - 1]
        static.batch(kind, ids, positions, spans, wanted, streams, rows)

    def _prompt_room(self, streams: int) -> int:
        """Positions that a test prompt may have, so that each stream has a block."""
        return min((self._limits.kv_blocks - streams) * self._block_size, self._limits.max_model_len)

    def _longest_context(self, rows: int) -> int:
        """Positions that a test prompt of so many rows, with a stream's, may have before it: whole blocks."""
        count = min(rows - 1, self._prompt_room(1))
        return (self._limits.max_model_len - count) // self._block_size * self._block_size

    def _prompt_blocks(self, wanted: int) -> int:
        """Blocks that a test prompt has filled whole and that every row of a test problem can share; at most `wanted`."""
        spare = min(self._limits.kv_blocks, -(-self._limits.max_model_len // self._block_size)) - 1
        filled = self._limits.prefill_tokens // self._block_size
        return max(0, min(wanted, spare, filled))

    def _decode_problem(
        self, count: int, problem: int, prefix: int
    ) -> tuple[list[int], list[int], list[Span]]:
        """(ids, positions, spans) of `count` sequences that share `prefix` blocks and go on in a block of their own, as
        far as there are blocks; two rows that share one are the same in all."""
        own = [prefix + i % (self._limits.kv_blocks - prefix) for i in range(count)]
        position = prefix * self._block_size
        spans = [Span(1, position + 1, [*range(prefix), block]) for block in own]
        return [self._token(7 * block + problem) for block in own], [position] * count, spans

    def _long_problem(self, count: int, context: int) -> tuple[list[int], list[int], list[Span]]:
        """Likewise, each behind as many positions, a multiple of the block size, of blocks that no other has, as far as there
        are blocks: what is computed is of no use, but takes as long."""
        blocks = context // self._block_size + 1
        places = [
            [(row * blocks + i) % self._limits.kv_blocks for i in range(blocks)] for row in range(count)
        ]
        ids = [self._token(row) for row in range(count)]
        return ids, [context] * count, [Span(1, context + 1, place) for place in places]

    def _token(self, i: int) -> int:
        return (i * 2654435761 + 12345) % self.model.config.vocab_size

    @property
    def _block_size(self) -> int:
        attention = self.model.attention
        assert isinstance(attention, PagedAttention)
        return attention.shape.block_size

    def choose_threads(self, most: int) -> int:
        """Set torch's CPU threads to the count, up to `most`, at which a decode step is fastest here and now.

        More threads are not always faster: a small model's GEMM takes 20 us, less than waking a thread that has no core
        to itself. Measured, because neither the core count nor the load average says how many cores are idle.
        """
        counts = sorted({1, *(n for n in (2, 4, 6, 8, 12, 16, 24, 32, 48, 64) if n < most), most})
        best, best_seconds = 1, float("inf")
        for count in counts:
            torch.set_num_threads(count)
            self.warm_up()
            seconds = min(self._timed_step() for _ in range(_STEPS_PER_THREAD_COUNT))
            if seconds < best_seconds * 0.95:
                best, best_seconds = count, seconds
            elif seconds > best_seconds * 1.5:
                break
        torch.set_num_threads(best)
        RECORDER.reset()
        return best

    def _timed_step(self) -> float:
        started = perf_counter()
        self.warm_up()
        return perf_counter() - started

    def _pass(
        self, kind: str, chunks: list[Chunk], on_device: torch.Tensor | None = None, streams: int = 0
    ) -> tuple[list[Sequence], Draft]:
        """on_device: the ids of streams' rows, where the host does not know them yet. streams: so many chunks, the first, are
        rows of streams beside prompts."""
        ids: list[int] = []
        positions: list[int] = []
        spans = []
        last_rows = []
        done = []
        unknown = 0 if on_device is None else len(on_device)  # ids, of the first chunks
        scored: list[tuple[Sequence, range, int]] = []  # positions, and the row of the first
        for i, chunk in enumerate(chunks):
            s = chunk.sequence
            stop = s.computed + chunk.count
            if unscored := s.unscored(stop):
                scored.append((s, unscored, len(ids) + unscored.start - s.computed))
            ids += s.tokens[s.computed : stop] if i >= unknown else [0]
            positions += range(s.computed, stop)
            spans.append(Span(chunk.count, stop, s.blocks))
            if chunk.completes:
                last_rows.append(len(ids) - 1)
                done.append(s)
        # All rows where prompts are scored, and where all are wanted; fixed batches have their own.
        all_rows = self._static is None and len(last_rows) == len(ids)
        rows = None if scored or all_rows else last_rows
        RECORDER.phase = _phase(kind)
        started = perf_counter()
        batch = self._inputs.batch(kind, ids, positions, spans, rows, streams)
        if on_device is not None:
            batch.token_ids[:unknown].copy_(on_device)
        if scored:
            hidden = self.model.hidden(batch)
            for sequence, positions_of, first_row in scored:
                self._score(hidden, sequence, positions_of, first_row)
            logits = self.model.logits(hidden[torch.tensor(last_rows, dtype=torch.int64, device=self.device)])
        else:
            logits = self._logits(kind, batch)[: len(done)]
        self.forward_seconds += perf_counter() - started
        for chunk in chunks:
            chunk.sequence.computed += chunk.count
        return done, draw(logits, done, ahead=unknown) if done else Draft([])

    def _logits(self, kind: str, batch: Batch) -> torch.Tensor:
        """[R, V], R at least the rows asked for."""
        fixed = self._static is not None and self._static.is_fixed(kind, batch)
        if fixed and kind in self.graphs and not self._is_sampled_eagerly(_phase(kind)):
            return self._replay(kind, batch)
        return self.model.forward(batch)

    def _replay(self, kind: str, batch: Batch) -> torch.Tensor:
        """A fixed batch's logits, from its graph where it has one."""
        logits = self.graphs[kind].run(len(batch.token_ids))
        return self.model.forward(batch) if logits is None else logits

    def _is_sampled_eagerly(self, phase: str) -> bool:
        """Whether this step leaves its graph so that its GEMM calls can be timed: a few times a minute, since an eager step
        takes several times as long."""
        now = perf_counter()
        if not RECORDER.sampling or now - self._eager_sample_s[phase] < _EAGER_SAMPLE_EVERY_S:
            return False
        self._eager_sample_s[phase] = now
        return True

    def _score(self, hidden: torch.Tensor, sequence: Sequence, positions: range, first_row: int) -> None:
        """Adds the scores of the prompt tokens that follow `positions`, whose rows of hidden [R, H] begin at first_row."""
        alternatives = sequence.request.sampling.prompt_logprobs
        assert sequence.scored is not None and alternatives is not None
        for start in range(0, len(positions), _SCORED_ROWS):
            part = positions[start : start + _SCORED_ROWS]
            logits = self.model.logits(hidden[first_row + start : first_row + start + len(part)])
            followers = sequence.tokens[part.start + 1 : part.stop + 1]
            sequence.scored += score(logits, followers, alternatives)


def _phase(kind: str) -> str:
    """Under which the calls of a pass are counted: rows of streams beside prompts go with those."""
    return "decode" if kind == "decode" else "prefill"


def _token_ids(flight: Flight, sequences: list[Sequence]) -> torch.Tensor:
    """int [R] on the device: what a flight of one pass gives these of its sequences."""
    ((done, draft),) = flight
    if sequences == done:
        return draft.token_ids()
    row_of = {sequence: row for row, sequence in enumerate(done)}
    return draft.token_ids([row_of[sequence] for sequence in sequences])
