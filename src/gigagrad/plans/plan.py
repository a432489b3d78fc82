"""A plan is data: frozen, comparable, printable, and round-trips through JSON."""

from __future__ import annotations

import html
from collections.abc import Iterable
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Final

from gigagrad.graphs import Graph
from gigagrad.plans.description import describe
from gigagrad.plans.program import Step, Tiles, Whole, from_plain, held_bytes, live, to_plain
from gigagrad.plans.segments import Segment


@dataclass(frozen=True, slots=True)
class SegmentPlan:
    """One segment: what it computes, its tiles and what a tile costs. Sizes in pixels of the field named, memory in
    bytes.
    """

    computes: Segment
    tile: tuple[int, int]
    """Height and width of a tile on the segment's largest target field."""
    tiles: tuple[int, int]
    crop: tuple[int, int]
    """Height and width of the largest crop read of an image: tile plus halo."""
    computed_ratio: float
    """Pixels read per pixel of the image: 1 means that nothing is computed twice."""
    tile_peak_bytes: int
    largest_block_bytes: int = 0
    """The largest of the blocks that its tiles are computed in."""
    chunks: int = 1
    """Into how many runs of tiles its sums are divided (`gigagrad.plans.chunks`)."""
    memory: tuple[Amount, ...] = ()
    """Amounts that its passes add to what is fixed and to what is kept."""
    beside_bytes: int = 0
    """Bytes that freed memory does not serve. Of what comes and goes beside its tiles (crops that wait, contributions
    to gradients) those blocks that the allocator takes from the system one by one; and where very many tiles are
    computed side by side, what their blocks may need beyond any order of freed ones."""
    forward_seconds: float = 0.0
    backward_seconds: float = 0.0
    """One pass of this segment without and with gradients, by the cost model."""
    saved_tiles: int = 0
    """Tiles whose activations are saved from the forward to the backward pass (`gigagrad.plans.saving`)."""
    shape: tuple[int, int] = (0, 0)
    """Height and width of the field that `tile` is of; nothing in plans of earlier versions."""
    read_shape: tuple[int, int] = (0, 0)
    """Height and width of the field that `crop` is of."""

    @property
    def index(self) -> int:
        return self.computes.index

    @property
    def tile_count(self) -> int:
        return self.tiles[0] * self.tiles[1]


EXACT = "exact"
"""The storage of a field that is kept bit for bit."""

MEMORY = "memory"
"""The name of the tier that the budget bounds."""


@dataclass(frozen=True, slots=True)
class Amount:
    """A named number of bytes: one line of an estimate."""

    name: str
    size_bytes: int


FIELDS: Final = "fields kept"
COTANGENTS: Final = "cotangents of fields kept"
"""Amounts of what buffers hold in memory."""
SAVED: Final = "activations saved for the backward pass"


def total(amounts: Iterable[Amount]) -> int:
    return sum([amount.size_bytes for amount in amounts])


def amount_of(amounts: Iterable[Amount], *names: str) -> int:
    """Sum the bytes under these names."""
    return sum(amount.size_bytes for amount in amounts if amount.name in names)


@dataclass(frozen=True, slots=True)
class KeptField:
    """A field that is there from the segment that computes it to the last one that reads it."""

    node: int
    tier: str
    operator: str
    module: str
    shape: tuple[int, ...]
    size_bytes: int
    """Bytes as it is stored; its cotangents take what its own dtype does."""
    storage: str = EXACT
    """The type that its values are rounded to, as `storage` of `compile` says it."""


@dataclass(frozen=True, slots=True)
class WholeField:
    """An operator that has no tile rule, or works on what such a one left: it runs once, on whole tensors."""

    operator: str
    module: str
    size_bytes: int
    """Bytes of its output."""


@dataclass(frozen=True, slots=True)
class RankPlan:
    """The shares of a step that ranks hold and send."""

    count: int
    held_share: float
    """The largest part of a field that one of them holds, of those that are not replicated."""
    message_bytes: int
    sent_bytes: int
    """Bytes sent by all of them in a step."""


@dataclass(frozen=True)
class Plan:
    """Everything a run will do, known before it starts. All memory in bytes, sizes in pixels.

    What is said of it (peak, time, what is sent, its text) is worked out from its `steps`.
    """

    image_shape: tuple[int, ...]
    device: str
    memory_format: str
    workers: int
    """Tiles computed at the same time, by one thread each; with 1, all threads share the operators of one tile."""
    threads: int
    """That share the operators of a tile: their sums depend on how many there are."""
    segments: tuple[SegmentPlan, ...]
    steps: tuple[Step, ...]
    kept: tuple[KeptField, ...]
    whole_field: tuple[WholeField, ...]
    budget_bytes: int | None
    fixed: tuple[Amount, ...] = ()
    """Amounts held whichever segment is computed."""
    whole_seconds: float = 0.0
    """Seconds of whole-field operators, by the cost model; of the whole image at once all of it."""
    ranks: RankPlan | None = None
    """None: one process by itself."""
    timed_seconds: tuple[float, ...] | None = None
    """Seconds of each pass, by a tile of it that was timed on this machine; None where none was."""
    readers: int = 1
    """Threads that read and decode images ahead of the tiles."""
    whole_pixels: int = 0
    """Fields of at most so many pixels are computed whole: nodes are those of `Graph.with_whole` of it."""

    @cached_property
    def passes(self) -> tuple[Tiles, ...]:
        """The steps that compute tiles, in order."""
        return tuple(step for step in self.steps if isinstance(step, Tiles))

    @cached_property
    def computed(self) -> tuple[Segment, ...]:
        """The segments, in order."""
        return tuple(segment.computes for segment in self.segments)

    @cached_property
    def whole(self) -> str | None:
        """The phases that PyTorch runs of the model and the loss by itself on the whole image, `forward` or `forward
        and backward`: then there are no segments. None: it is computed in tiles.
        """
        return next((step.phase for step in self.steps if isinstance(step, Whole)), None)

    @cached_property
    def moments(self) -> tuple[tuple[Amount, ...], ...]:
        """The memory held during each pass. What does not depend on the pass alone is the most that its segment's
        passes make of it.
        """
        share = 1.0 if self.ranks is None else self.ranks.held_share
        found = []
        for step, buffers in live(self.steps):
            fields, cotangents = held_bytes(buffers, MEMORY, share)
            own = (Amount(FIELDS, fields), Amount(COTANGENTS, cotangents), *self.segments[step.segment].memory)
            found.append((*self.fixed, *own))
        return tuple(found) or (self.fixed,)

    @property
    def memory_at_peak(self) -> tuple[Amount, ...]:
        """The amounts that add up to the peak: those held during the pass that needs most."""
        return max(self.moments, key=total)

    @cached_property
    def predicted_peak_bytes(self) -> int:
        return total(self.memory_at_peak)

    def most(self, *names: str) -> int:
        """Return the bytes under these names during the pass that holds most of them."""
        return max(amount_of(moment, *names) for moment in self.moments)

    @cached_property
    def elsewhere(self) -> tuple[Amount, ...]:
        """Peak of what is kept in each of the other tiers, by its name."""
        share, most = 1.0 if self.ranks is None else self.ranks.held_share, dict[str, int]()
        for _, buffers in live(self.steps):
            for tier in {buffer.tier for buffer in buffers} - {MEMORY}:
                most[tier] = max(most.get(tier, 0), sum(held_bytes(buffers, tier, share)))
        return tuple(Amount(tier, size) for tier, size in sorted(most.items()))

    def bytes_in(self, tier: str) -> int:
        """Return the peak of what is kept in another tier than the one that the budget bounds."""
        return amount_of(self.elsewhere, tier)

    @property
    def predicted_seconds(self) -> float:
        """Seconds of one step."""
        return self.modelled_seconds if self.timed_seconds is None else sum(self.timed_seconds)

    @property
    def modelled_seconds(self) -> float:
        """Seconds of one step, by the cost model alone."""
        return self.whole_seconds + sum(self._pass_seconds)

    @property
    def pass_shares(self) -> tuple[float, ...]:
        """The share of the predicted time that each pass takes; whole-field operators count to all passes alike."""
        passes = self._pass_seconds if self.timed_seconds is None else self.timed_seconds
        total = sum(passes)
        return tuple(seconds / total if total else 1 / len(passes) for seconds in passes)

    @property
    def _pass_seconds(self) -> tuple[float, ...]:
        segments = self.segments
        return tuple(
            segments[p.segment].forward_seconds if p.phase == "forward" else segments[p.segment].backward_seconds
            for p in self.passes
        )

    @property
    def tile(self) -> tuple[int, int]:
        """Height and width of the tiles of the last field; a model without any segment has one tile, the image."""
        return self.segments[-1].tile if self.segments else (self.image_shape[-2], self.image_shape[-1])

    @property
    def tile_count(self) -> int:
        """Tiles run in one step, over all passes; the whole image is one."""
        return bool(self.whole) + sum(self.segments[p.segment].tile_count for p in self.passes)

    def to_dict(self) -> dict[str, Any]:
        """Return plain types only, for JSON."""
        derived = {"predicted_peak_bytes": self.predicted_peak_bytes, "predicted_seconds": self.predicted_seconds}
        return {**to_plain(self), **derived}

    @classmethod
    def from_dict(cls, data: dict[str, Any]) -> Plan:
        """Undo `to_dict`, also after a trip through JSON, whatever stands beside it in plan.json.

        Raises TypeError or ValueError for anything else.
        """
        beside = ("predicted_peak_bytes", "predicted_seconds", "advice", "scaling")
        found: Plan = from_plain(cls, {name: value for name, value in data.items() if name not in beside})
        return found

    def memory_parts(self) -> list[tuple[str, int]]:
        """Return the amounts that the predicted peak adds up from: a name for people, and bytes. Parts of nothing are
        left out.
        """
        return [(amount.name, amount.size_bytes) for amount in self.memory_at_peak if amount.size_bytes]

    def _repr_html_(self) -> str:
        """Show the text in notebooks."""
        return f"<pre>{html.escape(str(self))}</pre>"

    def __str__(self) -> str:
        return str(describe(self))


@dataclass(frozen=True, slots=True)
class Placement:
    """One computed field: kept and where, or not, and how often it is computed."""

    node: int
    operator: str
    module: str
    shape: tuple[int, ...]
    size_bytes: int
    """Bytes of the whole field; where it is kept, as it is stored."""
    tier: str | None
    """The tier that the field is kept in; None if it is not kept."""
    storage: str
    """The type that its values are rounded to there."""
    segments: tuple[int, ...]
    """The segments that compute it."""
    readers: tuple[int, ...]
    """The segments that read it, if it is kept."""
    passes: int
    """Number of times that it is computed in one step, tile by tile."""

    @property
    def kept(self) -> bool:
        return self.tier is not None


def placements(graph: Graph, plan: Plan) -> tuple[Placement, ...]:
    """Return every field that the plan's segments compute, the largest first; none where the whole image is computed at
    once.
    """
    if plan.whole:
        return ()
    graph, kept = graph.with_whole(plan.whole_pixels), {field.node: field for field in plan.kept}
    passes = [sum(p.segment == segment.index for p in plan.passes) for segment in plan.computed]
    computing: dict[int, list[int]] = {}
    reading: dict[int, list[int]] = {}
    for segment in plan.computed:
        for i in segment.fields:
            computing.setdefault(i, []).append(segment.index)
        for i in segment.reads:
            reading.setdefault(i, []).append(segment.index)
    found = [
        Placement(
            node=i,
            operator=graph[i].operator,
            module=graph[i].origin.module_path,
            shape=graph[i].shape,
            size_bytes=kept[i].size_bytes if i in kept else graph[i].nbytes,
            tier=kept[i].tier if i in kept else None,
            storage=kept[i].storage if i in kept else EXACT,
            segments=tuple(where),
            readers=tuple(reading.get(i, ())),
            passes=sum(passes[index] for index in where),
        )
        for i, where in computing.items()
    ]
    return tuple(sorted(found, key=lambda placement: (-placement.size_bytes, placement.node)))
