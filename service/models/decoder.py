"""One configurable decoder: embeddings, pre-norm blocks, head.

    token_ids [T] -> hidden [T, C] -> per block: norm, qkv, (q/k norm), RoPE, KV write, attention, o, add
                                               norm, gate_up, SiLU-mul, down, add
                  -> norm -> head -> logits [R, V] of the rows asked for

Rows of one step lie one sequence after the other (see kernels/attention). Weights are plain attributes, not
nn.Modules: a decode step is a few hundred calls of microseconds, and Module.__call__ would add to each.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import torch

from nybble.kernels.activation import silu_mul
from nybble.kernels.attention import AttentionBackend, Span
from nybble.kernels.linear import Broken, W4A16Linear
from nybble.kernels.norm import RmsNorm
from nybble.kernels.packing import W4A16Weight, concat_rows
from nybble.kernels.rope import RopeTable, rotate
from nybble.service.errors import CheckpointError
from nybble.service.models.config import DecoderConfig


class WeightSource(Protocol):
    """What the decoder asks of a checkpoint (service/checkpoints)."""

    def tensor(self, name: str) -> torch.Tensor: ...

    def linear(self, module: str, n: int, k: int) -> W4A16Weight | torch.Tensor: ...

    def bias(self, module: str) -> torch.Tensor | None: ...


class HeadQuantizer(Protocol):
    """[N, K] 16-bit -> int4, for the output head."""

    def __call__(self, weight: torch.Tensor) -> W4A16Weight: ...


@dataclass(frozen=True, slots=True)
class Batch:
    """One forward pass. token_ids, positions: int64 [T]; spans: one per sequence, their q_len sum to T;
    logit_rows: the rows whose logits are wanted, None for all."""

    token_ids: torch.Tensor
    positions: torch.Tensor
    spans: Sequence[Span]
    logit_rows: torch.Tensor | None = None


class DenseLinear:
    """A 16-bit linear layer: modules a checkpoint left unquantised."""

    def __init__(
        self, weight: torch.Tensor, bias: torch.Tensor | None, dtype: torch.dtype, device: torch.device
    ) -> None:
        self.weight = weight.to(device, dtype)
        self.bias = None if bias is None else bias.to(device, dtype)

    @property
    def nbytes(self) -> int:
        return self.weight.nbytes + (0 if self.bias is None else self.bias.nbytes)

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        return torch.nn.functional.linear(x, self.weight, self.bias)


class SideBySide:
    """Parts of a fused layer whose formats differ, run one by one: y = cat(part(x))."""

    def __init__(self, parts: Sequence[W4A16Linear | DenseLinear]) -> None:
        self.parts = tuple(parts)

    @property
    def nbytes(self) -> int:
        return sum(p.nbytes for p in self.parts)

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        return torch.cat([part(x) for part in self.parts], dim=-1)


class RescoredHead:
    """An output head read in int4, with the best candidates' logits from its 16-bit rows.

    The int4 product over the whole vocabulary, a quarter of the bytes, finds the RESCORED best tokens; their rows are
    then multiplied exactly. What is sampled comes almost always from those; the others' int4 logits only share in the
    sum. weight [V, C] is the tied embedding, resident anyway, or the untied head itself.
    """

    # On the demo: perplexity +0.1 % over the 16-bit head with 32, +3.1 % with the int4 logits alone.
    RESCORED = 32

    def __init__(self, screen: W4A16Linear, weight: torch.Tensor) -> None:
        self.screen = screen
        self.weight = weight
        self.count = min(self.RESCORED, weight.shape[0])

    @property
    def nbytes(self) -> int:
        return self.screen.nbytes + self.weight.nbytes

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        logits = self.screen(x)
        best = logits.topk(self.count, dim=-1, sorted=False).indices
        exact = torch.bmm(self.weight[best], x.unsqueeze(-1)).squeeze(-1)
        return logits.scatter_(1, best, exact)


Linear = W4A16Linear | DenseLinear | SideBySide
Head = W4A16Linear | DenseLinear | RescoredHead


def block_modules(c: DecoderConfig) -> dict[str, tuple[int, int]]:
    """Every linear module of the blocks as checkpoints name it -> (N, K)."""
    q_dim, kv_dim = c.heads * c.head_dim, c.kv_heads * c.head_dim
    shapes = {
        "self_attn.q_proj": (q_dim, c.hidden_size),
        "self_attn.k_proj": (kv_dim, c.hidden_size),
        "self_attn.v_proj": (kv_dim, c.hidden_size),
        "self_attn.o_proj": (c.hidden_size, q_dim),
        "mlp.gate_proj": (c.intermediate_size, c.hidden_size),
        "mlp.up_proj": (c.intermediate_size, c.hidden_size),
        "mlp.down_proj": (c.hidden_size, c.intermediate_size),
    }
    return {f"model.layers.{i}.{name}": shape for i in range(c.layers) for name, shape in shapes.items()}


@dataclass(frozen=True, slots=True)
class Block:
    input_norm: RmsNorm
    qkv: Linear
    qk_norm: tuple[torch.Tensor, float] | None  # weight [1, H + Hkv, D], eps
    o: Linear
    post_norm: RmsNorm
    gate_up: Linear
    down: Linear
    window: int | None


class Decoder:
    """See the module's docstring. Built by `load`; `forward` needs the attention back end's cache allocated."""

    def __init__(
        self,
        config: DecoderConfig,
        embedding: torch.Tensor,
        blocks: Sequence[Block],
        norm: RmsNorm,
        head: Head,
        rope: RopeTable,
        attention: AttentionBackend,
    ) -> None:
        self.config = config
        self.embedding = embedding
        self.blocks = tuple(blocks)
        self.norm = norm
        self.head = head
        self.rope = rope
        self.attention = attention
        self.windows = tuple(dict.fromkeys(config.windows))
        self._scale = config.head_dim**-0.5

    @property
    def linears(self) -> dict[str, list[Linear]]:
        """Layer kind -> the layers of that kind; of a rescored head its int4 part."""
        kinds: dict[str, list[Linear]] = {"qkv": [], "o": [], "gate_up": [], "down": []}
        for b in self.blocks:
            for kind, layer in zip(kinds, (b.qkv, b.o, b.gate_up, b.down), strict=True):
                kinds[kind].append(layer)
        return {**kinds, "lm_head": [self.head.screen if isinstance(self.head, RescoredHead) else self.head]}

    @property
    def nbytes(self) -> int:
        """Resident bytes of the weights; a head that shares the embedding counts once."""
        total = self.embedding.nbytes + self.norm.nbytes + self.rope.nbytes + self.head.nbytes
        if isinstance(self.head, (DenseLinear, RescoredHead)):
            shared = self.head.weight.data_ptr() == self.embedding.data_ptr()
            total -= self.head.weight.nbytes if shared else 0
        for b in self.blocks:
            parts = (b.input_norm, b.qkv, b.o, b.post_norm, b.gate_up, b.down)
            total += sum(p.nbytes for p in parts) + (b.qk_norm[0].nbytes if b.qk_norm else 0)
        return total

    @property
    def _copies(self) -> list[W4A16Linear]:
        found = []
        for layers in self.linears.values():
            for layer in layers:
                parts = layer.parts if isinstance(layer, SideBySide) else (layer,)
                found += [p for p in parts if isinstance(p, W4A16Linear) and p.dense is not None]
        return found

    @property
    def dense_layers(self) -> int:
        """Int4 layers that have a dense copy."""
        return len(self._copies)

    @property
    def dense_nbytes(self) -> int:
        """Bytes of all dense copies."""
        return sum(p.dense.untyped_storage().nbytes() for p in self._copies if p.dense is not None)

    @property
    def dense_build_seconds(self) -> float:
        return sum(p.dense_build_seconds for p in self._copies)

    def forward(self, batch: Batch) -> torch.Tensor:
        """Logits [R, V] in the activation type."""
        return self.logits(self.hidden(batch))

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """hidden [R, H] as hidden() gives it -> [R, V], both in the activation type."""
        return self.head(hidden)

    def hidden(self, batch: Batch) -> torch.Tensor:
        """What the head sees, [R, H]: R rows, those of batch.logit_rows or all."""
        c, attention = self.config, self.attention
        rows = batch.token_ids.shape[0]
        rotary, total = c.heads + c.kv_heads, c.heads + 2 * c.kv_heads
        plan = attention.plan(batch.spans, self.windows)
        cos, sin = self.rope.at(batch.positions, rotary, c.kv_heads)
        x = torch.nn.functional.embedding(batch.token_ids, self.embedding)
        for index, block in enumerate(self.blocks):
            qkv = block.qkv(block.input_norm(x)).view(rows, total, c.head_dim)
            if block.qk_norm is not None:
                weight, eps = block.qk_norm
                qk = torch.nn.functional.rms_norm(qkv.narrow(1, 0, rotary), (c.head_dim,), None, eps) * weight
                qkv = torch.cat((qk, qkv.narrow(1, rotary, c.kv_heads)), dim=1)
            qkv = rotate(qkv, cos, sin)
            attention.write(index, qkv.narrow(1, c.heads, 2 * c.kv_heads), plan)
            mixed = attention.attend(index, qkv.narrow(1, 0, c.heads), plan, block.window, self._scale)
            x = x + block.o(mixed.reshape(rows, c.heads * c.head_dim))
            x = x + block.down(silu_mul(block.gate_up(block.post_norm(x))))
        if batch.logit_rows is not None:
            x = x[batch.logit_rows]
        return self.norm(x)


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

    quantize_head turns a 16-bit output head into int4, for a RescoredHead. dense keeps a dequantised
    copy of every int4 layer of the blocks (not of the head, which few rows reach). Raises what the source
    raises (CheckpointError) and ValueError when no kernel fits a layer.
    """
    c = config

    def plain(name: str, *shape: int) -> torch.Tensor:
        tensor = source.tensor(name)
        if tuple(tensor.shape) != shape:
            raise CheckpointError(
                f"tensor {name}: given {list(tensor.shape)}, accepted {list(shape)} by config.json: "
                "the two do not belong together"
            )
        return tensor

    def norm(name: str) -> RmsNorm:
        return RmsNorm(plain(name, c.hidden_size).to(device, dtype), c.rms_norm_eps)

    def single(
        weight: W4A16Weight | torch.Tensor, bias: torch.Tensor | None, label: str, copy: bool = dense
    ) -> W4A16Linear | DenseLinear:
        if isinstance(weight, W4A16Weight):
            return W4A16Linear(weight, bias, dtype, device, dense=copy, broken=broken, label=label)
        return DenseLinear(weight, bias, dtype, device)

    modules = block_modules(c)

    def fused(label: str, prefix: str, names: Sequence[str], has_bias: bool) -> Linear:
        parts = [f"{prefix}.{name}" for name in names]
        weights = [source.linear(module, *modules[module]) for module in parts]
        biases = [checked_bias(module) if has_bias else None for module in parts]
        if len(weights) == 1:
            return single(weights[0], biases[0], label)
        quantised = [w for w in weights if isinstance(w, W4A16Weight)]
        plain_weights = [w for w in weights if isinstance(w, torch.Tensor)]
        bias = torch.cat([b for b in biases if b is not None]) if has_bias else None
        if len(quantised) == len(weights):
            whole = concat_rows(quantised)
            if whole is not None:
                return single(whole, bias, label)
        elif len(plain_weights) == len(weights):
            return single(torch.cat(plain_weights), bias, label)
        return SideBySide([single(w, b, label) for w, b in zip(weights, biases, strict=True)])

    def checked_bias(module: str) -> torch.Tensor:
        bias, n = source.bias(module), modules[module][0]
        if bias is None:
            raise CheckpointError(
                f"{module}.bias: missing, but {c.architecture} with this config.json needs it"
            )
        if bias.shape != (n,):
            raise CheckpointError(f"tensor {module}.bias: given {list(bias.shape)}, accepted [{n}]")
        return bias

    def block(index: int) -> Block:
        p = f"model.layers.{index}"
        qk_norm = None
        if c.qk_norm:
            weights = [
                plain(f"{p}.self_attn.{name}_norm.weight", c.head_dim).expand(heads, -1)
                for name, heads in (("q", c.heads), ("k", c.kv_heads))
            ]
            qk_norm = (torch.cat(weights).unsqueeze(0).to(device, dtype), c.rms_norm_eps)
        return Block(
            input_norm=norm(f"{p}.input_layernorm.weight"),
            qkv=fused("qkv", f"{p}.self_attn", ("q_proj", "k_proj", "v_proj"), c.qkv_bias),
            qk_norm=qk_norm,
            o=fused("o", f"{p}.self_attn", ("o_proj",), c.o_bias),
            post_norm=norm(f"{p}.post_attention_layernorm.weight"),
            gate_up=fused("gate_up", f"{p}.mlp", ("gate_proj", "up_proj"), c.mlp_bias),
            down=fused("down", f"{p}.mlp", ("down_proj",), c.mlp_bias),
            window=c.windows[index],
        )

    embedding = plain("model.embed_tokens.weight", c.vocab_size, c.hidden_size).to(device, dtype)
    blocks = [block(i) for i in range(c.layers)]
    final_norm = norm("model.norm.weight")
    if c.tie_word_embeddings:
        weight: W4A16Weight | torch.Tensor = embedding
    else:
        weight = source.linear("lm_head", c.vocab_size, c.hidden_size)
    if quantize_head is not None and isinstance(weight, torch.Tensor):
        screen = W4A16Linear(quantize_head(weight), None, dtype, device, broken=broken, label="lm_head")
        head: Head = RescoredHead(screen, weight.to(device, dtype))
    else:
        head = single(weight, None, "lm_head", copy=False)
    rope = RopeTable(c.rope, max_positions, dtype, device)
    return Decoder(c, embedding, blocks, final_norm, head, rope, attention)
