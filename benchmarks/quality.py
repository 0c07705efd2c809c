"""What 4 bits cost: perplexity of the demo model, quantised in several ways, against its 16-bit source.

    python benchmarks/quality.py [--write benchmarks/results/quality-demo.md]
    python benchmarks/quality.py --head [--write benchmarks/results/quality-head.md]

transformers' own model runs in float32 on weights that are rounded to bf16 or dequantised, so that the figures show the
weights alone and not a kernel. Texts are local: licences (of this repository and of installed packages) and a part of
the Python language reference that the standard library carries. The calibration text of `nybble quantize` is neither.
Perplexity is exp of the mean negative log likelihood over consecutive windows; each window's first token is only context.
"""

from __future__ import annotations

import argparse
import datetime
import hashlib
import importlib.metadata
import math
import platform
import pydoc_data.topics
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import torch
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer

from nybble.kernels.linear.int8 import quantize_rows
from nybble.kernels.linear.reference import dequantize
from nybble.kernels.packing import W4A16Weight
from nybble.service.checkpoints import open_checkpoint, resolve
from nybble.service.checkpoints.calibration import importance, text_tokens
from nybble.service.checkpoints.demo import source_gguf
from nybble.service.checkpoints.gguf import GgufSource
from nybble.service.checkpoints.quantize import quantize_tensor
from nybble.service.models.layers import RescoredHead

WINDOW = 1024
TOKENS = 6 * WINDOW  # of each text, from its start
LICENCES = (
    "typing_extensions",
    "tqdm",
    "certifi",
)  # installed packages; the repository's own LICENSE comes first
TOPICS = ("assignment", "class", "compound", "exceptions", "execmodel")
REPOSITORY = Path(__file__).parents[1]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--write", type=Path, help="also write the table, as Markdown, to this file")
    parser.add_argument(
        "--head", action="store_true", help="only the choices of --lm-head, on the demo's blocks"
    )
    arguments = parser.parse_args()
    folder = resolve("demo")
    tokenizer = AutoTokenizer.from_pretrained(folder)
    texts = {
        name: tokenizer.encode(text)[:TOKENS]
        for name, text in (("licences", licences()), ("reference", reference()))
    }
    with source_gguf() as path:
        source = GgufSource(path)
        rows = list((measure_heads if arguments.head else measure)(source, folder, texts))
    report = render(rows, texts, "--lm-head keep" if arguments.head else "16-bit")
    print(report)
    if arguments.write:
        arguments.write.write_text(report, encoding="utf-8")


def licences() -> str:
    parts = [(REPOSITORY / "LICENSE").read_text(encoding="utf-8")]
    for package in LICENCES:
        files = importlib.metadata.files(package) or []
        parts += [f.read_text() for f in files if ".dist-info" in str(f) and "licen" in f.name.lower()]
    return "\n\n".join(parts)


def reference() -> str:
    return "\n".join(pydoc_data.topics.topics[name] for name in TOPICS)


def measure(
    source: GgufSource, folder: Path, texts: dict[str, list[int]]
) -> Iterator[tuple[str, dict[str, float]]]:
    """Yield (what, perplexity per text)."""
    model = build(source)
    linears = {n: m for n, m in model.named_modules() if isinstance(m, torch.nn.Linear) and n != "lm_head"}
    original = {name: module.weight.detach().clone() for name, module in linears.items()}
    head = model.lm_head.weight.detach().clone()

    def run(what: str) -> tuple[str, dict[str, float]]:
        start = time.perf_counter()
        found = {name: perplexity(model, ids) for name, ids in texts.items()}
        print(f"{what}: {found} ({time.perf_counter() - start:.0f} s)", file=sys.stderr)
        return what, found

    def fill(weight_of: Callable[[str], W4A16Weight]) -> None:
        for name, module in linears.items():
            module.weight.data.copy_(dequantize(weight_of(name)))

    yield run("16-bit source")
    weights = importance(source.config, source.tensor, set(linears), text_tokens(folder), lambda name: None)

    def rounded(group_size: int, symmetric: bool, calibrated: bool) -> Callable[[str], W4A16Weight]:
        return lambda name: quantize_tensor(
            original[name], group_size, symmetric, weights[name] if calibrated else None, torch.bfloat16
        )

    fill(rounded(32, False, calibrated=False))
    yield run("G=32 asymmetric, search without calibration")
    for group_size, symmetric in ((32, True), (64, False)):
        fill(rounded(group_size, symmetric, calibrated=True))
        yield run(f"G={group_size} {'symmetric' if symmetric else 'asymmetric'}, calibrated")
    with open_checkpoint(folder) as checkpoint:
        fill(lambda name: checkpoint.linear(name, *original[name].shape))
        measured = checkpoint.head_importance(head.shape[1])
    norm = model.model.norm.weight.detach().float().square()
    choices = {
        "int8 per row": int8_rows(head),
        "int4 G=32 asymmetric, measured importance": int4(head, measured),
        "int4 G=32 asymmetric, importance from the final norm": int4(head, norm),
        "int4 G=32 asymmetric, no importance": int4(head, None),
    }
    yield run("the demo folder: G=32 asymmetric, calibrated")
    for what, weight in choices.items():
        model.lm_head.weight = torch.nn.Parameter(weight)  # untied: the embedding keeps its 16 bits
        yield run(f"the demo folder, and its head {what}")
    model.lm_head.weight = torch.nn.Parameter(int4(head, measured))
    hook = model.lm_head.register_forward_hook(rescored(head))
    yield run(
        f"the demo as served on a CPU: head int4, best {RescoredHead.RESCORED} logits from its 16-bit rows"
    )
    hook.remove()
    for name, module in linears.items():
        module.weight.data.copy_(original[name])
    for what in list(choices)[:2]:
        model.lm_head.weight = torch.nn.Parameter(choices[what])
        yield run(f"16-bit source, but its head {what}")


def measure_heads(
    source: GgufSource, folder: Path, texts: dict[str, list[int]]
) -> Iterator[tuple[str, dict[str, float]]]:
    """The blocks as the demo has them, and each head as `nybble serve` reads it."""
    model = build(source)
    linears = {n: m for n, m in model.named_modules() if isinstance(m, torch.nn.Linear) and n != "lm_head"}
    head = model.lm_head.weight.detach().clone()
    with open_checkpoint(folder) as checkpoint:
        for name, module in linears.items():
            module.weight.data.copy_(dequantize(checkpoint.linear(name, *module.weight.shape)))
        measured = checkpoint.head_importance(head.shape[1])

    def run(what: str) -> tuple[str, dict[str, float]]:
        return what, {name: perplexity(model, ids) for name, ids in texts.items()}

    yield run("--lm-head keep: 16-bit")
    model.lm_head.weight = torch.nn.Parameter(int8_rows(head))
    yield run("--lm-head int8: one scale a row")
    model.lm_head.weight = torch.nn.Parameter(int4(head, measured))
    yield run("int4 alone, G=32 asymmetric (not offered)")
    hook = model.lm_head.register_forward_hook(rescored(head))
    yield run(f"--lm-head int4: the {RescoredHead.RESCORED} best logits from its 16-bit rows")
    hook.remove()


def build(source: GgufSource) -> torch.nn.Module:
    """transformers' model in float32, its weights rounded to bf16."""
    config = AutoConfig.for_model(**source.config)
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    state = {name: source.tensor(name).to(torch.bfloat16).float() for name in source.names()}
    missing, unexpected = model.load_state_dict(state, strict=False)
    assert not unexpected and set(missing) <= {"lm_head.weight"}
    return model.eval()


def int4(head: torch.Tensor, importance: torch.Tensor | None) -> torch.Tensor:
    return dequantize(quantize_tensor(head, 32, False, importance, torch.bfloat16))


def rescored(head: torch.Tensor) -> Callable[..., torch.Tensor]:
    """A forward hook that does to an int4 head's logits what RescoredHead does."""

    def hook(module: torch.nn.Module, args: tuple[torch.Tensor], logits: torch.Tensor) -> torch.Tensor:
        best = logits.topk(RescoredHead.RESCORED, dim=-1).indices
        exact = torch.matmul(head[best], args[0].unsqueeze(-1)).squeeze(-1)
        return logits.scatter(-1, best, exact)

    return hook


def int8_rows(weight: torch.Tensor) -> torch.Tensor:
    """[N, K] through symmetric int8 with one bf16 scale per row."""
    rounded = quantize_rows(weight, torch.bfloat16)
    return rounded.q.float() * rounded.scales.float().unsqueeze(1)


@torch.inference_mode()
def perplexity(model: torch.nn.Module, ids: list[int]) -> float:
    loss, count = 0.0, 0
    for start in range(0, len(ids) - 1, WINDOW):
        window = torch.tensor([ids[start : start + WINDOW]])
        if window.shape[1] < 2:
            break
        logits = model(window).logits[0, :-1].float()
        loss += torch.nn.functional.cross_entropy(logits, window[0, 1:], reduction="sum").item()
        count += window.shape[1] - 1
    return math.exp(loss / count)


def render(rows: list[tuple[str, dict[str, float]]], texts: dict[str, list[int]], against: str) -> str:
    flags = ["--head"] if against.startswith("--lm-head") else []
    base = rows[0][1]
    lines = [
        "# Quality of the demo model (SmolLM2-135M-Instruct, from GGUF Q4_1)",
        "",
        f"{datetime.date.today()}, `python {' '.join(['benchmarks/quality.py', *flags])}`; Python {platform.python_version()}, "
        + ", ".join(
            f"{p} {importlib.metadata.version(p)}" for p in ("torch", "transformers", "gguf", "tokenizers")
        )
        + f"; CPU, float32, windows of {WINDOW} tokens.",
        "",
        f"- licences: {len(texts['licences'])} tokens: LICENSE, then the licence files of "
        + ", ".join(f"{p} {importlib.metadata.version(p)}" for p in LICENCES)
        + f" (SHA-256 of the ids {digest(texts['licences'])})",
        f"- reference: {len(texts['reference'])} tokens: pydoc_data.topics: {', '.join(TOPICS)} "
        f"(SHA-256 of the ids {digest(texts['reference'])})",
        "",
        "| weights | " + " | ".join(f"perplexity, {name} | against {against}" for name in texts) + " |",
        "|---|" + "---:|---:|" * len(texts),
    ]
    for what, found in rows:
        cells = " | ".join(
            f"{found[name]:.2f} | {100 * (found[name] / base[name] - 1):+.1f} %" for name in texts
        )
        lines.append(f"| {what} | {cells} |")
    return "\n".join(lines) + "\n"


def digest(ids: list[int]) -> str:
    return hashlib.sha256(" ".join(map(str, ids)).encode()).hexdigest()[:16]


if __name__ == "__main__":
    main()
