"""One step on the device: rows in, tokens out."""

from __future__ import annotations

from time import perf_counter

import torch

from nybble.kernels.attention import Span
from nybble.kernels.linear import RECORDER
from nybble.service.engine.protocol import Token
from nybble.service.engine.sampler import Draft, draw, score
from nybble.service.engine.scheduler import Chunk, Step
from nybble.service.engine.sequence import Sequence
from nybble.service.models import Batch, Decoder

_STEPS_PER_THREAD_COUNT = 8
# Rows of a scored prompt whose logits exist at one time: a chunk's would be larger than the workspace.
_SCORED_ROWS = 16


# Sequences whose last row was computed, and their next tokens on the way from the device.
Flight = list[tuple[list[Sequence], Draft]]


class Runner:
    """Runs a step's decode rows and its prefill chunks as one forward pass, which reads the weights once, where the
    attention back end takes both; otherwise as two.

    forward_seconds adds up the time inside the model, so that the engine can tell its own overhead.
    """

    def __init__(self, model: Decoder, device: torch.device) -> None:
        self.model = model
        self.device = device
        self.forward_seconds = 0.0

    @property
    def runs_ahead(self) -> bool:
        """Whether `launch` returns before the device is done, so that the host has time for other things."""
        return self.device.type != "cpu"

    @torch.inference_mode()
    def launch(self, step: Step) -> Flight:
        """Start a step. Sequences count its rows as computed from here on."""
        flight: Flight = []
        rows = [Chunk(s, 1) for s in step.decode]
        if rows and step.prefill and self.model.attention.mixes_rows:
            return [self._pass("prefill", rows + step.prefill)]
        if rows:
            flight.append(self._pass("decode", rows))
        if step.prefill:
            flight.append(self._pass("prefill", step.prefill))
        return flight

    @torch.inference_mode()
    def collect(self, flight: Flight) -> list[tuple[Sequence, Token | None]]:
        """The next token of every sequence that got one; None where its logits were not finite. Waits for the device."""
        started = perf_counter()
        results = [pair for done, draft in flight for pair in zip(done, draft.tokens(), strict=True)]
        if self.runs_ahead:
            self.forward_seconds += perf_counter() - started
        return results

    def release_memory(self) -> None:
        """Give back what the allocator keeps for later; after an allocation failed."""
        if self.device.type == "cuda":
            torch.cuda.empty_cache()

    def warm_up(self) -> None:
        """One row through the model, so that no first request pays for lazy initialisation. Uses block 0, free then."""
        row = torch.zeros(1, dtype=torch.int64, device=self.device)
        with torch.inference_mode():
            self.model.forward(Batch(row, row, [Span(1, 1, [0])]))
        RECORDER.reset()

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

    def _pass(self, phase: str, chunks: list[Chunk]) -> tuple[list[Sequence], Draft]:
        ids: list[int] = []
        positions: list[int] = []
        spans = []
        last_rows = []
        done = []
        scored: list[tuple[Sequence, range, int]] = []  # positions, and the row of the first
        for chunk in chunks:
            s = chunk.sequence
            stop = s.computed + chunk.count
            if unscored := s.unscored(stop):
                scored.append((s, unscored, len(ids) + unscored.start - s.computed))
            ids += s.tokens[s.computed : stop]
            positions += range(s.computed, stop)
            spans.append(Span(chunk.count, stop, s.blocks))
            if chunk.completes:
                last_rows.append(len(ids) - 1)
                done.append(s)
        rows = (
            None
            if len(last_rows) == len(ids) or scored
            else torch.tensor(last_rows, dtype=torch.int64, device=self.device)
        )
        batch = Batch(
            torch.tensor(ids, dtype=torch.int64, device=self.device),
            torch.tensor(positions, dtype=torch.int64, device=self.device),
            spans,
            rows,
        )
        RECORDER.phase = phase
        started = perf_counter()
        if scored:
            hidden = self.model.hidden(batch)
            for sequence, positions_of, first_row in scored:
                self._score(hidden, sequence, positions_of, first_row)
            logits = self.model.logits(hidden[torch.tensor(last_rows, dtype=torch.int64, device=self.device)])
        else:
            logits = self.model.forward(batch)
        self.forward_seconds += perf_counter() - started
        for chunk in chunks:
            chunk.sequence.computed += chunk.count
        return done, draw(logits, done) if done else Draft([])

    def _score(self, hidden: torch.Tensor, sequence: Sequence, positions: range, first_row: int) -> None:
        """Adds the scores of the prompt tokens that follow `positions`, whose rows of hidden [R, H] begin at first_row."""
        alternatives = sequence.request.sampling.prompt_logprobs
        assert sequence.scored is not None and alternatives is not None
        for start in range(0, len(positions), _SCORED_ROWS):
            part = positions[start : start + _SCORED_ROWS]
            logits = self.model.logits(hidden[first_row + start : first_row + start + len(part)])
            followers = sequence.tokens[part.start + 1 : part.stop + 1]
            sequence.scored += score(logits, followers, alternatives)
