"""Milliseconds a token of transformers' own generate, on random 16-bit weights in a named shape: beside `nybble bench decode`.

python benchmarks/transformers_decode.py [--shape qwen3-8b] [--batches 1,8,64] [--context 1024] [--tokens 32]
"""

from __future__ import annotations

import argparse
import time

import torch
import transformers
from transformers import AutoConfig, AutoModelForCausalLM

from nybble.kernels.target import default_device
from nybble.service.checkpoints.random_weights import SHAPES


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--shape", default="qwen3-8b", choices=sorted(SHAPES))
    parser.add_argument("--batches", default="1,8,64")
    parser.add_argument("--context", type=int, default=1024)
    parser.add_argument("--tokens", type=int, default=32)
    arguments = parser.parse_args()
    device = default_device()
    fields = {**SHAPES[arguments.shape]}
    config = AutoConfig.for_model(fields.pop("model_type"), **fields)
    with device:
        model = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16).eval()
    print(
        f"transformers {transformers.__version__}, torch {torch.__version__}, {arguments.shape} in bfloat16"
    )
    for batch in map(int, arguments.batches.split(",")):
        ids = torch.randint(0, 256, (batch, arguments.context - arguments.tokens // 2), device=device)
        seconds(model, ids, 2)
        one, all_ = seconds(model, ids, 1), seconds(model, ids, 1 + arguments.tokens)
        tpot = (all_ - one) / arguments.tokens
        print(f"batch {batch}: {tpot * 1e3:.2f} ms a token, {batch / tpot:.1f} tokens/s", flush=True)


@torch.inference_mode()
def seconds(model: torch.nn.Module, ids: torch.Tensor, tokens: int) -> float:
    started = time.perf_counter()
    out = model.generate(
        ids,
        attention_mask=torch.ones_like(ids),
        max_new_tokens=tokens,
        min_new_tokens=tokens,
        do_sample=False,
        pad_token_id=0,
    )
    # Reading a number waits for the device.
    int(out[0, -1])
    return time.perf_counter() - started


if __name__ == "__main__":
    main()
