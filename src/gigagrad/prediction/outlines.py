"""Exact outlines of a mask along its pixel edges, found block by block and never held as a plane.

A rectilinear region is fixed by its corners: sorted along each row of the pixel lattice they pair up into horizontal
edges, sorted along each column into vertical ones (O'Rourke, "Uniqueness of orthogonal connect-the-dots", 1988).
Whether a lattice point is a corner depends on its four pixels only, so corners are gathered from small blocks; the
pairing and the walk around the rings are array operations on the corners alone (the walk is list ranking by pointer
doubling, Wyllie 1979). Regions are 4-connected: pixels that touch at a point only do not belong together.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

_Ints = NDArray[np.int64]


Corners = NDArray[np.void]
NO_CORNERS: Corners = np.empty(
    0, [("y", np.int64), ("x", np.int64), ("to_right", bool), ("to_bottom", bool), ("leaves_sideways", bool)]
)
"""Corners of a region on the pixel lattice, here none.

Each has one horizontal arm (to its right, else to its left) and one vertical arm (down, else up). `leaves_sideways`
says which arm the walk takes when it goes around with the region on its right hand as seen on a screen (y down).
"""


@dataclass(frozen=True, slots=True)
class Rings:
    """Closed rings, one after the other: ring `i` is `points[starts[i]:starts[i + 1]]`, the first point not repeated.

    `points` are `(n, 2)` as (x, y). `areas` are signed, in square pixels: positive for an outer ring, negative for a
    hole.
    """

    points: _Ints
    starts: _Ints
    areas: NDArray[np.float64]

    def ring(self, index: int) -> _Ints:
        return self.points[self.starts[index] : self.starts[index + 1]]


def corners_in(inside: NDArray[np.bool_], y0: int, x0: int) -> Corners:
    """Find the corners among the lattice points `[y0, y0 + h) x [x0, x0 + w)`, where lattice point (y, x) is the
    upper left corner of pixel (y, x). `inside` is `(h + 1, w + 1)`: the pixels from (y0 - 1, x0 - 1) on.
    """
    upright = inside[:, 1:] ^ inside[:, :-1]
    level = inside[1:, :-1] ^ inside[:-1, :-1]
    up, down = upright[:-1], upright[1:]
    ys, xs = np.nonzero((up ^ down) | (up & down & level))
    nw, ne = inside[ys, xs], inside[ys, xs + 1]
    sw, se = inside[ys + 1, xs], inside[ys + 1, xs + 1]
    left, top, right, bottom = nw ^ sw, nw ^ ne, ne ^ se, sw ^ se
    # Where all four edges meet, two pixels touch at a point: two corners, each within one of the two pixels.
    arms = (
        (left & top & (~right | nw), False, False, nw),
        (right & top & (~left | ne), True, False, se),
        (left & bottom & (~right | ne), False, True, nw),
        (right & bottom & (~left | nw), True, True, se),
    )
    found = []
    for here, to_right, to_bottom, sideways in arms:
        part = np.empty(np.count_nonzero(here), NO_CORNERS.dtype)
        part["y"], part["x"] = ys[here] + y0, xs[here] + x0
        part["to_right"], part["to_bottom"], part["leaves_sideways"] = to_right, to_bottom, sideways[here]
        found.append(part)
    return np.concatenate(found)


def rings_of(corners: Corners) -> Rings:
    """Walk around every ring of a whole region. About 100 bytes per corner are held meanwhile.

    Each ring begins at its first corner in reading order, and so do the rings among each other.
    """
    count = len(corners)
    if not count:
        return Rings(np.zeros((0, 2), np.int64), np.zeros(1, np.int64), np.zeros(0))
    corners = corners[np.lexsort((corners["to_bottom"], corners["x"], corners["y"]))]
    y, x = corners["y"], corners["x"]
    sideways = _partners(y, x, corners["to_right"])
    lengthways = _partners(x, y, corners["to_bottom"])
    following = np.where(corners["leaves_sideways"], sideways, lengthways)

    leader = np.arange(count)
    ahead = following.copy()
    for _ in range(count.bit_length()):
        leader = np.minimum(leader, leader[ahead])
        ahead = ahead[ahead]
    is_leader = leader == np.arange(count)
    ahead = np.where(is_leader, np.arange(count), following)
    steps_to_leader = np.where(is_leader, 0, 1)
    for _ in range(count.bit_length()):
        steps_to_leader += steps_to_leader[ahead]
        ahead = ahead[ahead]

    steps_to_leader[is_leader] = count  # the leader opens its ring
    order = np.lexsort((-steps_to_leader, leader))
    points = np.stack((x[order], y[order]), axis=1)
    firsts = np.flatnonzero(is_leader[order])
    starts = np.append(firsts, count)
    following_point = np.roll(points, -1, axis=0)
    following_point[starts[1:] - 1] = points[firsts]
    x, y = points.T
    twice = x * following_point[:, 1] - following_point[:, 0] * y
    return Rings(points, starts, np.add.reduceat(twice, firsts) / 2)


def _partners(line: _Ints, along: _Ints, forward: NDArray[np.bool_]) -> _Ints:
    """Find for each corner the other end of its edge on `line`: sorted along a line, corners pair up two by two."""
    order = np.lexsort((forward, along, line))
    assert not len(order) % 2, "a closed region has an even number of corners"
    assert forward[order[::2]].all(), "an edge must open with an arm that points forward"
    assert not forward[order[1::2]].any(), "an edge must close with an arm that points back"
    partner = np.empty(len(order), np.int64)
    partner[order[::2]], partner[order[1::2]] = order[1::2], order[::2]
    return partner
