"""The pool of KV-cache blocks, and the prefix cache within it.

A block is free, or in use by one or more sequences. A full block in use can be registered under the key of its content
(see Sequence.block_key); once nobody uses it, it stays what it is, counted as free, until its room is needed. Then the
least recently used goes first, and of blocks given back together the last, since a prefix is of use without what follows
it and not the other way round. A registered block is never written again: only full blocks are registered, and sequences
write beyond what they share.

Blocks of one sequence follow one another where possible, because a run of blocks can be read as a view and
a scattered sequence must be gathered. So a new sequence is placed in a free run long enough for what it may become,
and the rest of that run is reserved: taken by others only when nothing else is empty.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable, Sequence

_USED, _FREE, _RESERVED, _CACHED = 0, 1, 2, 3


class BlockPool:
    """`count` blocks, numbered from 0. All methods are O(count) byte scans at worst, in C.

    free: blocks that can be had, those that the prefix cache holds included.
    """

    def __init__(self, count: int) -> None:
        if count <= 0:
            raise ValueError(f"KV blocks: given {count}, accepted at least 1")
        self.count = count
        self.free = count
        self._state = bytearray([_FREE]) * count
        self._users = [0] * count
        self._block_of: dict[bytes, int] = {}
        self._key_of: dict[int, bytes] = {}
        self._unused: OrderedDict[int, None] = (
            OrderedDict()
        )  # registered and not in use, the next to go first

    @property
    def usage_ratio(self) -> float:
        return 1 - self.free / self.count

    @property
    def cached(self) -> int:
        """Blocks that are kept for their content alone."""
        return len(self._unused)

    def find(self, keys: Iterable[bytes]) -> list[int]:
        """The blocks registered under the leading keys, up to the first that is not there."""
        found = []
        for key in keys:
            block = self._block_of.get(key)
            if block is None:
                break
            found.append(block)
        return found

    def unused(self, blocks: Iterable[int]) -> int:
        """How many of these registered blocks nobody uses: sharing them takes that many from `free`."""
        return sum(block in self._unused for block in blocks)

    def sole(self, blocks: Iterable[int]) -> int:
        """How many of these blocks have one user: its end gives that many back."""
        return sum(self._users[block] == 1 for block in blocks)

    def share(self, blocks: Sequence[int]) -> None:
        """One more sequence uses these registered blocks."""
        for block in blocks:
            if self._users[block] == 0:
                del self._unused[block]
                self._state[block] = _USED
                self.free -= 1
            self._users[block] += 1

    def start(
        self, needed: int, expected: int, after: int | None = None
    ) -> tuple[list[int], tuple[int, int]] | None:
        """Blocks for a new sequence and the range reserved for its growth, or None when fewer than `needed` are
        free. `expected` is how many it may come to need; `after` is the last block of what it shares."""
        if needed > self.free:
            return None
        expected = max(needed, expected)
        first = self._run(expected, after)
        if first < 0:
            first = self._run(needed, after)
            if first < 0:
                # From the cache, the oldest content; in order, so that what was one run becomes one again.
                return sorted(self._take_any() for _ in range(needed)), (0, 0)
            expected = needed
        for block in range(first, first + needed):
            self._take(block)
        for block in range(first + needed, first + expected):
            self._state[block] = _RESERVED
        return list(range(first, first + needed)), (first + needed, first + expected)

    def extend(self, blocks: list[int], needed: int) -> bool:
        """Append `needed` blocks to `blocks`, next to its last where that is empty. False, and nothing is taken,
        when too few are free."""
        if needed > self.free:
            return False
        for _ in range(needed):
            after = blocks[-1] + 1 if blocks else 0
            if after < self.count and self._state[after] in (_FREE, _RESERVED):
                self._take(after)
                blocks.append(after)
            else:
                blocks.append(self._take_any())
        return True

    def register(self, block: int, key: bytes) -> None:
        """From now on this block, in use and full, is found under `key`. The first block of a key keeps it."""
        assert self._state[block] == _USED, f"KV block {block} is registered but not in use"
        if key not in self._block_of and block not in self._key_of:
            self._block_of[key] = block
            self._key_of[block] = key

    def forget(self, blocks: Iterable[int]) -> None:
        """Nobody finds these blocks any more; sequences that use them go on."""
        for block in blocks:
            key = self._key_of.pop(block, None)
            if key is not None:
                del self._block_of[key]
                if block in self._unused:
                    del self._unused[block]
                    self._state[block] = _FREE

    def release(self, blocks: Sequence[int], reserved: tuple[int, int] | None = None) -> None:
        """One sequence uses these blocks, given in its order, no more; its reservation goes too."""
        for block in reversed(blocks):
            assert self._users[block] > 0, f"KV block {block} released twice"
            self._users[block] -= 1
            if self._users[block] == 0:
                self.free += 1
                if block in self._key_of:
                    self._state[block] = _CACHED
                    self._unused[block] = None
                else:
                    self._state[block] = _FREE
        for block in range(*(reserved or (0, 0))):
            if self._state[block] == _RESERVED:
                self._state[block] = _FREE

    def _run(self, length: int, after: int | None) -> int:
        """The first of `length` empty blocks in a row, right behind `after` if possible; -1 if there are none."""
        run = bytes([_FREE]) * length
        if after is not None and self._state.startswith(run, after + 1):
            return after + 1
        return self._state.find(run)

    def _take(self, block: int) -> None:
        self._state[block] = _USED
        self._users[block] = 1
        self.free -= 1

    def _take_any(self) -> int:
        """An empty block, then a reserved one, then the one whose content has been of no use for longest."""
        block = self._state.find(_FREE)
        if block < 0:
            block = self._state.find(_RESERVED)
        if block < 0:
            block, _ = self._unused.popitem(last=False)
            del self._block_of[self._key_of.pop(block)]
        self._take(block)
        return block
