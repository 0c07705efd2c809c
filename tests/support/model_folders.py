"""Real quantisers' model folders with reference answers: those in tests/data, and those $NYBBLE_CHECKPOINTS names."""

import json
import os
from pathlib import Path

from nybble.service.models import ARCHITECTURES

DATA = Path(__file__).parents[1] / "data"


def architecture(folder: Path) -> str:
    return json.loads((folder / "config.json").read_text())["architectures"][0]


def folders() -> list[Path]:
    """Of the architectures that are served; a name in both places is taken from the latter."""
    roots = [DATA]
    if os.environ.get("NYBBLE_CHECKPOINTS"):
        roots.append(Path(os.environ["NYBBLE_CHECKPOINTS"]))
    found = {p.parent.name: p.parent for root in roots for p in sorted(root.glob("*/reference.json"))}
    return [path for path in found.values() if architecture(path) in ARCHITECTURES]


def prompts(folder: Path) -> list[dict]:
    """Per prompt: input_ids, top20_ids, top20_logits, greedy_ids, greedy_top1_top2_gap."""
    return json.loads((folder / "reference.json").read_text())["prompts"]
