"""In which order sums of parts are joined, and between which ranks they travel for that."""

from __future__ import annotations

from gigagrad.plans.owners import Owners

Step = dict[tuple[int, int], int]
"""Of ranks that send and get, how many sums."""


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


def behind(owners: Owners, stage: int, sender: int, receiver: int) -> int:
    """The first part with tiles behind those that a sender has gathered on the way up; where there is none, as many as
    there are parts.
    """
    parts, last = owners.parts(stage), min(2 * sender - receiver, owners.count) - 1
    return next((p for p in range(owners.own(stage, last).stop, len(parts)) if parts.tiles(p)), len(parts))


def up(owners: Owners, stage: int) -> list[Step]:
    """How sums reach the first rank: neighbours send, then pairs of neighbours, joined as far as the tree allows."""
    parts, held = owners.parts(stage), []
    for rank in range(owners.count):
        held.append(order := JoinOrder(before(owners, stage, rank)))
        for part in owners.own(stage, rank):
            if parts.tiles(part):
                order.append(part)
    steps: list[Step] = []
    for distance in _distances(owners.count):
        steps.append(step := {})
        for sender in range(distance, owners.count, 2 * distance):
            receiver = sender - distance
            held[sender].join_before(behind(owners, stage, sender, receiver))
            step[sender, receiver] = len(held[sender].parts)
            for part in held[sender].parts:
                held[receiver].append(part)
    return steps


def down(count: int) -> list[Step]:
    """And how the total of the first rank comes to all."""
    steps = reversed(_distances(count))
    return [{(rank, rank + step): 1 for rank in range(0, count - step, 2 * step)} for step in steps]


def _distances(count: int) -> list[int]:
    return [1 << power for power in range((count - 1).bit_length())]
