"""The passes that give gradients: what each stage's sweep is given, and where what it delivers goes."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from math import prod

import torch

from gigagrad.boxes import Box
from gigagrad.devices import MemoryWatch
from gigagrad.execution.cotangent_unit import multiplied
from gigagrad.execution.exchange import Exchange
from gigagrad.execution.fields import Fields
from gigagrad.execution.prepared import Prepared
from gigagrad.execution.sweeps import Piece, Sweeps
from gigagrad.execution.tape import Tape, Values
from gigagrad.graphs import FIELD_BINS
from gigagrad.plans import Stage
from gigagrad.plans.schedule import Cotangents, differentiable_reductions, last_cotangents


class Backward:
    """Of one run. Every pass may raise CotangentOverflow, where the run should begin anew."""

    def __init__(
        self,
        prepared: Prepared,
        sweeps: Sweeps,
        tape: Tape,
        fields: Fields,
        exchange: Exchange,
        watch: MemoryWatch,
    ) -> None:
        self._prepared, self._graph = prepared, prepared.graph
        self._sweeps, self._tape, self._fields, self._watch = sweeps, tape, fields, watch
        self._exchange = exchange
        self._started = False

    def one_pass(self, stage: Stage) -> Iterator[Piece]:
        """The last stage, forward and backward at once: its cotangents are known beforehand, but for a factor.

        Yields strips as `Sweeps.gradients`.
        """
        rule = last_cotangents(self._graph, stage)
        varying = differentiable_reductions(self._graph, stage)
        if rule is Cotangents.AFFINE:
            cotangents = self._tape.constant_cotangents(stage)
        else:
            node = self._graph[varying[0]]
            device = self._prepared.device.torch_device
            cotangents = {varying[0]: torch.ones(node.shape, dtype=node.dtype, device=device)}
        self._settle(stage, cotangents)
        totals = yield from self._sweeps.gradients(stage, cotangents, merge=True)
        self._check_totals(totals)
        self._start()
        if rule is Cotangents.SCALED:
            self._pull(self._tape.level_of(stage))
            found = self._tape.cotangent(varying[0])
            scale = 0.0 if found is None else found.item()
            for total in totals.values():
                total.mul_(scale)
            self._sweeps.errors.scale(stage.fields, scale)
        self._give(totals)

    def sweep(self, stage: Stage) -> Iterator[Piece]:
        """A stage whose values are all known: computed again, and pulled back. Yields as `one_pass`."""
        self._start()
        self._pull(self._tape.level_of(stage))
        cotangents = {}
        for reduction in differentiable_reductions(self._graph, stage):
            found = self._tape.cotangent(reduction)
            value = self._tape.values[reduction]
            cotangents[reduction] = torch.zeros_like(value) if found is None else found
        for field in stage.kept:
            for gathering in self._graph.gathers(field):
                whole = self._tape.cotangent(gathering)
                if whole is not None:
                    node = self._graph[field]
                    self._fields.cotangents[field].add(Box.whole(node.size(0), node.size(1)), whole)
        self._settle(stage, cotangents)
        totals = yield from self._sweeps.gradients(stage, cotangents, merge=False)
        self._check_totals(totals)
        self._give(totals)

    def finish(self) -> None:
        """What is left on the tape."""
        self._start()
        self._pull(0)
        self._exchange.put_together(self._tape.gradients)
        self._check((*self._tape.gradients.values(), *self.input_gradients.values()))

    @property
    def input_gradients(self) -> dict[str, torch.Tensor]:
        """The gradients of the images and labels that asked for one, by the name of the input."""
        found = {}
        for node in self._graph.nodes:
            if node.op == "target" and not node.is_field and node.differentiable:
                label = self._tape.cotangent(node.id)
                if label is not None:
                    found[node.arguments["name"]] = label
            elif node.is_field and node.is_source and node.differentiable:
                store = self._fields.cotangents.get(node.id)
                gradient = store.whole() if store is not None else None
                for gathering in self._graph.gathers(node.id):
                    whole = self._tape.cotangent(gathering)
                    if whole is not None:
                        gradient = whole if gradient is None else gradient + whole
                if gradient is not None:
                    found[node.arguments["name"]] = self._tape.unit.out_of(gradient).to(gradient.dtype)
        return found

    def _start(self) -> None:
        if not self._started:
            self._tape.start()
            self._started = True

    def _settle(self, stage: Stage, cotangents: Values) -> None:
        """The unit of cotangents in float16, by those that enter fields now and the pixels of a tile that sum them."""
        if not cotangents or not self._tape.unit.is_needed:
            return
        tile, pixels, entering = self._prepared.grid(stage)[0], 1, []
        for i, cotangent in cotangents.items():
            reduction, field = self._graph[i], self._graph[self._graph[i].operands[0]]
            pixels = max(pixels, tile.wanted(field.id).area)
            # A bin is an average of pixels: each of them gets a share of its cotangent.
            share = prod(reduction.shape) / prod(field.shape) if reduction.op == FIELD_BINS else 1
            entering.append(multiplied(cotangent, share))
        self._tape.unit.settle(entering, pixels=pixels)

    def _check_totals(self, totals: Values) -> None:
        """What all ranks have, so that all begin anew; shares are looked at when they are put together."""
        self._check(total for node_id, total in totals.items() if self._exchange.is_whole(node_id))

    def _check(self, gradients: Iterable[torch.Tensor]) -> None:
        if self._tape.unit.is_needed and self._tape.values[self._graph.output].isfinite().all():
            self._tape.unit.check(gradients)

    def _pull(self, level: int) -> None:
        """Pull back on the tape; the gradients of what whole-field operators read are new, all at once."""
        self._watch.make_room(self._tape.coming_bytes)
        self._tape.pull(level)

    def _give(self, totals: Values) -> None:
        for node_id in tuple(totals):
            give = self._tape.give_share if self._graph[node_id].op == "parameter" else self._tape.give
            give(node_id, totals.pop(node_id))
        self._tape.pull_parameters()
