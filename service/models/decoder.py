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
from typing import Any

import torch

from nybble.kernels.attention import AttentionBackend, Span
from nybble.kernels.linear import W4A16Linear
from nybble.kernels.norm import RmsNorm
from nybble.kernels.rope import RopeAngles, RopeTable
from nybble.service.models.config import DecoderConfig
from nybble.service.models.layers import DenseLinear, Head, Linear, RescoredHead, SideBySide
from nybble.service.models.ops import HeadNorm, Ops


@dataclass(frozen=True, slots=True)
class Batch:
    """One forward pass. token_ids, positions: int [T]; spans: one per sequence, their q_len sum to T; logit_rows: the
    rows whose logits are wanted, None for all. plan: what attention.plan makes of the spans, where the caller has it."""

    token_ids: torch.Tensor
    positions: torch.Tensor
    spans: Sequence[Span]
    logit_rows: torch.Tensor | None = None
    plan: Any = None


@dataclass(frozen=True, slots=True)
class Block:
    """post_norm stands before the MLP. o_norm and down_norm: of what each half adds, where the model has them.
    rope: index into Decoder.ropes. interleaved: rows of gate_up alternate gate and up."""

    input_norm: RmsNorm
    qkv: Linear
    qk_norm: HeadNorm | None
    o: Linear
    post_norm: RmsNorm
    gate_up: Linear
    down: Linear
    window: int | None
    interleaved: bool = False
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
        ropes: Sequence[RopeTable | RopeAngles],
        attention: AttentionBackend,
        ops: Ops,
    ) -> None:
        self.config = config
        self.embedding = embedding
        self.blocks = tuple(blocks)
        self.norm = norm
        self.head = head
        self.ropes = tuple(ropes)
        self.attention = attention
        self.ops = ops
        self.windows = tuple(dict.fromkeys(config.windows))
        following = [*(b.input_norm for b in self.blocks[1:]), norm]
        # Each block with the norm that comes after it.
        self._followed = tuple(zip(self.blocks, following, strict=True))

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
        c, attention, ops = self.config, self.attention, self.ops
        rows = batch.token_ids.shape[0]
        plan = attention.plan(batch.spans, self.windows) if batch.plan is None else batch.plan
        turns = ops.turns(self.ropes, batch.positions)
        x = torch.nn.functional.embedding(batch.token_ids, self.embedding)
        if c.embedding_scale != 1.0:
            x = x * c.embedding_scale
        h = ops.norm(x, self.blocks[0].input_norm)
        for index, (block, following) in enumerate(self._followed):
            q = ops.to_cache(index, ops.project(block.qkv, h), block.qk_norm, turns[block.rope], plan)
            mixed = attention.attend(index, q, plan, block.window, c.attention_scale, c.attention_softcap)
            mixed = mixed.reshape(rows, c.heads * c.head_dim)
            x, h = ops.add(x, ops.project(block.o, mixed), block.o_norm, block.post_norm)
            gated = ops.gate(block.gate_up, h, block.interleaved)
            x, h = ops.add(x, ops.project(block.down, gated), block.down_norm, following)
        return h if batch.logit_rows is None else h[batch.logit_rows]
