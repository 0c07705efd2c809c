"""Prompt rows by measured time, on devices whose clock is a formula."""

import random
import statistics

import pytest

from nybble.service.engine import pacing
from nybble.service.engine.kv_blocks import BlockPool
from nybble.service.engine.pacing import Budget, CostModel, Pacer, PassTime, PassTimes, Rows
from nybble.service.engine.protocol import Request, SamplingParams
from nybble.service.engine.scheduler import Scheduler
from nybble.service.engine.sequence import Sequence

BLOCK = 16


class Device:
    """Seconds of a step as a formula. decode: of a step of one stream, and what each more adds; then a prefill pass:
    fixed, per row (of `tile` rows at a time), per row and position seen."""

    def __init__(self, decode, more, fixed, per_row, per_pair, tile=1):
        self.decode, self.more = decode, more
        self.fixed, self.per_row, self.per_pair, self.tile = fixed, per_row, per_pair, tile

    def seconds(self, streams, contexts, chunks):
        seconds = 0.0
        if streams:
            seconds += self.decode + self.more * (streams - 1) + self.per_pair * sum(contexts)
        if chunks:
            rows = -(-sum(c.count for c in chunks) // self.tile) * self.tile
            seconds += self.fixed + self.per_row * rows + self.per_pair * sum(c.pairs for c in chunks)
        return seconds


DEVICES = {
    # Prompt rows and streams in one pass: what the rows add. An 8B model on a data-centre GPU, the same in tiles, the same
    # on an APU, a tiny model on two CPU cores.
    "gpu": Device(1.2e-3, 1e-5, 0.1e-3, 2.2e-5, 1.2e-9),
    "gpu-tiles": Device(1.2e-3, 1e-5, 0.1e-3, 1.5e-5, 1.2e-9, tile=32),
    "apu": Device(20e-3, 1e-4, 1e-3, 8e-4, 5e-8),
    "cpu-tiny-model": Device(9e-3, 2e-3, 1e-3, 1.6e-3, 4e-7),
    # In a pass of their own, which takes as long as a step of the streams, or a third longer.
    "gpu-two-passes": Device(1.2e-3, 1e-5, 1.3e-3, 2.2e-5, 1.2e-9),
    "gpu-slow-pass": Device(1.2e-3, 1e-5, 1.6e-3, 2.2e-5, 1.2e-9),
}


class Staircase(Device):
    """Passes padded to fixed numbers of rows, as captured on a data-centre GPU: up to 16 rows cost little more than one does,
    a few more twice as much, four times as many no more than that; streams are rows of the pass. off: by which factor they
    take longer than when measured at the start."""

    MIXED = {16: 2.4, 32: 4.0, 64: 4.2, 128: 5.2, 192: 7.0, 256: 8.5}  # ms
    PER_POSITION = 3e-8

    def __init__(self, off=1.0):
        super().__init__(2e-3, 1e-5, 0, 0, 0)
        self.off = off

    @property
    def times(self):
        mixed = {rows: PassTime(ms / 1e3, self.PER_POSITION) for rows, ms in self.MIXED.items()}
        return PassTimes({1: 2e-3, 8: 2.07e-3}, mixed, 512)

    def seconds(self, streams, contexts, chunks):
        if not (streams and chunks):
            return super().seconds(streams, contexts, []) + 2e-5 * sum(c.count for c in chunks)
        count = sum(c.count for c in chunks)
        rows = next((r for r in self.MIXED if r >= streams + count), max(self.MIXED))
        context = sum(c.count * c.context for c in chunks) / count
        scale = max(1.0, (streams + count) / rows)
        return self.off * scale * (self.MIXED[rows] / 1e3 + self.PER_POSITION * context)


class Hopper(Device):
    """An 8B model on an H200 as measured (ms): passes with prompts take several times a decode step, and what 64 streams read
    of the cache nearly as long as the rest of theirs. beside: more of a pass with prompts than was measured at the start."""

    MIXED = {16: 2.6, 32: 3.2, 64: 3.8, 128: 7.0, 192: 9.2, 256: 9.1, 320: 17.0, 512: 17.0}
    DECODE = {1: 1.8, 2: 1.85, 4: 1.95, 8: 2.1, 16: 2.4, 32: 2.9, 64: 3.3}
    PER_ROW = 2.5e-9  # and position before it

    def __init__(self, beside):
        super().__init__(0, 0, 0, 0, 39e-9)
        self.beside = beside

    @property
    def times(self):
        mixed = {n: PassTime(ms / 1e3, n * self.PER_ROW) for n, ms in self.MIXED.items() if n <= 320}
        return PassTimes({n: ms / 1e3 for n, ms in self.DECODE.items()}, mixed, 512, self.per_pair)

    def seconds(self, streams, contexts, chunks):
        rows = streams + sum(c.count for c in chunks)
        table = self.MIXED if chunks else self.DECODE
        size = next(size for size in table if size >= rows)
        behind = size * self.PER_ROW * sum(c.count * c.context for c in chunks) / max(1, rows - streams)
        beside = self.beside if chunks and streams else 0.0
        return table[size] / 1e3 + self.per_pair * sum(contexts) + behind + beside


class Clock:
    def __init__(self, device, noise=0.0, **fields):
        defaults = {"prefill": 512, "busy": 0, "blocks": 20_000, "running": 32}
        fields = defaults | fields
        self.device = device
        self.now = 0.0
        self.random = random.Random(0)
        self.noise = noise
        self.pacer = Pacer(fields["prefill"], fields["busy"], getattr(device, "times", None))
        self.scheduler = Scheduler(
            BlockPool(fields["blocks"]), BLOCK, fields["running"], self.pacer, clock=lambda: self.now
        )
        self.token_times = {}
        self.chunks = []  # (prompts' rows by id) of every step
        self.first = 0

    def add(self, name, length, max_tokens=100_000):
        self.first += 100_000
        prompt = tuple(range(self.first, self.first + length))
        sequence = Sequence(Request(name, prompt, SamplingParams(max_tokens), 0.0), ())
        self.scheduler.add(sequence)
        self.token_times[name] = []
        return sequence

    def step(self):
        step = self.scheduler.schedule()
        rows = [Rows(c.count, c.sequence.computed) for c in step.prefill]
        streams = len(step.decode)
        seconds = self.device.seconds(streams, [s.computed for s in step.decode], rows)
        seconds *= 1 + self.noise * self.random.uniform(-1, 1)
        self.now += seconds
        self.pacer.observe(seconds, streams, rows, sum(s.computed for s in step.decode), step.growth)
        self.chunks.append({c.sequence.id: c.count for c in step.prefill})
        got = list(step.decode) + [c.sequence for c in step.prefill if c.completes]
        for s in step.decode:
            s.computed += 1
        for chunk in step.prefill:
            chunk.sequence.computed += chunk.count
        for s in got:
            s.append(1)
            self.token_times[s.id].append(self.now)
            self.scheduler.commit(s, s.computed)

    def gaps(self, name, since=0.0):
        times = [t for t in self.token_times[name] if t >= since]
        return [b - a for a, b in zip(times, times[1:], strict=False)]


DEVICES |= {
    "staircase": Staircase(),
    "staircase-slower": Staircase(1.2),
    "hopper": Hopper(0.0),
    "hopper-slower": Hopper(1e-3),
}


@pytest.mark.parametrize("streams", [1, 4, 8])
@pytest.mark.parametrize("device", DEVICES)
def test_streams_go_on_while_16k_are_prefilled_and_a_short_prompt_overtakes(device, streams):
    clock = Clock(DEVICES[device], noise=0.05)
    for i in range(streams):
        clock.add(f"stream{i}", 100 + i)
    while min(len(t) for t in clock.token_times.values()) < 30:
        clock.step()
    usual = statistics.median(clock.gaps("stream0")[-20:])

    started = clock.now
    long = clock.add("long", 16_384, max_tokens=1)
    for _ in range(20):
        clock.step()
    short = clock.add("short", 5, max_tokens=1)
    before = len(clock.chunks)
    while short.output_len == 0:
        clock.step()
    assert len(clock.chunks) - before <= 2, "the short prompt's first token came after more than two chunks"
    clock.scheduler.remove(short)
    while long.output_len == 0:
        clock.step()
    worst = max(max(clock.gaps(f"stream{i}", started)) for i in range(streams))
    assert worst < 3 * usual
    # And not by doing next to nothing: the steps are used.
    assert (clock.now - started) / len(clock.gaps("stream0", started)) > 1.5 * usual


@pytest.mark.parametrize(("off", "rows"), [(1.0, 63), (0.7, 127), (1.2, 15)])
def test_captured_passes_are_filled_as_far_as_time_allows(off, rows):
    """Rows that only fill the padding are free, and no smaller chunk is chosen for what is learnt from small ones."""
    clock = Clock(Staircase(off))
    clock.add("stream", 100)
    while len(clock.token_times["stream"]) < 30:
        clock.step()
    long = clock.add("long", 4096, max_tokens=1)
    chunks = []
    while long.output_len == 0:
        clock.step()
        chunks.append(clock.chunks[-1].get("long", 0))
    assert statistics.median(chunks[10:]) == rows


@pytest.mark.parametrize("context", [0, 20_000, 100_000])
def test_rows_that_cost_nothing_more_are_taken_however_long_the_pass_is(context):
    """Behind many positions any pass takes longer than it may: then its padding is filled all the same."""
    pacer = Pacer(512, 0, Staircase().times)
    pacer.ratio = 1.4
    for _ in range(10):
        pacer.observe(2e-3, 1, [])
    assert pacer.budget(1).take(4096, context, BLOCK) == 15


def test_streams_and_prompts_fit_into_one_pass():
    clock = Clock(Staircase(0.01), busy=512)
    for streams, rows in ((1, 511), (8, 504), (600, 512)):
        assert clock.pacer.budget(streams).take(4096, 0, 1) == rows, (
            "no stream's row is worth reading the weights twice"
        )
    auto = Pacer(512, 0, Staircase().times)
    auto.observe(1.0, 8, [])
    assert auto.budget(8).take(4096, 0, BLOCK) == 504


@pytest.mark.parametrize("device", ["staircase", "gpu-tiles"])
def test_many_that_come_together_are_not_kept_waiting_for_the_first_ones_gaps(device):
    """With all of them a step takes three times as long: steps as long are right while they are on their way."""
    d = Staircase() if device == "staircase" else Device(2e-3, 0, 0.1e-3, 3e-5, 1.2e-9, tile=32)
    d.more = d.decode / 15
    clock = Clock(d)
    if device == "staircase":
        clock.pacer._times = PassTimes(
            {n: d.decode + (n - 1) * d.more for n in (1, 8, 31)}, d.times.mixed, 512
        )
    else:  # as many have run before
        for _ in range(20):
            clock.pacer.observe(d.decode + 30 * d.more, 31, [])
    clock.add("first", 100)
    while len(clock.token_times["first"]) < 20:
        clock.step()
    started = clock.now
    rest = [clock.add(f"{i}", 400) for i in range(30)]
    while not all(s.output_len for s in rest):
        clock.step()
    gaps, took = clock.gaps("first", started), clock.now - started
    for _ in range(20):
        clock.step()
    assert max(gaps) < 3 * statistics.median(clock.gaps("first")[-10:])
    # Steps as long as the streams of the moment allow take 0.71 s of gpu-tiles; as long as one stream's allow, 0.53 of staircase.
    assert took < (0.5 if device == "staircase" else 0.62)


@pytest.mark.parametrize(("beside", "most_s"), [(0.0, 1.8), (2e-3, 4.0)])
def test_a_full_house_that_comes_at_once_is_not_kept_waiting_for_rows_that_fit_beside_few(beside, most_s):
    """No step without prompts tells how long those of so many streams take, with all that they read. A pass of 64 rows has
    ever fewer free beside more streams: in those alone the last prompts would crawl, 20 s in all."""
    clock = Clock(Hopper(beside), running=64)
    clock.add("alone", 512, max_tokens=100)
    while clock.scheduler.running or clock.scheduler.waiting:
        clock.step()
        for s in [s for s in clock.scheduler.running if s.output_len == 100]:
            clock.scheduler.remove(s)
    started = clock.now
    prompts = [clock.add(f"{i}", 512) for i in range(64)]
    while not all(s.output_len for s in prompts):
        clock.step()
        assert clock.now - started < most_s


def test_a_prompt_does_not_raise_the_limit_for_itself():
    """It will be a second stream, and steps of two take twice as long: its rows are those that one stream's steps allow."""
    clock = Clock(Staircase())
    clock.pacer._times = PassTimes({1: 2e-3, 31: 4e-3}, Staircase().times.mixed, 512)
    clock.add("stream", 100)
    while len(clock.token_times["stream"]) < 30:
        clock.step()
    clock.add("long", 4096, max_tokens=1)
    clock.step()
    assert clock.chunks[-1]["long"] == 63
    clock.add("another", 4096, max_tokens=1)
    clock.step()
    assert sum(clock.chunks[-1].values()) > 63


def test_a_step_is_judged_by_the_growth_of_its_own_budget():
    """The budget after it may be for fewer newcomers: it comes first where steps are launched ahead."""
    pacer = Pacer(512, 0, PassTimes({1: 2e-3, 31: 4e-3}, Staircase().times.mixed, 512))
    pacer.observe(2e-3, 1, [])
    growth = pacer.budget(1, newcomers=1).growth
    assert growth == 2 and pacer.budget(1).growth == 1
    pacer.observe(8e-3, 1, [Rows(127, 0)], growth=growth)
    assert pacer.ratio == pacing.STEP_RATIO
    pacer.observe(8e-3, 1, [Rows(127, 0)], growth=1)
    assert pacer.ratio < pacing.STEP_RATIO


def test_a_device_that_becomes_slower_gets_smaller_chunks_within_a_few_steps():
    clock = Clock(DEVICES["cpu-tiny-model"])
    clock.add("stream", 100)
    for _ in range(20):
        clock.step()
    clock.add("long", 16_384)
    for _ in range(20):
        clock.step()
    before = clock.chunks[-1]["long"]
    d = clock.device
    clock.device = Device(d.decode, d.more, d.fixed, 4 * d.per_row, d.per_pair)
    for _ in range(20):
        clock.step()
    assert clock.chunks[-1]["long"] < before / 2


def test_without_streams_a_chunk_takes_at_most_half_a_second():
    clock = Clock(DEVICES["cpu-tiny-model"])
    clock.add("long", 4096)
    before = 0.0
    for i in range(8):
        clock.step()
        if i >= 2:
            assert clock.now - before < 0.6
        before = clock.now
    assert all(rows % BLOCK == 0 for chunk in clock.chunks for rows in chunk.values())


def test_the_model_finds_the_formula():
    device = DEVICES["apu"]
    model, rng = CostModel(), random.Random(1)
    for _ in range(40):
        rows = [Rows(rng.randint(1, 300), rng.randint(0, 8000))]
        model.observe(rows, device.seconds(0, [], rows))
    for rows in ([Rows(64, 0)], [Rows(200, 4000)], [Rows(10, 100), Rows(90, 2000)]):
        assert model.seconds(rows) == pytest.approx(device.seconds(0, [], rows), rel=0.02)


def test_one_hiccup_does_not_change_what_is_expected():
    model = CostModel()
    for i in range(30):
        model.observe([Rows(32 + i, 100)], 1e-3 * (32 + i))
    before = model.seconds([Rows(50, 100)])
    model.observe([Rows(40, 100)], 5.0)
    assert model.seconds([Rows(50, 100)]) < 1.5 * before
    pacer = Pacer(512, 0)
    for _ in range(10):
        pacer.observe(0.01, 1, [])
    pacer.observe(2.0, 1, [])
    assert pacer.usual(1) < 0.013


def test_the_usual_step_is_that_of_as_many_streams():
    pacer = Pacer(512, 0)
    assert pacer.usual(4) is None
    pacer.observe(0.010, 1, [])
    pacer.observe(0.030, 16, [])
    assert (pacer.usual(1), pacer.usual(17), pacer.usual(300)) == (0.010, 0.030, 0.030)
    assert pacer.usual(2) == 0.010


def test_the_usual_step_counts_what_streams_read():
    """One stream behind 1000 positions was measured: 2 ms where 1.8 were expected."""
    pacer = Pacer(512, 0, PassTimes({1: 1.7e-3, 8: 2.6e-3}, {64: PassTime(4e-3, 0)}, 64, 1e-7))
    pacer.observe(2e-3, 1, [], 1000)
    assert pacer.usual(1, 1000) == pytest.approx(2e-3)
    assert pacer.usual(1, 20_000) == pytest.approx(2e-3 / 1.8 * 3.7)
    assert pacer.usual(8, 8000) == pytest.approx(2e-3 / 1.8 * 3.4)


@pytest.mark.parametrize(
    ("most", "busy", "streams", "rows"), [(512, 0, 0, 512), (512, 64, 3, 64), (32, 64, 3, 32)]
)
def test_fixed_numbers_of_rows(most, busy, streams, rows):
    assert Pacer(most, busy).budget(streams).take(1000, 0) == rows


def test_parts_of_a_prompt_end_on_blocks_where_they_reach_one():
    budget = Budget(CostModel(), 50)
    assert budget.take(100, 7, 16) == 41  # 7 + 41 = 48
    assert budget.take(100, 7, 16) == 9, "fewer than a block"
    assert budget.take(100, 0, 16) == 0
    assert Budget(CostModel(), 50).take(20, 7, 16) == 20, "the end of a prompt is its end"
    assert Budget(CostModel(), 5).take(20, 0, 16) == 5, "no block's end is in reach"


def test_what_is_held_is_left_for_its_prompt():
    budget = Budget(CostModel(), 40)
    budget.hold(100, 0, 0.25)
    assert budget.take(100, 0) == 30
    budget.let_go()
    assert budget.take(100, 0) == 10
    budget.give_back()
    assert budget.take(4, 0) == 4
