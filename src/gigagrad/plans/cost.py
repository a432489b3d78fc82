"""Predict the time and the memory of one tile of a segment.

Small tiles compute their halos again and again and pay a fixed price per operator; large ones fall out of the caches.
Both effects are in the model of time: every operator takes what its bytes and its products take at the machine's rates
(docs/decisions/0002-tile-shape.md, docs/decisions/0083-kinds-of-work.md).
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from itertools import repeat
from math import prod
from typing import NamedTuple

from gigagrad.allowances import MAPPED_BYTES
from gigagrad.devices import Machine
from gigagrad.graphs import GATHER, MOMENTS, Call, Effort, Graph, Node, lookup
from gigagrad.graphs.graph import fill
from gigagrad.plans.geometry import Grid, Steps, lattice, reference, runs_by_rows
from gigagrad.plans.memory import (
    compiled_convolutions,
    crop_sizes,
    tile_bytes,
    worst_tile,
)
from gigagrad.plans.segments import Segment
from gigagrad.work import Work, unfolded_flops

_GRADIENT = 2
"""Calls of an operator's vector-Jacobian product."""
_REORDERED = 3
"""Times that weights are moved which the library reorders for itself: read, written and read again."""
_BYTES_OF_A_SUM = 6
"""Bytes that adding up moves, per byte of a gradient in float32: it is written and read, its sum in float64 is both."""
_MOVES_OF_MOMENTS = 3
"""Times that the gradient of a mean and a variance moves their field."""
_SMALLEST_SIDE_PX = 16
_LARGEST_SIDE_PX = 4096
_USUAL_SIDE_PX = 128
"""Tile side at which pieces between cuts are compared."""
_USUAL_CROP_PX = 512
"""At most so many pixels of the finest field are such a tile's own share."""


def autograd_seconds(machine: Machine, efforts: Iterable[Effort]) -> float:
    """Predict kernels that plain autograd calls one by one, all threads at work on each: those of a whole image, and of
    whole fields between tiles. What is no new tensor is still in the cache.
    """
    machine, seconds, calls = machine.by_autograd(), 0.0, 0
    for effort in efforts:
        seconds += machine.operator_seconds(
            effort.moved_bytes, effort.flops, effort.work, cached=effort.in_place, ragged=effort.ragged_bytes
        )
        calls += 1
    return machine.wall_seconds(seconds, calls, 1, 1)


class _Rates(NamedTuple):
    """Rates of one operator's work on tiles, whatever their size."""

    reads: tuple[int, ...]
    """The fields that it reads."""
    flops_per_byte: float
    """Products per byte that it makes."""
    work: Work
    weight_flops_per_byte: float
    """Products of its weight's gradient."""
    weight_work: Work
    given_seconds: float
    """Seconds that moving its operands which are no fields takes, once a tile (oneDNN reorders weights first)."""
    others: float
    """Its vector-Jacobian product in forwards, without that of a weight, which is one."""
    differentiable: bool


@dataclass(frozen=True, slots=True, eq=False)
class TileCost:
    """One segment with one tile shape. Seconds are one thread's, for one pass over the whole segment."""

    tile: tuple[int, int]
    """Height and width on the segment's largest target field."""
    tiles: tuple[int, int]
    """Rows and columns of the grid."""
    crop: tuple[int, int]
    """Height and width of the largest crop read of an image: tile plus halo."""
    computed_ratio: float
    """Pixels read per pixel of the image."""
    tile_peak_bytes: int
    saved_bytes: int
    """Bytes of a tile that autograd saves from its forward to its backward."""
    forward_seconds: float
    """Without gradients."""
    backward_seconds: float
    """Computed again and pulled back; as `forward_seconds` where no gradients were asked for."""
    again_seconds: float
    """The part of that in which tiles are computed again."""
    forward_calls: float
    """Operators called in that pass, each of which takes `Machine.seconds_per_operator` of the seconds."""
    backward_calls: float
    crop_bytes: int
    """Bytes that are read ahead for each tile."""
    own_crop_bytes: int
    """Bytes of these beside the tile's own memory while it is computed: kept shares, where they are computed again."""
    compiled: int
    """Number of kernels that its convolutions are compiled to."""
    largest_block_bytes: int
    """The largest crop, or global value of which a tile makes a copy or a gradient."""
    largest_crop_numel: int
    """The most numbers in a crop."""
    crops: Mapping[int, tuple[int, int]]
    """Height and width of a tile's crop of each field that the segment reads or keeps."""

    @property
    def tile_count(self) -> int:
        return self.tiles[0] * self.tiles[1]


class Costs:
    """Costs of the segments of one graph, each computed once: plans that keep other fields share most of their
    segments, and networks repeat their blocks. `rounds`: kept fields are rounded on the way to their stores.
    """

    def __init__(self, graph: Graph, machine: Machine, *, rounds: bool = False, like: Costs | None = None) -> None:
        self.graph = graph
        self._machine = machine
        self._rounds = rounds
        self._with_whole: dict[int, Costs] = {}
        self._forms: dict[tuple[object, ...], int] = {}
        self._known: dict[tuple[object, ...], TileCost] = {}
        # By form, also of segments of graphs `like` this one.
        self._kinds: _Kinds = _Kinds(graph, {} if like is None else like._kinds.numbers)
        self._numbers: dict[tuple[object, ...], int] = {} if like is None else like._numbers
        self._usual: dict[int, tuple[float, float]] = {} if like is None else like._usual
        self._shapes: dict[tuple[int, int], list[tuple[int, int]]] = {} if like is None else like._shapes
        self._alike: dict[tuple[object, ...], tuple[int, TileCost]] = {} if like is None else like._alike
        self._steps = Steps.of(graph)
        # Looked up many thousand times.
        self._added = [node.nbytes * (node.differentiable and not node.is_field) for node in graph.nodes]
        self._itemsizes = [node.dtype.itemsize for node in graph.nodes]
        self._sizes = [[node.size(axis) if node.is_field else 0 for node in graph.nodes] for axis in (0, 1)]
        self._flops: dict[int, float] = {}
        self._rates: dict[int, _Rates] = {}
        self._whole_seconds: dict[tuple[bool, bool], float] = {}

    def with_whole(self, pixels: int) -> Costs:
        """Return the costs of the graph in which fields of at most so many pixels are whole."""
        if pixels not in self._with_whole:
            graph = self.graph.with_whole(pixels)
            self._with_whole[pixels] = Costs(graph, self._machine, rounds=self._rounds, like=self)
        return self._with_whole[pixels]

    def of(self, segment: Segment, shape: tuple[int, int], *, backward: bool, roughly: bool = False) -> TileCost:
        """Return the cost of the worst tile; `roughly`: of one in the middle, in a fifth of the time, and without
        compiled kernels.
        """
        key = (*segment_key(segment), shape, backward, roughly)
        if key not in self._known:
            form, first = (self.form(segment), shape, backward, roughly), _first(segment)
            if form not in self._alike:
                self._alike[form] = first, self._cost(segment, shape, backward=backward, roughly=roughly)
            other, cost = self._alike[form]
            if other != first:
                cost = replace(cost, crops={i + first - other: crop for i, crop in cost.crops.items()})
            self._known[key] = cost
        return self._known[key]

    def shapes(self, segment: Segment, ranks: int) -> list[tuple[int, int]]:
        """Return tile shapes worth costing."""
        key = self.form(segment), ranks
        if key not in self._shapes:
            self._shapes[key] = tile_shapes(self.graph, segment, ranks)
        return self._shapes[key]

    def usual_seconds(self, segment: Segment) -> tuple[float, float]:
        """Predict a forward and a backward pass by one thread with tiles of a usual size, judged by one in the middle:
        to compare cuts.

        What computes a coarse field works on finer ones: tiles that are small for it have large crops, and without a
        cut in between nearly all of these are halo.
        """
        form = self.form(segment)
        if form not in self._usual:
            self._usual[form] = self._judge(segment)
        return self._usual[form]

    def form(self, segment: Segment) -> int:
        """Return a number that segments have in common which do the same to fields of the same kinds, also of graphs
        with other whole fields: those of equal blocks, whose nodes are as far apart.
        """
        key = segment_key(segment)
        if key not in self._forms:
            graph, kinds, first = self.graph, self._kinds, _first(segment)
            form = (
                tuple([kinds[i] for i in segment.fields]),
                tuple([i - first for i in segment.fields]),
                tuple([i - first for i in segment.reads]),
                tuple([i - first for i in segment.kept]),
                tuple([(kinds[i], graph.nodes[i].operands[0] - first) for i in segment.reductions]),
                None if segment.output is None else segment.output - first,
                sum([self._added[i] for i in segment.globals]),
            )
            self._forms[key] = self._numbers.setdefault(form, len(self._numbers))
        return self._forms[key]

    def _judge(self, segment: Segment) -> tuple[float, float]:
        graph, targets, sides = self.graph, segment.targets(self.graph), []
        for size_of in self._sizes:
            size = max([size_of[i] for i in targets])
            finest = max([size_of[i] for i in (*segment.fields, *segment.reads)])
            sides.append(min(size, _USUAL_SIDE_PX, max(1, _USUAL_CROP_PX * size // finest)))
        grid = Grid(graph, segment, (sides[0], sides[1]), self._steps)
        tile, largest = grid.middle, graph[grid.reference]
        tiles = largest.size(0) * largest.size(1) / tile.wanted(grid.reference).area
        forward, backward, _ = self._tile_seconds(segment, crop_sizes(graph, segment, tile))
        beside = self._machine.host_seconds()
        return forward * tiles + beside, backward * tiles + beside

    def whole_seconds(self, *, backward: bool, on_host: bool = True) -> float:
        """Predict the seconds of whole-field operators, which no choice of tiles changes; `on_host` what they make is
        taken from the system block by block.
        """
        key = backward, on_host
        if key not in self._whole_seconds:
            mapped, efforts = 0, list[Effort]()
            for node in self.graph.nodes:
                if node.whole and node.op != GATHER:
                    pulled_back = backward and node.differentiable
                    times = 1 + lookup(node.op).gradient_forwards * pulled_back
                    mapped += round(times * node.nbytes) if node.nbytes >= MAPPED_BYTES else 0
                    efforts += self._efforts(node, pulled_back)
            pages = self._machine.block_seconds(mapped) if on_host else 0.0
            self._whole_seconds[key] = autograd_seconds(self._machine, efforts) + pages
        return self._whole_seconds[key]

    def _efforts(self, node: Node, backward: bool) -> Iterator[Effort]:
        """Yield a whole-field operator's forward, and with `backward` its gradients, as of forwards."""
        graph, known = self.graph, self._rates_of(node)
        moved = node.nbytes + sum(graph[i].nbytes for i in set(node.operands))
        yield Effort(moved, known.flops_per_byte * node.nbytes, known.work)
        if backward:
            flops = known.others * known.flops_per_byte * node.nbytes
            yield Effort(round(known.others * moved), flops, known.work)
            flops = known.weight_flops_per_byte * node.nbytes
            yield Effort(moved, flops, known.weight_work)

    def _flops_of(self, node: Node) -> float:
        if node.id not in self._flops:
            self._flops[node.id] = lookup(node.op).flops(Call(node, self.graph.operands(node)))
        return self._flops[node.id]

    def _rates_of(self, node: Node) -> _Rates:
        if node.id in self._rates:
            return self._rates[node.id]
        rule, operands = lookup(node.op), self.graph.operands(node)
        call = Call(node, operands)
        given = sum(self.graph[i].nbytes for i in set(node.operands) if not self.graph[i].is_field)
        given *= _REORDERED if rule.compiled else 1
        works = rule.work_of(call), rule.weight_work_of(call)
        flops, weight_flops = (self._flops_of(node) if work is not Work.UNFOLDED else _unfolded(call) for work in works)
        made = max(1, node.nbytes)  # a slice may be empty
        found = _Rates(
            reads=self.graph.reads[node.id],
            flops_per_byte=flops / made,
            work=works[0],
            weight_flops_per_byte=weight_flops / made,
            weight_work=works[1],
            given_seconds=given / self._machine.memory_bytes_per_second,
            others=rule.gradient_forwards - 1,
            differentiable=node.differentiable,
        )
        self._rates[node.id] = found
        return found

    def _cost(self, segment: Segment, shape: tuple[int, int], *, backward: bool, roughly: bool) -> TileCost:
        graph = self.graph
        grid = Grid(graph, segment, shape, self._steps)
        tile = grid.middle if roughly else worst_tile(grid)
        size = crop_sizes(graph, segment, tile)
        rows, columns = tile.y.spans, tile.x.spans
        crops = {i: (rows[i].length, columns[i].length) for i in segment.reads if size[i]}
        crop = max(crops.values(), key=prod, default=(0, 0))
        ys, xs = self._sizes
        height, width = ys[grid.reference], xs[grid.reference]
        useful = min(shape[0], height) * min(shape[1], width)
        scale = max([ys[i] * xs[i] for i in segment.reads], default=1) / (height * width)
        read = sum(size[i] for i in segment.reads)
        # They come along with their cotangents.
        kept_shares = sum(size[i] for i in segment.kept) if backward else 0
        tiles = height * width / useful
        forward, backward_too, again = (seconds * tiles for seconds in self._tile_seconds(segment, size))
        peak, saved = tile_bytes(graph, segment, tile, backward=backward, rounds=self._rounds, size=size)
        calls = len(segment.fields) * tiles
        differentiable = sum([graph.nodes[i].differentiable for i in segment.fields])
        return TileCost(
            tile=shape,
            tiles=grid.shape,
            crop=crop,
            computed_ratio=crop[0] * crop[1] / (useful * scale),
            tile_peak_bytes=peak,
            saved_bytes=saved,
            forward_seconds=forward,
            backward_seconds=backward_too if backward else forward,
            again_seconds=again if backward else 0.0,
            forward_calls=calls,
            backward_calls=calls + _GRADIENT * differentiable * tiles if backward else calls,
            crop_bytes=read + 2 * kept_shares,
            own_crop_bytes=kept_shares,
            compiled=0 if roughly else compiled_convolutions(grid, backward=backward),
            largest_block_bytes=max([*size.values(), *[graph.nodes[i].nbytes for i in segment.globals]], default=0),
            largest_crop_numel=max([nbytes // self._itemsizes[i] for i, nbytes in size.items()], default=0),
            crops=crops | {i: tile.wanted(i).shape for i in segment.kept},
        )

    def _tile_seconds(self, segment: Segment, size: dict[int, int]) -> tuple[float, float, float]:
        """Predict one tile's forward pass, its backward pass, and how much of that computes it again, by the bytes of
        its crops. Backward computes again all
        but the kept fields whose operators need no output for their gradient, costs about two forwards more, and adds
        the gradients of what is no field to their sums; where weights are large, that is most of what a small tile
        takes.
        """
        graph, machine = self.graph, self._machine
        moved = sum(size[i] for i in (*segment.reads, *segment.kept))
        forward = backward = moved / machine.memory_bytes_per_second
        again = 0.0
        not_again = {i for i in segment.kept if lookup(graph[i].op).backward_without_output}
        known, operator_seconds = self._rates, machine.operator_seconds
        for i in segment.fields:
            rates = known.get(i) or self._rates_of(graph.nodes[i])
            reads, flops, work, weight_flops, weight_work, given, others, differentiable = rates
            own = moved = size[i]
            for j in reads:
                moved += size[j]
            once = operator_seconds(moved, own * flops, work) + given
            forward += once
            if i not in not_again:
                again += once
            if differentiable:
                weight = once
                if weight_work is not work:
                    weight = operator_seconds(moved, own * weight_flops, weight_work) + given
                backward += once * others + weight
        for i in segment.reductions:
            node, read = graph[i], size[graph[i].operands[0]]
            of_norm = node.op == MOMENTS
            forward += machine.operator_seconds(read, 0.0, Work.STATISTICS if of_norm else Work.VALUES)
            gradient = _MOVES_OF_MOMENTS if of_norm else 1
            backward += machine.operator_seconds(gradient * read, 0.0) * node.differentiable
        added = sum([self._added[i] for i in segment.globals])
        backward += again + _BYTES_OF_A_SUM * added / machine.memory_bytes_per_second
        return forward, backward, again


class _Kinds(dict[int, int]):
    """The kinds of a graph's nodes, counted when they are asked for: nodes of one kind do the same to values of the
    same kinds, and read fields that are as far from them. `numbers` are those of other graphs, too.
    """

    def __init__(self, graph: Graph, numbers: dict[tuple[object, ...], int]) -> None:
        self._graph, self.numbers = graph, numbers

    def __missing__(self, node_id: int) -> int:
        node, nodes = self._graph[node_id], self._graph.nodes
        kind = (
            node.op,
            repr([fill(value, repeat(None)) for value in node.arguments.values()]),
            tuple([node_id - i if nodes[i].is_field else None for i in node.operands]),
            *[(n.shape, n.axes, n.patches, n.dtype, n.differentiable) for n in (node, *self._graph.operands(node))],
        )
        found = self[node_id] = self.numbers.setdefault(kind, len(self.numbers))
        return found


def _first(segment: Segment) -> int:
    """Return the node from which those of segments of one form are as far."""
    return (segment.fields or segment.reads)[0]


def _unfolded(call: Call) -> float:
    """Count the products of a convolution by unfolded windows."""
    return unfolded_flops(prod(call.node.shape) // call.node.shape[1], call.operands[1].shape, call["groups"])


def segment_key(segment: Segment) -> tuple[object, ...]:
    """Identify a segment, wherever in a plan it stands."""
    return segment.kept, segment.reductions, segment.output, segment.fields, segment.reads


def tile_shapes(graph: Graph, segment: Segment, ranks: int = 1) -> list[tuple[int, int]]:
    """Return tile shapes worth costing: about squares, in steps of the lattice, that cut the field evenly.

    They are multiples of 16 pixels: files hold bricks of 8 to 64, and a brick that two tiles share is written twice.
    For several ranks it counts more that all segments are divided among them at the same places.
    """
    largest = graph[reference(graph, segment)]
    size = largest.extent
    steps = lattice(graph, segment)
    shared = 0 if runs_by_rows(segment, largest) else 1
    shapes = []
    side = _SMALLEST_SIDE_PX
    while side <= _LARGEST_SIDE_PX:
        shape = [_even(side, size[axis], steps[axis]) for axis in (0, 1)]
        if ranks > 1:
            shape[shared] = _shared(side, size[shared], steps[shared], ranks)
        shapes.append((shape[0], shape[1]))
        side = max(side + 16, side * 5 // 4 // 16 * 16)
    return list(dict.fromkeys(shapes))


def _even(side: int, size: int, step: int) -> int:
    """Return the least side, in such steps, that cuts an axis into as few tiles: the last one is not a narrow rest, for
    which whoever computes tiles side by side would wait.
    """
    cut = -(-size // min(_round_up(side, step), size))
    return min(_round_up(_round_up(-(-size // cut), _SMALLEST_SIDE_PX), step), size)


def _shared(side: int, size: int, step: int, ranks: int) -> int:
    """Return a side that gives each rank as many tiles, at best exactly, as near to this one as may be."""
    about = max(1, round(size / (ranks * side)))
    counts = range(-(-about // 2), 2 * about + 1)
    count = min(counts, key=lambda one: (size % (ranks * one * step) > 0, max(one / about, about / one)))
    return min(_round_up(-(-size // (ranks * count)), step), size)


def _round_up(value: int, step: int) -> int:
    return -(-value // step) * step
