"""How groups of ranks share the slides of a step, such that no bit depends on how many groups there are.

Each slide's gradient is complete before it meets another one's, and they meet in a binary tree over the slides' places
in the step, as one process has it, too: in the parameters' dtypes, and no library adds for us. Every group adds up a
share of all gradients. What runs leave in buffers is left again in the order of slides.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from itertools import groupby

import torch
from torch import Tensor, nn

from gigagrad.execution.engine import Engine
from gigagrad.execution.model_state import Left
from gigagrad.plans import Plan
from gigagrad.plans.sums import share_of
from gigagrad.ranks import Message, Ranks
from gigagrad.ranks.messages import packed, unpacked

Gradients = list[Tensor | None]
"""Of each parameter; None where none reaches it."""


def dealt(pixels: Sequence[int], groups: int) -> list[int]:
    """The group of each slide: the longest first, each to the group with the least so far (Graham, 1969). Of slides of
    one size a group gets neighbours, whose gradients it adds up by itself.
    """
    loads, owners = [0] * groups, [0] * len(pixels)
    for size, alike in groupby(sorted(range(len(pixels)), key=lambda slide: -pixels[slide]), pixels.__getitem__):
        slides, takers = [*alike], list[int]()
        for _ in slides:
            takers.append(loads.index(min(loads)))
            loads[takers[-1]] += size
        for slide, taker in zip(slides, sorted(takers), strict=True):
            owners[slide] = taker
    return owners


class GradientTree:
    """The sum of the gradients of `count` slides. Those that others have are missing here, until `total`.

    Node k of level l is the sum of slides k * 2**l to (k + 1) * 2**l - 1, as far as there are any.
    """

    def __init__(self, parameters: Iterable[Tensor], count: int) -> None:
        self._parameters, self._count = list(parameters), count
        self._depth = (count - 1).bit_length()
        self._held: dict[tuple[int, int], Gradients] = {}

    def add(self, slide: int, gradients: Gradients) -> None:
        """That of a slide, joined with what is here as far as the tree joins it."""
        self._put(0, slide, gradients)

    def total(self, ranks: Ranks) -> Gradients:
        """Of all slides, to all ranks, which ask at once: each adds up its share of every parameter's numbers."""
        if ranks.count == 1:
            return self._held.pop((self._depth, 0))
        told = ranks.said([(*node, _there(gradients)) for node, gradients in self._held.items()])
        shares = [_Share(self._parameters, rank, ranks.count) for rank in range(ranks.count)]
        flat = [[one if one is None else one.reshape(-1) for one in gradients] for gradients in self._held.values()]
        self._held.clear()
        messages = [packed(part for gradients in flat for part in share.cut(gradients)) for share in shares]
        del flat
        own = shares[ranks.index]
        sizes = [sum(own.nbytes(there) for *_, there in nodes) for nodes in told]
        for nodes, message in zip(told, _swapped(messages, sizes, ranks), strict=True):
            start = 0
            for level, place, there in nodes:
                gradients, start = own.opened(message, there, start)
                self._put(level, place, gradients)
        total = self._held.pop((self._depth, 0))
        there, message = _there(total), packed(part for part in total if part is not None)
        came = _swapped([message] * ranks.count, [share.nbytes(there) for share in shares], ranks)
        parts = [share.opened(message, there)[0] for share, message in zip(shares, came, strict=True)]
        return [_whole(*some) for some in zip(self._parameters, *parts, strict=True)]

    def _put(self, level: int, place: int, gradients: Gradients) -> None:
        while level < self._depth:
            sibling = place ^ 1
            if sibling << level < self._count:
                other = self._held.pop((level, sibling), None)
                if other is None:
                    break
                gradients = [_sum(one, two) for one, two in zip(other, gradients, strict=True)]
            level, place = level + 1, place >> 1
        self._held[level, place] = gradients


class _Share:
    """What one of so many ranks adds up: some numbers of every parameter."""

    def __init__(self, parameters: Sequence[Tensor], rank: int, count: int) -> None:
        self._dtypes = [parameter.dtype for parameter in parameters]
        self._numbers = [share_of(parameter.numel(), rank, count) for parameter in parameters]

    def cut(self, gradients: Gradients) -> Iterator[Tensor]:
        """Its part of gradients that are flat."""
        return (one[own] for one, own in zip(gradients, self._numbers, strict=True) if one is not None)

    def nbytes(self, there: Collection[int]) -> int:
        """Of the gradients of these parameters."""
        return sum(self._dtypes[i].itemsize * self._size(i) for i in there)

    def opened(self, message: Message, there: Collection[int], start: int = 0) -> tuple[Gradients, int]:
        """Its part of the gradients of these parameters, from a place of a message on, and where they end."""
        found: Gradients = [None] * len(self._dtypes)
        for i in there:
            found[i], start = unpacked(message, start, (self._size(i),), self._dtypes[i])
        return found, start

    def _size(self, parameter: int) -> int:
        own = self._numbers[parameter]
        return len(range(own.start, own.stop))


def _there(gradients: Gradients) -> list[int]:
    return [i for i, one in enumerate(gradients) if one is not None]


def _swapped(messages: Sequence[Message], sizes: Sequence[int], ranks: Ranks) -> list[Message]:
    """What all ranks have for this one, which has these messages for them and for itself, by rank; of so many bytes."""
    came = ranks.exchange({r: messages[r] for r in ranks.others}, {r: sizes[r] for r in ranks.others})
    nothing = messages[ranks.index][:0]
    return [messages[r] if r == ranks.index else came.get(r, nothing) for r in range(ranks.count)]


def _whole(parameter: Tensor, *parts: Tensor | None) -> Tensor | None:
    there = [part for part in parts if part is not None]
    if not there:
        return None
    return torch.empty_like(parameter, requires_grad=False).copy_(torch.cat(there).reshape(parameter.shape))


def leave_in_order(model: nn.Module, left: Mapping[int, Left], owners: Sequence[int], ranks: Ranks) -> None:
    """Leave in the buffers what the runs of a step's slides leave there, one after the other: `left` by the slides of
    this rank, the buffers being as before the step on every rank.
    """
    for slide, owner in enumerate(owners):
        if owner == ranks.index:
            left[slide].again()
        last = slide + 1 == len(owners)
        takers = ranks.others if last else {owners[slide + 1]} - {owner}
        if not takers:
            continue
        sent = {}
        if owner == ranks.index:
            message = packed(model.buffers())
            sent = {taker: message for taker in takers if taker != owner}
        for message in ranks.deliver(sent).values():
            place = 0
            for buffer in model.buffers():
                value, place = unpacked(message, place, tuple(buffer.shape), buffer.dtype)
                buffer.detach().copy_(value)


def plan_alike(engine: Engine, plan: Callable[[], Plan], ranks: Ranks) -> Plan:
    """What `plan` makes by the engine, with the choices of the first rank on all."""
    made = plan() if ranks.index == 0 else None
    state = ranks.said(None if made is None else engine.state_dict())[0]
    if made is None:
        engine.load_state_dict(state)
        made = plan()
    return made


def _sum(one: Tensor | None, two: Tensor | None) -> Tensor | None:
    if one is None or two is None:
        return two if one is None else one
    return one.add_(two)
