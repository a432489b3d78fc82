"""Allow for the memory beside the tensors that can be counted: every allowance of a plan, with what it was measured
from.

Bytes unless said otherwise. docs/decisions/0013-whole-process-accounting.md has the measurements; `bench/budgets.py`
repeats them.
"""

from __future__ import annotations

from typing import Final

MIB: Final = 2**20

# The process
RUNTIME_BYTES: Final = 64 * MIB
"""The growth in a process's first step: code that is paged in (16 to 18 MiB, ten networks), stacks, readers."""
LATER_RUNTIME_BYTES: Final = 24 * MIB
"""The growth in a later step: kernels for shapes that have not been seen."""
UNNOTICED_BYTES: Final = 16 * MIB
"""The growth of a process before the planner looks at it again, and what other threads take while one looks."""
KERNEL_BYTES: Final = 72 * 2**10
"""The size of a compiled convolution in oneDNN's cache, forward or one of two backward (13 to 80 KiB)."""
AMX_KERNEL_BYTES: Final = 320 * 2**10
"""The size on a processor with matrix tiles for its dtype (270 KiB on average)."""
LANES: Final = 16
"""Channels that a vector register holds; kernels pad to them in a layout of their own."""
MOST_COMPILED: Final = 1024
"""Compiled kernels that oneDNN's cache holds."""

# Tiles
ALLOCATOR_FRAGMENTATION: Final = 0.5
"""Freed blocks that the allocator has not given back, per byte that tiles allocate (94 MiB beside 97 alive)."""
SAVED_FRAGMENTATION: Final = 0.1
"""Freed blocks between those that are saved from the forward to the backward pass, per byte of these."""
FREED_OF_RECORDED: Final = 0.15
"""The share of memory that freed blocks may take of while a step is recorded, when nothing can be given back (a step of
ResNet-18 at 4096 px had 2.03 GiB in and between blocks where 2 GiB were planned)."""
FEW_TILES: Final = 100
FRAGMENTATION_OF_DOUBLING: Final = 0.05
MOST_FURTHER_FRAGMENTATION: Final = 0.25
"""Tiles side by side free blocks in ever another order, and the worst of many orders is worse: beyond a few tiles each
doubling adds some fragmentation (1,600 tiles took up to 660 of 632 MiB without it)."""
FRAGMENTATION_BESIDE_WHOLE: Final = 0.25
"""The slack beside whole fields and gradients, while nothing is given back (ViT-Base, Swin-Tiny)."""
LEAST_ALLOCATOR_CACHE_BYTES: Final = 64 * MIB
MOST_ALLOCATOR_CACHE_BYTES: Final = 160 * MIB
ALLOCATOR_CACHE_PER_TILE: Final = 2.0
"""The bytes that the allocator may hold between tiles beside that, where the budget has room: twice what tiles
allocate, within these bounds. New pages cost time, with 64 MiB a tenth of the paper's step
(docs/decisions/0018-large-blocks.md)."""
HEAP_TOP_BYTES: Final = 64 * MIB
"""The most that the top of the C library's heap holds of small freed blocks."""
MAPPED_BYTES: Final = 8 * MIB
"""Blocks as large as this are taken from the system one by one, but for those of tiles where the plan has room."""
HUGE_PAGE_BYTES: Final = 2 * MIB
"""Large blocks are made of whole ones (docs/decisions/0015-huge-pages.md)."""
FILLED_UNSEEN_BYTES: Final = 128 * MIB
"""New pages of a whole network between two looks at what the process holds, and until freed ones are given back."""
ANNOUNCED_BYTES: Final = MIB
"""Smaller blocks of tiles are taken without a look at what the process holds."""

# On the way
READ_AHEAD: Final = 1
"""Crops that wait for their turn, beside one for each thread that reads."""
WRITES_BEHIND: Final = 2
"""Crops that wait to be written to another tier, at most, before the computation waits for it."""
ROWS_AT_ONCE: Final = 4
"""Rows of bricks on their way between crops and the disk at once, at most."""

# Budgets
ROOM_BYTES: Final = 40 * MIB
"""The difference of a process from the one that was refused: its first allocations, its garbage."""
FREE_SHARE: Final = 0.95
"""The share of what is free now that a run counts on where no budget is named: others use the machine, too."""


def most_kept(peak_bytes: int, used_bytes: int, room_bytes: int | None) -> int:
    """Return what may be held between two steps with such a peak, freed blocks included: of the room, or of any where
    that is None, at least as much is left for others as stays beside what is used
    (docs/decisions/0090-memory-step-after-step.md).
    """
    if room_bytes is None:
        return peak_bytes
    return min(peak_bytes, used_bytes + max(0, room_bytes - used_bytes) // 2)


def whole_pages(nbytes: int) -> int:
    """Return the bytes that a block takes in memory: a large one is made of huge pages."""
    return -(-nbytes // HUGE_PAGE_BYTES) * HUGE_PAGE_BYTES if nbytes >= HUGE_PAGE_BYTES else nbytes
