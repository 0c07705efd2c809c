"""docs/checkpoints.md: each row of its tables is a small folder made here, read, and described by what happens.

    PYTHONPATH=tests/support python tests/checkpoints/test_documented.py

writes the tables anew into the page.
"""

import json
import re
import tempfile
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import torch
from made_layers import AWQ_COLUMNS, G, K, M, N, awq, compressed, gptq, pack, pack8, value
from safetensors.torch import save_file

from nybble.kernels.linear import dequantize
from nybble.kernels.packing import W4A16Weight
from nybble.service.checkpoints import FORMATS, open_checkpoint
from nybble.service.errors import CheckpointError, ConfigError
from nybble.service.models import ARCHITECTURES, read_config

PAGE = Path(__file__).parents[2] / "docs" / "checkpoints.md"
GROUP = torch.arange(K) // G
LOADS, FLOAT = "loads", "loads, in 16 bits"


@dataclass(frozen=True)
class Row:
    """folder: what is in it. expected: the layer's value by definition, None where it is refused."""

    format: str
    variant: str
    quantization: dict[str, Any] | None
    tensors: dict[str, torch.Tensor] = field(default_factory=dict)
    expected: torch.Tensor | None = None
    settings_file: str | None = None


def rows() -> list[Row]:
    gen = torch.Generator().manual_seed(0)

    def random(low: int, high: int, *shape: int) -> torch.Tensor:
        return torch.randint(low, high, shape, generator=gen)

    q, z = random(0, 16, N, K), random(0, 16, N, K // G)
    s = torch.rand(N, K // G, generator=gen).half() + 0.5
    wide, wide_z = random(0, 256, N, K), random(0, 256, N, K // G)
    g_idx = torch.randperm(K, generator=gen) // G
    one = torch.zeros(K, dtype=torch.int64)
    ct = {f"{M}.weight_packed": pack(q), f"{M}.weight_scale": s}
    gp = {f"{M}.qweight": pack(q).t(), f"{M}.scales": s.t()}
    aw = {
        f"{M}.qweight": pack(q.t(), AWQ_COLUMNS),
        f"{M}.scales": s.t(),
        f"{M}.qzeros": pack(z.t(), AWQ_COLUMNS),
    }
    sym, asym = value(q, 8, s, GROUP), value(q, z, s, GROUP)
    zp = {f"{M}.weight_zero_point": pack(z.t()).t()}
    v1, v2 = {f"{M}.qzeros": pack((z.t() - 1) % 16)}, {f"{M}.qzeros": pack(z.t())}
    kv = {"model.layers.0.self_attn.k_scale": torch.ones(1)}

    def groups(**change: Any) -> dict[str, Any]:
        group = compressed()["config_groups"]["group_0"] | change
        return compressed() | {"config_groups": {"group_0": group}}

    auto = {"quant_method": "auto-round", "bits": 4, "group_size": G, "sym": False, "data_type": "int"}
    c, g, a, r = "compressed-tensors", "GPTQ", "AWQ", "auto-round"
    return [
        Row(c, "symmetric, per group", compressed(), ct, sym),
        Row(c, "per channel", compressed(strategy="channel", group_size=None), ct | {f"{M}.weight_scale": s[:, :1]},
            value(q, 8, s[:, :1], one)),
        Row(c, "asymmetric, zero points packed", compressed(symmetric=False), ct | zp, asym),
        Row(c, "asymmetric, zero points as int8", compressed(symmetric=False),
            ct | {f"{M}.weight_zero_point": (z - 8).to(torch.int8)}, asym),
        Row(c, "actorder group", compressed(actorder="group"), ct | {f"{M}.weight_g_idx": g_idx.int()},
            value(q, 8, s, g_idx)),
        Row(c, "actorder group without weight_g_idx", compressed(actorder="group"), ct),
        Row(c, "actorder weight", compressed(actorder="weight"), ct, sym),
        Row(c, "8 bits (also beside 4)", compressed(num_bits=8),
            {f"{M}.weight_packed": pack8(wide), f"{M}.weight_scale": s}, value(wide, 128, s, GROUP)),
        Row(c, "scales of a quantised KV cache", compressed(), ct | kv, sym),
        Row(c, "a quantised module that `ignore` lists", compressed() | {"ignore": ["re:.*q_proj"]}, ct),
        Row(c, "a module that no target covers", groups(targets=["re:.*mlp.*"]), ct),
        Row(c, "2, 3, ... bits", compressed(num_bits=3), ct),
        Row(c, "fp8, nvfp4, int-quantized, marlin-24, ...", compressed() | {"format": "float-quantized"}, ct),
        Row(c, "quantised activations", groups(input_activations={"num_bits": 8}), ct),
        Row(c, "2:4 sparsity", compressed() | {"sparsity_config": {"format": "sparse-24-bitmask"}}, ct),
        Row(c, "transforms at run time", compressed() | {"transform_config": {"config_groups": {"u": {}}}}, ct),
        Row(g, "symmetric (qzeros ignored)", gptq(sym=True), gp | v2, sym),
        Row(g, "asymmetric, v1", gptq(checkpoint_format="gptq"), gp | v1, asym),
        Row(g, "asymmetric, v1 by GPTQModel", gptq(meta={"quantizer": ["gptqmodel:7.6.0"]}),
            gp | {f"{M}.qzeros": pack(z.t()) - 0x11111111}, asym),
        Row(g, "asymmetric, v2", gptq(checkpoint_format="gptq_v2"), gp | v2, asym),
        Row(g, "desc_act", gptq(sym=True, desc_act=True), gp | {f"{M}.g_idx": g_idx.int()}, value(q, 8, s, g_idx)),
        Row(g, "desc_act, g_idx in order", gptq(sym=True, desc_act=True), gp | {f"{M}.g_idx": GROUP.int()}, sym),
        Row(g, "desc_act without g_idx", gptq(sym=True, desc_act=True), gp),
        Row(g, "group_size -1", gptq(sym=True, group_size=-1), gp | {f"{M}.scales": s[:, :1].t()},
            value(q, 8, s[:, :1], one)),
        Row(g, "`dynamic`: another group size", gptq(sym=True, dynamic={".*q_proj": {"group_size": K}}),
            gp | {f"{M}.scales": s[:, :1].t()}, value(q, 8, s[:, :1], one)),
        Row(g, "`dynamic`: 8 bits", gptq(sym=True, dynamic={".*q_proj": {"bits": 8}}),
            {f"{M}.qweight": pack8(wide).t(), f"{M}.scales": s.t()}, value(wide, 128, s, GROUP)),
        Row(g, "8 bits", gptq(bits=8, checkpoint_format="gptq_v2"),
            {f"{M}.qweight": pack8(wide).t(), f"{M}.scales": s.t(), f"{M}.qzeros": pack8(wide_z.t())},
            value(wide, wide_z, s, GROUP)),
        Row(g, "`dynamic`: other bits", gptq(sym=True, dynamic={".*q_proj": {"bits": 3}}), gp),
        Row(g, "settings in quantize_config.json", gptq(sym=True), gp, sym, "quantize_config.json"),
        Row(g, "other layouts (marlin, gptq_p, ...)", gptq(checkpoint_format="marlin"), gp),
        Row(g, "2, 3, ... bits", gptq(bits=3), gp),
        Row(a, "gemm", awq(), aw, asym),
        Row(a, "gemm, as GPTQModel labels it", gptq(checkpoint_format="gemm"), aw, asym),
        Row(a, "settings in quant_config.json", {"w_bit": 4, "q_group_size": G, "version": "GEMM"}, aw, asym,
            "quant_config.json"),
        Row(a, "gemv", awq(version="gemv"), aw),
        Row(a, "gemv_fast", awq(version="gemv_fast"), aw),
        Row(a, "marlin", awq(version="marlin"), aw),
        Row(r, "auto_round:auto_gptq", auto | {"packing_format": "auto_round:auto_gptq"}, gp | v1, asym),
        Row(r, "auto_round:auto_awq", auto | {"packing_format": "auto_round:auto_awq"}, aw, asym),
        Row(r, "auto_round:exllamav2, tritonv2, ...", auto | {"packing_format": "auto_round:exllamav2"}, gp | v2, asym),
        Row(r, "quantised activations", auto | {"act_bits": 8}, gp | v1),
        Row(r, "mx_fp, nv_fp, fp8", auto | {"data_type": "mx_fp"}, gp | v1),
        Row("others", "bitsandbytes, hqq, fp8, quark, torchao, ...", {"quant_method": "bitsandbytes"}, gp),
        Row("others", "16-bit weights", None, {f"{M}.weight": sym}),
    ]  # fmt: skip


def make(row: Row, folder: Path) -> None:
    config: dict[str, Any] = {"architectures": ["LlamaForCausalLM"]}
    if row.settings_file is not None:
        (folder / row.settings_file).write_text(json.dumps(row.quantization))
    elif row.quantization is not None:
        config["quantization_config"] = row.quantization
    (folder / "config.json").write_text(json.dumps(config))
    save_file({name: t.contiguous().clone() for name, t in row.tensors.items()}, folder / "model.safetensors")


def outcome(row: Row, folder: Path) -> str:
    """What the page says of a row, found by reading it."""
    make(row, folder)
    try:
        with open_checkpoint(folder) as checkpoint:
            weight = checkpoint.linear(M, N, K)
            assert checkpoint.unread() == []
    except CheckpointError as error:
        assert row.expected is None, error.message
        return "refused: " + re.sub(rf"{re.escape(str(folder))}(/[\w.]+)?(: )?", "", error.message)
    assert row.expected is not None, "this was to be refused"
    found = dequantize(weight) if isinstance(weight, W4A16Weight) else weight
    assert torch.equal(found, row.expected), "a wrong value"
    return LOADS if isinstance(weight, W4A16Weight) else FLOAT


def table() -> str:
    lines = ["| format | variant | |", "|---|---|---|"]
    with tempfile.TemporaryDirectory() as name:
        for i, row in enumerate(rows()):
            folder = Path(name) / str(i)
            folder.mkdir()
            lines.append(f"| {row.format} | {row.variant} | {outcome(row, folder).replace('|', '&#124;')} |")
    return "\n".join(lines)


def refused_configs() -> str:
    """Fields of config.json, and what is said of them."""
    base = {
        "vocab_size": 256, "hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2,
        "num_attention_heads": 4, "max_position_embeddings": 512,
    }  # fmt: skip
    changes: list[tuple[str, Callable[[], dict[str, Any]]]] = [
        ("LlamaForCausalLM", lambda: {"num_local_experts": 8}),
        ("LlamaForCausalLM", lambda: {"rope_scaling": {"rope_type": "dynamic", "factor": 2.0}}),
        ("LlamaForCausalLM", lambda: {"hidden_act": "gelu"}),
        ("Gemma3ForCausalLM", lambda: {"use_bidirectional_attention": True}),
        ("MixtralForCausalLM", dict),
    ]
    lines = []
    for name, change in changes:
        with pytest.raises(ConfigError) as caught:
            read_config({"architectures": [name], **base, **change()})
        lines.append(f"- {caught.value.message}")
    return "\n".join(lines)


SECTIONS = {
    "table": table,
    "architectures": lambda: ", ".join(name.removesuffix("ForCausalLM") for name in ARCHITECTURES) + ".",
    "refused": refused_configs,
}


def page(text: str) -> str:
    """The page with its generated sections made anew."""
    for name, section in SECTIONS.items():
        start, end = f"<!-- {name} -->\n", f"\n<!-- end of {name} -->"
        before, rest = text.split(start)
        text = before + start + section() + end + rest.split(end)[1]
    return text


def test_every_format_has_rows() -> None:
    methods = {(row.quantization or {}).get("quant_method") for row in rows()}
    assert methods >= set(FORMATS) - {"intel/auto-round"}


def test_the_page_says_what_happens() -> None:
    assert PAGE.read_text() == page(PAGE.read_text()), "run this file as a program to write the page anew"


if __name__ == "__main__":
    PAGE.write_text(page(PAGE.read_text()))
