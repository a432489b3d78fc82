"""In which order sums of parts are joined, and what of that a rank does by itself."""

from __future__ import annotations

from gigagrad.plans.owners import Owners


class JoinOrder:
    """When sums of parts are joined: in a binary tree over the numbers of parts, of which some may be missing.

    Two of them meet as high as the first bit in which their numbers differ. `before`: the last part that somebody else
    has before these.
    """

    def __init__(self, before: int | None = None) -> None:
        self.parts: list[int] = []
        """Of each sum that is not joined further yet, one part."""
        self._before = before

    def append(self, part: int) -> int:
        """A further sum, of a part behind all others: how often the last two before it are to be joined first."""
        joins = self.join_before(part)
        self.parts.append(part)
        return joins

    def join_before(self, following: int) -> int:
        """How often the last two are to be joined: what meets below where it meets the part that follows."""
        joins = 0
        while len(self.parts) > 1:
            left, right = self.parts[-2:]
            before = self.parts[-3] if len(self.parts) > 2 else self._before
            if left ^ right > right ^ following or (before is not None and left ^ right > before ^ left):
                break
            self.parts.pop()
            joins += 1
        return joins


def before(owners: Owners, stage: int, rank: int) -> int | None:
    """The last part with tiles before those of a rank, if there is one."""
    parts = owners.parts(stage)
    return next((part for part in reversed(range(owners.own(stage, rank).start)) if parts.tiles(part)), None)


def behind(owners: Owners, stage: int, rank: int) -> int:
    """The first part with tiles behind those of a rank; where there is none, as many as there are parts."""
    parts = owners.parts(stage)
    return next((p for p in range(owners.own(stage, rank).stop, len(parts)) if parts.tiles(p)), len(parts))


def joined(owners: Owners, stage: int, rank: int) -> list[int]:
    """Of each sum that a rank has of a stage, joined as far as the tree joins its parts alone, one part."""
    parts, order = owners.parts(stage), JoinOrder(before(owners, stage, rank))
    for part in owners.own(stage, rank):
        if parts.tiles(part):
            order.append(part)
    order.join_before(behind(owners, stage, rank))
    return order.parts
