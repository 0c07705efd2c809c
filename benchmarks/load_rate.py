"""How fast a model folder is loaded from a cold page cache, beside how fast the disk reads the same files.

    python benchmarks/load_rate.py FOLDER [--gigabytes 4] [--device auto] [--runs 3]

Makes FOLDER (removed at the end unless --keep): a compressed-tensors W4A16 Llama of the given size with random weights,
8B-like layers, shards of 2 GB. Then, each in a process of its own and from a cold page cache, in turn:

    disk      pread of the files from start to end, in blocks of 8 MiB
    read      every tensor through the checkpoint reader, in the order in which the decoder asks
    load      the same, repacked into kernels' layouts: what `nybble serve` does before it is ready
    prepacked like load, from the folder's saved prepacked form (`nybble quantize --prepack`)

The cache is dropped with posix_fadvise(DONTNEED) on written-back files; that it was shows in the disk's own rate. Peak memory is VmHWM of the process less what it was before the load.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import statistics
import subprocess
import sys
from contextlib import nullcontext
from pathlib import Path
from time import perf_counter

BLOCK = 8 << 20
HIDDEN, WIDE, HEADS, KV_HEADS, VOCABULARY, GROUP = 4096, 14336, 32, 8, 32064, 128
MODES = ("disk", "read", "load", "prepacked")


def make(folder: Path, gigabytes: float) -> None:
    """Random int4 layers until the folder has this many bytes."""
    import torch

    from nybble.kernels.packing import W4A16Weight
    from nybble.service.checkpoints.quantize import (
        QuantizeOptions,
        _Shards,
        pack_quantized,
        quantization_config,
    )

    folder.mkdir(parents=True, exist_ok=True)
    shapes = {
        "self_attn.q_proj": (HIDDEN, HIDDEN),
        "self_attn.k_proj": (HIDDEN * KV_HEADS // HEADS, HIDDEN),
        "self_attn.v_proj": (HIDDEN * KV_HEADS // HEADS, HIDDEN),
        "self_attn.o_proj": (HIDDEN, HIDDEN),
        "mlp.gate_proj": (WIDE, HIDDEN),
        "mlp.up_proj": (WIDE, HIDDEN),
        "mlp.down_proj": (HIDDEN, WIDE),
    }
    layer_bytes = sum(n * k // 2 + n * k // GROUP * 2 for n, k in shapes.values())
    embedding = torch.randn(VOCABULARY, HIDDEN, dtype=torch.float32).to(torch.bfloat16)
    layers = max(1, round((gigabytes * 1e9 - embedding.nbytes) / layer_bytes))
    shards = _Shards(folder)
    shards.add({"model.embed_tokens.weight": embedding, "model.norm.weight": torch.ones(HIDDEN).bfloat16()})
    for i in range(layers):
        p = f"model.layers.{i}"
        for name in ("input_layernorm", "post_attention_layernorm"):
            shards.add({f"{p}.{name}.weight": torch.ones(HIDDEN).bfloat16()})
        for name, (n, k) in shapes.items():
            q = torch.randint(-(2**31), 2**31, (n, k // 8), dtype=torch.int64).to(torch.int32)
            scales = (torch.rand(n, k // GROUP) * 0.01).bfloat16()
            shards.add(pack_quantized(f"{p}.{name}", W4A16Weight(q, scales, None, None, GROUP, n, k)))
    shards.finish()
    config = {
        "architectures": ["LlamaForCausalLM"],
        "hidden_size": HIDDEN,
        "intermediate_size": WIDE,
        "num_hidden_layers": layers,
        "num_attention_heads": HEADS,
        "num_key_value_heads": KV_HEADS,
        "vocab_size": VOCABULARY,
        "max_position_embeddings": 4096,
        "rms_norm_eps": 1e-5,
        "rope_theta": 1e4,
        "tie_word_embeddings": True,
        "eos_token_id": 2,
        "dtype": "bfloat16",
        "quantization_config": quantization_config(QuantizeOptions(GROUP, True, False), ["lm_head"]),
    }
    (folder / "config.json").write_text(json.dumps(config))


def drop_cache(folder: Path) -> None:
    os.sync()
    for path in (path for path in folder.rglob("*") if path.is_file()):
        fd = os.open(path, os.O_RDONLY)
        os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
        os.close(fd)


def peak_bytes() -> int:
    status = Path("/proc/self/status").read_text()
    return int(status.split("VmHWM:")[1].split()[0]) * 1024


def measure(mode: str, folder: Path, device_name: str) -> dict[str, float]:
    """One run in this process: seconds, bytes of weights, and peak memory beyond what was there before."""
    files = sorted(folder.glob("*.safetensors"))
    total = sum(path.stat().st_size for path in files)
    if mode == "disk":
        buffer = bytearray(BLOCK)
        started = perf_counter()
        for path in files:
            fd = os.open(path, os.O_RDONLY)
            offset = 0
            while count := os.preadv(fd, [buffer], offset):
                offset += count
            os.close(fd)
        return {"seconds": perf_counter() - started, "bytes": total, "peak_bytes": 0}

    import torch

    from nybble.kernels.attention import choose
    from nybble.kernels.host_memory import kept_blocks
    from nybble.kernels.target import default_device, detect, shares_host_memory, usable_cores
    from nybble.kernels.threads import single_steps
    from nybble.service.checkpoints import open_checkpoint
    from nybble.service.checkpoints.prepacked import prepack, prepacked_layout
    from nybble.service.engine.load import head_quantizer
    from nybble.service.malloc import large_blocks_go_back
    from nybble.service.models import load, read_config

    if mode == "prepacked" and not any(folder.glob("prepacked/*")):
        prepack(folder)
        return {}
    device = default_device() if device_name == "auto" else torch.device(device_name)
    torch.set_num_threads(usable_cores())
    target = detect(device)
    if device.type == "cuda":
        torch.zeros(1, device=device)
    before = peak_bytes()
    started = perf_counter()
    shared, pin = shares_host_memory(device), device.type == "cuda"
    with large_blocks_go_back(), kept_blocks(), open_checkpoint(folder, None, shared, pin) as checkpoint:
        weights = checkpoint.total_bytes
        if mode == "read":
            names = [name for name in checkpoint.names() if "norm" not in name]
            order = sorted(names, key=lambda n: (int(n.split(".")[2]) if ".layers." in n else -1, n))
            checkpoint.expect(order)
            for name in order:
                checkpoint.tensor(name)
        else:
            config = read_config(checkpoint.config, folder)
            if mode == "prepacked":
                checkpoint.use_prepacked(prepacked_layout(target, torch.bfloat16))
            attention = choose(target, torch.bfloat16, config.head_dim, 16).backend
            head = head_quantizer("auto", checkpoint, config, torch.bfloat16, device)
            with single_steps() if device.type == "cpu" else nullcontext():
                model = load(config, checkpoint, attention, torch.bfloat16, device, 4096, head)
            weights = model.nbytes
    if device.type == "cuda":
        torch.cuda.synchronize()
    seconds = perf_counter() - started
    return {"seconds": seconds, "bytes": total, "peak_bytes": peak_bytes() - before, "weights_bytes": weights}


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("folder", type=Path)
    parser.add_argument("--gigabytes", type=float, default=4.0)
    parser.add_argument("--device", default="auto")
    parser.add_argument("--runs", type=int, default=3)
    parser.add_argument("--modes", default="disk,read,load,prepacked")
    parser.add_argument("--keep", action="store_true")
    parser.add_argument("--one", choices=MODES, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.one:
        print(json.dumps(measure(args.one, args.folder, args.device)))
        return
    if not (args.folder / "config.json").is_file():
        make(args.folder, args.gigabytes)
    if "prepacked" in args.modes:
        subprocess.run([sys.executable, __file__, str(args.folder), "--one", "prepacked"], check=True)
    results: dict[str, list[dict[str, float]]] = {}
    for _ in range(args.runs):
        for mode in args.modes.split(","):
            drop_cache(args.folder)
            command = [sys.executable, __file__, str(args.folder), "--one", mode, "--device", args.device]
            out = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True).stdout
            results.setdefault(mode, []).append(json.loads(out.splitlines()[-1]))
    disk = statistics.median(r["bytes"] / r["seconds"] for r in results["disk"])
    print("| mode | GB/s, each run | median share of the disk's rate | peak memory beyond the weights, GiB |")
    print("|---|---|---|---|")
    for mode, runs in results.items():
        rates = [r["bytes"] / r["seconds"] for r in runs]
        over = max((r["peak_bytes"] - r.get("weights_bytes", 0)) / 2**30 for r in runs)
        shown = ", ".join(f"{rate / 1e9:.2f}" for rate in rates)
        extra = f"{over:.2f}" if mode in ("load", "prepacked") else ""
        print(f"| {mode} | {shown} | {statistics.median(rates) / disk:.0%} | {extra} |")
    if not args.keep:
        shutil.rmtree(args.folder)


if __name__ == "__main__":
    main()
