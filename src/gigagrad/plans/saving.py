"""Choose the tiles whose activations autograd saves from the forward to the backward pass, to not compute them again.

A budget that holds more than a plan takes is worth time: of every segment as many tiles are saved as there is room for,
first of the segments that save the most seconds for a byte. What is saved of a segment is there from its forward to its
backward pass, thus during all passes of later segments, too. This is the choice of checkpointing (Chen et al., 2016) by
tiles, beside the one by layers that cuts make.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from math import inf

from gigagrad.plans.plan import SAVED, Amount, SegmentPlan, total

_WORTH_IT = 0.02
"""The share of a step's time that a segment's tiles must save: else its plan is easier to read without."""


@dataclass(frozen=True, slots=True)
class Savable:
    """Holds what a segment may save: so many bytes of each of its tiles, beside `copies_bytes` for all of them."""

    tile_count: int
    most_of_one: int
    """The tiles of the rank that has most."""
    tile_bytes: int
    copies_bytes: int
    tile_seconds: float
    """Seconds by which a tile that is saved shortens a step."""

    def bytes_of(self, tiles: int) -> int:
        """Return what one rank holds where so many tiles are saved by all."""
        of_one = -(-tiles * self.most_of_one // self.tile_count)
        return of_one * self.tile_bytes + self.copies_bytes if tiles else 0

    def fitting(self, room: int) -> int:
        """Return the most tiles of which no rank holds more than so many bytes."""
        of_one = max(0, room - self.copies_bytes) // max(1, self.tile_bytes)
        return min(self.tile_count, of_one * self.tile_count // self.most_of_one)


def is_saved(position: int, saved: int, tile_count: int) -> bool:
    """Say whether the tile at a position is among so many. They are spread evenly: of as many tiles in a row as a rank
    has, no more are saved than its share, however many ranks there are.
    """
    return (position + 1) * saved // tile_count > position * saved // tile_count


def worth_saving(segments: Sequence[SegmentPlan], savable: Sequence[Savable | None]) -> list[int]:
    """Return the number of tiles of each segment that are worth being saved: all or none."""
    seconds = sum(each.forward_seconds + each.backward_seconds for each in segments)
    gained = [one.tile_count * one.tile_seconds if one else -inf for one in savable]
    return [
        one.tile_count if one and gain >= _WORTH_IT * seconds else 0 for one, gain in zip(savable, gained, strict=True)
    ]


def with_saved(
    segments: Sequence[SegmentPlan], savable: Sequence[Savable | None], wanted: Sequence[int], room: int
) -> tuple[SegmentPlan, ...]:
    """Return the segments as they are where each saves as many of the tiles wanted as fit, with what its passes take
    anyway, in `room` bytes.
    """
    slack = [room - total(segment.memory) for segment in segments]
    counts = [0] * len(segments)
    pairs = [(i, one) for i, one in enumerate(savable) if one and wanted[i]]
    for i, one in sorted(pairs, key=lambda pair: -pair[1].tile_seconds / max(1, pair[1].tile_bytes)):
        counts[i] = min(wanted[i], one.fitting(min(slack[i:])))
        slack[i:] = [each - one.bytes_of(counts[i]) for each in slack[i:]]
    found, held = [], 0
    for segment, may, count in zip(segments, savable, counts, strict=True):
        if may and count:
            held += may.bytes_of(count)
            left = max(0.0, segment.backward_seconds - count * may.tile_seconds)
            segment = replace(segment, saved_tiles=count, backward_seconds=left)
        found.append(replace(segment, memory=(*segment.memory, Amount(SAVED, held))) if held else segment)
    return tuple(found)
