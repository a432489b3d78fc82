"""Keep the memory of fields that are gone for those that come: what the system hands out anew it has to clear first.

That took a seventh of a deep step on a virtual machine (docs/decisions/0024-fields-from-step-to-step.md).
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import ClassVar
from weakref import WeakValueDictionary

import torch

from gigagrad.allowances import MAPPED_BYTES
from gigagrad.threads import living


class BufferPool:
    """A pool of blocks by size; small ones are left to the C library. Nobody waits for anybody: a run may be closed as
    garbage in the middle of this.
    """

    _all: ClassVar[WeakValueDictionary[int, BufferPool]] = WeakValueDictionary()

    def __init__(self) -> None:
        self._blocks: dict[int, list[torch.Tensor]] = {}
        self._all[id(self)] = self
        self._taken = WeakValueDictionary[int, torch.Tensor]()
        self.most_bytes: int | None = None
        """Bytes that it may hold beside those that are taken, with them, unless more are taken; None: any number."""

    def take(self, nbytes: int) -> torch.Tensor:
        """Take a block of so many bytes, `(nbytes,)` in uint8, with anything in it."""
        try:
            block = self._blocks[nbytes].pop()
        except (KeyError, IndexError):
            if self.most_bytes is not None:
                taken = sum(block.nbytes for block in living(self._taken))
                self._drop(self.own_bytes + taken + nbytes - self.most_bytes)
            block = torch.empty(nbytes, dtype=torch.uint8)
        self._taken[id(block)] = block
        return block

    def give(self, block: torch.Tensor) -> None:
        """Put back a block that nobody else uses any more."""
        self._taken.pop(id(block), None)
        if block.nbytes >= MAPPED_BYTES:
            self._blocks.setdefault(block.nbytes, []).append(block)

    def fresh_bytes(self, sizes: Iterable[int]) -> int:
        """Count the bytes that blocks of these sizes would take from the system."""
        left = {nbytes: len(blocks) for nbytes, blocks in tuple(self._blocks.items())}
        fresh = 0
        for nbytes in sizes:
            left[nbytes] = left.get(nbytes, 0) - 1
            fresh += nbytes if left[nbytes] < 0 else 0
        return fresh

    @property
    def own_bytes(self) -> int:
        """The bytes that this pool holds."""
        return sum(nbytes * len(blocks) for nbytes, blocks in tuple(self._blocks.items()))

    @classmethod
    def held_bytes(cls) -> int:
        """Count the bytes that all pools of this process hold."""
        return sum(one.own_bytes for one in living(cls._all))

    @classmethod
    def give_back(cls, enough: int | None = None) -> int:
        """Give blocks of this process back to the system, until that was enough; or all. Returns the bytes."""
        given = 0
        for one in living(cls._all):
            given += one._drop(None if enough is None else enough - given)
        return given

    def _drop(self, enough: int | None) -> int:
        """Give blocks of this pool back to the system, until that was enough; or all. Returns the bytes."""
        given = 0
        for nbytes in sorted(self._blocks, reverse=True):
            while (enough is None or given < enough) and self._blocks[nbytes]:
                self._blocks[nbytes].pop()
                given += nbytes
        return given
