"""Send between passes what ranks need of each other: halos of kept fields, sums, cotangents beyond their own.

An `Exchange` ends a pass: a packed message for each pair of ranks, in an order that both know from the plan. A `Gather`
puts together what is large, and at the end the gradients of parameters. No library adds for us: bytes travel, and
whoever gets them adds, in the order of chunks.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from math import prod

import torch

from gigagrad.execution.ordered_sum import Joined, OrderedSum, Overlap
from gigagrad.execution.prepared import Prepared, Shape
from gigagrad.execution.scalars import Values
from gigagrad.plans import Chunks, Segment, Tiles
from gigagrad.plans.chunks import before, behind
from gigagrad.plans.partition import gradient_dtype, share_of, sum_dtype
from gigagrad.plans.program import Exchange, Gather, Sum, Transfer
from gigagrad.ranks import Ranks
from gigagrad.ranks.ranks import packed, unpacked
from gigagrad.stores import Store


@dataclass(frozen=True, slots=True, eq=False)
class PassResult:
    """A pass of this rank, before ranks have exchanged anything."""

    step: Tiles
    segment: Segment
    stores: Mapping[int, Store]
    """Stores of what it kept, or of the cotangents that it added up, as they travel: without rounding."""
    overlaps: Mapping[int, Overlap] = field(default_factory=dict)
    gradients: OrderedSum | None = None
    reduced: OrderedSum | None = None


class Comm:
    """Sends what the steps of a run say. Every rank calls the same in the same order. Raises RankError."""

    def __init__(self, prepared: Prepared, ranks: Ranks) -> None:
        self._prepared, self._problem, self._graph, self._ranks = prepared, prepared.problem, prepared.graph, ranks
        self._device, self._dtype = prepared.device.torch_device, prepared.device.sum_dtype
        steps = prepared.plan.steps if ranks.count > 1 else ()
        gathers = [step for step in steps if isinstance(step, Gather) and step.gradients]
        self._late = frozenset(i for step in gathers for i in step.nodes)

    def own(self, step: Tiles) -> tuple[Chunks, range]:
        """Return the chunks of a pass, and which of them this rank computes."""
        return self._prepared.chunks(step.segment), step.own(self._ranks.index)

    def new_sums(self, step: Tiles) -> OrderedSum:
        return OrderedSum(self._dtype, self._prepared.bound(step.segment).merges, before(*self.own(step)))

    def new_overlap(self, step: Tiles, chunks: Chunks, field: int, store: Store) -> Overlap:
        first = step.own(self._ranks.index).start
        elsewhere = chunks.reached_before(field, first) if first else []
        return Overlap(store, chunks, field, elsewhere, (self._device, self._prepared.layout))

    def shapes(self, nodes: Iterable[int]) -> dict[int, Shape]:
        """Return shape and dtype of the sums of nodes."""
        return {i: (self._graph[i].shape, sum_dtype(self._problem, i)) for i in nodes}

    def exchange(self, step: Exchange, result: PassResult) -> tuple[Values, Values]:
        """End a pass: what it kept gets its halos, cotangents come to whoever needs them next, and all sums are joined.
        Returns those of gradients, of parameters this rank's share, and the values of reductions; of what a `Gather`
        puts together, this rank's share.
        """
        of_both = ((result.gradients, step.gradients), (result.reduced, step.reductions))
        if self._ranks.count == 1:
            for store in result.stores.values():
                store.flush()
            found = [{} if sums is None else sums.total() for sums, _ in of_both]
        else:
            found = self._exchanged(step, result)
        for total, (_, how) in zip(found, of_both, strict=True):  # as they lie in memory wherever they were summed
            total.update({key: total[key].contiguous() for key in how.whole + how.cut if key in total})
        return found[0], found[1]

    def _exchanged(self, step: Exchange, result: PassResult) -> list[Values]:
        of_both = ((result.gradients, step.gradients), (result.reduced, step.reductions))
        sums = [self._sums(result.step, some, how, step.chunks) for some, how in of_both]
        own = self._ranks.index

        def between(sender: int, receiver: int) -> list[Transfer]:
            return [one for one in step.transfers if (one.sender, one.receiver) == (sender, receiver)]

        def crop(one: Transfer) -> torch.Tensor:
            if one.chunk is None:
                return result.stores[one.node].read(one.box)
            return result.overlaps[one.node].kept_sum(one.chunk, one.box)

        def coming(sender: int) -> list[Shape]:
            moved, stores = between(sender, own), result.stores
            return [(stores[one.node].crop_shape(one.box), stores[one.node].dtype) for one in moved]

        boxes: Part = (lambda receiver: map(crop, between(own, receiver)), coming)
        *of_sums, of_boxes = exchange(self._ranks, [*(part for part, _ in sums), boxes])
        totals = [total(came) for (_, total), came in zip(sums, of_sums, strict=True)]
        crops = [pair for rank, came in of_boxes.items() for pair in zip(between(rank, own), came, strict=True)]
        for moved, came_crop in crops:
            if moved.chunk is None:
                result.stores[moved.node].write(moved.box, came_crop)
        crops += [(moved, crop(moved)) for moved in between(own, own)]
        # Cotangents rank after rank, and ranks have theirs in the order of chunks.
        for moved, came_crop in sorted(crops, key=lambda pair: pair[0].sender):
            if moved.chunk is not None:
                result.stores[moved.node].add(moved.box, came_crop)
        for store in result.stores.values():
            store.flush()
        return totals

    def gather(self, step: Gather, values: Sequence[Values]) -> None:
        """Put together, in place, what each rank has a share of."""
        if step.gradients:
            shapes = {i: (self._graph[i].shape, gradient_dtype(self._graph, i)) for i in step.nodes}
        else:
            shapes = self.shapes(step.nodes)
        of_whom = {i: each for each in values for i in step.nodes if i in each}
        shares = {i: each.pop(i) for i, each in of_whom.items()}
        for i, whole in gathered(self._ranks, shares, shapes, self._device).items():
            of_whom[i][i] = whole

    def share(self, parameter: int, gradient: torch.Tensor) -> torch.Tensor:
        """Return what this rank has of a parameter's gradient until the step is over."""
        if parameter not in self._late:
            return gradient
        return gradient.contiguous().view(-1)[share_of(gradient.numel(), self._ranks.index, self._ranks.count)]

    def is_whole(self, node: int) -> bool:
        """Say whether every rank has all of a sum of gradients."""
        return node not in self._late

    def _sums(
        self, step: Tiles, sums: OrderedSum | None, how: Sum, chunks: Sequence[Sequence[int]]
    ) -> tuple[Part, Callable[[Mapping[int, Sequence[torch.Tensor]]], Values]]:
        """Return what ranks send of the sums of one pass; and a function that makes of what came those of all chunks:
        whole, or of what is shared out this rank's share, flat. `chunks`: of each sum that ranks have, one chunk.
        """
        if sums is None or not how.all:
            return (lambda receiver: (), lambda sender: ()), lambda came: {}
        shapes, shared = self.shapes(how.all), frozenset(how.shared)
        rank, count = self._ranks.index, self._ranks.count

        def flat(key: int, value: torch.Tensor) -> torch.Tensor:
            assert (tuple(value.shape), value.dtype) == shapes[key], key
            return value.contiguous().view(-1) if key in shared else value

        def share(key: int, value: torch.Tensor, of: int) -> torch.Tensor:
            return value[share_of(len(value), of, count)] if key in shared else value

        joined = sums.joined(behind(*self.own(step)))
        own = [(chunk, {key: flat(key, values.pop(key)) for key in tuple(values)}) for chunk, values in joined]

        def sent(receiver: int) -> Iterator[torch.Tensor]:
            """Yield of each sum the chunk, for each node whether there is one, and all of them, zeros for none."""
            for chunk, values in own:
                yield torch.tensor([chunk, *(key in values for key in shapes)])
                for key, (shape, dtype) in shapes.items():
                    value = values.get(key)
                    yield share(key, flat(key, torch.zeros(shape, dtype=dtype)) if value is None else value, receiver)

        def coming(sender: int) -> list[Shape]:
            one: list[Shape] = [((1 + len(shapes),), torch.int64)]
            for key, (shape, dtype) in shapes.items():
                one.append(((_length(share_of(prod(shape), rank, count)),) if key in shared else shape, dtype))
            return one * len(chunks[sender])

        def opened(tensors: Sequence[torch.Tensor]) -> Iterator[Joined]:
            for start in range(0, len(tensors), 1 + len(shapes)):
                chunk, *there = tensors[start].tolist()
                values = zip(shapes, there, tensors[start + 1 :], strict=False)
                own_copy = {
                    key: value.to(self._device, copy=key not in shared) for key, known, value in values if known
                }
                yield chunk, own_copy

        def total(came: Mapping[int, Sequence[torch.Tensor]]) -> Values:
            of_all = OrderedSum(self._dtype, self._prepared.bound(step.segment).merges)
            for other in range(count):
                if other in came:
                    of_all.append(opened(came[other]))
                else:
                    mine = ((chunk, {i: share(i, values.pop(i), rank) for i in tuple(values)}) for chunk, values in own)
                    of_all.append(mine)
            return of_all.total()

        return (sent, coming), total


Part = tuple[Callable[[int], Iterable[torch.Tensor]], Callable[[int], Sequence[Shape]]]
"""A function that gives what this rank sends to another one, and one that gives the shapes of what that one sends."""


def exchange(ranks: Ranks, parts: Sequence[Part]) -> list[dict[int, list[torch.Tensor]]]:
    """Exchange all parts of the messages of several ranks at once; return what came, of each part by the rank that sent
    it. All ranks have parts of the same kinds in the same order. Raises RankError.
    """
    sent = {rank: packed(tensor for send, _ in parts for tensor in send(rank)) for rank in ranks.others}
    expected = {rank: [coming(rank) for _, coming in parts] for rank in ranks.others}
    sizes = {rank: sum(_nbytes(shape) for of in shapes for shape in of) for rank, shapes in expected.items()}
    received = ranks.exchange(sent, sizes)
    del sent
    nothing, found = torch.empty(0, dtype=torch.uint8), [dict[int, list[torch.Tensor]]() for _ in parts]
    for rank in ranks.others:
        data, place = received.pop(rank, nothing), 0
        for came, shapes in zip(found, expected[rank], strict=True):
            came[rank] = tensors = []
            for shape, dtype in shapes:
                tensor, place = unpacked(data, place, shape, dtype)
                tensors.append(tensor)
    return found


def gathered(ranks: Ranks, shares: Values, shapes: Mapping[int, Shape], device: torch.device) -> Values:
    """Return all of the values, of these shapes, of which every rank has a share; those that no rank has are left out.
    Raises RankError.
    """

    def coming(sender: int) -> list[Shape]:
        found = [((_length(share_of(prod(shape), sender, ranks.count)),), dtype) for shape, dtype in shapes.values()]
        return [((len(shapes),), torch.int64), *found]

    def sent(receiver: int) -> Iterator[torch.Tensor]:
        yield torch.tensor([i in shares for i in shapes], dtype=torch.int64)
        for i, (shape, dtype) in zip(shapes, coming(ranks.index)[1:], strict=True):
            yield shares[i] if i in shares else torch.zeros(shape, dtype=dtype)

    (came,) = exchange(ranks, [(sent, coming)])
    whole = {}
    for place, (i, (shape, _)) in enumerate(shapes.items(), 1):
        if i in shares:
            of_others = {rank: tensors[place].to(device) for rank, tensors in came.items()} | {ranks.index: shares[i]}
            whole[i] = torch.cat([of_others[rank] for rank in range(ranks.count)]).view(shape)
    return whole


def _length(share: slice) -> int:
    return int(share.stop - share.start)


def _nbytes(shape: Shape) -> int:
    return prod(shape[0]) * shape[1].itemsize
