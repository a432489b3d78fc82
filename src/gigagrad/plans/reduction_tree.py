"""Order the additions of a reduction: which sums of parts are added to which, and which of these a rank adds alone."""

from __future__ import annotations

from gigagrad.plans.parts import Parts


class ReductionTree:
    """The order in which sums of parts are added: in a binary tree over the numbers of parts, of which some may be
    missing.

    Two of them meet as high as the first bit in which their numbers differ. `before`: the last part that somebody else
    has before these.
    """

    def __init__(self, before: int | None = None) -> None:
        self.parts: list[int] = []
        """One part of each sum that is not joined further yet."""
        self._before = before

    def append(self, part: int) -> int:
        """Add a further sum, of a part behind all others; return how often the last two before it are to be joined
        first.
        """
        joins = self.join_before(part)
        self.parts.append(part)
        return joins

    def join_before(self, following: int) -> int:
        """Return how often the last two are to be joined: as long as their node of the tree is below the one where they
        join the part that follows.
        """
        joins = 0
        while len(self.parts) > 1:
            left, right = self.parts[-2:]
            before = self.parts[-3] if len(self.parts) > 2 else self._before
            if left ^ right > right ^ following or (before is not None and left ^ right > before ^ left):
                break
            self.parts.pop()
            joins += 1
        return joins


def before(parts: Parts, own: range) -> int | None:
    """Return the last part with tiles before a rank's own, if there is one."""
    return max((part for part in parts.filled if part < own.start), default=None)


def behind(parts: Parts, own: range) -> int:
    """Return the first part with tiles behind a rank's own; where there is none, as many as there are parts."""
    return min((part for part in parts.filled if part >= own.stop), default=len(parts))


def joined(parts: Parts, own: range) -> list[int]:
    """Return one part of each sum that a rank has of its own parts, joined as far as the tree joins them alone."""
    order = ReductionTree(before(parts, own))
    for part in parts.filled:
        if part in own:
            order.append(part)
    order.join_before(behind(parts, own))
    return order.parts
