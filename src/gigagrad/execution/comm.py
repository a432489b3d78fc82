"""Send between passes what ranks need of each other: halos of kept fields, sums, cotangents beyond their own.

An `Exchange` ends a pass: a packed message for each pair of ranks, in an order that both know from the plan. A `Gather`
puts together what is large, and at the end the gradients of parameters.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

import torch

from gigagrad.execution.messages import Boxes, Shape, Shares, Sums, exchange
from gigagrad.execution.ordered_sum import OrderedSum
from gigagrad.execution.overlaps import Overlap
from gigagrad.execution.prepared import Prepared
from gigagrad.execution.scalars import Values
from gigagrad.graphs import Merge, merge_of
from gigagrad.plans import Parts, Stage, Tiles
from gigagrad.plans.parts import before, behind
from gigagrad.plans.program import Exchange, Gather, Sum
from gigagrad.plans.sums import gradient_dtype, share_of, sum_dtype
from gigagrad.ranks import Ranks
from gigagrad.stores import Store


@dataclass(frozen=True, slots=True, eq=False)
class PassResult:
    """A pass of this rank, before ranks have exchanged anything."""

    step: Tiles
    stage: Stage
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
        gathers = [step for step in prepared.plan.steps if isinstance(step, Gather) and step.gradients]
        self._late = frozenset(i for step in gathers for i in step.nodes)

    def own(self, step: Tiles) -> tuple[Parts, range]:
        """Return the parts of a pass, and which of them this rank computes."""
        return self._prepared.parts(step.stage), step.own(self._ranks.index)

    def new_sums(self, step: Tiles) -> OrderedSum:
        return OrderedSum(self._dtype, self._merges(step.stage), before(*self.own(step)))

    def new_overlap(self, step: Tiles, parts: Parts, field: int, store: Store) -> Overlap:
        elsewhere = parts.reached_before(field, step.own(self._ranks.index).start)
        return Overlap(store, parts, field, elsewhere, (self._device, self._prepared.layout))

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
        sums = [None if some is None else self._sums(result.step, some, how, step.parts) for some, how in of_both]
        boxes = Boxes(self._ranks.index, step.transfers, result.stores, result.overlaps)
        exchange(self._ranks, [*filter(None, sums), boxes])
        return [{} if one is None else one.total for one in sums]

    def gather(self, step: Gather, values: Sequence[Values]) -> None:
        """Put together, in place, what each rank has a share of."""
        if step.gradients:
            shapes = {i: (self._graph[i].shape, gradient_dtype(self._graph, i)) for i in step.nodes}
        else:
            shapes = self.shapes(step.nodes)
        of_whom = {i: each for each in values for i in step.nodes if i in each}
        message = Shares(self._ranks, {i: each.pop(i) for i, each in of_whom.items()}, shapes, self._device)
        exchange(self._ranks, [message])
        for i, whole in message.whole.items():
            of_whom[i][i] = whole

    def share(self, parameter: int, gradient: torch.Tensor) -> torch.Tensor:
        """Return what this rank has of a parameter's gradient until the step is over."""
        if parameter not in self._late:
            return gradient
        return gradient.contiguous().view(-1)[share_of(gradient.numel(), self._ranks.index, self._ranks.count)]

    def is_whole(self, node: int) -> bool:
        """Say whether every rank has all of a sum of gradients."""
        return node not in self._late

    def _sums(self, step: Tiles, sums: OrderedSum, how: Sum, parts: Sequence[Sequence[int]]) -> Sums:
        own = sums.joined(behind(*self.own(step))) if how.all else []
        total = OrderedSum(self._dtype, self._merges(step.stage))
        others = parts if how.all else [()] * self._ranks.count
        return Sums(self._ranks, own, others, self.shapes(how.all), how.shared, total, self._device)

    def _merges(self, stage: int) -> dict[int, Merge]:
        reductions = self._prepared.plan.stages[stage].computes.reductions
        merges = ((i, merge_of(self._graph[i])) for i in reductions)
        return {i: merge for i, merge in merges if merge is not None}
