"""The memory a plan may count on, and what it says when that is too little."""

from __future__ import annotations

from dataclasses import dataclass

from gigagrad.errors import BudgetError
from gigagrad.plans.plan import DISK, HOST
from gigagrad.units import format_bytes

MOST_COMPILED = 1024
"""How many compiled kernels oneDNN's cache keeps."""
KERNEL_BYTES = 72 * 2**10
"""What the kernel of one convolution takes there (docs/decisions/0013-whole-process-accounting.md)."""
_TIERS = {
    HOST: ("host memory", "close other programs, or raise host_memory"),
    DISK: ("scratch files", "make room in the scratch folder, name another one, or raise scratch_bytes"),
}
"""Where fields are that are not in memory, and what helps if there are too many."""
_ROOM_BYTES = 40 * 2**20
"""By how much a process differs from the one that was refused: its first allocations, its garbage."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Limits:
    """The memory a plan may count on, in bytes. `budget_bytes=None` means that only speed decides."""

    budget_bytes: int | None
    base_bytes: int
    reader_cache_bytes: int
    runtime_bytes: int
    """What a step adds beside tensors and compiled convolutions."""
    compiled_room: int = MOST_COMPILED
    """How many compiled convolutions oneDNN's cache may still grow by."""
    kernel_bytes: int = KERNEL_BYTES
    """What each of them takes on this processor."""
    optimizer_bytes: int = 0
    """What an optimizer will hold from its first step on, as long as it does not yet."""
    host_bytes: int = 0
    """Host memory for kept fields of a run on a GPU."""
    scratch_bytes: int = 0
    """Room for kept fields in files."""

    @property
    def fixed_bytes(self) -> int:
        """What is held whatever the plan: the process itself, the readers' caches and what an optimizer will hold."""
        return self.base_bytes + self.reader_cache_bytes + self.optimizer_bytes

    def compiled_bytes(self, count: int) -> int:
        """What so many compiled convolutions add to the process."""
        return min(count, self.compiled_room) * self.kernel_bytes

    def refusal(self, what: str, needed_bytes: int) -> BudgetError:
        """What does not fit in the budget, and a budget that would do."""
        return BudgetError(
            what, budget_bytes=self.budget_bytes or 0, needed_bytes=needed_bytes, smallest_bytes=roomy(needed_bytes)
        )

    def tier_refusal(self, tier: str, tier_bytes: int, room_bytes: int, needed_bytes: int) -> BudgetError:
        """What does not fit in another tier than the memory that `budget_bytes` bounds; `needed_bytes` of that would do
        instead.
        """
        where, remedy = _TIERS[tier]
        return BudgetError(
            f"the fields that this plan keeps in {where} take {format_bytes(tier_bytes)}, there is room for "
            f"{format_bytes(room_bytes)}",
            budget_bytes=self.budget_bytes or 0,
            needed_bytes=needed_bytes,
            smallest_bytes=roomy(needed_bytes),
            remedy=f"{remedy}; with all of them in memory it takes {format_bytes(needed_bytes)} there",
        )


def roomy(needed_bytes: int) -> int:
    """A budget to recommend: with room to spare, because a process never has the same size twice, and rounded up to a
    number that survives being printed with three digits and typed in again.
    """
    step = max(16 * 2**20, 1 << (needed_bytes.bit_length() - 6))
    return -(-(needed_bytes + _ROOM_BYTES) // step) * step
