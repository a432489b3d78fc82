"""Define what a planner is asked: a graph, the machine, and the memory there is in every tier."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace

import torch

from gigagrad.allowances import KERNEL_BYTES, MOST_COMPILED, ROOM_BYTES
from gigagrad.devices import Machine
from gigagrad.errors import BudgetError
from gigagrad.graphs import Graph, WholeCost
from gigagrad.plans.plan import Amount, total
from gigagrad.plans.segments import Segment, gathered
from gigagrad.stores import Half, MemoryTier, Quantised, Rounding, Tier
from gigagrad.units import format_bytes

_MARGIN = 2
"""So many times the readers that rates ask for: a pass that waits for its images loses more than a crop that waits for
its pass."""
_SMALLEST_ITEMSIZE = 4
"""Rounding values of fewer bytes gains nothing."""


def compiled_by_default(count: int) -> int:
    """Return what so many compiled convolutions add to a process that has none yet."""
    return min(count, MOST_COMPILED) * KERNEL_BYTES


@dataclass(frozen=True, kw_only=True, slots=True)
class Reading:
    """The cost of reading a graph's images: seconds, bytes and threads."""

    seconds: Mapping[str, float] = field(default_factory=dict)
    """Seconds that one thread takes to decode each image once, by the name of the input; none for what is in memory."""
    thread_bytes: int = 0
    """Bytes that a thread holds of a file, beside the pixels it reads."""
    threads: int = 1
    """The largest number of them."""
    beside: bool = False
    """True where tiles are computed on the same cores."""

    def seconds_of(self, graph: Graph, segment: Segment) -> float:
        """Tell what one thread takes for a pass over a segment: what is decoded serves every tile that reads it."""
        images = [graph[i].arguments["name"] for i in segment.reads if graph[i].is_source]
        return sum(self.seconds.get(name, 0.0) for name in images)

    def pass_seconds(self, seconds: float, computing: float, readers: int) -> float:
        """Tell what a pass takes by the clock that computes so long, and whose images take one thread `seconds`."""
        beside = seconds / self.threads if self.beside else 0.0
        return max(computing + beside, seconds / readers)

    def readers(self, seconds: float, computing: float) -> int:
        """Tell how many must read so that a pass which computes so long does not wait for what takes one `seconds`."""
        if not seconds:
            return 1
        needed = math.ceil(_MARGIN * seconds / computing) if self.beside and computing else self.threads
        return max(1, min(needed, self.threads))


@dataclass(frozen=True, kw_only=True, eq=False)
class Problem:
    """Everything a plan depends on. `budget_bytes=None` means that only speed decides."""

    graph: Graph
    backward: bool
    machine: Machine = field(default_factory=Machine)
    device: str = "cpu"
    sum_dtype: torch.dtype = torch.float64
    """The type of sums over tiles."""
    image_bytes: int = 0
    """Bytes of the images and labels, where the device holds all of them during a run."""
    is_recorded: bool = False
    """True for a step that the device records."""
    unplaced: Problem | None = None
    """The problem where the images take too much memory: they are read crop by crop, a step is computed operator by
    operator, and fields are in all tiers."""
    ranks: int = 1
    """Number of ranks that share the work; memory is that of one of them."""
    budget_bytes: int | None = None
    held: tuple[Amount, ...] = ()
    """Amounts held whatever the plan: the process, readers' caches, what a step and an optimizer will add."""
    compiled_bytes: Callable[[int], int] = compiled_by_default
    """Bytes that so many compiled convolutions will add."""
    output_bytes: Callable[[int, tuple[int, ...]], int] = lambda tile_height, shape: 0
    """Bytes that the sink holds of an output field of this shape that comes in rows of tiles of that height."""
    handed: int | None = None
    """The image whose gradient goes to the sink in strips, from the top, instead of being held until the end."""
    tiers: tuple[Tier, ...] = (MemoryTier(),)
    """Tiers in which fields may be kept, the memory that the budget bounds first and others in the order of
    preference."""
    rooms: Mapping[str, int] = field(default_factory=dict)
    """Bytes that fields may take in each of the other tiers."""
    saves: bool = True
    """False where no activations may be saved from the forward to the backward pass."""
    rounding: Rounding | None = None
    """The way in which kept fields are stored in fewer bits. Cotangents never are."""
    whole: WholeCost | None = None
    """The cost of the whole image in plain autograd; None where the image is to be computed in tiles."""
    workers: int | None = None
    """Tiles computed side by side; None where as many as there are threads, or one at a time, may be faster."""
    free_bytes: int | None = None
    """Bytes beside these that the device may give now, for a plan without a budget; None where that is not known."""
    reading: Reading = field(default_factory=Reading)
    """The cost of reading the images."""

    @property
    def most_numel(self) -> float:
        """Return the most numbers that a tensor may have: kernels of a GPU count them in 32 bits."""
        return math.inf if self.device == "cpu" else 2**31 - 1

    @property
    def image_shape(self) -> tuple[int, ...]:
        image = self.graph.source("image")
        assert image is not None
        return image.shape

    @property
    def room_bytes(self) -> int | None:
        """The most that a plan may take: the budget, or what is free. None: not known."""
        if self.budget_bytes is None and self.free_bytes is not None:
            return self.free_bytes + total(self.held)
        return self.budget_bytes

    def of(self, whole_pixels: int) -> Problem:
        """Return the same for the graph in which fields of at most so many pixels are computed whole."""
        return replace(self, graph=self.graph.with_whole(whole_pixels)) if whole_pixels else self

    @property
    def memory(self) -> Tier:
        return self.tiers[0]

    def tier(self, name: str) -> Tier:
        """Return the tier of this name. Raises BudgetError for one that is not there, as when a plan comes from
        elsewhere.
        """
        for tier in self.tiers:
            if tier.name == name:
                return tier
        raise BudgetError(
            f"there is no tier {name!r} here",
            budget_bytes=self.budget_bytes or 0,
            needed_bytes=0,
            smallest_bytes=0,
            remedy="name one with scratch=, or plan anew",
        )

    def rounds(self, node_id: int, tier: Tier) -> bool:
        """Say whether a field is rounded where it is kept in this tier. Integers and what whole-field operators read
        never are; quantised values take fewer bytes only behind a codec, so fields in memory stay as they are.
        """
        dtype = self.graph[node_id].dtype
        if self.rounding is None or (isinstance(self.rounding, Quantised) and not tier.encodes):
            return False
        return dtype.is_floating_point and dtype.itemsize >= _SMALLEST_ITEMSIZE and node_id not in gathered(self.graph)

    def stored_bytes_per_pixel(self, node_id: int, tier: Tier) -> int:
        """Return the bytes that a pixel of a field takes at most where it is kept in this tier."""
        node, rounding = self.graph[node_id], self.rounding
        if isinstance(rounding, Half) and self.rounds(node_id, tier):
            return node.bytes_per_pixel // node.dtype.itemsize * rounding.dtype.itemsize
        return node.bytes_per_pixel

    def refusal(self, what: str, needed_bytes: int) -> BudgetError:
        """Return an error that names what does not fit in the budget, and a budget that would do."""
        return BudgetError(
            what, budget_bytes=self.budget_bytes or 0, needed_bytes=needed_bytes, smallest_bytes=roomy(needed_bytes)
        )

    def tier_refusal(self, tier: Tier, tier_bytes: int, needed_bytes: int) -> BudgetError:
        """Return an error that names what does not fit in another tier; `needed_bytes` of the memory that the budget
        bounds would do instead.
        """
        return BudgetError(
            f"the fields that this plan keeps in {tier.place} take {format_bytes(tier_bytes)}, there is room for "
            f"{format_bytes(self.rooms.get(tier.name, 0))}",
            budget_bytes=self.budget_bytes or 0,
            needed_bytes=needed_bytes,
            smallest_bytes=roomy(needed_bytes),
            remedy=f"{tier.remedy}; with all of them in memory it takes {format_bytes(needed_bytes)} there",
        )


def roomy(needed_bytes: int) -> int:
    """Return a budget to recommend: with room to spare, because a process never has the same size twice, and rounded up
    to a number that survives being printed with three digits and typed in again.
    """
    step = max(16 * 2**20, 1 << (needed_bytes.bit_length() - 6))
    return -(-(needed_bytes + ROOM_BYTES) // step) * step
