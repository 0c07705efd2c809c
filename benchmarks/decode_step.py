"""Time decode steps of a random-weight model in a real shape, and where the time goes.

    python benchmarks/decode_step.py                               Qwen3-8B, batches 1, 8 and 64, contexts 1k and 16k
    python benchmarks/decode_step.py --batches 1 --contexts 1024 --lm-head int4 --prefill 2048 --dense

No download: weights are random int4 made on the device, activations stay near 1. Every part is captured as a graph of
its own and replayed, so no figure contains Python:

    step    the whole forward, as the engine replays it
    GEMMs   the four projections of every layer     attention  of every layer     rest  norms, rotation, KV writes
    head    the output projection
    gaps    what is left of the step: launches that do not overlap

beside them `eager` (the same forward called from Python), `engine` (filling the buffers, one copy, replay, greedy
sampling, tokens on the host: what one step of the engine costs) and the limit: bytes that a step must read (weights,
head, keys and values) over this device's measured read rate.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial

import torch

from nybble.kernels.attention import CacheShape, Span, choose
from nybble.kernels.attention.paged import PagedAttention
from nybble.kernels.packing import W4A16Weight
from nybble.kernels.target import Target, detect
from nybble.service.checkpoints.quantize import quantize_tensor
from nybble.service.engine.graphs import DecodeGraphs, DeviceCapture
from nybble.service.engine.inputs import Limits, StaticInputs
from nybble.service.engine.protocol import Request, SamplingParams
from nybble.service.engine.sampler import sample
from nybble.service.engine.sequence import Sequence
from nybble.service.models import Batch, Decoder, DecoderConfig, load, read_config

DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16}
BLOCK_SIZE = 16

_COMMON = {
    "architectures": ["Qwen3ForCausalLM"],
    "model_type": "qwen3",
    "hidden_act": "silu",
    "rms_norm_eps": 1e-6,
    "rope_theta": 1000000.0,
    "max_position_embeddings": 40960,
    "tie_word_embeddings": False,
    "attention_bias": False,
}
SHAPES = {
    "qwen3-8b": {
        "hidden_size": 4096,
        "intermediate_size": 12288,
        "num_hidden_layers": 36,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
        "head_dim": 128,
        "vocab_size": 151936,
    },
    "qwen3-4b": {
        "hidden_size": 2560,
        "intermediate_size": 9728,
        "num_hidden_layers": 36,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
        "head_dim": 128,
        "vocab_size": 151936,
    },
    "tiny": {  # to try this script, also in Triton's interpreter (TRITON_INTERPRET=1)
        "hidden_size": 128,
        "intermediate_size": 256,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 32,
        "vocab_size": 512,
    },
}


@dataclass
class RandomSource:
    """A WeightSource of random numbers on the device; outputs of a layer have the size of its inputs.

    sizes: shapes of the tensors that are no linear layers.
    """

    device: torch.device
    dtype: torch.dtype
    group_size: int
    sizes: dict[str, tuple[int, ...]]
    generator: torch.Generator = field(init=False)

    def __post_init__(self) -> None:
        self.generator = torch.Generator(self.device).manual_seed(0)

    def expect(self, modules: list[str]) -> None:
        pass

    def tensor(self, name: str) -> torch.Tensor:
        size = self.sizes[name]
        if len(size) == 1:  # a norm
            return torch.ones(size, dtype=self.dtype, device=self.device)
        return torch.randn(size, generator=self.generator, dtype=self.dtype, device=self.device)

    def linear(self, module: str, n: int, k: int) -> W4A16Weight | torch.Tensor:
        if module == "lm_head":
            weight = torch.randn(n, k, generator=self.generator, dtype=self.dtype, device=self.device)
            return weight.mul_(k**-0.5)
        words = {"generator": self.generator, "device": self.device, "dtype": torch.int64}
        q = torch.randint(-(2**31), 2**31 - 1, (n, k // 8), **words)
        spread = torch.rand(n, k // self.group_size, generator=self.generator, device=self.device) + 0.5
        scales = (spread / (4.6 * k**0.5)).to(self.dtype)  # 4.6: the deviation of q - 8
        return W4A16Weight(q.to(torch.int32), scales, None, None, self.group_size, n, k)

    def bias(self, module: str) -> torch.Tensor | None:
        return None

    def has(self, module: str) -> bool:
        return True


def plain_sizes(c: DecoderConfig) -> dict[str, tuple[int, ...]]:
    sizes: dict[str, tuple[int, ...]] = {
        "model.embed_tokens.weight": (c.vocab_size, c.hidden_size),
        "model.norm.weight": (c.hidden_size,),
    }
    for i in range(c.layers):
        prefix = f"model.layers.{i}"
        for norm in ("input_layernorm", "post_attention_layernorm"):
            sizes[f"{prefix}.{norm}.weight"] = (c.hidden_size,)
        for norm in ("q_norm", "k_norm"):
            sizes[f"{prefix}.self_attn.{norm}.weight"] = (c.head_dim,)
    return sizes


class Clock:
    """Milliseconds of a piece of device work: captured and replayed on a GPU, called on a CPU."""

    def __init__(self, device: torch.device, repeats: int) -> None:
        self.device = device
        self.repeats = repeats if device.type == "cuda" else 2

    def replayed(self, work: Callable[[], object]) -> float:
        if self.device.type == "cpu":
            return self.called(work)
        work()
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            work()
        return self._events(graph.replay)

    def called(self, work: Callable[[], object]) -> float:
        """Wall time of calls in a row, the last one waited for."""
        work()
        self._wait()
        times = []
        for _ in range(5):
            started = time.perf_counter()
            for _ in range(self.repeats):
                work()
            self._wait()
            times.append((time.perf_counter() - started) / self.repeats)
        return 1e3 * statistics.median(times)

    def _events(self, work: Callable[[], object]) -> float:
        times = []
        for _ in range(5):
            start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            work()
            start.record()
            for _ in range(self.repeats):
                work()
            end.record()
            end.synchronize()
            times.append(start.elapsed_time(end) / self.repeats)
        return statistics.median(times)

    def _wait(self) -> None:
        if self.device.type == "cuda":
            torch.cuda.synchronize()


def read_rate(clock: Clock) -> float:
    """Bytes a second of a reduction over 4 GiB (64 MiB on a CPU)."""
    size = (4 << 30) if clock.device.type == "cuda" else (64 << 20)
    x = torch.ones(size // 4, dtype=torch.float32, device=clock.device)
    return size / (1e-3 * clock.replayed(lambda: x.sum()))


def build(args: argparse.Namespace, device: torch.device, target: Target) -> Decoder:
    raw = {**_COMMON, **SHAPES[args.shape]}
    if args.layers:
        raw["num_hidden_layers"] = args.layers
    config = read_config(raw)
    dtype = DTYPES[args.dtype]
    if device.type == "cuda":
        attention = choose(target, dtype, config.head_dim, BLOCK_SIZE).backend
    else:
        attention = PagedAttention()
    quantize = None
    if args.lm_head == "int4":
        quantize = partial(quantize_tensor, group_size=32, symmetric=False, importance=None)
    source = RandomSource(device, dtype, args.group_size, plain_sizes(config))
    positions = min(config.max_positions, max(args.contexts) + max(args.prefill, default=0) + 64)
    return load(config, source, attention, dtype, device, positions, quantize, args.dense)


def kv_bytes_per_token(model: Decoder, dtype: torch.dtype) -> int:
    c = model.config
    return 2 * c.layers * c.kv_heads * c.head_dim * dtype.itemsize


def decode_parts(model: Decoder, batch: Batch) -> dict[str, Callable[[], object]]:
    """The forward taken apart: each part is all of its launches in a step, on made-up inputs of the right shape."""
    c, ops, attention = model.config, model.ops, model.attention
    rows, dtype, device = len(batch.token_ids), model.embedding.dtype, model.embedding.device
    turns = ops.turns(model.ropes, batch.positions)

    def empty(width: int) -> torch.Tensor:
        return torch.randn(rows, width, device=device).to(dtype)

    h, mixed, gated = empty(c.hidden_size), empty(c.heads * c.head_dim), empty(c.intermediate_size)
    q = empty(c.heads * c.head_dim).view(rows, c.heads, c.head_dim)
    first = model.blocks[0]
    qkv, o, down = ops.project(first.qkv, h), ops.project(first.o, mixed), ops.project(first.down, gated)

    def gemms() -> None:
        for b in model.blocks:
            ops.project(b.qkv, h)
            ops.project(b.o, mixed)
            ops.gate(b.gate_up, h, b.interleaved)
            ops.project(b.down, gated)

    def attend() -> None:
        for i, b in enumerate(model.blocks):
            attention.attend(i, q, batch.plan, b.window, c.attention_scale, c.attention_softcap)

    def rest() -> None:
        x = torch.nn.functional.embedding(batch.token_ids, model.embedding)
        ops.norm(x, first.input_norm)
        for i, b in enumerate(model.blocks):
            ops.to_cache(i, qkv, b.qk_norm, turns[b.rope], batch.plan)
            x, _ = ops.add(x, o, b.o_norm, b.post_norm)
            x, _ = ops.add(x, down, b.down_norm, model.norm)

    return {"GEMMs": gemms, "attention": attend, "rest": rest, "head": lambda: model.logits(h)}


def decode_row(
    model: Decoder, batch_size: int, context: int, clock: Clock, rate: float, dtype: torch.dtype
) -> str:
    blocks_each = -(-context // BLOCK_SIZE)
    c, device = model.config, clock.device
    shape = CacheShape(c.layers, batch_size * blocks_each, BLOCK_SIZE, c.kv_heads, c.head_dim, dtype)
    need = shape.block_bytes * shape.blocks
    release(model, device)
    if device.type == "cuda" and need > torch.cuda.mem_get_info()[0] - (4 << 30):
        return f"{batch_size:5} {context:7}   keys and values need {need / 2**30:.0f} GiB: left out"
    model.attention.allocate(shape, device)
    model.attention.whole.normal_()  # type: ignore[attr-defined]
    static = StaticInputs(Limits(batch_size, 16, context, shape.blocks), BLOCK_SIZE, device)
    tables = [
        list(range(i, shape.blocks, batch_size)) for i in range(batch_size)
    ]  # scattered, as after a while
    spans = [Span(1, context, table) for table in tables]
    ids, positions = list(range(batch_size)), [context - 1] * batch_size

    def fill(problem: int) -> None:
        static.decode([i + problem for i in ids], positions, spans)

    fill(0)
    batch = static.decode_batch(batch_size)

    def forward() -> torch.Tensor:
        return model.forward(batch)

    eager = clock.called(forward)
    step = clock.replayed(forward)
    parts = {name: clock.replayed(work) for name, work in decode_parts(model, batch).items()}
    engine = clock.called(engine_step(forward, fill, batch_size, device))
    head = model.head.screen if hasattr(model.head, "screen") else model.head
    linears = sum(
        layer.nbytes for kind, layers in model.linears.items() for layer in layers if kind != "lm_head"
    )
    nbytes = linears + head.nbytes + batch_size * context * kv_bytes_per_token(model, dtype)
    limit = 1e3 * nbytes / rate
    gaps = step - sum(parts.values())
    return (
        f"{batch_size:5} {context:7} {step:8.3f} {limit:8.3f} {step / limit:6.2f} "
        + " ".join(f"{parts[name]:9.3f}" for name in ("GEMMs", "attention", "rest", "head"))
        + f" {gaps:7.3f} {eager:8.3f} {engine:8.3f} {engine / limit:6.2f} {1e3 * batch_size / engine:10.0f}"
    )


def engine_step(
    forward: Callable[[], torch.Tensor], fill: Callable[[int], None], count: int, device: torch.device
) -> Callable[[], object]:
    """What the engine does in a greedy decode step, the scheduler's bookkeeping left out."""
    greedy = SamplingParams(8, temperature=0.0)
    sequences = [Sequence(Request(str(i), (1,), greedy, 0.0), ()) for i in range(count)]
    if device.type == "cpu":
        return lambda: (fill(0), sample(forward(), sequences))
    graphs = DecodeGraphs(DeviceCapture(device))
    graphs.prepare(count, forward, fill)
    if graphs.fallbacks:
        print(f"  batch {count}: no graph ({dict(graphs.fallbacks)}): the engine's figure is eager")

    def run() -> object:
        fill(0)
        logits = graphs.run(count)
        return sample(forward() if logits is None else logits, sequences)

    return run


def release(model: Decoder, device: torch.device) -> None:
    """Let go of the last row's cache before the next one is made."""
    for name in ("whole", "cache"):
        model.attention.__dict__.pop(name, None)
    if device.type == "cuda":
        torch.cuda.empty_cache()


def prefill_row(model: Decoder, rows: int, clock: Clock, dtype: torch.dtype) -> str:
    c, device = model.config, clock.device
    blocks = -(-rows // BLOCK_SIZE)
    release(model, device)
    model.attention.allocate(CacheShape(c.layers, blocks, BLOCK_SIZE, c.kv_heads, c.head_dim, dtype), device)
    static = StaticInputs(Limits(1, rows, rows, blocks), BLOCK_SIZE, device)
    span = Span(rows, rows, list(range(blocks)))
    batch = static.batch("prefill", [1] * rows, list(range(rows)), [span], [rows - 1])
    few = Clock(device, 3)
    seconds = few.called(lambda: model.forward(batch)) / 1e3
    parameters = sum(
        layer.config.n * layer.config.k
        for kind, layers in model.linears.items()
        for layer in layers
        if kind != "lm_head" and hasattr(layer, "config")
    )
    return f"{rows:5} rows {1e3 * seconds:9.2f} ms {rows / seconds:9.0f} tokens/s {2e-12 * parameters * rows / seconds:7.1f} TFLOP/s in GEMMs"


def numbers(text: str) -> list[int]:
    return [int(part) for part in text.split(",") if part]


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--shape", choices=SHAPES, default="qwen3-8b")
    parser.add_argument("--layers", type=int, default=0, help="fewer layers than the shape has")
    parser.add_argument("--batches", type=numbers, default=[1, 8, 64])
    parser.add_argument("--contexts", type=numbers, default=[1024, 16384])
    parser.add_argument("--prefill", type=numbers, default=[], help="row counts of prompts to time, 512,2048")
    parser.add_argument("--dtype", choices=DTYPES, default="bf16")
    parser.add_argument("--group-size", type=int, default=128)
    parser.add_argument("--lm-head", choices=("keep", "int4"), default="keep")
    parser.add_argument("--dense", action="store_true", help="with dense copies for prefill")
    parser.add_argument("--repeats", type=int, default=30)
    args = parser.parse_args()

    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    target, dtype = detect(device), DTYPES[args.dtype]
    clock = Clock(device, args.repeats)
    with torch.inference_mode():
        rate = read_rate(clock)
        began = time.perf_counter()
        model = build(args, device, target)
        paths = {
            kind: layers[0].path_for(1)
            for kind, layers in model.linears.items()
            if hasattr(layers[0], "path_for")
        }
        print(
            f"{target.name} ({target.arch}), torch {torch.__version__}, {args.shape}, {args.dtype}, G {args.group_size}"
        )
        print(
            f"{model.config.layers} layers, weights {model.nbytes / 1e9:.2f} GB, head {args.lm_head}, attention "
            f"{model.attention.name}, paths at batch 1: {paths}; built in {time.perf_counter() - began:.0f} s"
        )
        print(f"read rate {rate / 1e9:.0f} GB/s; all times in milliseconds a step\n")
        print(
            "batch context     step    limit  ratio     GEMMs attention      rest      head    gaps    eager   engine  "
            "ratio   tokens/s"
        )
        for context in args.contexts:
            for batch_size in args.batches:
                print(decode_row(model, batch_size, context, clock, rate, dtype), flush=True)
        for rows in args.prefill:
            print(prefill_row(model, rows, clock, dtype), flush=True)
    if device.type == "cuda":
        print(f"\npeak memory {torch.cuda.max_memory_allocated() / 2**30:.1f} GiB")


if __name__ == "__main__":
    main()
