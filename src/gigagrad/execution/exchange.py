"""What the ranks of a run tell each other between sweeps: halos of kept fields, sums, cotangents beyond their own.

One meeting ends a pass: a packed message for each pair of ranks, in an order that both know from the plan. One more
puts together what is large and needed at once, and one at the end the gradients of parameters.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

import torch

from gigagrad.execution.parcels import Cotangents, Halos, Shape, Shares, Sums, swap
from gigagrad.execution.part_sums import PartSums
from gigagrad.execution.prepared import Prepared
from gigagrad.execution.seams import Seam
from gigagrad.execution.tape import Values
from gigagrad.graphs import Merge, merge_of
from gigagrad.plans import Parts, Stage
from gigagrad.plans.joins import before, behind, joined
from gigagrad.plans.owners import Owners
from gigagrad.plans.stages import summed_globals
from gigagrad.plans.sums import Keys, gradient_dtype, keys_of, late_gradients, share_of, sum_dtype
from gigagrad.ranks import Ranks
from gigagrad.stores import Store


class Exchange:
    """Of one run. Every rank calls the same in the same order. Raises RankError."""

    def __init__(self, prepared: Prepared, owners: Owners, ranks: Ranks) -> None:
        self._problem, self._graph, self._owners, self._ranks = prepared.problem, prepared.graph, owners, ranks
        self._device, self._dtype = prepared.device.torch_device, prepared.device.sum_dtype
        self._layout = prepared.layout
        self._at_last = late_gradients(prepared.graph, prepared.stages) if ranks.count > 1 else []
        self._late = frozenset(i for some in self._at_last for i in some)

    def own(self, stage: Stage) -> tuple[Parts, range]:
        """The parts of a stage, and which of them this rank computes."""
        return self._owners.parts(stage.index), self._owners.own(stage.index, self._ranks.index)

    def new_sums(self, stage: Stage) -> PartSums:
        return PartSums(self._dtype, self._merges(stage), before(self._owners, stage.index, self._ranks.index))

    def new_seam(self, stage: Stage, parts: Parts, field: int, store: Store) -> Seam:
        elsewhere = self._owners.cotangents.elsewhere(stage.index, field, self._ranks.index)
        return Seam(store, parts, field, elsewhere, (self._device, self._layout))

    def shapes(self, nodes: Iterable[int]) -> dict[int, Shape]:
        """Of the sums of nodes."""
        return {i: (self._graph[i].shape, sum_dtype(self._problem, i)) for i in nodes}

    def end_forward(self, stage: Stage, stores: Mapping[int, Store], reduced: PartSums) -> Values:
        """A sweep is over: what the stage keeps gets its halos, and its reductions their values, which are returned."""
        keys = keys_of(self._problem, stage.reductions)
        sums = self._sums(stage, reduced, keys)
        swap(self._ranks, [sums, Halos(self._owners, self._ranks.index, stage.kept, stores)])
        return self._whole([(sums, keys)])[0]

    def end_backward(
        self,
        stage: Stage,
        stores: Mapping[int, Store],
        seams: Mapping[int, Seam],
        gradients: PartSums,
        reduced: PartSums | None,
    ) -> tuple[Values, Values]:
        """A sweep is over: cotangents come to whoever needs them next. Returns the values of reductions, if there are
        any, and the sums of the gradients of what is no field; of those of parameters this rank's share.
        """
        every = [(gradients, keys_of(self._problem, summed_globals(self._graph, stage)))]
        if reduced is not None:
            every.append((reduced, keys_of(self._problem, stage.reductions)))
        sums = [(self._sums(stage, some, keys), keys) for some, keys in every]
        cotangents = Cotangents(self._owners, self._ranks.index, stage.index, seams, stores)
        swap(self._ranks, [*(some for some, _ in sums), cotangents])
        totals, *values = self._whole(sums)
        return (values[0] if values else {}), totals

    def share(self, parameter: int, gradient: torch.Tensor) -> torch.Tensor:
        """What this rank has of a parameter's gradient until the step is over."""
        if parameter not in self._late:
            return gradient
        return gradient.contiguous().view(-1)[share_of(gradient.numel(), self._ranks.index, self._ranks.count)]

    def is_whole(self, node: int) -> bool:
        """Whether every rank has all of a sum of gradients."""
        return node not in self._late

    def put_together(self, gradients: Values) -> None:
        """The step is over: all ranks get the whole of what each has a share of."""
        for some in self._at_last:
            shapes = {i: (self._graph[i].shape, gradient_dtype(self._graph, i)) for i in some}
            gradients.update(self._put_together({i: gradients.pop(i) for i in some if i in gradients}, shapes))

    def _sums(self, stage: Stage, sums: PartSums, keys: Keys) -> Sums:
        own = sums.joined(behind(self._owners, stage.index, self._ranks.index)) if keys.all else []
        everybody = range(self._ranks.count)
        parts = [joined(self._owners, stage.index, rank) if keys.all else [] for rank in everybody]
        total = PartSums(self._dtype, self._merges(stage))
        return Sums(self._ranks, own, parts, self.shapes(keys.all), keys.shared, total, self._device)

    def _whole(self, sums: Sequence[tuple[Sums, Keys]]) -> list[Values]:
        """The totals, with what is cut put together again."""
        totals = [some.total for some, _ in sums]
        cut = [key for _, keys in sums for key in keys.cut]
        if cut:
            shares = {key: total.pop(key) for total in totals for key in cut if key in total}
            whole = self._put_together(shares, self.shapes(cut))
            for total, (_, keys) in zip(totals, sums, strict=True):
                total.update({key: whole[key] for key in keys.cut if key in whole})
        for total, (_, keys) in zip(totals, sums, strict=True):  # as they lie in memory wherever they were summed
            total.update({key: total[key].contiguous() for key in keys.whole + keys.cut if key in total})
        return totals

    def _put_together(self, shares: Values, shapes: Mapping[int, Shape]) -> Values:
        parcel = Shares(self._ranks, shares, shapes, self._device)
        swap(self._ranks, [parcel])
        return parcel.whole

    def _merges(self, stage: Stage) -> dict[int, Merge]:
        merges = ((i, merge_of(self._graph[i])) for i in stage.reductions)
        return {i: merge for i, merge in merges if merge is not None}
