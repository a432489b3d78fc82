"""Runs one tile of a stage: every field on its crop, in graph order, freeing crops after their last reader."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

import torch

from gigagrad.allowances import ANNOUNCED_BYTES
from gigagrad.boxes import Box, Span
from gigagrad.execution.refusals import explained
from gigagrad.execution.rounding_error import Watch
from gigagrad.graphs import FIELD_BINS, MOMENTS, Call, Graph, Site, lookup
from gigagrad.graphs.crops import part
from gigagrad.graphs.graph import fill
from gigagrad.graphs.operators import call as call_operator
from gigagrad.plans import Stage, TileGeometry
from gigagrad.plans.memory import crop_bytes, workspace_bytes
from gigagrad.stores import Rounding


@dataclass(frozen=True, slots=True, eq=False)
class TileInputs:
    """What a tile is computed from, by node id. Backward, the shares of the stage's kept fields come along."""

    crops: dict[int, torch.Tensor]
    """Of the fields that the stage reads."""
    cotangents: dict[int, torch.Tensor]
    """Of the kept fields' shares, from later stages."""
    stored: dict[int, torch.Tensor]
    """The kept fields' shares themselves."""


class StageProgram:
    """A stage made ready to run: calls, rows and the last reader of every crop."""

    def __init__(
        self,
        graph: Graph,
        stage: Stage,
        device: torch.device,
        roundings: Mapping[int, Rounding] | None = None,
        make_room: Callable[[int], None] | None = None,
    ) -> None:
        self.graph = graph
        self.stage = stage
        self.device = device
        self._roundings = roundings or {}
        """Of kept fields: what is computed from them here is computed from what their stores will give back."""
        self._make_room = make_room
        """Called with the bytes of every block before it is taken, but for the smallest."""
        self.targets = stage.targets(graph)
        self._calls = [Call(graph[i], graph.operands(graph[i])) for i in stage.fields]
        self._silent = frozenset(i for i in stage.kept if lookup(graph[i].op).backward_without_output)
        self._operands = {call.node.id: {operand.id for operand in call.operands} for call in self._calls}

    def run(
        self,
        tile: TileGeometry,
        crops: dict[int, torch.Tensor],
        globals_: dict[int, torch.Tensor],
        *,
        silent: frozenset[int] = frozenset(),
        watch: Watch | None = None,
    ) -> dict[int, torch.Tensor]:
        """The tile's share of every target that has one, by node id. `crops` of the fields read is emptied.

        With autograd on, the results carry the tape back to whichever of `crops` and `globals_` ask for gradients; the
        values of `silent` targets are not computed then.
        """
        values: dict[int, torch.Tensor] = dict(crops)
        crops.clear()
        last_reader = self._last_readers(tile)
        for call in self._calls:
            node_id = call.node.id
            if tile.box(node_id) is None:
                continue
            inputs = self._inputs(call, tile, values, globals_)
            self._announce(tile, node_id, crop_bytes(self.graph, tile, node_id))
            values[node_id] = self._evaluate(call, tile, inputs, asked=node_id not in silent)
            self._announce_gradients(tile, node_id, values[node_id], inputs)
            if watch is not None and node_id in watch:
                read = inputs[0]
                assert read is not None
                watch.attach(node_id, read, values[node_id])
            del inputs
            if node_id in self._roundings and node_id not in silent:
                values[node_id] = self._rounded(node_id, values[node_id], tile)
            for operand in self._operands[node_id]:
                if last_reader.get(operand) == node_id and operand not in self.targets:
                    values.pop(operand, None)
        return {
            target: _crop(self.graph, target, values[target], tile, tile.wanted(target).y, tile.wanted(target).x)
            for target in self.targets
            if not tile.wanted(target).empty
        }

    def partial_sums(
        self,
        tile: TileGeometry,
        shares: dict[int, torch.Tensor],
        known: Mapping[int, torch.Tensor] = MappingProxyType({}),
    ) -> dict[int, torch.Tensor]:
        """The tile's contribution to each reduction of the stage whose field has a share. Those whose whole values are
        `known` are wanted for their gradients only.
        """
        sums = {}
        for reduction in self.stage.reductions:
            node = self.graph[reduction]
            field = node.operands[0]
            if field in shares:
                arguments = {**node.arguments, "field": shares[field]}
                if node.op == MOMENTS:
                    arguments["known"] = known.get(reduction)
                if node.op == FIELD_BINS:
                    wanted = tile.wanted(field)
                    for name, span in (("weights_y", wanted.y), ("weights_x", wanted.x)):
                        weights = self.graph.constants[self.graph[node.arguments[name].id].arguments["name"]]
                        arguments[name] = weights[:, span.start : span.stop].to(self.device)
                with explained(node):
                    sums[reduction] = call_operator(node.op, arguments)
        return sums

    def run_for_gradient(
        self,
        tile: TileGeometry,
        inputs: TileInputs,
        globals_: dict[int, torch.Tensor],
        cotangents: dict[int, torch.Tensor],
        watch: Watch | None = None,
        known: Mapping[int, torch.Tensor] = MappingProxyType({}),
    ) -> tuple[dict[int, torch.Tensor], list[torch.Tensor], list[torch.Tensor]]:
        """Partial sums (off the tape), and the tensors to pull back with their cotangents.

        Where the sums are `known`, those that are returned mean nothing.
        A kept field's share gets its cotangent from later stages and from its own reductions. Where its operator needs
        no output for its gradient, the share is not computed again: what the reductions need of it is stored.
        """
        with torch.enable_grad():
            shares = self.run(tile, inputs.crops, globals_, silent=self._silent & inputs.stored.keys(), watch=watch)
            stored = {i: share.requires_grad_() for i, share in inputs.stored.items() if i in self._silent}
            sums = self.partial_sums(tile, {**shares, **stored}, known)
        outputs = {i: shares[i] for i in inputs.cotangents if i in shares and shares[i].requires_grad}
        seeds = {i: inputs.cotangents[i] for i in outputs}
        pulled: dict[int, list[int]] = {}
        for reduction in cotangents:
            if reduction in sums and sums[reduction].requires_grad:
                field = self.graph[reduction].operands[0]
                if field in stored:
                    pulled.setdefault(field, []).append(reduction)
                else:
                    outputs[reduction], seeds[reduction] = sums[reduction], cotangents[reduction]
        for field, reductions in pulled.items():
            if field in outputs:
                (found,) = torch.autograd.grad(
                    [sums[r] for r in reductions], stored[field], [cotangents[r] for r in reductions]
                )
                seeds[field] = seeds[field] + found
        sums = {i: value.detach() for i, value in sums.items()}
        return sums, list(outputs.values()), list(seeds.values())

    def _announce(self, tile: TileGeometry, node_id: int, nbytes: int) -> None:
        """Results of so many bytes, and what the operator takes for itself."""
        if self._make_room is not None and nbytes >= ANNOUNCED_BYTES:
            self._make_room(nbytes + workspace_bytes(self.graph, tile, node_id))

    def _announce_gradients(
        self, tile: TileGeometry, node_id: int, value: torch.Tensor, inputs: list[torch.Tensor | None]
    ) -> None:
        """The same of the gradients that are made once the value is pulled back."""
        if self._make_room is not None and value.grad_fn is not None:
            nbytes = sum(x.nbytes for x in inputs if x is not None and x.requires_grad)
            if nbytes >= ANNOUNCED_BYTES:
                value.grad_fn.register_prehook(lambda _: self._announce(tile, node_id, nbytes))

    def _rounded(self, node_id: int, value: torch.Tensor, tile: TileGeometry) -> torch.Tensor:
        box, axes = tile.box(node_id), self.graph[node_id].axes
        assert box is not None
        assert axes is not None
        straight_through: Any = _StraightThrough.apply
        rounded: torch.Tensor = straight_through(value, self._roundings[node_id], box, axes)
        return rounded

    def _last_readers(self, tile: TileGeometry) -> dict[int, int]:
        readers = {}
        for call in self._calls:
            if tile.box(call.node.id) is not None:
                for operand in self._operands[call.node.id]:
                    readers[operand] = call.node.id
        return readers

    def _inputs(
        self, call: Call, tile: TileGeometry, values: dict[int, torch.Tensor], globals_: dict[int, torch.Tensor]
    ) -> list[torch.Tensor | None]:
        """By position, not by id: an operator may read the same field twice with different spans. None: not read."""
        _, operands = tile.site(call.node.id)
        return [
            globals_[operand.id]
            if not operand.is_field
            else None
            if spans is None
            else _crop(self.graph, operand.id, values[operand.id], tile, *spans)
            for operand, spans in zip(call.operands, operands, strict=True)
        ]

    def _evaluate(
        self, call: Call, tile: TileGeometry, inputs: list[torch.Tensor | None], *, asked: bool
    ) -> torch.Tensor:
        out, operands = tile.site(call.node.id)
        remaining = iter(inputs)
        arguments = {name: fill(value, remaining) for name, value in call.node.arguments.items()}
        if arguments.get("device") is not None:
            arguments["device"] = self.device
        with explained(call.node):
            return lookup(call.node.op).run(call, arguments, Site(out, operands, asked))


class _StraightThrough(torch.autograd.Function):
    """Rounded values; the cotangent passes as if they had not been (docs/math.md)."""

    @staticmethod
    def forward(ctx: Any, value: torch.Tensor, rounding: Rounding, box: Box, axes: tuple[int, int]) -> torch.Tensor:
        return rounding.round(value, box, axes)

    @staticmethod
    def backward(ctx: Any, cotangent: torch.Tensor) -> tuple[torch.Tensor, None, None, None]:
        return cotangent, None, None, None


def _crop(graph: Graph, node_id: int, value: torch.Tensor, tile: TileGeometry, y: Span, x: Span) -> torch.Tensor:
    """The part `[y) x [x)` of a computed crop, as a view."""
    starts = [wanted.start - axis.spans[node_id].start for wanted, axis in ((y, tile.y), (x, tile.x))]
    return part(value, graph[node_id].spatial, starts, (y.length, x.length))
