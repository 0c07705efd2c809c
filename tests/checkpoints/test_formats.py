"""Every spelling of a quantised layer, on layers packed here nibble by nibble from the formats' definitions."""

import json
from typing import Any

import pytest
import torch
from made_layers import AWQ_COLUMNS, G, K, M, N, awq, compressed, gptq, pack, pack8, value

from nybble.kernels.packing import W4A16Weight, unpack_rows
from nybble.service.checkpoints import open_checkpoint
from nybble.service.errors import CheckpointError


@pytest.fixture
def layer() -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """q [N, K] and z [N, K/G] that hold every value 0..15, s [N, K/G]."""
    torch.manual_seed(0)
    q = torch.randint(0, 16, (N, K))
    z = torch.arange(N * K // G).view(N, K // G) % 16
    return q, z, torch.rand(N, K // G).to(torch.float16) + 0.5


def _any(folder: Any, n: int = N, k: int = K, module: str = M) -> W4A16Weight | torch.Tensor:
    with open_checkpoint(folder) as checkpoint:
        weight = checkpoint.linear(module, n, k)
        assert checkpoint.unread() == []
    return weight


def _read(folder: Any, n: int = N, k: int = K, module: str = M) -> W4A16Weight:
    weight = _any(folder, n, k, module)
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
            compressed(),
            {
                f"{M}.weight_packed": pack(q),
                f"{M}.weight_scale": s,
                f"{M}.weight_shape": torch.tensor([N, K]),
            },
        )
        _same(_read(folder), q, None, s)

    @pytest.mark.parametrize("spelling", ["packed int32", "signed int8"])
    def test_asymmetric(self, write, layer, spelling: str) -> None:
        q, z, s = layer
        stored = pack(z.t()).t() if spelling == "packed int32" else (z - 8).to(torch.int8)
        folder = write(
            compressed(symmetric=False),
            {f"{M}.weight_packed": pack(q), f"{M}.weight_scale": s, f"{M}.weight_zero_point": stored},
        )
        _same(_read(folder), q, z, s)

    @pytest.mark.parametrize("rows", [1, 7, 9])
    def test_packed_zero_points_of_a_row_count_that_is_no_multiple_of_8(
        self, write, layer, rows: int
    ) -> None:
        q, z, s = (t[:rows] for t in layer)
        padded = torch.nn.functional.pad(z, (0, 0, 0, -rows % 8))
        folder = write(
            compressed(symmetric=False),
            {
                f"{M}.weight_packed": pack(q),
                f"{M}.weight_scale": s,
                f"{M}.weight_zero_point": pack(padded.t()).t(),
            },
        )
        _same(_read(folder, n=rows), q, z, s)

    @pytest.mark.parametrize(
        "weights", [{"strategy": "channel", "group_size": None}, {"group_size": -1}], ids=str
    )
    def test_per_channel_is_one_group(self, write, layer, weights: dict[str, Any]) -> None:
        q, _, s = layer
        folder = write(compressed(**weights), {f"{M}.weight_packed": pack(q), f"{M}.weight_scale": s[:, :1]})
        weight = _read(folder)
        _same(weight, q, None, s[:, :1])
        assert weight.group_size == K

    def test_zero_points_of_a_symmetric_weight_are_ignored(self, write, layer) -> None:
        q, z, s = layer
        tensors = {
            f"{M}.weight_packed": pack(q),
            f"{M}.weight_scale": s,
            f"{M}.weight_zero_point": z.to(torch.int8),
        }
        _same(_read(write(compressed(), tensors)), q, None, s)

    @pytest.mark.parametrize(
        ("g_idx", "kept"),
        [(torch.arange(K) // G, False), (torch.full((K,), -1), False), (torch.arange(K) % 2, True)],
        ids=["trivial", "unset", "real"],
    )
    def test_act_order(self, write, layer, g_idx: torch.Tensor, kept: bool) -> None:
        q, _, s = layer
        tensors = {f"{M}.weight_packed": pack(q), f"{M}.weight_scale": s, f"{M}.weight_g_idx": g_idx.int()}
        weight = _read(write(compressed(), tensors))
        assert (weight.g_idx is not None) == kept
        if kept:
            assert torch.equal(weight.g_idx, g_idx.int())

    def test_act_order_out_of_range_is_refused(self, write, layer) -> None:
        q, _, s = layer
        tensors = {
            f"{M}.weight_packed": pack(q),
            f"{M}.weight_scale": s,
            f"{M}.weight_g_idx": torch.arange(K).int(),
        }
        with pytest.raises(CheckpointError, match=r"weight_g_idx: given groups 0\.\.63, accepted 0\.\.1"):
            _read(write(compressed(), tensors))

    @pytest.mark.parametrize("wide", [1 << 16, 65536 * 3, 1 << 32, 1 << 40, -(1 << 40)])
    def test_wide_values_are_compared_before_they_are_narrowed(self, write, layer, wide: int) -> None:
        q, z, s = layer
        tensors = {f"{M}.weight_packed": pack(q), f"{M}.weight_scale": s}
        zeros, order = (z - 8).long(), (torch.arange(K) % 2).long()
        zeros[0, 0], order[0] = wide, wide
        with pytest.raises(CheckpointError, match=r"weight_zero_point: given .*accepted -8\.\.7"):
            _read(write(compressed(symmetric=False), tensors | {f"{M}.weight_zero_point": zeros}))
        with pytest.raises(CheckpointError, match=r"weight_g_idx: given groups .*accepted 0\.\.1"):
            _read(write(compressed(), tensors | {f"{M}.weight_g_idx": order}))

    @pytest.mark.parametrize("pattern", [M, "model.layers.0.self_attn", "re:.*q_proj"])
    def test_ignored_module_stays_16_bit(self, write, pattern: str) -> None:
        plain = torch.randn(N, K, dtype=torch.bfloat16)
        with open_checkpoint(
            write(compressed() | {"ignore": [pattern]}, {f"{M}.weight": plain})
        ) as checkpoint:
            assert torch.equal(checkpoint.linear(M, N, K), plain)

    @pytest.mark.parametrize("pattern", [M, "model.layers.0.self_attn", "re:.*q_proj"])
    def test_ignored_module_with_quantised_tensors_is_refused(self, write, layer, pattern: str) -> None:
        tensors = {f"{M}.weight_packed": pack(layer[0]), f"{M}.weight_scale": layer[2]}
        with pytest.raises(CheckpointError, match="q_proj is listed in `ignore`"):
            _read(write(compressed() | {"ignore": [pattern]}, tensors))

    @pytest.mark.parametrize("target", [M, r"re:.*\.self_attn\..*"])
    def test_a_nearer_target_beats_the_class(self, write, layer, target: str) -> None:
        q, _, s = layer
        quantization = compressed(group_size=K)
        near = compressed()["config_groups"]["group_0"] | {"targets": [target]}
        quantization["config_groups"]["group_1"] = near
        folder = write(quantization, {f"{M}.weight_packed": pack(q), f"{M}.weight_scale": s})
        assert _read(folder).group_size == G

    def test_a_module_no_target_covers_is_refused(self, write, layer) -> None:
        quantization = compressed()
        quantization["config_groups"]["group_0"]["targets"] = ["re:.*mlp.*"]
        tensors = {f"{M}.weight_packed": pack(layer[0]), f"{M}.weight_scale": layer[2]}
        with pytest.raises(CheckpointError, match=r"no target of config_groups \(re:\.\*mlp\.\*\) covers it"):
            _read(write(quantization, tensors))

    @pytest.mark.parametrize(
        ("change", "field"),
        [
            ({"num_bits": 3}, "weights.num_bits: given 3, accepted 4 or 8"),
            ({"type": "float"}, "weights.type: given 'float', accepted int"),
            ({"strategy": "tensor"}, "weights.strategy: given 'tensor', accepted group or channel"),
            ({"dynamic": True}, "weights.dynamic: given True"),
        ],
        ids=lambda v: v if isinstance(v, str) else "",
    )
    def test_other_weights_are_refused_by_field(self, write, change: dict[str, Any], field: str) -> None:
        with pytest.raises(CheckpointError, match=field):
            open_checkpoint(write(compressed(**change), {"a": torch.zeros(1)}))

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
            open_checkpoint(write(compressed() | change, {"a": torch.zeros(1)}))

    def test_quantised_activations_are_refused(self, write) -> None:
        quantization = compressed()
        quantization["config_groups"]["group_0"]["input_activations"] = {"num_bits": 8}
        with pytest.raises(CheckpointError, match="input_activations: given 'quantised activations'"):
            open_checkpoint(write(quantization, {"a": torch.zeros(1)}))

    @pytest.mark.parametrize("spelling", ["symmetric", "packed int32", "signed int8"])
    def test_8_bit_weights_are_dequantised(self, write, caplog, spelling: str) -> None:
        q, s = torch.randint(0, 256, (N, K)), torch.rand(N, K // G) + 0.5
        z = torch.randint(0, 256, (N, K // G))
        tensors = {f"{M}.weight_packed": pack8(q), f"{M}.weight_scale": s}
        if spelling == "packed int32":
            tensors[f"{M}.weight_zero_point"] = pack8(z.t()).t()
        elif spelling == "signed int8":
            tensors[f"{M}.weight_zero_point"] = (z - 128).to(torch.int8)
        symmetric = spelling == "symmetric"
        weight = _any(write(compressed(num_bits=8, symmetric=symmetric), tensors))
        assert isinstance(weight, torch.Tensor)
        assert torch.equal(weight, value(q, 128 if symmetric else z, s, torch.arange(K) // G))
        assert "served in 16 bits" in caplog.text and M in caplog.text

    @pytest.mark.parametrize("k", [52, 60, 72], ids=lambda k: f"K-{k}")
    def test_a_k_that_no_int4_kernel_takes_is_dequantised(self, write, k: int) -> None:
        q, s = torch.randint(0, 16, (N, k)), torch.rand(N, -(-k // G)) + 0.5
        padded = torch.nn.functional.pad(q, (0, -k % 8))
        folder = write(compressed(), {f"{M}.weight_packed": pack(padded), f"{M}.weight_scale": s})
        weight = _any(folder, k=k)
        assert isinstance(weight, torch.Tensor)
        assert torch.equal(weight, value(q, 8, s, torch.arange(k) // G))

    def test_groups_of_other_sizes_and_bits(self, write, layer) -> None:
        q, _, s = layer
        quantization = compressed()
        for name, target, change in (
            ("group_1", "mlp.down_proj", {"group_size": K}),
            ("group_2", "model.layers.1", {"num_bits": 8}),
        ):
            weights = compressed(**change)["config_groups"]["group_0"] | {"targets": [target]}
            quantization["config_groups"][name] = weights
        down, eight = "model.layers.0.mlp.down_proj", "model.layers.1.self_attn.q_proj"
        wide = torch.randint(0, 256, (N, K))
        folder = write(
            quantization,
            {
                f"{M}.weight_packed": pack(q),
                f"{M}.weight_scale": s,
                f"{down}.weight_packed": pack(q),
                f"{down}.weight_scale": s[:, :1],
                f"{eight}.weight_packed": pack8(wide),
                f"{eight}.weight_scale": s,
            },
        )
        with open_checkpoint(folder) as checkpoint:
            assert checkpoint.linear(M, N, K).group_size == G
            assert checkpoint.linear(down, N, K).group_size == K
            assert torch.equal(checkpoint.linear(eight, N, K), value(wide, 128, s, torch.arange(K) // G))
            assert checkpoint.unread() == []

    @pytest.mark.parametrize("pattern", ["q_proj", "self_attn.q_proj", "model.layers.0"])
    def test_parts_of_a_name_are_ignored(self, write, layer, pattern: str) -> None:
        tensors = {f"{M}.weight_packed": pack(layer[0]), f"{M}.weight_scale": layer[2]}
        with pytest.raises(CheckpointError, match="q_proj is listed in `ignore`"):
            _read(write(compressed() | {"ignore": [pattern]}, tensors))

    @pytest.mark.parametrize("pattern", ["proj", "model.layers.0.self", "re:q_proj", "layers.1"])
    def test_what_only_looks_alike_is_not_ignored(self, write, layer, pattern: str) -> None:
        tensors = {f"{M}.weight_packed": pack(layer[0]), f"{M}.weight_scale": layer[2]}
        _read(write(compressed() | {"ignore": [pattern]}, tensors))

    @pytest.mark.parametrize("actorder", ["group", "dynamic", True])
    def test_shuffled_groups_without_their_order_are_refused(self, write, layer, actorder: Any) -> None:
        tensors = {f"{M}.weight_packed": pack(layer[0]), f"{M}.weight_scale": layer[2]}
        with pytest.raises(
            CheckpointError, match="no tensor .*weight_g_idx, which this module's actorder needs"
        ):
            _read(write(compressed(actorder=actorder), tensors))

    @pytest.mark.parametrize("actorder", ["weight", "static", None])
    def test_groups_in_order_need_none(self, write, layer, actorder: Any) -> None:
        tensors = {f"{M}.weight_packed": pack(layer[0]), f"{M}.weight_scale": layer[2]}
        assert _read(write(compressed(actorder=actorder), tensors)).g_idx is None

    def test_scales_of_a_kv_cache_are_accepted_with_one_warning(self, write, layer, caplog) -> None:
        tensors = {f"{M}.weight_packed": pack(layer[0]), f"{M}.weight_scale": layer[2]}
        for i in range(3):
            tensors |= {f"model.layers.{i}.self_attn.{n}_scale": torch.ones(1) for n in "kv"}
        _read(write(compressed() | {"kv_cache_scheme": {"num_bits": 8, "type": "float"}}, tensors))
        assert len(caplog.records) == 1
        assert "6 scales of a quantised KV cache" in caplog.text and "kept in 16 bits" in caplog.text

    @pytest.mark.parametrize("group_size", [G, -1], ids=["group", "channel"])
    def test_a_strategy_that_is_left_out_follows_from_the_group_size(
        self, write, layer, group_size: int
    ) -> None:
        q, _, s = layer
        tensors = {f"{M}.weight_packed": pack(q), f"{M}.weight_scale": s if group_size == G else s[:, :1]}
        assert _read(write(compressed(strategy=None, group_size=group_size), tensors)).group_size == (
            G if group_size == G else K
        )

    def test_the_first_releases_did_not_name_themselves(self, write, layer) -> None:
        tensors = {f"{M}.weight_packed": pack(layer[0]), f"{M}.weight_scale": layer[2]}
        folder = write(None, tensors)
        old = {k: v for k, v in compressed().items() if k != "quant_method"}
        (folder / "config.json").write_text(json.dumps({"compression_config": old}))
        _same(_read(folder), layer[0], None, layer[2])

    def test_a_zero_point_of_neither_spelling_is_refused(self, write, layer) -> None:
        tensors = {f"{M}.weight_packed": pack(layer[0]), f"{M}.weight_scale": layer[2]}
        tensors[f"{M}.weight_zero_point"] = torch.zeros(3, 2, dtype=torch.int32)
        with pytest.raises(
            CheckpointError, match=r"given int32 \[3, 2\], accepted int32 \[2, 2\] \(packed\) or int8"
        ):
            _read(write(compressed(symmetric=False), tensors))


def _trained(
    v_shift: int = 0, seed: int = 0, rows: int = 64
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """q, z, s of a weight as training leaves it: mean 0, rounded between each group's least and greatest value."""
    w = torch.randn(rows, 4 * G, generator=torch.Generator().manual_seed(seed)).view(rows, -1, G)
    low, high = w.amin(-1).clamp(max=0), w.amax(-1).clamp(min=0)
    s = ((high - low) / 15).half()
    z = (-low / s).round().clamp(0, 15).long()
    q = ((w / s.unsqueeze(-1)).round() + z.unsqueeze(-1)).clamp(0, 15).long().view(rows, -1)
    return q, z, s


class TestGptq:
    def _tensors(self, layer, qzeros: torch.Tensor, **more: torch.Tensor) -> dict[str, torch.Tensor]:
        q, _, s = layer
        tensors = {"qweight": pack(q).t(), "scales": s.t(), "qzeros": qzeros, **more}
        return {f"{M}.{name}": t for name, t in tensors.items()}

    def test_v1_stores_the_zero_point_less_one(self, write, layer) -> None:
        q, z, s = layer
        folder = write(gptq(checkpoint_format="gptq"), self._tensors(layer, pack((z.t() - 1) % 16)))
        _same(_read(folder), q, z, s)

    def test_v1_of_gptqmodel_borrows_between_nibbles(self, write, layer) -> None:
        q, z, s = layer
        qzeros = pack(z.t()) - 0x11111111
        assert not torch.equal(qzeros, pack((z.t() - 1) % 16)), "the case needs a zero point of 0"
        folder = write(gptq(meta={"quantizer": ["gptqmodel:7.6.0"]}), self._tensors(layer, qzeros))
        _same(_read(folder), q, z, s)

    def test_v2_stores_the_zero_point(self, write, layer) -> None:
        q, z, s = layer
        folder = write(gptq(checkpoint_format="gptq_v2"), self._tensors(layer, pack(z.t())))
        _same(_read(folder), q, z, s)

    def test_symmetric_ignores_stored_zero_points(self, write, layer) -> None:
        q, z, s = layer
        _same(_read(write(gptq(sym=True), self._tensors(layer, pack(z.t())))), q, None, s)

    def test_group_size_minus_one_is_one_group(self, write, layer) -> None:
        q, z, s = layer
        one = (q, z[:, :1], s[:, :1])
        weight = _read(
            write(gptq(group_size=-1, checkpoint_format="gptq_v2"), self._tensors(one, pack(one[1].t())))
        )
        _same(weight, *one)
        assert weight.group_size == K

    @pytest.mark.parametrize("real", [False, True])
    def test_act_order(self, write, layer, real: bool) -> None:
        g_idx = (torch.arange(K) % 2 if real else torch.arange(K) // G).int()
        weight = _read(
            write(
                gptq(desc_act=True, sym=True),
                self._tensors(layer, torch.zeros(K // G, N // 8).int(), g_idx=g_idx),
            )
        )
        assert (weight.g_idx is not None) == real

    def test_act_order_without_its_tensor_is_refused(self, write, layer) -> None:
        folder = write(gptq(desc_act=True, sym=True), self._tensors(layer, torch.zeros(K // G, N // 8).int()))
        with pytest.raises(CheckpointError, match="no tensor .*g_idx, which desc_act=true needs"):
            _read(folder)

    def test_a_zero_bias_on_a_layer_without_bias_is_not_missed(self, write, layer) -> None:
        tensors = self._tensors(layer, torch.zeros(K // G, N // 8).int(), bias=torch.zeros(N))
        _read(write(gptq(sym=True), tensors))

    def test_a_bias_that_matters_is_reported_unread(self, write, layer) -> None:
        tensors = self._tensors(layer, torch.zeros(K // G, N // 8).int(), bias=torch.ones(N))
        with open_checkpoint(write(gptq(sym=True), tensors)) as checkpoint:
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

    @pytest.mark.parametrize("stored", ["gptq", "gptq_v2"])
    @pytest.mark.parametrize("said", ["gptq", "gptq_v2"])
    @pytest.mark.parametrize("order", [False, True], ids=["", "act-order"])
    def test_zero_points_are_read_as_they_are_stored(
        self, write, caplog, stored: str, said: str, order: bool
    ) -> None:
        q, z, s = _trained()
        n, k = q.shape
        qzeros = pack((z.t() - 1) % 16 if stored == "gptq" else z.t())
        tensors = self._tensors((q, z, s), qzeros)
        if order:
            g_idx = torch.randperm(k, generator=torch.Generator().manual_seed(1)) // G
            shuffled = q[:, torch.argsort(torch.argsort(g_idx, stable=True), stable=True)]
            tensors[f"{M}.qweight"] = pack(shuffled).t()
            tensors[f"{M}.g_idx"] = g_idx.int()
        with open_checkpoint(write(gptq(checkpoint_format=said, desc_act=order), tensors)) as checkpoint:
            for _ in range(2):
                assert torch.equal(checkpoint.linear(M, n, k).zeros.long(), z)
        assert [r.message for r in caplog.records if "the metadata says" in r.message].__len__() == (
            stored != said
        )

    def test_a_symmetric_layer_written_as_v2_under_v1s_name(self, write, caplog) -> None:
        q, z, s = torch.randint(1, 16, (N, K)), torch.full((N, K // G), 8), torch.rand(N, K // G).half()
        weight = _read(write(gptq(), self._tensors((q, z, s), pack(z.t()))))
        assert torch.equal(weight.zeros.long(), z) and "read as gptq_v2" in caplog.text

    @pytest.mark.parametrize("writer", ["autogptq", "gptqmodel:2.0"])
    @pytest.mark.parametrize("version", ["gptq", "gptq_v2"])
    def test_8_bit_weights_are_dequantised(self, write, writer: str, version: str) -> None:
        q, s = torch.randint(0, 256, (N, K)), torch.rand(N, K // G) + 0.5
        z = torch.randint(0, 256, (N, K // G))
        z[0, 0] = 0
        words = pack8(z.t())
        if version == "gptq":
            words = words - 0x01010101 if writer.startswith("gptqmodel") else pack8((z.t() - 1) % 256)
        quantization = gptq(bits=8, checkpoint_format=version, meta={"quantizer": [writer]})
        tensors = {f"{M}.qweight": pack8(q).t(), f"{M}.scales": s.t(), f"{M}.qzeros": words}
        assert torch.equal(_any(write(quantization, tensors)), value(q, z, s, torch.arange(K) // G))

    def test_8_bit_symmetric(self, write) -> None:
        q, s = torch.randint(0, 256, (N, K)), torch.rand(N, K // G) + 0.5
        tensors = {f"{M}.qweight": pack8(q).t(), f"{M}.scales": s.t()}
        expected = value(q, 128, s, torch.arange(K) // G)
        assert torch.equal(_any(write(gptq(bits=8, sym=True), tensors)), expected)

    def test_overrides_by_module(self, write, layer) -> None:
        """The first that fits counts; "-:" modules stay 16-bit; what is not overridden is the common setting."""
        q, z, s = layer
        wide = torch.randint(0, 256, (N, K))
        names = {kind: f"model.layers.0.mlp.{kind}_proj" for kind in ("gate", "up", "down")}
        dynamic = {
            r"+:.*\.gate_proj": {"group_size": K, "sym": False},
            r"-:.*\.up_proj": {},
            names["down"]: {"bits": 8},
            r".*": {"mse": 2.0},
        }
        tensors = self._tensors(layer, torch.zeros(K // G, N // 8).int())
        tensors |= {
            f"{names['gate']}.qweight": pack(q).t(),
            f"{names['gate']}.scales": s[:, :1].t(),
            f"{names['gate']}.qzeros": pack(z[:, :1].t()),
            f"{names['up']}.weight": torch.ones(N, K).half(),
            f"{names['down']}.qweight": pack8(wide).t(),
            f"{names['down']}.scales": s.t(),
            f"{names['down']}.qzeros": torch.zeros(K // G, N // 4).int(),
        }
        quantization = gptq(sym=True, dynamic=dynamic, checkpoint_format="gptq_v2")
        with open_checkpoint(write(quantization, tensors)) as checkpoint:
            _same(checkpoint.linear(M, N, K), q, None, s)
            gate = checkpoint.linear(names["gate"], N, K)
            _same(gate, q, z[:, :1], s[:, :1])
            assert gate.group_size == K
            assert torch.equal(checkpoint.linear(names["up"], N, K), torch.ones(N, K).half())
            expected = value(wide, 128, s, torch.arange(K) // G)
            assert torch.equal(checkpoint.linear(names["down"], N, K), expected)
            assert checkpoint.unread() == []

    def test_bits_that_are_not_read_are_refused_by_module(self, write, layer) -> None:
        tensors = self._tensors(layer, torch.zeros(K // G, N // 8).int())
        with pytest.raises(CheckpointError, match=f"module {M}: bits: given 3, accepted 4 or 8"):
            _read(write(gptq(sym=True, dynamic={r".*q_proj": {"bits": 3}}), tensors))

    def test_a_quantised_head(self, write, layer) -> None:
        q, _, s = layer
        tensors = {"lm_head.qweight": pack(q).t(), "lm_head.scales": s.t()}
        _same(_read(write(gptq(sym=True, lm_head=True), tensors), module="lm_head"), q, None, s)

    def test_a_last_group_that_is_not_full(self, write) -> None:
        k = K + 8
        q, z, s = torch.randint(0, 16, (N, k)), torch.randint(0, 16, (N, 3)), torch.rand(N, 3) + 0.5
        folder = write(gptq(checkpoint_format="gptq_v2"), self._tensors((q, z, s), pack(z.t())))
        assert torch.equal(_any(folder, k=k), value(q, z, s, torch.arange(k) // G))

    @pytest.mark.parametrize("given", [float("inf"), float("nan")])
    def test_scales_that_are_not_finite_are_refused(self, write, layer, given: float) -> None:
        layer[2][3, 1] = given
        tensors = self._tensors(layer, torch.zeros(K // G, N // 8).int())
        with pytest.raises(CheckpointError, match="q_proj.scales holds values that are not finite"):
            _read(write(gptq(sym=True), tensors))

    def test_awq_tensors_under_gptqs_name(self, write, layer) -> None:
        """GPTQModel calls its AWQ files gptq, in format gemm."""
        q, z, s = layer
        tensors = TestAwq()._tensors(q, z, s)
        quantization = gptq(format="gemm", checkpoint_format="gemm", method="gptq")
        _same(_read(write(quantization, tensors)), q, z, s)

    @pytest.mark.parametrize(
        "dynamic",
        [{"-:.*lm_head.*": {}}, {r"+:.*mlp.*": {"bits": 4, "group_size": G}}, {"x": {"mse": 2.0}}],
        ids=["skip", "the same", "no format"],
    )
    def test_harmless_overrides_are_accepted(self, write, dynamic: dict[str, Any]) -> None:
        open_checkpoint(write(gptq(dynamic=dynamic), {"a": torch.zeros(1)})).close()

    @pytest.mark.parametrize(
        ("change", "field"),
        [
            ({"bits": 3}, "bits: given 3, accepted 4 or 8"),
            ({"checkpoint_format": "marlin"}, "checkpoint_format: given 'marlin', accepted gptq or gptq_v2"),
            ({"pack_dtype": "int64"}, "pack_dtype: given 'int64'"),
            ({"is_marlin_format": True}, "is_marlin_format: given True"),
            ({"group_size": None}, "group_size: given None"),
            ({"dynamic": {"+:.*down(": {}}}, r"dynamic\['\+:\.\*down\('\]: given the pattern"),
            ({"dynamic": {"x": {"bits": "4"}}}, r"dynamic\['x'\]: bits: given '4', accepted a whole number"),
            ({"checkpoint_format": "gptq_p"}, "checkpoint_format: given 'gptq_p'"),
        ],
        ids=lambda v: v if isinstance(v, str) else "",
    )
    def test_other_files_are_refused_by_field(self, write, change: dict[str, Any], field: str) -> None:
        with pytest.raises(CheckpointError, match=field):
            open_checkpoint(write(gptq() | change, {"a": torch.zeros(1)}))


class TestAwq:
    def _tensors(self, q: torch.Tensor, z: torch.Tensor, s: torch.Tensor) -> dict[str, torch.Tensor]:
        return {
            f"{M}.qweight": pack(q.t(), AWQ_COLUMNS),
            f"{M}.qzeros": pack(z.t(), AWQ_COLUMNS),
            f"{M}.scales": s.t(),
        }

    def test_gemm_order(self, write, layer) -> None:
        _same(_read(write(awq(), self._tensors(*layer))), *layer)

    def test_more_columns_than_one_chunk(self, write) -> None:
        n = 1024 + 40
        q, z, s = torch.randint(0, 16, (n, 32)), torch.randint(0, 16, (n, 1)), torch.rand(n, 1).half()
        _same(_read(write(awq(), self._tensors(q, z, s)), n=n, k=32), q, z, s)

    def test_without_zero_points_the_weight_is_symmetric(self, write, layer) -> None:
        q, z, s = layer
        folder = write(awq(zero_point=False), self._tensors(q, torch.full_like(z, 8), s))
        _same(_read(folder), q, None, s)

    def test_stored_zero_points_count_whatever_the_flag_says(self, write, layer) -> None:
        _same(_read(write(awq(zero_point=False), self._tensors(*layer))), *layer)

    @pytest.mark.parametrize(
        ("change", "field"),
        [
            ({"bits": 8}, "bits: given 8, accepted 4"),
            ({"version": "gemv"}, "version: given 'gemv', accepted gemm"),
            ({"version": "GEMV_FAST"}, "version: given 'gemv_fast', accepted gemm"),
            ({"version": "marlin"}, "version: given 'marlin', accepted gemm"),
            ({"version": "llm-awq"}, "version: given 'llm-awq', accepted gemm"),
            ({"version": "exllama"}, "version: given 'exllama', accepted gemm"),
            ({"group_size": "32"}, "group_size: given '32'"),
        ],
        ids=lambda v: v if isinstance(v, str) else "",
    )
    def test_other_files_are_refused_by_field(self, write, change: dict[str, Any], field: str) -> None:
        with pytest.raises(CheckpointError, match=field):
            open_checkpoint(write(awq() | change, {"a": torch.zeros(1)}))

    @pytest.mark.parametrize("named", [{}, {"quant_method": "awq"}], ids=["unnamed", "named"])
    def test_settings_beside_config_json(self, write, layer, named: dict[str, str]) -> None:
        folder = write(None, self._tensors(*layer))
        old = {"zero_point": True, "q_group_size": G, "w_bit": 4, "version": "GEMM"}
        (folder / "quant_config.json").write_text(json.dumps(old | named))
        _same(_read(folder), *layer)

    def test_a_last_group_that_is_not_full(self, write) -> None:
        k = K + 8
        q, z, s = torch.randint(0, 16, (N, k)), torch.randint(0, 16, (N, 3)), torch.rand(N, 3) + 0.5
        assert torch.equal(
            _any(write(awq(), self._tensors(q, z, s)), k=k), value(q, z, s, torch.arange(k) // G)
        )


class TestAutoRound:
    def _config(self, packing: str, **fields: Any) -> dict[str, Any]:
        return {
            "quant_method": "auto-round",
            "packing_format": packing,
            "bits": 4,
            "group_size": G,
            "sym": False,
            "data_type": "int",
            "autoround_version": "0.9",
            "block_name_to_quantize": "model.layers",
            **fields,
        }

    @pytest.mark.parametrize(
        ("packing", "shift"),
        [
            ("auto_round:auto_gptq", 1),
            ("auto_round:gptq", 1),
            ("auto_round:exllamav2", 0),
            ("auto_round:tritonv2_zp", 0),
        ],
    )
    @pytest.mark.parametrize("method", ["auto-round", "intel/auto-round"])
    def test_gptq_packing(self, write, packing: str, shift: int, method: str) -> None:
        q, z, s = _trained()
        tensors = TestGptq()._tensors((q, z, s), pack((z.t() - shift) % 16))
        folder = write(self._config(packing, quant_method=method), tensors)
        _same(_read(folder, *q.shape), q, z, s)

    def test_earlier_files_say_backend(self, write, layer, caplog) -> None:
        quantization = self._config("", backend="auto_round:exllamav2")
        del quantization["packing_format"]
        q, z, s = layer
        _same(_read(write(quantization, TestGptq()._tensors(layer, pack(z.t())))), q, z, s)

    def test_awq_packing(self, write, layer) -> None:
        tensors = TestAwq()._tensors(*layer)
        _same(_read(write(self._config("auto_round:auto_awq"), tensors)), *layer)

    def test_settings_of_single_modules(self, write, layer) -> None:
        q, z, s = layer
        extra = {M: {"group_size": K, "bits": 4}, "lm_head": {"bits": 16, "data_type": "float"}}
        tensors = TestGptq()._tensors((q, z[:, :1], s[:, :1]), torch.zeros(1, N // 8).int())
        weight = _read(write(self._config("auto_round:auto_gptq", sym=True, extra_config=extra), tensors))
        assert weight.group_size == K and weight.symmetric

    @pytest.mark.parametrize(
        ("fields", "message"),
        [
            (
                {"packing_format": "auto_round:llm_compressor"},
                "packing_format: given 'auto_round:llm_compressor'",
            ),
            ({"packing_format": "gguf"}, "packing_format: given 'gguf'"),
            ({"data_type": "mx_fp"}, "data_type: given 'mx_fp', accepted int"),
            ({"act_bits": 8}, "act_bits: given 8, accepted 16"),
            ({"bits": 2}, "bits: given 2, accepted 4 or 8"),
            (
                {"extra_config": {"a": {"data_type": "fp8", "bits": 8}}},
                r"extra_config\['a'\]: data_type: given 'fp8'",
            ),
        ],
        ids=lambda v: str(v) if isinstance(v, dict) else "",
    )
    def test_other_files_are_refused_by_field(self, write, fields: dict[str, Any], message: str) -> None:
        quantization = self._config("auto_round:auto_gptq") | fields
        with pytest.raises(CheckpointError, match=message):
            open_checkpoint(write(quantization, {"a": torch.zeros(1)}))


@pytest.mark.parametrize(
    ("n", "k", "message"),
    [
        (N * 2, K, r"q_proj\.weight_packed: given int32 \[16, 8\], accepted int32 \[32, 8\]"),
        (N, K * 2, r"q_proj\.weight_packed: given int32 \[16, 8\], accepted int32 \[16, 16\]"),
    ],
    ids=["N", "K"],
)
def test_a_shape_that_does_not_fit_is_named(write, layer, n: int, k: int, message: str) -> None:
    folder = write(compressed(), {f"{M}.weight_packed": pack(layer[0]), f"{M}.weight_scale": layer[2]})
    with pytest.raises(CheckpointError, match=message):
        _read(folder, n=n, k=k)


def test_a_plain_weight_of_another_shape_or_type_is_named(write) -> None:
    folder = write(
        compressed(), {"a.weight": torch.zeros(4, 8), "b.weight": torch.zeros(4, 8).to(torch.float8_e4m3fn)}
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
        open_checkpoint(write(compressed() | change, {}))


@pytest.mark.parametrize(
    "change", [{"group_size": "x"}, {"group_size": float("nan")}, {"group_size": [32]}], ids=str
)
def test_a_group_size_of_another_kind_is_refused(write, change: dict[str, Any]) -> None:
    with pytest.raises(CheckpointError, match="quantization_config: "):
        open_checkpoint(write(compressed(**change), {}))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"ignore": 5}, "quantization_config: ignore: given 5, accepted a list of names"),
        ({"ignore": "lm_head"}, "ignore: given 'lm_head', accepted a list of names"),
        ({"ignore": [5]}, r"ignore: given \[5\], accepted a list of names"),
        ({"config_groups": [1]}, r"config_groups: given \[1\], accepted an object"),
        ({"config_groups": {"g": 5}}, "config_groups: g: given 5, accepted an object"),
        ({"config_groups": {"g": {"format": "pack-quantized", "weights": 5}}}, "weights: given 5, accepted"),
        ({"sparsity_config": "x"}, "sparsity_config: given 'x', accepted an object"),
        ({"transform_config": "x"}, "transform_config: given 'x', accepted an object"),
    ],
    ids=str,
)
def test_fields_of_another_kind_are_named(write, change: dict[str, Any], message: str) -> None:
    with pytest.raises(CheckpointError, match=message):
        open_checkpoint(write(compressed() | change, {}))


@pytest.mark.parametrize("targets", [5, "Linear", [5], {"a": 1}], ids=str)
def test_targets_of_another_kind_are_named(write, targets: Any) -> None:
    quantization = compressed()
    quantization["config_groups"]["group_0"]["targets"] = targets
    with pytest.raises(CheckpointError, match="group_0: targets: given .*, accepted a list of names"):
        open_checkpoint(write(quantization, {}))


@pytest.mark.parametrize("field", ["dynamic", "extra_config"])
@pytest.mark.parametrize("given", [5, "x", [1], {"a": 5}], ids=str)
def test_overrides_of_another_kind_are_named(write, field: str, given: Any) -> None:
    with pytest.raises(CheckpointError, match=f"{field}: .*given .*, accepted an object"):
        open_checkpoint(write(gptq(**{field: given}), {}))


@pytest.mark.parametrize("bits", [4.0, 8.0])
def test_bits_written_with_a_point_are_whole_numbers(write, layer, bits: float) -> None:
    q, _, s = layer
    packed = pack(q) if bits == 4 else pack8(q + 120)
    tensors = {f"{M}.weight_packed": packed, f"{M}.weight_scale": s}
    weight = _any(write(compressed(num_bits=bits, group_size=float(G)), tensors))
    assert isinstance(weight, W4A16Weight) == (bits == 4)
    tensors = {f"{M}.qweight": packed.t(), f"{M}.scales": s.t()}
    again = _any(write(gptq(sym=True, bits=bits, group_size=float(G)), tensors))
    if bits == 4:
        _same(again, q, None, s)
    else:
        assert torch.equal(again, weight)


@pytest.mark.parametrize("given", ["x", 5, ["group"]], ids=str)
def test_an_actorder_that_is_not_known_is_named(write, given: Any) -> None:
    weights = {"num_bits": 4, "group_size": 32, "strategy": "group", "actorder": given}
    group = {"targets": ["Linear"], "weights": weights}
    quantization = {
        "quant_method": "compressed-tensors", "format": "pack-quantized", "config_groups": {"group_0": group}
    }  # fmt: skip
    with pytest.raises(
        CheckpointError, match=r"group_0: weights.actorder: given .*, accepted group or dynamic"
    ):
        open_checkpoint(write(quantization, {"x": torch.ones(1)}))


@pytest.mark.parametrize("method", ["ignore", "targets", "dynamic"])
def test_a_pattern_that_takes_forever_is_named(write, monkeypatch: pytest.MonkeyPatch, method: str) -> None:
    """`re` would not come back within the age of the universe, and could not be stopped."""
    monkeypatch.setattr("nybble.service.checkpoints.patterns.LIMIT_S", 0.05)
    endless, module = r"(?:.|..)+[!?]$", "model.layers.0.self_attn.q_proj_with_a_longer_name"
    weights = {"num_bits": 4, "group_size": 32, "strategy": "group"}
    group = {"targets": ["re:" + endless] if method == "targets" else ["Linear"], "weights": weights}
    quantization: dict[str, Any] = {
        "quant_method": "compressed-tensors",
        "format": "pack-quantized",
        "config_groups": {"group_0": group},
        "ignore": ["re:" + endless] if method == "ignore" else [],
    }
    tensors = {f"{module}.weight_packed": torch.ones(8, 8, dtype=torch.int32)}
    if method == "dynamic":
        quantization = {
            "quant_method": "gptq",
            "bits": 4,
            "group_size": 32,
            "dynamic": {endless: {"bits": 8}},
        }
        tensors = {f"{module}.qweight": torch.ones(8, 8, dtype=torch.int32)}
    with open_checkpoint(write(quantization, tensors)) as checkpoint:
        with pytest.raises(CheckpointError, match="takes over 0.05 s on module model.layers.0.*correct it"):
            checkpoint.linear(module, 8, 64)
