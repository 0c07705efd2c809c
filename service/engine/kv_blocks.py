"""The pool of KV-cache blocks.

Blocks of one sequence follow one another where possible, because a run of blocks can be read as a view and
a scattered sequence must be gathered. So a new sequence is placed in a free run long enough for what it may become,
and the rest of that run is reserved: taken by others only when nothing else is free.
"""

from __future__ import annotations

_USED, _FREE, _RESERVED = 0, 1, 2


class BlockPool:
    """`count` blocks, numbered from 0. All methods are O(count) byte scans at worst, in C."""

    def __init__(self, count: int) -> None:
        if count <= 0:
            raise ValueError(f"KV blocks: given {count}, accepted at least 1")
        self.count = count
        self.free = count
        self._state = bytearray([_FREE]) * count

    @property
    def usage_ratio(self) -> float:
        return 1 - self.free / self.count

    def start(self, needed: int, expected: int) -> tuple[list[int], tuple[int, int]] | None:
        """Blocks for a new sequence and the range reserved for its growth, or None when fewer than `needed` are
        free. `expected` is how many it may come to need."""
        if needed > self.free:
            return None
        expected = max(needed, expected)
        first = self._state.find(bytes([_FREE]) * expected)
        if first < 0:
            first = self._state.find(bytes([_FREE]) * needed)
            if first < 0:
                return [self._take_any() for _ in range(needed)], (0, 0)
            expected = needed
        for block in range(first, first + needed):
            self._take(block)
        for block in range(first + needed, first + expected):
            self._state[block] = _RESERVED
        return list(range(first, first + needed)), (first + needed, first + expected)

    def extend(self, blocks: list[int], needed: int) -> bool:
        """Append `needed` blocks to `blocks`, next to its last where that is not in use. False, and nothing is taken,
        when too few are free."""
        if needed > self.free:
            return False
        for _ in range(needed):
            after = blocks[-1] + 1 if blocks else 0
            if after < self.count and self._state[after] != _USED:
                self._take(after)
                blocks.append(after)
            else:
                blocks.append(self._take_any())
        return True

    def release(self, blocks: list[int], reserved: tuple[int, int] | None = None) -> None:
        """Give blocks back, and the reservation that came with them."""
        for block in blocks:
            assert self._state[block] == _USED, f"KV block {block} released twice"
            self._state[block] = _FREE
        self.free += len(blocks)
        for block in range(*(reserved or (0, 0))):
            if self._state[block] == _RESERVED:
                self._state[block] = _FREE

    def _take(self, block: int) -> None:
        self._state[block] = _USED
        self.free -= 1

    def _take_any(self) -> int:
        block = self._state.find(_FREE)
        if block < 0:
            block = self._state.find(_RESERVED)
        self._take(block)
        return block
