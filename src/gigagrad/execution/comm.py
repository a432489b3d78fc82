"""Send between passes what ranks need of each other: halos of kept fields, sums, cotangents beyond their own.

An `Exchange` ends a pass: a packed message for each pair of ranks, in an order that both know from the plan. A `Gather`
puts together what is large, and at the end the gradients of parameters. No library adds for us: bytes travel, and
whoever gets them adds, in the order of chunks.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import islice
from math import prod

import torch

from gigagrad.execution.ordered_sum import Joined, OrderedSum, Overlap
from gigagrad.execution.prepared import Prepared, Shape
from gigagrad.execution.scalars import Values
from gigagrad.plans import Chunks, Tiles
from gigagrad.plans.chunks import before, behind
from gigagrad.plans.partition import gradient_dtype, share_of, sum_dtype
from gigagrad.plans.program import Exchange, Gather, Sum, Transfer
from gigagrad.ranks import Ranks
from gigagrad.ranks.ranks import Message, packed, unpacked
from gigagrad.stores import Store


@dataclass(frozen=True, slots=True, eq=False)
class PassResult:
    """A pass of this rank, before ranks have exchanged anything."""

    step: Tiles
    stores: Mapping[int, Store]
    """Stores of what it kept, or of the cotangents that it added up, as they travel: without rounding."""
    gradients: OrderedSum
    reduced: OrderedSum
    overlaps: Mapping[int, Overlap] = field(default_factory=dict)


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
        return Overlap(store, chunks, field, elsewhere, self._device, self._prepared.layout)

    def shapes(self, nodes: Iterable[int]) -> dict[int, Shape]:
        """Return shape and dtype of the sums of nodes."""
        return {i: (self._graph[i].shape, sum_dtype(self._problem, i)) for i in nodes}

    def exchange(self, step: Exchange, result: PassResult) -> tuple[Values, Values]:
        """End a pass: what it kept gets its halos, cotangents come to whoever needs them next, and all sums are joined.
        Returns those of gradients, of parameters this rank's share, and the values of reductions; of what a `Gather`
        puts together, this rank's share.
        """
        sums = (result.gradients, step.gradients), (result.reduced, step.reductions)
        if self._ranks.count == 1:
            totals = [one.total() for one, _ in sums]
        else:
            parts = [self._sums(result.step, one, how, step.chunks) for one, how in sums]
            came = self._exchanged(step, result, parts)
            totals = [part.total(came) for part in parts]
            self._place(step, result, came)
        for store in result.stores.values():
            store.flush()
        for total, (_, how) in zip(totals, sums, strict=True):  # as they lie in memory wherever they were summed
            total.update({key: total[key].contiguous() for key in how.whole + how.cut if key in total})
        return totals[0], totals[1]

    def _exchanged(self, step: Exchange, result: PassResult, parts: Sequence[_Sums]) -> Received:
        """Send other ranks sums and boxes; return what they send."""
        stores, own = result.stores, self._ranks.index

        def sent(receiver: int) -> Iterator[torch.Tensor]:
            for part in parts:
                yield from part.sent(receiver)
            for moved in step.between(own, receiver):
                yield _crop(moved, result)

        def coming(sender: int) -> list[Shape]:
            of_sums = [shape for part in parts for shape in part.coming(sender)]
            moved = step.between(sender, own)
            return of_sums + [(stores[one.node].crop_shape(one.box), stores[one.node].dtype) for one in moved]

        others = self._ranks.others
        return exchange(self._ranks, {rank: packed(sent(rank)) for rank in others}, {r: coming(r) for r in others})

    def _place(self, step: Exchange, result: PassResult, came: Received) -> None:
        """Write the halos that came, and add cotangents: rank after rank, and ranks have theirs in the order of
        chunks.
        """
        own = self._ranks.index
        crops = [pair for rank, rest in came.items() for pair in zip(step.between(rank, own), rest, strict=True)]
        for moved, crop in crops:
            if moved.chunk is None:
                result.stores[moved.node].write(moved.box, crop)
        crops += [(moved, _crop(moved, result)) for moved in step.between(own, own)]
        for moved, crop in sorted(crops, key=lambda pair: pair[0].sender):
            if moved.chunk is not None:
                result.stores[moved.node].add(moved.box, crop)

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

    def _sums(self, step: Tiles, sums: OrderedSum, how: Sum, chunks: Sequence[Sequence[int]]) -> _Sums:
        joined = sums.joined(behind(*self.own(step))) if how.all else []
        total = OrderedSum(self._dtype, self._prepared.bound(step.segment).merges)
        return _Sums(self._ranks, self._device, self.shapes(how.all), how, joined, chunks if how.all else [], total)


class _Sums:
    """Sums of one pass between ranks: those of this rank, of its chunks, and what it gets of all others. What is shared
    out is flat, and each rank gets its share of it; the rest is whole.
    """

    def __init__(
        self,
        ranks: Ranks,
        device: torch.device,
        shapes: dict[int, Shape],
        how: Sum,
        joined: Sequence[Joined],
        chunks: Sequence[Sequence[int]],
        total: OrderedSum,
    ) -> None:
        """Take this rank's sums, `joined`, which is emptied. `chunks`: of each sum that ranks have, one chunk; `total`
        is empty yet.
        """
        self._rank, self._count, self._device = ranks.index, ranks.count, device
        self._shapes, self._shared, self._chunks = shapes, frozenset(how.shared), chunks
        self._own = [
            (chunk, {key: self._flat(key, values.pop(key)) for key in tuple(values)}) for chunk, values in joined
        ]
        self._total = total

    def sent(self, receiver: int) -> Iterator[torch.Tensor]:
        """Yield of each sum the chunk, for each node whether there is one, and all of them, zeros for none."""
        for chunk, values in self._own:
            yield torch.tensor([chunk, *(key in values for key in self._shapes)])
            for key, (shape, dtype) in self._shapes.items():
                value = values[key] if key in values else self._flat(key, torch.zeros(shape, dtype=dtype))
                yield self._share(key, value, receiver)

    def coming(self, sender: int) -> list[Shape]:
        one: list[Shape] = [((1 + len(self._shapes),), torch.int64)]
        for key, (shape, dtype) in self._shapes.items():
            one.append(((_length(prod(shape), self._rank, self._count),) if key in self._shared else shape, dtype))
        return one * len(self._chunks[sender]) if self._shapes else []

    def total(self, came: Received) -> Values:
        """Return the sums of all chunks, taken from what came: whole, or of what is shared out this rank's share."""
        for rank in range(self._count) if self._shapes else ():
            self._total.append(self._own_share() if rank == self._rank else self._opened(came[rank], rank))
        return self._total.total()

    def _own_share(self) -> Iterator[Joined]:
        for chunk, values in self._own:
            yield chunk, {key: self._share(key, values.pop(key), self._rank) for key in tuple(values)}

    def _opened(self, tensors: Iterator[torch.Tensor], sender: int) -> Iterator[Joined]:
        for _ in self._chunks[sender]:
            chunk, *there = next(tensors).tolist()
            values = zip(self._shapes, there, islice(tensors, len(self._shapes)), strict=True)
            own = {key: v.to(self._device, copy=key not in self._shared) for key, is_there, v in values if is_there}
            yield chunk, own

    def _flat(self, key: int, value: torch.Tensor) -> torch.Tensor:
        assert (tuple(value.shape), value.dtype) == self._shapes[key], key
        return value.contiguous().view(-1) if key in self._shared else value

    def _share(self, key: int, value: torch.Tensor, rank: int) -> torch.Tensor:
        return value[share_of(len(value), rank, self._count)] if key in self._shared else value


Received = Mapping[int, Iterator[torch.Tensor]]
"""The tensors that came from each other rank, in the order in which they were packed."""


def exchange(ranks: Ranks, sent: Mapping[int, Message], coming: Mapping[int, Sequence[Shape]]) -> Received:
    """Exchange messages with all other ranks, of which tensors of these shapes come. Raises RankError."""
    received = ranks.exchange(sent, {rank: sum(map(_nbytes, shapes)) for rank, shapes in coming.items()})
    nothing = torch.empty(0, dtype=torch.uint8)
    return {rank: unpacked(received.pop(rank, nothing), shapes) for rank, shapes in coming.items()}


def gathered(ranks: Ranks, shares: Values, shapes: Mapping[int, Shape], device: torch.device) -> Values:
    """Return all of the values, of these shapes, of which every rank has a share; those that no rank has are left out.
    Raises RankError.
    """

    def flat(rank: int) -> list[Shape]:
        return [((_length(prod(shape), rank, ranks.count),), dtype) for shape, dtype in shapes.values()]

    own = zip(shapes, flat(ranks.index), strict=True)
    message = packed(shares[i] if i in shares else torch.zeros(shape, dtype=dtype) for i, (shape, dtype) in own)
    came = exchange(ranks, dict.fromkeys(ranks.others, message), {rank: flat(rank) for rank in ranks.others})
    whole = {}
    for i, (shape, _) in shapes.items():
        others = {rank: next(tensors) for rank, tensors in came.items()}
        if i in shares:
            found = [shares[i] if rank == ranks.index else others[rank].to(device) for rank in range(ranks.count)]
            whole[i] = torch.cat(found).view(shape)
    return whole


def _crop(moved: Transfer, result: PassResult) -> torch.Tensor:
    if moved.chunk is None:
        return result.stores[moved.node].read(moved.box)
    return result.overlaps[moved.node].kept_sum(moved.chunk, moved.box)


def _length(size: int, rank: int, ranks: int) -> int:
    share = share_of(size, rank, ranks)
    return int(share.stop - share.start)


def _nbytes(shape: Shape) -> int:
    return prod(shape[0]) * shape[1].itemsize
