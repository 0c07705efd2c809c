"""One configurable decoder: embeddings, pre-norm blocks, head.

    token_ids [T] -> hidden [T, C] -> per block: norm, qkv, (q/k norm), RoPE, KV write, attention, o, (norm), add
                                               norm, gate_up, gated activation, down, (norm), add
                  -> norm -> head -> logits [R, V] of the rows asked for

What architectures differ in beyond that is scales, caps, norms and windows: see DecoderConfig.

Rows of one step lie one sequence after the other (see kernels/attention). Weights are plain attributes, not
nn.Modules: a decode step is a few hundred calls of microseconds, and Module.__call__ would add to each.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from nybble.kernels.activation import GATED
from nybble.kernels.attention import AttentionBackend, Span
from nybble.kernels.linear import W4A16Linear
from nybble.kernels.norm import RmsNorm
from nybble.kernels.rope import RopeTable, rotate
from nybble.service.models.config import DecoderConfig


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


@dataclass(frozen=True, slots=True)
class Block:
    """post_norm stands before the MLP. o_norm and down_norm: of what each half adds, where the model has them.
    rope: index into Decoder.ropes."""

    input_norm: RmsNorm
    qkv: Linear
    qk_norm: tuple[torch.Tensor, float] | None  # weight [1, H + Hkv, D], eps
    o: Linear
    post_norm: RmsNorm
    gate_up: Linear
    down: Linear
    window: int | None
    rope: int = 0
    o_norm: RmsNorm | None = None
    down_norm: RmsNorm | None = None


class Decoder:
    """See the module's docstring. Built by `load` (load.py); `forward` needs the attention back end's cache allocated."""

    def __init__(
        self,
        config: DecoderConfig,
        embedding: torch.Tensor,
        blocks: Sequence[Block],
        norm: RmsNorm,
        head: Head,
        ropes: Sequence[RopeTable],
        attention: AttentionBackend,
    ) -> None:
        self.config = config
        self.embedding = embedding
        self.blocks = tuple(blocks)
        self.norm = norm
        self.head = head
        self.ropes = tuple(ropes)
        self.attention = attention
        self.windows = tuple(dict.fromkeys(config.windows))
        self._gated = GATED[config.activation]

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
        total = self.embedding.nbytes + self.norm.nbytes + self.head.nbytes
        total += sum(rope.nbytes for rope in self.ropes)
        if isinstance(self.head, (DenseLinear, RescoredHead)):
            shared = self.head.weight.data_ptr() == self.embedding.data_ptr()
            total -= self.head.weight.nbytes if shared else 0
        for b in self.blocks:
            parts = (b.input_norm, b.qkv, b.o, b.o_norm, b.post_norm, b.gate_up, b.down, b.down_norm)
            total += sum(p.nbytes for p in parts if p is not None) + (b.qk_norm[0].nbytes if b.qk_norm else 0)
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
        c = self.config
        logits = self.head(hidden)
        if c.logit_scale != 1.0:
            logits = logits * c.logit_scale
        if c.logit_softcap is not None:
            logits = torch.tanh(logits / c.logit_softcap) * c.logit_softcap
        return logits

    def hidden(self, batch: Batch) -> torch.Tensor:
        """What the head sees, [R, H]: R rows, those of batch.logit_rows or all."""
        c, attention = self.config, self.attention
        rows = batch.token_ids.shape[0]
        rotary, total = c.heads + c.kv_heads, c.heads + 2 * c.kv_heads
        plan = attention.plan(batch.spans, self.windows)
        turns = [rope.at(batch.positions, rotary, c.kv_heads) for rope in self.ropes]
        x = torch.nn.functional.embedding(batch.token_ids, self.embedding)
        if c.embedding_scale != 1.0:
            x = x * c.embedding_scale
        for index, block in enumerate(self.blocks):
            qkv = block.qkv(block.input_norm(x)).view(rows, total, c.head_dim)
            if block.qk_norm is not None:
                weight, eps = block.qk_norm
                qk = torch.nn.functional.rms_norm(qkv.narrow(1, 0, rotary), (c.head_dim,), None, eps) * weight
                qkv = torch.cat((qk, qkv.narrow(1, rotary, c.kv_heads)), dim=1)
            qkv = rotate(qkv, *turns[block.rope])
            attention.write(index, qkv.narrow(1, c.heads, 2 * c.kv_heads), plan)
            q = qkv.narrow(1, 0, c.heads)
            mixed = attention.attend(index, q, plan, block.window, c.attention_scale, c.attention_softcap)
            x = self._add(x, block.o(mixed.reshape(rows, c.heads * c.head_dim)), block.o_norm)
            x = self._add(x, block.down(self._gated(block.gate_up(block.post_norm(x)))), block.down_norm)
        if batch.logit_rows is not None:
            x = x[batch.logit_rows]
        return self.norm(x)

    def _add(self, x: torch.Tensor, part: torch.Tensor, norm: RmsNorm | None) -> torch.Tensor:
        if norm is not None:
            part = norm(part)
        return torch.add(x, part, alpha=self.config.residual_scale)
