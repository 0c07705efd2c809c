"""How many prompt rows a step may compute: as many as its time allows. No torch and no clock here.

Running streams wait for a step's prompt rows as well as for their own. So while there are streams, the rows are chosen
by the time they are expected to take, from what earlier steps took:

    seconds of a prefill pass = fixed + per_row * rows + per_pair * (rows x positions each of them sees)

fitted to the passes measured so far, older ones fading. Where steps are captured that is a staircase instead, since a pass
of a few rows is padded to a fixed number of them: its steps are measured at the start (PassTimes), and what is learnt later
is by which factor they are off. The usual time of a step without prompt rows is kept per number of streams, with the positions
that they read: while many prompts come one after the other there is none to be measured, and it grows.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass

# A step with prompt rows is meant to take at most this many times one without: under the 3 that are promised, by what
# predictions err. Steps that come near the 3 all the same lower it, since the machine is less steady; others raise it again.
STEP_RATIO, LEAST_STEP_RATIO = 2.2, 1.4
_NEAR = 2.6
_LOWER, _RAISE = 0.93, 0.002
# Longer passes, in decode steps, need not be known.
LONGEST_STEP = 4.0
# Where the mere pass takes longer than that, rows that add this part of a usual step still come with it.
LEAST_SHARE = 0.12
# Without streams nobody waits for the next token, but a newcomer does for the chunk that is under way.
IDLE_CHUNK_S = 0.5
# The rows beside streams start with this many at most and grow by half, or by two, from one step to the next: the formula is
# only known near where it was measured.
_FIRST_ROWS, _GROWTH, _LEAST_GROWTH = 16, 0.5, 2
# Of a measurement's weight, this is left when the next one comes.
_FADING = 0.85
# Measured seconds count as at most this many times the expected ones: a hiccup of the machine is no new normal. Of passes with
# prompt rows more is believed, since more is at stake.
_CLIP, _PROMPT_CLIP = 2.0, 3.0
_PAIRS = 1024.0  # rows x positions are counted in these


@dataclass(frozen=True, slots=True)
class Rows:
    """`count` rows of one prompt, behind `context` positions that are computed."""

    count: int
    context: int

    @property
    def pairs(self) -> float:
        return self.count * (self.context + self.count / 2)


class CostModel:
    """Seconds of a prefill pass; see the module's docstring."""

    def __init__(self) -> None:
        self.coefficients = (0.0, 0.0, 0.0)
        self._products = [[0.0] * 3 for _ in range(3)]
        self._targets = [0.0] * 3
        self.measured = 0

    def observe(self, rows: Iterable[Rows], seconds: float) -> None:
        x = _features(rows)
        expected = max(self._predict(x), 1e-6) if self.measured >= 3 else max(seconds, 1e-6)
        seconds = min(seconds, _PROMPT_CLIP * expected)
        self.measured += 1
        # Relative errors count, not absolute ones: a short pass tells as much as a long one. Relative to what was expected,
        # or a device that becomes slower would be believed the less the slower it is.
        weight = 1 / expected**2
        for i in range(3):
            self._targets[i] = _FADING * self._targets[i] + weight * x[i] * seconds
            for j in range(3):
                self._products[i][j] = _FADING * self._products[i][j] + weight * x[i] * x[j]
        self.coefficients = _least_squares(self._products, self._targets)

    def seconds(self, rows: Iterable[Rows]) -> float:
        return self._predict(_features(rows))

    def _predict(self, x: tuple[float, float, float]) -> float:
        return sum(c * v for c, v in zip(self.coefficients, x, strict=True))


def _features(rows: Iterable[Rows]) -> tuple[float, float, float]:
    rows = list(rows)
    return 1.0, float(sum(r.count for r in rows)), sum(r.pairs for r in rows) / _PAIRS


def _least_squares(products: list[list[float]], targets: list[float]) -> tuple[float, float, float]:
    """The coefficients that fit best, none below 0 and that of rows above it, since more rows without more time is noise.
    Where measurements do not tell two apart, the effect goes to the rows: larger chunks are approached step by step."""
    for kept in ((0, 1, 2), (0, 1), (1, 2), (1,)):
        matrix = [[products[i][j] + (1e-6 * products[i][i] if i == j else 0.0) for j in kept] for i in kept]
        found = _solve(matrix, [targets[i] for i in kept])
        if found is not None and min(found) >= 0 and found[kept.index(1)] > 0:
            spread = dict(zip(kept, found, strict=True))
            return spread.get(0, 0.0), spread[1], spread.get(2, 0.0)
    return 0.0, 0.0, 0.0


def _solve(matrix: list[list[float]], right: list[float]) -> list[float] | None:
    """Gaussian elimination of a symmetric positive definite system; None when it is not."""
    size = len(right)
    rows = [[*matrix[i], right[i]] for i in range(size)]
    for i in range(size):
        if rows[i][i] <= 0:
            return None
        for j in range(i + 1, size):
            factor = rows[j][i] / rows[i][i]
            for k in range(i, size + 1):
                rows[j][k] -= factor * rows[i][k]
    result = [0.0] * size
    for i in reversed(range(size)):
        known = sum(rows[i][k] * result[k] for k in range(i + 1, size))
        result[i] = (rows[i][size] - known) / rows[i][i]
    return result


@dataclass(frozen=True, slots=True)
class PassTime:
    """Seconds of a pass without positions before its rows, and what each position adds that stands before all of them."""

    seconds: float
    per_position: float


@dataclass(frozen=True, slots=True)
class PassTimes:
    """Of captured passes by their rows, padding included, ascending: decode steps on few positions, and streams' and prompts'
    rows together, as far as those are worth knowing. rows: of the longest pass there is. per_position: what each position
    that a stream reads adds to a step."""

    decode: Mapping[int, float]
    mixed: Mapping[int, PassTime]
    rows: int
    per_position: float = 0.0

    def added(self, prompts: Sequence[Rows], streams: int) -> float:
        """Seconds that prompt rows add to a step of this many streams."""
        count = sum(p.count for p in prompts)
        rows = _padded(self.mixed, streams + count)
        time, scale = self.mixed[rows], max(1.0, (streams + count) / rows)
        context = sum(p.count * p.context for p in prompts) / max(count, 1)
        return max(0.0, (time.seconds + time.per_position * context) * scale - self.step(streams))

    def step(self, streams: float, positions: float = 0.0) -> float:
        """Seconds of a decode step of this many streams, which read so many positions together."""
        return self.decode[_padded(self.decode, streams)] + self.per_position * positions


def _padded(known: Mapping[int, object], rows: float) -> int:
    """The first number of rows that holds these, or the last there is."""
    all_rows = tuple(known)
    return all_rows[min(bisect_left(all_rows, rows), len(all_rows) - 1)]


class Budget:
    """The prompt rows of one step, for one prompt after the other.

    cost: seconds of prompts' rows. rows: at most; seconds: what they may take, None for any time; spare: seconds that rows
    may add to the pass in any case, which takes mere(context) for hardly any; in_blocks: whether chunks end where blocks do,
    if they can. growth: how many times longer steps are when those that could get rows are streams.
    """

    def __init__(
        self,
        cost: Callable[[Sequence[Rows]], float],
        rows: int,
        seconds: float | None = None,
        spare: float = 0.0,
        mere: Callable[[int], float] = lambda context: 0.0,
        in_blocks: bool = True,
        growth: float = 1.0,
    ) -> None:
        self.growth = growth
        self._cost = cost
        self._rows = rows
        self._seconds = seconds
        self._spare = spare
        self._mere = mere
        self._in_blocks = in_blocks
        self._taken: list[Rows] = []
        self._held: list[Rows] = []

    def take(self, wanted: int, context: int, align: int = 1) -> int:
        """How many of a prompt's next `wanted` rows, behind `context` positions, fit. If not all of them do, and they are
        twice `align` or more, they end on a multiple of it."""
        count = self._fit(wanted, context)
        if self._in_blocks and 2 * align <= count < wanted:
            count = (context + count) // align * align - context
        if count:
            self._taken.append(Rows(count, context))
        return count

    def give_back(self) -> None:
        """Undo the last `take` that gave any."""
        self._taken.pop()

    def hold(self, wanted: int, context: int, share: float) -> None:
        """Keep this share of what a prompt could take for it, until `let_go`."""
        count = int(self._fit(wanted, context) * share)
        if count:
            self._held.append(Rows(count, context))

    def let_go(self) -> None:
        self._held.clear()

    def _fit(self, wanted: int, context: int) -> int:
        high = min(wanted, self._rows - sum(r.count for r in (*self._taken, *self._held)))
        if self._seconds is None or high <= 0:
            return max(high, 0)
        low = 0
        while low < high:
            middle = (low + high + 1) // 2
            low, high = (middle, high) if self._fits(Rows(middle, context)) else (low, middle - 1)
        # The first prompt of a step always gets on.
        return low or (0 if self._taken else 1)

    def _fits(self, rows: Rows) -> bool:
        assert self._seconds is not None
        seconds = self._cost([*self._taken, *self._held, rows])
        return seconds <= self._seconds or seconds - self._mere(rows.context) <= self._spare


@dataclass(frozen=True, slots=True)
class _Usual:
    """Steps of about as many streams, without prompt rows: how many were measured, and their means."""

    steps: int
    seconds: float
    streams: float
    positions: float


class Pacer:
    """Measured step times in, row budgets out.

    most: rows of a step. most_busy: the same while there are streams; 0 chooses by time. times: of passes, where they were
    measured.
    """

    def __init__(self, most: int, most_busy: int, times: PassTimes | None = None) -> None:
        self._times = times
        self._factor = 1.0
        self.most = most
        self.most_busy = most_busy
        self.model = CostModel()
        self.ratio = STEP_RATIO
        self._last_busy = 0
        # bit length of the number of streams -> steps measured, and of older ones fading means
        self._usual: dict[int, _Usual] = {}

    def budget(self, streams: int, newcomers: int = 0, positions: int = 0, coming: int = 0) -> Budget:
        """For a step that also computes one row each of `streams` sequences, which read so many positions together, while so
        many prompts could get on; coming: positions that others than the longest of these will read.

        These are streams soon, and a step takes longer then. So it may now: of many that come together, the last would
        otherwise wait for the sake of gaps that the first have for a moment only.
        """
        if not streams:
            return Budget(self.model.seconds, self.most, IDLE_CHUNK_S if self.model.measured else None)
        if self.most_busy:
            return Budget(self.model.seconds, min(self._room(streams), self.most_busy))
        usual = self.usual(streams, positions)
        if usual is None:
            # Streams came from prompts, so prompts have been measured; but nothing to compare them with yet.
            usual = self.model.seconds([Rows(1, 0)])
        then = self.usual(streams + newcomers, positions + coming) or 0.0
        growth = then / usual if then > usual > 0 else 1.0
        seconds, spare = self.ratio * growth * usual - usual, LEAST_SHARE * usual
        if self._times is not None:
            # A stream's row more, and the last block of a pass would be another pass: its other rows would be padding.
            added = self._added(streams, usual)
            most = self._room(streams)
            return Budget(
                added,
                most,
                seconds,
                spare,
                lambda context: added([Rows(1, context)]),
                in_blocks=False,
                growth=growth,
            )
        last = self._last_busy
        most = min(self.most, last + max(int(last * _GROWTH), _LEAST_GROWTH) if last else _FIRST_ROWS)
        return Budget(
            self.model.seconds,
            most,
            seconds,
            spare,
            lambda context: self.model.coefficients[0],
            growth=growth,
        )

    def _room(self, streams: int) -> int:
        """Most prompt rows: as many as fit into one pass with the streams', where any do."""
        room = self.most if self._times is None else min(self.most, self._times.rows - streams)
        return room if room > 0 else self.most

    def _added(self, streams: int, usual: float) -> Callable[[Sequence[Rows]], float]:
        """Prompts' rows -> seconds that they add to a step of this many streams, which usually takes `usual`."""
        times = self._times
        assert times is not None
        return lambda prompts: self._factor * (usual + times.added(prompts, streams)) - usual

    def usual(self, streams: int, positions: int = 0) -> float | None:
        """Seconds of a step of this many streams without prompt rows: of the most similar number measured, and as many times
        that as captured steps of the two took at the start, on as many positions."""
        if not self._usual:
            return None
        size = streams.bit_length()
        known = self._usual[min(self._usual, key=lambda measured: (abs(measured - size), measured))]
        if self._times is None:
            return known.seconds
        then = self._times.step(known.streams, known.positions)
        return known.seconds * self._times.step(streams, positions) / then

    def observe(
        self, seconds: float, streams: int, prompts: list[Rows], positions: int = 0, growth: float = 1.0
    ) -> None:
        """What a step took. positions: that its streams read together; growth: of its budget."""
        if not prompts:
            self._observe_usual(seconds, streams, positions)
        elif not streams:
            self.model.observe(prompts, seconds)
        else:
            self._observe_busy(seconds, streams, prompts, positions, growth)

    def _observe_busy(
        self, seconds: float, streams: int, prompts: list[Rows], positions: int, growth: float
    ) -> None:
        usual = self.usual(streams, positions) or 0.0
        self._last_busy = sum(r.count for r in prompts)
        near = usual > 0 and seconds > _NEAR * growth * usual
        self.ratio = (
            max(self.ratio * _LOWER, LEAST_STEP_RATIO) if near else min(self.ratio + _RAISE, STEP_RATIO)
        )
        if self._times is None:
            self.model.observe(prompts, max(seconds - usual, 0.05 * seconds))
        elif usual:
            expected = usual + self._times.added(prompts, streams)
            off = min(max(seconds / expected, self._factor / _PROMPT_CLIP), self._factor * _PROMPT_CLIP)
            self._factor += (1 - _FADING) * (off - self._factor)

    def _observe_usual(self, seconds: float, streams: int, positions: int) -> None:
        size = streams.bit_length()
        known = self._usual.get(size, _Usual(0, seconds, streams, positions))
        share = max(0.2, 1 / (known.steps + 1))

        def faded(before: float, now: float) -> float:
            return before + share * (now - before)

        self._usual[size] = _Usual(
            known.steps + 1,
            faded(known.seconds, min(seconds, _CLIP * known.seconds)),
            faded(known.streams, streams),
            faded(known.positions, positions),
        )
