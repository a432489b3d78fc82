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

    def take(self, nbytes: int) -> torch.Tensor:
        """Take a block of so many bytes, `(nbytes,)` in uint8, with anything in it."""
        try:
            return self._blocks[nbytes].pop()
        except (KeyError, IndexError):
            return torch.empty(nbytes, dtype=torch.uint8)

    def give(self, block: torch.Tensor) -> None:
        """Put back a block that nobody else uses any more."""
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

    @classmethod
    def held_bytes(cls) -> int:
        """Count the bytes that all pools of this process hold."""
        return sum(nbytes * len(blocks) for one in living(cls._all) for nbytes, blocks in tuple(one._blocks.items()))

    @classmethod
    def give_back(cls, enough: int | None = None) -> int:
        """Give blocks of this process back to the system, until that was enough; or all. Returns the bytes."""
        given = 0
        for one in living(cls._all):
            for nbytes in sorted(one._blocks, reverse=True):
                while (enough is None or given < enough) and one._blocks[nbytes]:
                    one.take(nbytes)
                    given += nbytes
        return given
