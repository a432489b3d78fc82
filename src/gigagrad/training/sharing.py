"""Slides of a step shared among groups of ranks, such that no bit depends on how many groups there are.

Each slide's gradient is complete before it meets another one's, and they meet in a binary tree over the slides' places
in the step, as one process has it, too: in the parameters' dtypes, and no library adds for us. Every group adds up a
share of all gradients. What runs leave in buffers is left again in the order of slides.
"""

from __future__ import annotations

import hashlib
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from itertools import groupby

import torch
from torch import Tensor, nn

from gigagrad.cohorts import Cohort
from gigagrad.config.fit import FitConfig
from gigagrad.errors import ConfigError
from gigagrad.execution.engine import Engine
from gigagrad.execution.model_state import Left
from gigagrad.execution.parcels import Parcel, Shape, Shares, swap
from gigagrad.plans import Plan
from gigagrad.plans.sums import share_of
from gigagrad.ranks import Ranks
from gigagrad.ranks.messages import copy_into, packed
from gigagrad.ranks.ranks import named
from gigagrad.training.folder import RunFolder

Gradients = list[Tensor | None]
"""A gradient of each parameter; None where none reaches it."""

_Node = tuple[int, int]
"""Level and place."""


def assign(pixels: Sequence[int], groups: int) -> list[int]:
    """Assign each slide to a group: the longest first, each to the group with the least so far (Graham, 1969). Of
    slides of one size a group gets neighbours, whose gradients it adds up by itself.
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
        self._held: dict[_Node, Gradients] = {}

    def add(self, slide: int, gradients: Gradients) -> None:
        """Add the gradient of a slide, joined with what is here as far as the tree joins it."""
        self._put(0, slide, gradients)

    def total(self, ranks: Ranks) -> Gradients:
        """Return the sum over all slides to all ranks, which ask at once: each adds up its share of every parameter."""
        if ranks.count == 1:
            return self._held.pop((self._depth, 0))
        sharded = _ShardedSums(ranks, self._parameters, self._held)
        self._held.clear()
        swap(ranks, [sharded])
        for (level, place), gradients in sharded.found:
            self._put(level, place, gradients)
        total = dict(enumerate(self._held.pop((self._depth, 0))))
        shapes = {i: (tuple(parameter.shape), parameter.dtype) for i, parameter in enumerate(self._parameters)}
        shares = Shares(ranks, {i: one for i, one in total.items() if one is not None}, shapes, torch.device("cpu"))
        swap(ranks, [shares])
        found: Gradients = [None] * len(shapes)
        for i, whole in shares.whole.items():  # laid out as the parameter is, as one process has it
            found[i] = torch.empty_like(self._parameters[i], requires_grad=False).copy_(whole)
        return found

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


class _ShardedSums(Parcel):
    """A message with each rank's share of all sums that any rank has; once taken, `found` has this one's."""

    def __init__(self, ranks: Ranks, parameters: Sequence[Tensor], sums: Mapping[_Node, Gradients]) -> None:
        self._index, self._count, self._parameters = ranks.index, ranks.count, parameters
        self._own = [one.reshape(-1) for gradients in sums.values() for one in gradients if one is not None]
        there = [(node, [i for i, one in enumerate(sums[node]) if one is not None]) for node in sums]
        self._told: list[list[tuple[_Node, list[int]]]] = ranks.said(there)
        self.found: list[tuple[_Node, Gradients]] = []

    def sent(self, receiver: int) -> Iterator[Tensor]:
        for one in self._own:
            yield one[share_of(len(one), receiver, self._count)]

    def coming(self, sender: int) -> list[Shape]:
        parameters = [self._parameters[i] for _, there in self._told[sender] for i in there]
        shares = [share_of(parameter.numel(), self._index, self._count) for parameter in parameters]
        return [
            ((share.stop - share.start,), parameter.dtype) for share, parameter in zip(shares, parameters, strict=True)
        ]

    def take(self, came: Mapping[int, Sequence[Tensor]]) -> None:
        for rank, nodes in enumerate(self._told):
            shares = iter(came[rank] if rank in came else [one.cpu() for one in self.sent(rank)])
            for node, there in nodes:
                gradients: Gradients = [None] * len(self._parameters)
                for i in there:
                    gradients[i] = next(shares)
                self.found.append((node, gradients))


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
            copy_into(model.buffers(), message)


def plan_alike(engine: Engine, plan: Callable[[], Plan], ranks: Ranks) -> Plan:
    """Return what `plan` makes by the engine, with the choices of the first rank on all."""
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


_SEEN_SECONDS = 60.0
"""Until a file is seen on other machines: disks that are shared remember for some time that there was none."""


def check_same_start(
    ranks: Ranks, folder: RunFolder, step: int | None, config: FitConfig, cohort: Cohort, shapes: Sequence[object]
) -> None:
    """Raise `ConfigError` where ranks have other settings, other slides, of `shapes`, or find another run in the
    folder, after `step`; None: no run.
    """
    own = {name: repr(value) for name, value in config.to_dict().items() if name not in config.MAY_DIFFER}
    own |= {"rows of the cohort": cohort.fingerprint, "sizes of slides": _digest(repr(shapes).encode())}
    for rank, (other, theirs) in enumerate(ranks.said([step, own])):
        if other != step:
            raise ConfigError(
                f"rank {rank} finds {_run_found(other)} in {folder.path}, and rank {ranks.index} {_run_found(step)}; "
                "give an --out on a disk that all of them see"
            )
        if differing := [name for name in own if own[name] != theirs.get(name)]:
            raise ConfigError(
                f"ranks {ranks.index} and {rank} differ in {', '.join(differing)}; start all with the same command, "
                "and with the same files"
            )


def check_same_weights(ranks: Ranks, model: nn.Module) -> None:
    """Raise `ConfigError` where ranks begin with different ones."""
    if ranks.count == 1:
        return
    state = [tensor.detach().cpu().contiguous().view(-1) for tensor in model.state_dict().values()]
    first, *others = ranks.said(_digest(*(memoryview(tensor.view(torch.uint8).numpy()) for tensor in state)))
    if differing := [rank for rank, other in enumerate(others, 1) if other != first]:
        raise ConfigError(
            f"other weights than those of the first rank are those of {named(differing)}; make the model draw from "
            "PyTorch's generator alone, or give the same --weights to all"
        )


def check_seen(ranks: Ranks, folder: RunFolder) -> None:
    """Raise `ConfigError` where a rank does not see what the first one has written."""
    end = time.monotonic() + _SEEN_SECONDS
    while not folder.checkpoint.exists() and time.monotonic() < end:
        time.sleep(0.1)
    with ranks.together():
        if not folder.checkpoint.exists():
            raise ConfigError(
                f"rank {ranks.index} does not see what the first one writes into {folder.path}; give an --out on a "
                "disk that all of them see"
            )


def _digest(*parts: bytes | memoryview) -> str:
    digest = hashlib.sha256()
    for part in parts:
        digest.update(part)
    return digest.hexdigest()


def _run_found(step: int | None) -> str:
    return "no run" if step is None else f"a run after step {step}"
