"""Make the messages of ranks, by kind: boxes of fields, cotangents, sums, shares of what is summed.

No library adds for us: bytes travel, and whoever gets them adds, in the order of parts.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Collection, Iterator, Mapping, Sequence
from math import prod

import torch

from gigagrad.execution.ordered_sum import Joined, OrderedSum
from gigagrad.execution.overlaps import Overlap
from gigagrad.execution.scalars import Values
from gigagrad.plans.program import Transfer
from gigagrad.plans.sums import share_of
from gigagrad.ranks import Ranks
from gigagrad.ranks.ranks import packed, unpacked
from gigagrad.stores import Store

Shape = tuple[tuple[int, ...], torch.dtype]


class Message(ABC):
    """The part of a message that one rank sends; all others have one of the same kind."""

    @abstractmethod
    def sent(self, receiver: int) -> Iterator[torch.Tensor]:
        """Yield what this rank sends to another one."""

    @abstractmethod
    def coming(self, sender: int) -> list[Shape]:
        """Return the shapes of what another one sends to this rank, which it knows beforehand."""

    @abstractmethod
    def take(self, came: Mapping[int, Sequence[torch.Tensor]]) -> None:
        """Take what came from all others, by the rank that sent it."""


def exchange(ranks: Ranks, messages: Sequence[Message]) -> None:
    """Exchange all of these at once, in their order. Raises RankError."""
    if ranks.count == 1:
        for message in messages:
            message.take({})
        return
    sent = {rank: packed(tensor for message in messages for tensor in message.sent(rank)) for rank in ranks.others}
    coming = {rank: [message.coming(rank) for message in messages] for rank in ranks.others}
    sizes = {rank: sum(_nbytes(shape) for of in shapes for shape in of) for rank, shapes in coming.items()}
    received = ranks.exchange(sent, sizes)
    del sent
    nothing, found = torch.empty(0, dtype=torch.uint8), {}
    for rank in ranks.others:
        data, place, found[rank] = received.pop(rank, nothing), 0, list[list[torch.Tensor]]()
        for shapes in coming[rank]:
            found[rank].append(tensors := [])
            for shape, dtype in shapes:
                tensor, place = unpacked(data, place, shape, dtype)
                tensors.append(tensor)
    for number, message in enumerate(messages):
        message.take({rank: tensors[number] for rank, tensors in found.items()})


class Boxes(Message):
    """Boxes of fields, and of their cotangents: those written as they come, and those added in the order of parts."""

    def __init__(
        self, rank: int, transfers: Sequence[Transfer], stores: Mapping[int, Store], overlaps: Mapping[int, Overlap]
    ) -> None:
        self._rank, self._transfers, self._stores, self._overlaps = rank, transfers, stores, overlaps

    def sent(self, receiver: int) -> Iterator[torch.Tensor]:
        return map(self._crop, self._between(self._rank, receiver))

    def coming(self, sender: int) -> list[Shape]:
        stores = self._stores
        moved = self._between(sender, self._rank)
        return [(stores[one.node].crop_shape(one.box), stores[one.node].dtype) for one in moved]

    def take(self, came: Mapping[int, Sequence[torch.Tensor]]) -> None:
        """Take what came; cotangents are added rank after rank, and ranks have theirs in the order of parts."""
        crops = list[tuple[Transfer, torch.Tensor]]()
        for sender, found in came.items():
            crops += zip(self._between(sender, self._rank), found, strict=True)
        for one, crop in crops:
            if one.part is None:
                self._stores[one.node].write(one.box, crop)
        crops += [(one, self._crop(one)) for one in self._between(self._rank, self._rank)]
        for one, crop in sorted(crops, key=lambda pair: pair[0].sender):
            if one.part is not None:
                self._stores[one.node].add(one.box, crop)
        for store in self._stores.values():
            store.flush()

    def _crop(self, one: Transfer) -> torch.Tensor:
        if one.part is None:
            return self._stores[one.node].read(one.box)
        return self._overlaps[one.node].kept_sum(one.part, one.box)

    def _between(self, sender: int, receiver: int) -> list[Transfer]:
        return [one for one in self._transfers if (one.sender, one.receiver) == (sender, receiver)]


class Sums(Message):
    """The sums of one pass; once taken, `total` has those of all parts: whole, or of what is `cut` this rank's share,
    flat.
    """

    def __init__(
        self,
        ranks: Ranks,
        own: Sequence[Joined],
        parts: Sequence[Sequence[int]],
        shapes: Mapping[int, Shape],
        cut: Collection[int],
        empty: OrderedSum,
        device: torch.device,
    ) -> None:
        """Set what this rank has, `own`; `parts`: of each sum that ranks have, one part, by rank; `shapes`: of a whole
        sum, by node; `empty`: where all are joined.
        """
        self._rank, self._count = ranks.index, ranks.count
        self._parts, self._shapes, self._empty, self._device = parts, shapes, empty, device
        self._cut = cut if ranks.count > 1 else ()
        self._own = [(part, {key: self._flat(key, values.pop(key)) for key in tuple(values)}) for part, values in own]
        self.total: Values = {}

    def sent(self, receiver: int) -> Iterator[torch.Tensor]:
        """Yield of each sum the part, for each node whether there is one, and all of them, zeros for none."""
        for part, values in self._own:
            yield torch.tensor([part, *(key in values for key in self._shapes)])
            for key, (shape, dtype) in self._shapes.items():
                value = values.get(key)
                if value is None:
                    value = self._flat(key, torch.zeros(shape, dtype=dtype))
                yield self._share(key, value, receiver)

    def coming(self, sender: int) -> list[Shape]:
        one: list[Shape] = [((1 + len(self._shapes),), torch.int64)]
        for key, (shape, dtype) in self._shapes.items():
            one.append(
                ((_length(share_of(prod(shape), self._rank, self._count)),) if key in self._cut else shape, dtype)
            )
        return one * len(self._parts[sender])

    def take(self, came: Mapping[int, Sequence[torch.Tensor]]) -> None:
        for rank in range(self._count):
            self._empty.append(self._opened(came[rank]) if rank in came else self._mine())
        self.total = self._empty.total()

    def _mine(self) -> Iterator[Joined]:
        for part, values in self._own:
            yield part, {key: self._share(key, values.pop(key), self._rank) for key in tuple(values)}

    def _opened(self, tensors: Sequence[torch.Tensor]) -> Iterator[Joined]:
        for start in range(0, len(tensors), 1 + len(self._shapes)):
            part, *there = tensors[start].tolist()
            values = zip(self._shapes, there, tensors[start + 1 :], strict=False)
            yield (
                part,
                {key: value.to(self._device, copy=key not in self._cut) for key, is_there, value in values if is_there},
            )

    def _flat(self, key: int, value: torch.Tensor) -> torch.Tensor:
        assert (tuple(value.shape), value.dtype) == self._shapes[key], key
        return value.contiguous().view(-1) if key in self._cut else value

    def _share(self, key: int, value: torch.Tensor, rank: int) -> torch.Tensor:
        return value[share_of(len(value), rank, self._count)] if key in self._cut else value


class Shares(Message):
    """Values of which every rank has a share; once taken, `whole` has all of each. Values that no rank has are left
    out.
    """

    def __init__(self, ranks: Ranks, shares: Values, shapes: Mapping[int, Shape], device: torch.device) -> None:
        self._rank, self._count = ranks.index, ranks.count
        self._shares, self._shapes, self._device = shares, shapes, device
        self.whole: Values = {}

    def sent(self, receiver: int) -> Iterator[torch.Tensor]:
        yield torch.tensor([key in self._shares for key in self._shapes], dtype=torch.int64)
        for key, (shape, dtype) in zip(self._shapes, self.coming(self._rank)[1:], strict=True):
            yield self._shares.get(key, torch.zeros(shape, dtype=dtype))

    def coming(self, sender: int) -> list[Shape]:
        found: list[Shape] = [((len(self._shapes),), torch.int64)]
        for shape, dtype in self._shapes.values():
            found.append(((_length(share_of(prod(shape), sender, self._count)),), dtype))
        return found

    def take(self, came: Mapping[int, Sequence[torch.Tensor]]) -> None:
        for number, (key, (shape, _)) in enumerate(self._shapes.items(), 1):
            if key in self._shares:
                shares = [
                    self._shares[key] if rank == self._rank else came[rank][number].to(self._device)
                    for rank in range(self._count)
                ]
                self.whole[key] = torch.cat(shares).view(shape) if self._count > 1 else shares[0]


def _length(share: slice) -> int:
    return int(share.stop - share.start)


def _nbytes(shape: Shape) -> int:
    return prod(shape[0]) * shape[1].itemsize
