"""Every spelling of a quantised layer, on layers packed here nibble by nibble from the formats' definitions."""

from typing import Any

import pytest
import torch

from nybble.kernels.packing import W4A16Weight, unpack_rows
from nybble.service.checkpoints import open_checkpoint
from nybble.service.errors import CheckpointError

N, K, G = 16, 64, 32
AWQ_COLUMNS = (0, 2, 4, 6, 1, 3, 5, 7)
M = "model.layers.0.self_attn.q_proj"


def _word(nibbles: list[int]) -> int:
    value = sum(int(v) << (4 * i) for i, v in enumerate(nibbles))
    return value - (1 << 32) if value >= 1 << 31 else value


def _pack(values: torch.Tensor, columns: tuple[int, ...] = tuple(range(8))) -> torch.Tensor:
    """[R, C] -> int32 [R, C/8]; nibble i of a word is column columns[i] of its eight."""
    rows, cols = values.shape
    words = [
        [_word([values[r, c + j].item() for j in columns]) for c in range(0, cols, 8)] for r in range(rows)
    ]
    return torch.tensor(words, dtype=torch.int32)


@pytest.fixture
def layer() -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """q [N, K] and z [N, K/G] that hold every value 0..15, s [N, K/G]."""
    torch.manual_seed(0)
    q = torch.randint(0, 16, (N, K))
    z = torch.arange(N * K // G).view(N, K // G) % 16
    return q, z, torch.rand(N, K // G).to(torch.float16) + 0.5


def _compressed(**weights: Any) -> dict[str, Any]:
    base = {
        "num_bits": 4,
        "type": "int",
        "symmetric": True,
        "strategy": "group",
        "group_size": G,
        "dynamic": False,
    }
    group = {
        "targets": ["Linear"],
        "weights": base | weights,
        "input_activations": None,
        "output_activations": None,
    }
    return {
        "quant_method": "compressed-tensors",
        "format": "pack-quantized",
        "ignore": ["lm_head"],
        "config_groups": {"group_0": group},
    }


def _gptq(**fields: Any) -> dict[str, Any]:
    return {"quant_method": "gptq", "bits": 4, "group_size": G, "sym": False, "desc_act": False, **fields}


def _awq(**fields: Any) -> dict[str, Any]:
    return {
        "quant_method": "awq",
        "bits": 4,
        "group_size": G,
        "zero_point": True,
        "version": "gemm",
        **fields,
    }


def _read(folder: Any, n: int = N, k: int = K) -> W4A16Weight:
    with open_checkpoint(folder) as checkpoint:
        weight = checkpoint.linear(M, n, k)
        assert checkpoint.unread() == []
    assert isinstance(weight, W4A16Weight)
    return weight


def _same(weight: W4A16Weight, q: torch.Tensor, z: torch.Tensor | None, s: torch.Tensor) -> None:
    assert torch.equal(unpack_rows(weight.q).long(), q)
    assert torch.equal(weight.scales, s) and weight.scales.is_contiguous()
    if z is None:
        assert weight.zeros is None
    else:
        assert weight.zeros is not None and torch.equal(weight.zeros.long(), z)


class TestCompressedTensors:
    def test_symmetric(self, write, layer) -> None:
        q, _, s = layer
        folder = write(
            _compressed(),
            {
                f"{M}.weight_packed": _pack(q),
                f"{M}.weight_scale": s,
                f"{M}.weight_shape": torch.tensor([N, K]),
            },
        )
        _same(_read(folder), q, None, s)

    @pytest.mark.parametrize("spelling", ["packed int32", "signed int8"])
    def test_asymmetric(self, write, layer, spelling: str) -> None:
        q, z, s = layer
        stored = _pack(z.t()).t() if spelling == "packed int32" else (z - 8).to(torch.int8)
        folder = write(
            _compressed(symmetric=False),
            {f"{M}.weight_packed": _pack(q), f"{M}.weight_scale": s, f"{M}.weight_zero_point": stored},
        )
        _same(_read(folder), q, z, s)

    @pytest.mark.parametrize("rows", [1, 7, 9])
    def test_packed_zero_points_of_a_row_count_that_is_no_multiple_of_8(
        self, write, layer, rows: int
    ) -> None:
        q, z, s = (t[:rows] for t in layer)
        padded = torch.nn.functional.pad(z, (0, 0, 0, -rows % 8))
        folder = write(
            _compressed(symmetric=False),
            {
                f"{M}.weight_packed": _pack(q),
                f"{M}.weight_scale": s,
                f"{M}.weight_zero_point": _pack(padded.t()).t(),
            },
        )
        _same(_read(folder, n=rows), q, z, s)

    @pytest.mark.parametrize(
        "weights", [{"strategy": "channel", "group_size": None}, {"group_size": -1}], ids=str
    )
    def test_per_channel_is_one_group(self, write, layer, weights: dict[str, Any]) -> None:
        q, _, s = layer
        folder = write(
            _compressed(**weights), {f"{M}.weight_packed": _pack(q), f"{M}.weight_scale": s[:, :1]}
        )
        weight = _read(folder)
        _same(weight, q, None, s[:, :1])
        assert weight.group_size == K

    def test_zero_points_of_a_symmetric_weight_are_ignored(self, write, layer) -> None:
        q, z, s = layer
        tensors = {
            f"{M}.weight_packed": _pack(q),
            f"{M}.weight_scale": s,
            f"{M}.weight_zero_point": z.to(torch.int8),
        }
        _same(_read(write(_compressed(), tensors)), q, None, s)

    @pytest.mark.parametrize(
        ("g_idx", "kept"),
        [(torch.arange(K) // G, False), (torch.full((K,), -1), False), (torch.arange(K) % 2, True)],
        ids=["trivial", "unset", "real"],
    )
    def test_act_order(self, write, layer, g_idx: torch.Tensor, kept: bool) -> None:
        q, _, s = layer
        tensors = {f"{M}.weight_packed": _pack(q), f"{M}.weight_scale": s, f"{M}.weight_g_idx": g_idx.int()}
        weight = _read(write(_compressed(), tensors))
        assert (weight.g_idx is not None) == kept
        if kept:
            assert torch.equal(weight.g_idx, g_idx.int())

    def test_act_order_out_of_range_is_refused(self, write, layer) -> None:
        q, _, s = layer
        tensors = {
            f"{M}.weight_packed": _pack(q),
            f"{M}.weight_scale": s,
            f"{M}.weight_g_idx": torch.arange(K).int(),
        }
        with pytest.raises(CheckpointError, match=r"weight_g_idx: given groups 0\.\.63, accepted 0\.\.1"):
            _read(write(_compressed(), tensors))

    @pytest.mark.parametrize("pattern", [M, "model.layers.0.self_attn", "re:.*q_proj"])
    def test_ignored_module_stays_16_bit(self, write, pattern: str) -> None:
        plain = torch.randn(N, K, dtype=torch.bfloat16)
        with open_checkpoint(
            write(_compressed() | {"ignore": [pattern]}, {f"{M}.weight": plain})
        ) as checkpoint:
            assert torch.equal(checkpoint.linear(M, N, K), plain)

    @pytest.mark.parametrize("pattern", [M, "model.layers.0.self_attn", "re:.*q_proj"])
    def test_ignored_module_with_quantised_tensors_is_refused(self, write, layer, pattern: str) -> None:
        tensors = {f"{M}.weight_packed": _pack(layer[0]), f"{M}.weight_scale": layer[2]}
        with pytest.raises(CheckpointError, match="q_proj is listed in `ignore`"):
            _read(write(_compressed() | {"ignore": [pattern]}, tensors))

    @pytest.mark.parametrize("target", [M, r"re:.*\.self_attn\..*"])
    def test_a_nearer_target_beats_the_class(self, write, layer, target: str) -> None:
        q, _, s = layer
        quantization = _compressed(group_size=K)
        near = _compressed()["config_groups"]["group_0"] | {"targets": [target]}
        quantization["config_groups"]["group_1"] = near
        folder = write(quantization, {f"{M}.weight_packed": _pack(q), f"{M}.weight_scale": s})
        assert _read(folder).group_size == G

    def test_a_module_no_target_covers_is_refused(self, write, layer) -> None:
        quantization = _compressed()
        quantization["config_groups"]["group_0"]["targets"] = ["re:.*mlp.*"]
        tensors = {f"{M}.weight_packed": _pack(layer[0]), f"{M}.weight_scale": layer[2]}
        with pytest.raises(CheckpointError, match=r"no target of config_groups \(re:\.\*mlp\.\*\) covers it"):
            _read(write(quantization, tensors))

    @pytest.mark.parametrize(
        ("change", "field"),
        [
            ({"num_bits": 8}, "weights.num_bits: given 8, accepted 4"),
            ({"type": "float"}, "weights.type: given 'float', accepted int"),
            ({"strategy": "tensor"}, "weights.strategy: given 'tensor', accepted group or channel"),
            ({"dynamic": True}, "weights.dynamic: given True"),
        ],
        ids=lambda v: v if isinstance(v, str) else "",
    )
    def test_other_weights_are_refused_by_field(self, write, change: dict[str, Any], field: str) -> None:
        with pytest.raises(CheckpointError, match=field):
            open_checkpoint(write(_compressed(**change), {"a": torch.zeros(1)}))

    @pytest.mark.parametrize(
        ("change", "field"),
        [
            ({"format": "marlin-24"}, "format: given 'marlin-24', accepted pack-quantized"),
            ({"config_groups": {}}, "config_groups: given {}"),
            ({"sparsity_config": {"format": "sparse-24-bitmask"}}, "sparsity_config.format"),
            ({"transform_config": {"config_groups": {"u": {}}}}, "transform_config"),
        ],
        ids=lambda v: v if isinstance(v, str) else "",
    )
    def test_other_formats_are_refused_by_field(self, write, change: dict[str, Any], field: str) -> None:
        with pytest.raises(CheckpointError, match=field):
            open_checkpoint(write(_compressed() | change, {"a": torch.zeros(1)}))

    def test_quantised_activations_are_refused(self, write) -> None:
        quantization = _compressed()
        quantization["config_groups"]["group_0"]["input_activations"] = {"num_bits": 8}
        with pytest.raises(CheckpointError, match="input_activations: given 'quantised activations'"):
            open_checkpoint(write(quantization, {"a": torch.zeros(1)}))


class TestGptq:
    def _tensors(self, layer, qzeros: torch.Tensor, **more: torch.Tensor) -> dict[str, torch.Tensor]:
        q, _, s = layer
        tensors = {"qweight": _pack(q).t(), "scales": s.t(), "qzeros": qzeros, **more}
        return {f"{M}.{name}": t for name, t in tensors.items()}

    def test_v1_stores_the_zero_point_less_one(self, write, layer) -> None:
        q, z, s = layer
        folder = write(_gptq(checkpoint_format="gptq"), self._tensors(layer, _pack((z.t() - 1) % 16)))
        _same(_read(folder), q, z, s)

    def test_v1_of_gptqmodel_borrows_between_nibbles(self, write, layer) -> None:
        q, z, s = layer
        qzeros = _pack(z.t()) - 0x11111111
        assert not torch.equal(qzeros, _pack((z.t() - 1) % 16)), "the case needs a zero point of 0"
        folder = write(_gptq(meta={"quantizer": ["gptqmodel:7.6.0"]}), self._tensors(layer, qzeros))
        _same(_read(folder), q, z, s)

    def test_v2_stores_the_zero_point(self, write, layer) -> None:
        q, z, s = layer
        folder = write(_gptq(checkpoint_format="gptq_v2"), self._tensors(layer, _pack(z.t())))
        _same(_read(folder), q, z, s)

    def test_symmetric_ignores_stored_zero_points(self, write, layer) -> None:
        q, z, s = layer
        _same(_read(write(_gptq(sym=True), self._tensors(layer, _pack(z.t())))), q, None, s)

    def test_group_size_minus_one_is_one_group(self, write, layer) -> None:
        q, z, s = layer
        one = (q, z[:, :1], s[:, :1])
        weight = _read(
            write(_gptq(group_size=-1, checkpoint_format="gptq_v2"), self._tensors(one, _pack(one[1].t())))
        )
        _same(weight, *one)
        assert weight.group_size == K

    @pytest.mark.parametrize("real", [False, True])
    def test_act_order(self, write, layer, real: bool) -> None:
        g_idx = (torch.arange(K) % 2 if real else torch.arange(K) // G).int()
        weight = _read(
            write(
                _gptq(desc_act=True, sym=True),
                self._tensors(layer, torch.zeros(K // G, N // 8).int(), g_idx=g_idx),
            )
        )
        assert (weight.g_idx is not None) == real

    def test_act_order_without_its_tensor_is_refused(self, write, layer) -> None:
        folder = write(
            _gptq(desc_act=True, sym=True), self._tensors(layer, torch.zeros(K // G, N // 8).int())
        )
        with pytest.raises(CheckpointError, match="no tensor .*g_idx, which desc_act=true needs"):
            _read(folder)

    def test_a_zero_bias_on_a_layer_without_bias_is_not_missed(self, write, layer) -> None:
        tensors = self._tensors(layer, torch.zeros(K // G, N // 8).int(), bias=torch.zeros(N))
        _read(write(_gptq(sym=True), tensors))

    def test_a_bias_that_matters_is_reported_unread(self, write, layer) -> None:
        tensors = self._tensors(layer, torch.zeros(K // G, N // 8).int(), bias=torch.ones(N))
        with open_checkpoint(write(_gptq(sym=True), tensors)) as checkpoint:
            checkpoint.linear(M, N, K)
            assert checkpoint.unread() == [f"{M}.bias"]
            assert checkpoint.unread() == [f"{M}.bias"], "asking changes nothing"
            assert torch.equal(checkpoint.bias(M), torch.ones(N))
            assert checkpoint.unread() == []

    def test_settings_beside_config_json(self, write, layer) -> None:
        q, _, s = layer
        folder = write(None, self._tensors(layer, torch.zeros(K // G, N // 8).int()))
        (folder / "quantize_config.json").write_text(
            '{"bits": 4, "group_size": 32, "desc_act": false, "sym": true}'
        )
        _same(_read(folder), q, None, s)

    @pytest.mark.parametrize(
        "dynamic",
        [{"-:.*lm_head.*": {}}, {r"+:.*mlp.*": {"bits": 4, "group_size": G}}, {"x": {"mse": 2.0}}],
        ids=["skip", "the same", "no format"],
    )
    def test_harmless_overrides_are_accepted(self, write, dynamic: dict[str, Any]) -> None:
        open_checkpoint(write(_gptq(dynamic=dynamic), {"a": torch.zeros(1)})).close()

    @pytest.mark.parametrize(
        ("change", "field"),
        [
            ({"bits": 8}, "bits: given 8, accepted 4"),
            ({"checkpoint_format": "marlin"}, "checkpoint_format: given 'marlin', accepted gptq or gptq_v2"),
            ({"pack_dtype": "int64"}, "pack_dtype: given 'int64'"),
            ({"is_marlin_format": True}, "is_marlin_format: given True"),
            ({"group_size": None}, "group_size: given None"),
            (
                {"dynamic": {"+:.*down.*": {"bits": 8}}},
                r"dynamic\['\+:\.\*down\.\*'\]\.bits: given 8, accepted 4",
            ),
        ],
        ids=lambda v: v if isinstance(v, str) else "",
    )
    def test_other_files_are_refused_by_field(self, write, change: dict[str, Any], field: str) -> None:
        with pytest.raises(CheckpointError, match=field):
            open_checkpoint(write(_gptq() | change, {"a": torch.zeros(1)}))


class TestAwq:
    def _tensors(self, q: torch.Tensor, z: torch.Tensor, s: torch.Tensor) -> dict[str, torch.Tensor]:
        return {
            f"{M}.qweight": _pack(q.t(), AWQ_COLUMNS),
            f"{M}.qzeros": _pack(z.t(), AWQ_COLUMNS),
            f"{M}.scales": s.t(),
        }

    def test_gemm_order(self, write, layer) -> None:
        _same(_read(write(_awq(), self._tensors(*layer))), *layer)

    def test_more_columns_than_one_chunk(self, write) -> None:
        n = 1024 + 40
        q, z, s = torch.randint(0, 16, (n, 32)), torch.randint(0, 16, (n, 1)), torch.rand(n, 1).half()
        _same(_read(write(_awq(), self._tensors(q, z, s)), n=n, k=32), q, z, s)

    def test_without_zero_points_the_weight_is_symmetric(self, write, layer) -> None:
        q, z, s = layer
        folder = write(_awq(zero_point=False), self._tensors(q, torch.full_like(z, 8), s))
        _same(_read(folder), q, None, s)

    def test_stored_zero_points_count_whatever_the_flag_says(self, write, layer) -> None:
        _same(_read(write(_awq(zero_point=False), self._tensors(*layer))), *layer)

    @pytest.mark.parametrize(
        ("change", "field"),
        [
            ({"bits": 8}, "bits: given 8, accepted 4"),
            ({"version": "gemv"}, "version: given 'gemv', accepted gemm"),
            ({"group_size": "32"}, "group_size: given '32'"),
        ],
        ids=lambda v: v if isinstance(v, str) else "",
    )
    def test_other_files_are_refused_by_field(self, write, change: dict[str, Any], field: str) -> None:
        with pytest.raises(CheckpointError, match=field):
            open_checkpoint(write(_awq() | change, {"a": torch.zeros(1)}))


@pytest.mark.parametrize(
    ("n", "k", "message"),
    [
        (N * 2, K, r"q_proj\.weight_packed: given int32 \[16, 8\], accepted int32 \[32, 8\]"),
        (N, K * 2, r"q_proj\.weight_packed: given int32 \[16, 8\], accepted int32 \[16, 16\]"),
        (
            N,
            K + G + 4,
            "q_proj: K=100 with group_size 32; accepted a K that is a multiple of 8 and of group_size",
        ),
    ],
    ids=["N", "K", "K and G"],
)
def test_a_shape_that_does_not_fit_is_named(write, layer, n: int, k: int, message: str) -> None:
    folder = write(_compressed(), {f"{M}.weight_packed": _pack(layer[0]), f"{M}.weight_scale": layer[2]})
    with pytest.raises(CheckpointError, match=message):
        _read(folder, n=n, k=k)


def test_a_plain_weight_of_another_shape_or_type_is_named(write) -> None:
    folder = write(
        _compressed(), {"a.weight": torch.zeros(4, 8), "b.weight": torch.zeros(4, 8).to(torch.float8_e4m3fn)}
    )
    with open_checkpoint(folder) as checkpoint:
        with pytest.raises(CheckpointError, match=r"a\.weight: given float32 \[4, 8\], accepted .* \[8, 8\]"):
            checkpoint.linear("a", 8, 8)
        with pytest.raises(CheckpointError, match=r"b\.weight: given float8_e4m3fn"):
            checkpoint.linear("b", 4, 8)
        with pytest.raises(CheckpointError, match=r"module c has neither c\.weight_packed nor c\.weight"):
            checkpoint.linear("c", 4, 8)


@pytest.mark.parametrize("given", [True, "awq", [1]])
def test_a_quantization_config_that_is_no_object(write, given: Any) -> None:
    with pytest.raises(CheckpointError, match="quantization_config: given .*, accepted an object"):
        open_checkpoint(write(given, {}))


@pytest.mark.parametrize(
    "change",
    [
        {"quant_method": ["x"]},
        {"ignore": 5},
        {"config_groups": [1]},
        {"config_groups": {"group_0": None}},
        {"sparsity_config": "x"},
        {"ignore": ["re:("]},
    ],
    ids=str,
)
def test_a_value_of_another_kind_is_refused(write, change: dict[str, Any]) -> None:
    with pytest.raises(CheckpointError, match="quantization_config: "):
        open_checkpoint(write(_compressed() | change, {}))


@pytest.mark.parametrize(
    "change", [{"group_size": "x"}, {"group_size": float("nan")}, {"group_size": [32]}], ids=str
)
def test_a_group_size_of_another_kind_is_refused(write, change: dict[str, Any]) -> None:
    with pytest.raises(CheckpointError, match="quantization_config: "):
        open_checkpoint(write(_compressed(**change), {}))
