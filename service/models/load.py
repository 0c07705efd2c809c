"""From a checkpoint to a Decoder on a device."""

from __future__ import annotations

import logging
from collections.abc import Iterable, Iterator, Sequence
from typing import Protocol

import torch

from nybble.kernels.attention import AttentionBackend
from nybble.kernels.linear import Broken, SavedWeight, W4A16Linear
from nybble.kernels.linear.int8 import Int8Linear, Int8Weight
from nybble.kernels.norm import RmsNorm
from nybble.kernels.packing import W4A16Weight, concat_rows, interleave_halves, take_rows
from nybble.kernels.rope import head_order
from nybble.service.errors import CheckpointError
from nybble.service.finite import all_finite
from nybble.service.models.config import DecoderConfig
from nybble.service.models.decoder import Block, Decoder
from nybble.service.models.layers import DenseLinear, Head, Linear, RescoredHead, SideBySide
from nybble.service.models.ops import OPS, HeadNorm

log = logging.getLogger(__name__)

# What a tensor that is not quantised may be stored in.
FLOATS = (torch.bfloat16, torch.float16, torch.float32, torch.float64)
EMBEDDING, FINAL_NORM, HEAD = "model.embed_tokens.weight", "model.norm.weight", "lm_head"
# Norms of a block by the Block's field; `post` where each half also normalises its output.
_NORMS = {"input_norm": "input_layernorm", "post_norm": "post_attention_layernorm"}
_POST_NORMS = {
    "input_norm": "input_layernorm",
    "o_norm": "post_attention_layernorm",
    "post_norm": "pre_feedforward_layernorm",
    "down_norm": "post_feedforward_layernorm",
}


class WeightSource(Protocol):
    """What the decoder asks of a checkpoint (service/checkpoints). Every tensor is asked for once."""

    def tensor(self, name: str) -> torch.Tensor: ...

    def linear(self, module: str, n: int, k: int) -> W4A16Weight | torch.Tensor: ...

    def bias(self, module: str) -> torch.Tensor | None: ...

    def expect(self, wanted: Sequence[str]) -> None:
        """The modules and tensors that will be asked for, in order."""
        ...

    def has_saved(self, layer: str) -> bool:
        """Whether a layer of the decoder ("model.layers.0.qkv") is there as a kernel keeps it."""
        ...

    def saved(self, layer: str, modules: Sequence[str]) -> SavedWeight:
        """That layer, which these modules make up."""
        ...

    def has(self, module: str) -> bool:
        """Whether there is a weight, quantised or not, for this linear module."""
        ...


class HeadQuantizer(Protocol):
    """[N, K] 16-bit -> int4 or int8, for the output head."""

    def __call__(self, weight: torch.Tensor) -> W4A16Weight | Int8Weight: ...


def fused_modules(c: DecoderConfig) -> dict[str, tuple[tuple[str, ...], bool]]:
    """Layer kind -> the modules it is made of, below model.layers.N, and whether they have biases."""
    qkv = ("qkv_proj",) if c.packed else ("q_proj", "k_proj", "v_proj")
    gate_up = ("gate_up_proj",) if c.packed else ("gate_proj", "up_proj")
    return {
        "qkv": (tuple(f"self_attn.{name}" for name in qkv), c.qkv_bias),
        "o": (("self_attn.o_proj",), c.o_bias),
        "gate_up": (tuple(f"mlp.{name}" for name in gate_up), c.mlp_bias),
        "down": (("mlp.down_proj",), c.mlp_bias),
    }


def block_modules(c: DecoderConfig) -> dict[str, tuple[int, int]]:
    """Every linear module of the blocks as checkpoints name it -> (N, K)."""
    q_dim, kv_dim = c.heads * c.head_dim, c.kv_heads * c.head_dim
    shapes = {
        "self_attn.q_proj": (q_dim, c.hidden_size),
        "self_attn.k_proj": (kv_dim, c.hidden_size),
        "self_attn.v_proj": (kv_dim, c.hidden_size),
        "self_attn.qkv_proj": (q_dim + 2 * kv_dim, c.hidden_size),
        "self_attn.o_proj": (c.hidden_size, q_dim),
        "mlp.gate_proj": (c.intermediate_size, c.hidden_size),
        "mlp.up_proj": (c.intermediate_size, c.hidden_size),
        "mlp.gate_up_proj": (2 * c.intermediate_size, c.hidden_size),
        "mlp.down_proj": (c.hidden_size, c.intermediate_size),
    }
    names = [name for parts, _ in fused_modules(c).values() for name in parts]
    return {f"model.layers.{i}.{name}": shapes[name] for i in range(c.layers) for name in names}


def needed_tensors(c: DecoderConfig) -> dict[str, tuple[int, ...]]:
    """Name -> shape of every tensor of the unquantised model that `load` asks for."""
    shapes: dict[str, tuple[int, ...]] = {
        f"{module}.weight": shape for module, shape in block_modules(c).items()
    }
    shapes |= {EMBEDDING: (c.vocab_size, c.hidden_size), FINAL_NORM: (c.hidden_size,)}
    if not c.tie_word_embeddings:
        shapes[f"{HEAD}.weight"] = (c.vocab_size, c.hidden_size)
    biased = [name for names, has_bias in fused_modules(c).values() if has_bias for name in names]
    for i in range(c.layers):
        prefix = f"model.layers.{i}"
        for name in (_POST_NORMS if c.post_norms else _NORMS).values():
            shapes[f"{prefix}.{name}.weight"] = (c.hidden_size,)
        for name in biased:
            shapes[f"{prefix}.{name}.bias"] = shapes[f"{prefix}.{name}.weight"][:1]
        for name in ("q", "k") if c.qk_norm else ():
            shapes[f"{prefix}.self_attn.{name}_norm.weight"] = (c.head_dim,)
    return shapes


def load(
    config: DecoderConfig,
    source: WeightSource,
    attention: AttentionBackend,
    dtype: torch.dtype,
    device: torch.device,
    max_positions: int,
    quantize_head: HeadQuantizer | None = None,
    dense: bool = False,
    broken: Broken = frozenset(),
) -> Decoder:
    """Read every weight of `config` from `source` onto `device`.

    quantize_head turns a 16-bit output head into int8, or into int4 for a RescoredHead. dense keeps a dequantised
    copy of every int4 layer of the blocks (not of the head, which few rows reach). Raises what the source
    raises (CheckpointError) and ValueError when no kernel fits a layer.
    """
    return _Loader(config, source, attention, dtype, device, dense, broken).decoder(
        max_positions, quantize_head
    )


class _Loader:
    def __init__(
        self,
        config: DecoderConfig,
        source: WeightSource,
        attention: AttentionBackend,
        dtype: torch.dtype,
        device: torch.device,
        dense: bool,
        broken: Broken,
    ) -> None:
        self.config = config
        self.source = source
        self.attention = attention
        self.ops = OPS[attention.name](config, attention)
        self.dtype = dtype
        self.device = device
        self.dense = dense
        self.broken = broken
        self.modules = block_modules(config)
        self.fused = fused_modules(config)
        self.row_order = _row_order(config)
        self.apart: list[str] = []

    def decoder(self, max_positions: int, quantize_head: HeadQuantizer | None) -> Decoder:
        c = self.config
        self.source.expect([EMBEDDING, HEAD, FINAL_NORM, *self.block_order()])
        # The largest tensors first: while one is on its way to the device, little else is there yet.
        embedding = self.plain(EMBEDDING, c.vocab_size, c.hidden_size).to(self.device, self.dtype)
        head = self.head(embedding, quantize_head)
        norm = self.norm(FINAL_NORM)
        blocks = [self.block(i) for i in range(c.layers)]
        if self.apart:
            log.warning(
                "%s of different formats (%s): run one by one, not as one fused layer",
                self.apart[0],
                f"{len(self.apart)} such layers",
            )
        configs = (c.rope,) if c.window_rope is None else (c.rope, c.window_rope)
        ropes = [self.ops.rope(rope, max_positions, self.dtype, self.device) for rope in configs]
        return Decoder(c, embedding, blocks, norm, head, ropes, self.attention, self.ops)

    def block_order(self) -> list[str]:
        """Modules and tensors of all blocks in the order in which `block` reads them."""
        return [name for i in range(self.config.layers) for name in self.order_of(f"model.layers.{i}")]

    def order_of(self, prefix: str) -> Iterator[str]:
        c = self.config
        for name in (_POST_NORMS if c.post_norms else _NORMS).values():
            yield f"{prefix}.{name}.weight"
        for kind, (modules, has_bias) in self.fused.items():
            if self.source.has_saved(f"{prefix}.{kind}"):
                yield f"{prefix}.{kind}"
                if has_bias:
                    yield from (f"{prefix}.{module}.bias" for module in modules)
            else:
                yield from (f"{prefix}.{module}" for module in modules)
            if kind == "qkv" and c.qk_norm:
                yield from (f"{prefix}.self_attn.{name}_norm.weight" for name in ("q", "k"))

    def plain(self, name: str, *shape: int, dtype: torch.dtype | None = None) -> torch.Tensor:
        """A tensor that is no linear weight, as stored; sound in `dtype`, the activation type unless given."""
        return _sound(name, _shaped(name, self.source.tensor(name), shape), dtype or self.dtype)

    def norm_plain(self, name: str, size: int) -> torch.Tensor:
        return self.plain(name, size, dtype=torch.float32 if self.config.norm_offset else self.dtype)

    def linear(self, module: str, n: int, k: int) -> W4A16Weight | torch.Tensor:
        weight = self.source.linear(module, n, k)
        if isinstance(weight, torch.Tensor):
            return _sound(f"{module}.weight", weight, self.dtype)
        _sound(f"{module}'s scales", weight.scales, self.dtype)
        return weight

    def norm(self, name: str) -> RmsNorm:
        weight = self.norm_weight(self.norm_plain(name, self.config.hidden_size))
        return RmsNorm(weight.to(self.device), self.config.rms_norm_eps)

    def norm_weight(self, stored: torch.Tensor) -> torch.Tensor:
        """In the activation type; where an offset is added in float32, since 1 + w has more digits than w."""
        offset = self.config.norm_offset
        return stored.float() + offset if offset else stored.to(self.dtype)

    def head(self, embedding: torch.Tensor, quantize_head: HeadQuantizer | None) -> Head:
        weight = self.head_weight(embedding)
        if quantize_head is not None and isinstance(weight, torch.Tensor):
            quantised = quantize_head(weight)
            if isinstance(quantised, Int8Weight):
                return Int8Linear(quantised, self.dtype, self.device, HEAD)
            screen = W4A16Linear(quantised, None, self.dtype, self.device, broken=self.broken, label=HEAD)
            return RescoredHead(screen, weight.to(self.device, self.dtype))
        return self.single(weight, None, HEAD, dense=False)

    def head_weight(self, embedding: torch.Tensor) -> W4A16Weight | torch.Tensor:
        c = self.config
        shape = (c.vocab_size, c.hidden_size)
        if not c.tie_word_embeddings:
            if not self.source.has(HEAD):
                raise CheckpointError(
                    f"no weight for {HEAD}, and config.json does not tie it to the embedding; if it is tied, set "
                    '"tie_word_embeddings": true in config.json, else fetch the missing file'
                )
            return self.linear(HEAD, *shape)
        if not self.source.has(HEAD):
            return embedding
        own = self.linear(HEAD, *shape)
        if isinstance(own, torch.Tensor) and torch.equal(own.to(self.device, self.dtype), embedding):
            return embedding
        kind = "another weight" if isinstance(own, torch.Tensor) else "a quantised weight"
        log.warning(
            "config.json ties %s to the embedding, but the files hold %s for it: that is used", HEAD, kind
        )
        return own

    def block(self, index: int) -> Block:
        c, prefix = self.config, f"model.layers.{index}"
        norms = {
            field: self.norm(f"{prefix}.{name}.weight")
            for field, name in (_POST_NORMS if c.post_norms else _NORMS).items()
        }
        qkv = self.layer("qkv", prefix)
        qk_norm = self.qk_norm(prefix) if c.qk_norm else None
        o, gate_up = self.layer("o", prefix), self.layer("gate_up", prefix)
        return Block(
            qkv=qkv,
            qk_norm=qk_norm,
            o=o,
            gate_up=gate_up,
            interleaved=self.ops.interleaves and not isinstance(gate_up, SideBySide),
            down=self.layer("down", prefix),
            window=c.windows[index],
            rope=int(c.window_rope is not None and c.windows[index] is not None),
            **norms,
        )

    def qk_norm(self, prefix: str) -> HeadNorm:
        """The norms of queries and keys."""
        c = self.config
        order = head_order(c.rope)
        weights = []
        for name in ("q", "k"):
            weight = self.norm_plain(f"{prefix}.self_attn.{name}_norm.weight", c.head_dim)
            weight = self.norm_weight(weight if order is None else weight[order])
            weights.append(weight.to(self.device, self.dtype))
        return self.ops.head_norm(weights[0], weights[1], c.rms_norm_eps)

    def layer(self, kind: str, prefix: str) -> Linear:
        """One layer of a block from its modules: side by side in one matrix where their formats allow it."""
        names, has_bias = self.fused[kind]
        modules = [f"{prefix}.{name}" for name in names]
        if self.source.has_saved(f"{prefix}.{kind}"):
            saved = self.source.saved(f"{prefix}.{kind}", modules)
            for part, value in saved.tensors.items():
                if value.is_floating_point():
                    _sound(f"{prefix}.{kind}.{part} as it was prepacked", value, self.dtype)
            joined = _joined([self.bias(module) if has_bias else None for module in modules])
            if joined is not None and kind == "qkv" and self.row_order is not None:
                joined = joined[self.row_order]
            try:
                return self.single(saved, joined, kind)
            except ValueError as error:
                raise CheckpointError(
                    f"{prefix}.{kind} as it was prepacked: {error}; quantise again, or remove it"
                ) from error
        weights = [self.linear(module, *self.modules[module]) for module in modules]
        biases = [self.bias(module) if has_bias else None for module in modules]
        if kind == "qkv" and self.row_order is not None:
            weights, biases = self.turned(weights, biases)
        whole = weights[0] if len(weights) == 1 else _side_by_side(weights)
        if whole is not None:
            bias = _joined(biases)
            if kind == "gate_up" and self.ops.interleaves:
                return self.interleaved(whole, bias)
            return self.single(whole, bias, kind)
        self.apart.append(", ".join(modules))
        return SideBySide([self.single(w, b, kind) for w, b in zip(weights, biases, strict=True)])

    def interleaved(self, whole: W4A16Weight | torch.Tensor, bias: torch.Tensor | None) -> Linear:
        """A gate_up layer with every gate's row beside its up's."""
        order = interleave_halves(2 * self.config.intermediate_size)
        whole = take_rows(whole, order) if isinstance(whole, W4A16Weight) else whole[order]
        layer = self.single(whole, None if bias is None else bias[order], "gate_up")
        if isinstance(layer, W4A16Linear):
            layer.expect_gate(self.config.activation)
        return layer

    def turned(
        self, weights: Sequence[W4A16Weight | torch.Tensor], biases: Sequence[torch.Tensor | None]
    ) -> tuple[list[W4A16Weight | torch.Tensor], list[torch.Tensor | None]]:
        """Rows of queries and keys in the order that the rotation wants (see `head_order`)."""
        assert self.row_order is not None
        start = 0
        turned: list[W4A16Weight | torch.Tensor] = []
        turned_biases: list[torch.Tensor | None] = []
        for weight, bias in zip(weights, biases, strict=True):
            n = weight.n if isinstance(weight, W4A16Weight) else weight.shape[0]
            index = self.row_order[start : start + n] - start
            turned.append(take_rows(weight, index) if isinstance(weight, W4A16Weight) else weight[index])
            turned_biases.append(None if bias is None else bias[index])
            start += n
        return turned, turned_biases

    def bias(self, module: str) -> torch.Tensor:
        bias, n = self.source.bias(module), self.modules[module][0]
        if bias is None:
            raise CheckpointError(
                f"{module}.bias: missing, but {self.config.architecture} with this config.json needs it"
            )
        name = f"{module}.bias"
        return _sound(name, _shaped(name, bias, (n,)), self.dtype)

    def single(
        self,
        weight: W4A16Weight | SavedWeight | torch.Tensor,
        bias: torch.Tensor | None,
        label: str,
        dense: bool | None = None,
    ) -> W4A16Linear | DenseLinear:
        if isinstance(weight, torch.Tensor):
            return DenseLinear(weight, bias, self.dtype, self.device)
        dense = self.dense if dense is None else dense
        return W4A16Linear(
            weight, bias, self.dtype, self.device, dense=dense, broken=self.broken, label=label
        )


def _shaped(name: str, tensor: torch.Tensor, shape: tuple[int, ...]) -> torch.Tensor:
    """The tensor. Raises CheckpointError for another shape, or a type that means nothing without scales."""
    if tuple(tensor.shape) != shape or tensor.dtype not in FLOATS:
        accepted = " or ".join(str(d).removeprefix("torch.") for d in FLOATS)
        raise CheckpointError(
            f"tensor {name}: given {str(tensor.dtype).removeprefix('torch.')} {list(tensor.shape)}, accepted {accepted} "
            f"{list(shape)} by config.json: the two do not belong together; take another copy of this model"
        )
    return tensor


def _sound(name: str, tensor: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """The tensor as it is. Raises CheckpointError where it is not finite, or would not be in `dtype`."""
    if not all_finite(tensor):
        raise CheckpointError(f"tensor {name} holds values that are not finite (inf or nan): fetch it again")
    if tensor.numel() and torch.finfo(tensor.dtype).max > torch.finfo(dtype).max:
        ends = torch.stack(torch.aminmax(tensor))
        if not bool(torch.isfinite(ends.to(dtype)).all()):
            kind = str(dtype).removeprefix("torch.")
            raise CheckpointError(
                f"tensor {name}: given {float(ends[0]):.4g}..{float(ends[1]):.4g}, accepted up to "
                f"{torch.finfo(dtype).max:.4g} in {kind}: serve this model with `--dtype bfloat16` (or float32)"
            )
    return tensor


def _row_order(c: DecoderConfig) -> torch.Tensor | None:
    """int64 [(H + 2 Hkv) D]: where each row of the fused qkv layer comes from, None when they stay."""
    order = head_order(c.rope)
    if order is None:
        return None
    rotary = (c.heads + c.kv_heads) * c.head_dim
    turned = torch.arange(0, rotary, c.head_dim).unsqueeze(1) + order
    return torch.cat((turned.view(-1), torch.arange(rotary, rotary + c.kv_heads * c.head_dim)))


def _side_by_side(weights: Sequence[W4A16Weight | torch.Tensor]) -> W4A16Weight | torch.Tensor | None:
    """All rows as one weight, None when their formats differ."""
    quantised = [w for w in weights if isinstance(w, W4A16Weight)]
    plain = [w for w in weights if isinstance(w, torch.Tensor)]
    if not plain:
        return concat_rows(quantised)
    if quantised or len({w.dtype for w in plain}) > 1:
        return None
    return torch.cat(plain)


def _joined(biases: Iterable[torch.Tensor | None]) -> torch.Tensor | None:
    there = [b for b in biases if b is not None]
    return torch.cat(there) if there else None
