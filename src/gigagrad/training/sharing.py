"""How groups of ranks share the slides of a step, such that no bit depends on how many groups there are.

Each slide's gradient is complete before it meets another one's, and they meet in a binary tree over the slides' places
in the step, as one process has it, too: in the parameters' dtypes, and no library adds for us. What runs leave in
buffers is left again in the order of slides.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence

import torch
from torch import Tensor, nn

from gigagrad.execution.engine import Engine
from gigagrad.execution.model_state import Left
from gigagrad.plans import Plan
from gigagrad.ranks import Message, Ranks
from gigagrad.ranks.messages import packed, unpacked

Gradients = list[Tensor | None]
"""Of each parameter; None where none reaches it."""


def dealt(pixels: Sequence[int], groups: int) -> list[int]:
    """The group of each slide: the longest first, each to the group with the least so far (Graham, 1969)."""
    loads, owners = [0] * groups, [0] * len(pixels)
    for slide in sorted(range(len(pixels)), key=lambda slide: -pixels[slide]):
        owners[slide] = loads.index(min(loads))
        loads[owners[slide]] += pixels[slide]
    return owners


class GradientTree:
    """The sum of the gradients of `count` slides. Those that others add are missing here, until `total`.

    Node k of level l is the sum of slides k * 2**l to (k + 1) * 2**l - 1, as far as there are any.
    """

    def __init__(self, parameters: Iterable[Tensor], count: int) -> None:
        self._parameters, self._count = list(parameters), count
        self._depth = (count - 1).bit_length()
        self._held: dict[tuple[int, int], Gradients] = {}

    def add(self, slide: int, gradients: Gradients) -> None:
        """That of a slide, joined with what is here as far as the tree joins it."""
        self._put(0, slide, gradients)

    def total(self, owners: Sequence[int], ranks: Ranks) -> Gradients:
        """Of all slides, to all ranks; `owners[i]` has added slide i. The first slide's owner of a node has its sum."""
        for level in range(self._depth):
            sent: dict[int, Message] = {}
            coming: dict[int, list[int]] = {}
            for place in range(1, ((self._count - 1) >> level) + 1, 2):
                giver, taker = owners[place << level], owners[(place - 1) << level]
                if giver == taker:
                    continue
                if giver == ranks.index:
                    message = self._packed(self._held.pop((level, place)))
                    sent[taker] = torch.cat([sent[taker], message]) if taker in sent else message
                elif taker == ranks.index:
                    coming.setdefault(giver, []).append(place)
            for giver, message in ranks.deliver(sent).items():
                for place in coming[giver]:
                    gradients, message = self._unpacked(message)
                    self._put(level, place, gradients)
        root = self._held.pop((self._depth, 0), None)
        sent = {} if root is None else {rank: self._packed(root) for rank in ranks.others}
        for message in ranks.deliver(sent).values():
            root, _ = self._unpacked(message)
        assert root is not None
        return root

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

    def _packed(self, gradients: Gradients) -> Message:
        there = torch.tensor([gradient is not None for gradient in gradients], dtype=torch.uint8)
        return packed([there, *(gradient for gradient in gradients if gradient is not None)])

    def _unpacked(self, message: Message) -> tuple[Gradients, Message]:
        """What was packed first, and what comes behind it."""
        place, found = len(self._parameters), list[Tensor | None]()
        for parameter, known in zip(self._parameters, message[:place].tolist(), strict=True):
            gradient = None
            if known:
                gradient, place = unpacked(message, place, tuple(parameter.shape), parameter.dtype)
                gradient = torch.empty_like(parameter, requires_grad=False).copy_(gradient)
            found.append(gradient)
        return found, message[place:]


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
