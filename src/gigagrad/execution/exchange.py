"""What the ranks of a run tell each other between sweeps: halos of kept fields, sums, cotangents beyond their own.

One packed message for each pair of ranks that have something in common, in an order that both know from the plan. No
library adds for us: bytes travel, and whoever gets them adds, in the order of parts.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from math import prod

import torch

from gigagrad.boxes import Box
from gigagrad.execution.part_sums import Joined, PartSums
from gigagrad.execution.prepared import Prepared
from gigagrad.execution.seams import Seam
from gigagrad.execution.tape import Values
from gigagrad.graphs import FIELD_MAX
from gigagrad.plans import Parts, Stage
from gigagrad.plans.joins import before, behind, down, up
from gigagrad.plans.owners import Owners
from gigagrad.plans.traffic import sum_bytes, sum_dtype
from gigagrad.ranks import Message, Ranks
from gigagrad.ranks.messages import packed, unpacked
from gigagrad.stores import Store

Piece = tuple[int, Box, int]
"""A box of a field, by its node, and the part that it is of where that matters."""


class Exchange:
    """Of one run; `stores` by field. Every rank calls the same in the same order. Raises RankError."""

    def __init__(self, prepared: Prepared, owners: Owners, ranks: Ranks) -> None:
        self._problem, self._graph, self._owners, self._ranks = prepared.problem, prepared.graph, owners, ranks
        self._device, self._dtype = prepared.device.torch_device, prepared.device.sum_dtype
        self._layout = prepared.layout

    def own(self, stage: Stage) -> tuple[Parts, range]:
        """The parts of a stage, and which of them this rank computes."""
        return self._owners.parts(stage.index), self._owners.own(stage.index, self._ranks.index)

    def new_sums(self, stage: Stage) -> PartSums:
        largest = {i for i in stage.reductions if self._graph[i].op == FIELD_MAX}
        return PartSums(self._dtype, largest, before(self._owners, stage.index, self._ranks.index))

    def new_seam(self, stage: Stage, parts: Parts, field: int, store: Store) -> Seam:
        elsewhere = self._owners.cotangents.elsewhere(stage.index, field, self._ranks.index)
        return Seam(store, parts, field, elsewhere, (self._device, self._layout))

    def halos(self, stage: Stage, stores: Mapping[int, Store]) -> None:
        """Of what a stage keeps, now that it is written. `stores` as bytes travel: without rounding."""

        def pieces(sender: int, receiver: int) -> list[Piece]:
            return [(i, box, 0) for i in stage.kept for box in self._owners.halo(i, sender, receiver)]

        if stage.kept and self._ranks.count > 1:
            for _, (field, box, _), crop in self._swapped(
                pieces, lambda piece: stores[piece[0]].read(piece[1]), stores
            ):
                stores[field].write(box, crop)
        for field in stage.kept:
            stores[field].flush()

    def cotangents(self, stage: Stage, seams: Mapping[int, Seam], stores: Mapping[int, Store]) -> None:
        """Of the fields that a stage has read, to whoever needs them next: sums first, then strips part after part."""
        owners, index, here = self._owners.cotangents, stage.index, self._ranks.index

        def sums(sender: int, receiver: int) -> list[Piece]:
            return [(i, box, 0) for i in seams for box in owners.sums(index, i, sender, receiver)]

        def strips(sender: int, receiver: int) -> list[Piece]:
            return [(i, box, part) for i in seams for part, box in owners.strips(index, i, sender, receiver)]

        def strip(piece: Piece) -> torch.Tensor:
            field, box, part = piece
            return seams[field].strip(part, box)

        if seams and self._ranks.count > 1:
            for _, (field, box, _), crop in self._swapped(sums, lambda piece: stores[piece[0]].read(piece[1]), stores):
                stores[field].write(box, crop)
            own = ((here, piece, strip(piece)) for piece in strips(here, here))
            came = [*self._swapped(strips, strip, stores), *own]
            for _, (field, box, _), crop in sorted(came, key=lambda one: one[0]):
                stores[field].add(box, crop)
        for field in seams:
            stores[field].flush()

    def total(self, stage: Stage, sums: PartSums, keys: Sequence[int]) -> Values:
        """Of all ranks, of the nodes `keys`: neighbours join theirs, then pairs of them, until the first rank has all,
        and all get it.
        """
        if self._ranks.count == 1 or not keys:
            return sums.total()
        here, nbytes = self._ranks.index, sum_bytes(self._problem, keys)
        for step in up(self._owners, stage.index):
            sent = {}
            for sender, receiver in step:
                if sender == here:
                    joined = sums.joined(behind(self._owners, stage.index, sender, receiver))
                    sent = {receiver: packed(tensor for one in joined for tensor in self._flat(one, keys))}
            coming = {sender: count * nbytes for (sender, receiver), count in step.items() if receiver == here}
            for message in self._ranks.exchange(sent, coming).values():
                sums.append(
                    self._joined(message[place : place + nbytes], keys) for place in range(0, len(message), nbytes)
                )
        whole = packed(self._flat((0, sums.total()), keys)) if here == 0 else None
        for step in down(self._ranks.count):
            sent = {receiver: whole for sender, receiver in step if sender == here and whole is not None}
            coming = {sender: nbytes for sender, receiver in step if receiver == here}
            for message in self._ranks.exchange(sent, coming).values():
                whole = message
        assert whole is not None
        return self._joined(whole, keys)[1]

    def _flat(self, joined: Joined, keys: Sequence[int]) -> Iterator[torch.Tensor]:
        """A message's tensors: the part, for each node whether there is a sum, and all of them, zeros for none."""
        part, values = joined
        yield torch.tensor([part, *(key in values for key in keys)])
        for key in keys:
            dtype, shape = sum_dtype(self._problem, key), self._graph[key].shape
            value = values.get(key)
            assert value is None or (value.dtype, tuple(value.shape)) == (dtype, shape), key
            yield torch.zeros(shape, dtype=dtype) if value is None else value

    def _joined(self, message: Message, keys: Sequence[int]) -> Joined:
        (part, *there), place = message[: 8 * (1 + len(keys))].clone().view(torch.int64).tolist(), 8 * (1 + len(keys))
        values = {}
        for key, is_there in zip(keys, there, strict=True):
            value, place = unpacked(message, place, self._graph[key].shape, sum_dtype(self._problem, key))
            if is_there:
                values[key] = value.to(self._device)
        return part, values

    def _swapped(
        self,
        pieces: Callable[[int, int], list[Piece]],
        crop: Callable[[Piece], torch.Tensor],
        stores: Mapping[int, Store],
    ) -> Iterator[tuple[int, Piece, torch.Tensor]]:
        """What comes from every other rank, in their order: the sender, which piece, and its crop."""
        here = self._ranks.index
        others = [rank for rank in range(self._ranks.count) if rank != here]
        sent = {rank: packed(crop(piece) for piece in pieces(here, rank)) for rank in others}
        coming = {rank: pieces(rank, here) for rank in others}
        sizes = {
            rank: sum(prod(_shape(stores[i], box)) * stores[i].dtype.itemsize for i, box, _ in found)
            for rank, found in coming.items()
        }
        messages = self._ranks.exchange(sent, sizes)
        for rank, message in sorted(messages.items()):
            place = 0
            for piece in coming[rank]:
                store = stores[piece[0]]
                value, place = unpacked(message, place, _shape(store, piece[1]), store.dtype)
                yield rank, piece, value


def _shape(store: Store, box: Box) -> tuple[int, ...]:
    shape = list(store.shape)
    shape[store.axes[0]], shape[store.axes[1]] = box.shape
    return tuple(shape)
