"""Runs one tile of a stage: every field on its crop, in graph order, freeing crops after their last reader."""

from __future__ import annotations

import torch

from gigagrad.boxes import Span
from gigagrad.graphs import Call, Graph, Site, lookup
from gigagrad.graphs.graph import fill
from gigagrad.graphs.operators import call as call_operator
from gigagrad.plans import Stage, TileGeometry


class StageProgram:
    """A stage made ready to run: calls, rows and the last reader of every crop."""

    def __init__(self, graph: Graph, stage: Stage, device: torch.device) -> None:
        self.graph = graph
        self.stage = stage
        self.device = device
        self.targets = stage.targets(graph)
        self._calls = [Call(graph[i], graph.operands(graph[i])) for i in stage.fields]
        self._operands = {call.node.id: {operand.id for operand in call.operands} for call in self._calls}

    def run(
        self, tile: TileGeometry, crops: dict[int, torch.Tensor], globals_: dict[int, torch.Tensor]
    ) -> dict[int, torch.Tensor]:
        """The tile's share of every target that has one, by node id. `crops` holds the images' crops; it is emptied.

        With autograd on, the results carry the tape back to whichever of `globals_` ask for gradients.
        """
        values: dict[int, torch.Tensor] = dict(crops)
        crops.clear()
        last_reader = self._last_readers(tile)
        for call in self._calls:
            node_id = call.node.id
            if tile.box(node_id) is None:
                continue
            values[node_id] = self._evaluate(call, tile, values, globals_)
            for operand in self._operands[node_id]:
                if last_reader.get(operand) == node_id and operand not in self.targets:
                    values.pop(operand, None)
        return {
            target: _crop(self.graph, target, values[target], tile, tile.wanted(target).y, tile.wanted(target).x)
            for target in self.targets
            if not tile.wanted(target).empty
        }

    def partial_sums(self, shares: dict[int, torch.Tensor]) -> dict[int, torch.Tensor]:
        """The tile's contribution to each reduction of the stage."""
        sums = {}
        for reduction in self.stage.reductions:
            node = self.graph[reduction]
            if node.operands[0] in shares:
                arguments = {**node.arguments, "field": shares[node.operands[0]]}
                sums[reduction] = call_operator(node.op, arguments)
        return sums

    def _last_readers(self, tile: TileGeometry) -> dict[int, int]:
        readers = {}
        for call in self._calls:
            if tile.box(call.node.id) is not None:
                for operand in self._operands[call.node.id]:
                    readers[operand] = call.node.id
        return readers

    def _evaluate(
        self,
        call: Call,
        tile: TileGeometry,
        values: dict[int, torch.Tensor],
        globals_: dict[int, torch.Tensor],
    ) -> torch.Tensor:
        out, operands = tile.site(call.node.id)
        # By position, not by id: an operator may read the same field twice with different spans.
        inputs = iter(
            [
                globals_[operand.id]
                if not operand.is_field
                else None
                if spans is None
                else _crop(self.graph, operand.id, values[operand.id], tile, *spans)
                for operand, spans in zip(call.operands, operands, strict=True)
            ]
        )
        arguments = {name: fill(value, inputs) for name, value in call.node.arguments.items()}
        if arguments.get("device") is not None:
            arguments["device"] = self.device
        row = lookup(call.node.op)
        assert row is not None
        return row.run(call, arguments, Site(out, operands))


def _crop(graph: Graph, node_id: int, value: torch.Tensor, tile: TileGeometry, y: Span, x: Span) -> torch.Tensor:
    """The part `[y) x [x)` of a computed crop, as a view."""
    axes = graph[node_id].axes
    assert axes is not None
    for axis, wanted, computed in ((axes[0], y, tile.y.spans[node_id]), (axes[1], x, tile.x.spans[node_id])):
        if wanted != computed:
            value = value.narrow(axis, wanted.start - computed.start, wanted.length)
    return value
