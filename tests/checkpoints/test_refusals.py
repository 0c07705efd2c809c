"""Every field of the small real folders' config.json, and of each format's settings, with values that make no sense.

A refusal names the field and the value, and says what is accepted or what to do.
"""

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from nybble.service.checkpoints import FORMATS
from nybble.service.errors import CheckpointError, ConfigError
from nybble.service.models import read_config

DATA = Path(__file__).parents[1] / "data"
CONFIGS = sorted(DATA.glob("*/config.json"))
GARBAGE: list[Any] = ["x", [], {}, [1], {"a": 1}, True, -1, 0, 1.5, float("inf"), 10**30, "4", ["a"], -5.5]
REMEDY = re.compile(r"accepted|understood|add |set |no multiple|remove|correct")
SETTINGS: dict[str, dict[str, Any]] = {
    "compressed-tensors": json.loads((DATA / "llama-ct-g32" / "config.json").read_text())["quantization_config"],
    "gptq": {
        "quant_method": "gptq", "bits": 4, "group_size": 32, "sym": True, "desc_act": False, "pack_dtype": "int32",
        "checkpoint_format": "gptq", "dynamic": {"+:.*down.*": {"bits": 4, "group_size": 32, "sym": True}},
    },
    "awq": {"quant_method": "awq", "bits": 4, "group_size": 32, "zero_point": True, "version": "gemm"},
    "auto-round": {
        "quant_method": "auto-round", "bits": 4, "group_size": 32, "sym": True, "data_type": "int", "act_bits": 16,
        "packing_format": "auto_round:auto_gptq", "extra_config": {"lm_head": {"bits": 16}},
    },
}  # fmt: skip


def _paths(value: Any, above: tuple[str, ...] = ()) -> Iterator[tuple[str, ...]]:
    if isinstance(value, dict):
        for key, inner in value.items():
            yield (*above, key)
            yield from _paths(inner, (*above, key))


def _with(config: dict[str, Any], path: tuple[str, ...], value: Any) -> dict[str, Any]:
    changed: dict[str, Any] = json.loads(json.dumps(config))
    inner = changed
    for key in path[:-1]:
        inner = inner[key]
    inner[path[-1]] = value
    return changed


@pytest.mark.parametrize("path", CONFIGS, ids=lambda path: path.parent.name)
def test_fields_of_config_json(path: Path) -> None:
    config = json.loads(path.read_text())
    config.pop("quantization_config")
    refused = 0
    for field in _paths(config):
        for value in GARBAGE:
            try:
                read_config(_with(config, field, value), path.parent)
            except (ConfigError, CheckpointError) as error:
                refused += 1
                # transformers writes some fields with a _ before the name that they are read by.
                assert field[-1].lstrip("_") in error.message, (field, value, error.message)
                assert REMEDY.search(error.message), error.message
    assert refused > 100


@pytest.mark.parametrize("method", SETTINGS)
def test_fields_of_quantisation_settings(method: str) -> None:
    where, refused = "config.json: quantization_config", 0
    for field in _paths(SETTINGS[method]):
        for value in GARBAGE:
            if field == ("quant_method",):
                continue
            settings = _with(SETTINGS[method], field, value)
            try:
                FORMATS[method](settings, where)
            except CheckpointError as error:
                refused += 1
                assert error.message.startswith(where), error.message
                assert field[-1] in error.message, (field, value, error.message)
                assert "accepted" in error.message, error.message
    assert refused > 20
