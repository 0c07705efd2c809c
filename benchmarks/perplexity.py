"""Perplexity of a model as the engine computes it, on any device: what its kernels cost in quality.

    python benchmarks/perplexity.py [demo] --device cpu --dtype float32 --save-ids ids.json
    python benchmarks/perplexity.py [demo] --device cuda --dtype bfloat16 --ids ids.json

The text is a part of the Python language reference, as in quality.py, whose wording changes with Python: --ids takes the
tokens that another run saved. Consecutive windows are scored as prompts (prompt_logprobs); perplexity is exp of the mean
negative log-probability, each window's first token is only context.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import math
import time
from pathlib import Path

from nybble.service.checkpoints import resolve
from nybble.service.engine.load import build_engine
from nybble.service.engine.protocol import EngineConfig, Request, SamplingParams

WINDOW = 1024
WINDOWS = 6


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("model", nargs="?", default="demo")
    parser.add_argument("--device", default="auto")
    parser.add_argument("--dtype", default="auto")
    parser.add_argument("--lm-head", default="keep")
    parser.add_argument("--ids", type=Path, help="tokens that --save-ids wrote, in place of the text")
    parser.add_argument("--save-ids", type=Path)
    arguments = parser.parse_args()
    folder = resolve(arguments.model)
    ids = json.loads(arguments.ids.read_text()) if arguments.ids else tokens_of_text(folder)
    if arguments.save_ids:
        arguments.save_ids.write_text(json.dumps(ids))
    engine = build_engine(
        EngineConfig(
            str(folder),
            device=arguments.device,
            dtype=arguments.dtype,
            max_model_len=WINDOW,
            lm_head=arguments.lm_head,
            kv_cache_bytes=1 << 30,
        )
    )
    started = time.perf_counter()
    scoring = SamplingParams(max_tokens=0, prompt_logprobs=0)
    total = count = 0
    for start in range(0, len(ids), WINDOW):
        engine.add(Request(str(start), tuple(ids[start : start + WINDOW]), scoring, 0.0))
    while engine.has_work:
        for out in engine.step():
            if out.error:
                raise SystemExit(out.error)
            total -= sum(token.logprob for token in out.prompt_logprobs)
            count += len(out.prompt_logprobs)
    digest = hashlib.sha256(json.dumps(ids).encode()).hexdigest()[:16]
    kernels = ", ".join(sorted({k.kernel for k in engine.info.kernels}))
    print(
        f"{arguments.model} on {engine.info.target}, {engine.info.dtype}, head {arguments.lm_head}, kernels {kernels}: "
        f"perplexity {math.exp(total / count):.4f} over {count} tokens (ids {digest}), {time.perf_counter() - started:.0f} s"
    )


def tokens_of_text(folder: Path) -> list[int]:
    from quality import reference
    from transformers import AutoTokenizer

    ids: list[int] = AutoTokenizer.from_pretrained(folder).encode(reference())
    return ids[: WINDOWS * WINDOW]


if __name__ == "__main__":
    main()
