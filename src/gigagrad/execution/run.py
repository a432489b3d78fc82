"""Runs a plan over one image: sweeps of the stages, sums of the reductions, cotangents, gradients.

Map-reduce autodiff. Forward, each stage maps over its tiles and adds up partial sums. Between sweeps the global values
(arithmetic on reductions and parameters) are computed once, with autograd's tape. Backward, each tile runs again with
autograd on and its vector-Jacobian product, for the final cotangents of the stage's reductions, is added into one
float64 sum per parameter. Tiles are disjoint, so the total is the whole image's gradient.

Tiles run in a fixed order and sums are in float64, so that two runs of one plan give the same bits.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch

from gigagrad.boxes import Box
from gigagrad.events import Events, TileDone
from gigagrad.execution.parallel import in_order
from gigagrad.execution.process import Trimmer
from gigagrad.execution.sources import Crops, Source, read_ahead
from gigagrad.execution.tile import StageProgram
from gigagrad.graphs import FIELD_SUM, Graph
from gigagrad.graphs.graph import substitute
from gigagrad.graphs.operators import call as call_operator
from gigagrad.plans import Grid, Plan, Stage, TileGeometry
from gigagrad.plans.schedule import Cotangents, differentiable_reductions, last_cotangents

Values = dict[int, torch.Tensor]


@dataclass(frozen=True, slots=True, eq=False)
class Prepared:
    """A captured graph with its plan, ready to run on any image of the same size."""

    graph: Graph
    plan: Plan
    stages: tuple[Stage, ...]
    device: torch.device

    def grid(self, stage: Stage) -> Grid:
        return Grid(self.graph, stage, self.plan.stages[stage.index].tile)


class Run:
    """One forward, or forward and backward, of one image. `stored` looks up parameters and buffers."""

    def __init__(
        self,
        prepared: Prepared,
        sources: dict[str, Source],
        stored: Callable[[str, str], torch.Tensor],
        events: Events,
        *,
        backward: bool,
    ) -> None:
        self._prepared = prepared
        self._graph = prepared.graph
        self._sources = sources
        self._events = events
        self._backward = backward
        self._values: Values = {}
        self._sums: Values = {}
        self._gradients: Values = {}
        self._cotangents: Values = {}
        plan = prepared.plan
        largest = max((stage.tile_peak_bytes for stage in plan.stages), default=0)
        self._trimmer = (
            Trimmer(plan.predicted_peak_bytes - plan.workers * largest) if prepared.device.type == "cpu" else None
        )
        self._done = 0
        self._total = plan.tile_count
        for node in self._graph.nodes:
            if node.is_source and not node.is_field:
                name = node.arguments["name"]
                source = sources.get(node.op)
                constant = self._graph.constants.get(name) if node.op == "constant" else None
                value = source.tensor if source is not None else constant
                value = stored(node.op, name) if value is None else value
                value = value.detach().to(prepared.device)
                self._values[node.id] = value.requires_grad_(node.differentiable and backward)
        self._compute_globals()

    @property
    def output(self) -> torch.Tensor:
        """The value of a graph whose output has no spatial axes (the loss, a class score), off the tape."""
        return self._values[self._graph.output].detach()

    @property
    def gradients(self) -> dict[int, torch.Tensor]:
        """The finished float64 gradients by parameter node."""
        return {i: g for i, g in self._gradients.items() if self._graph[i].op == "parameter"}

    def run(self) -> None:
        """Every pass of the plan (of a plan that delivers no field: see `stream`)."""
        for step in self._prepared.plan.passes:
            stage = self._prepared.stages[step.stage]
            if step.phase == "forward":
                for _ in self._sweep_forward(stage):
                    pass
            elif step.phase == "one pass":
                self._sweep_both(stage)
            else:
                self._sweep_backward(stage)
        if self._backward:
            self._finish_globals()

    def stream(self) -> Iterator[tuple[Box, torch.Tensor]]:
        """The boxes and crops of the output field, tile by tile in row-major order."""
        for stage in self._prepared.stages:
            yield from self._sweep_forward(stage)

    # Sweeps

    def _sweep_forward(self, stage: Stage) -> Iterator[tuple[Box, torch.Tensor]]:
        program = self._program(stage)
        boundary = self._boundary(stage, gradients=False)

        def work(item: tuple[TileGeometry, Crops]) -> tuple[TileGeometry, Values, torch.Tensor | None]:
            tile, crops = item
            with torch.no_grad():
                shares = program.run(tile, crops, boundary)
                output = shares.get(stage.output) if stage.output is not None else None
                return tile, program.partial_sums(shares), output

        for tile, sums, output in in_order(self._tiles(stage), work, self._prepared.plan.workers):
            self._add_sums(sums)
            self._report("forward")
            if stage.output is not None and output is not None:
                yield tile.wanted(stage.output), output
        self._finish_sums(stage)

    def _sweep_both(self, stage: Stage) -> None:
        rule = last_cotangents(self._graph, stage)
        varying = differentiable_reductions(self._graph, stage)
        if rule is Cotangents.AFFINE:
            cotangents = self._constant_cotangents(stage)
        else:
            node = self._graph[varying[0]]
            cotangents = {varying[0]: torch.ones(node.shape, dtype=node.dtype, device=self._prepared.device)}
        self._sweep_gradients(stage, cotangents, add_sums=True)
        self._finish_sums(stage)
        if rule is Cotangents.SCALED:
            scale = self._reduction_cotangents(varying)[varying[0]].to(torch.float64)
            for gradient in self._gradients.values():
                gradient.mul_(scale.reshape(()))

    def _sweep_backward(self, stage: Stage) -> None:
        self._sweep_gradients(
            stage, self._reduction_cotangents(differentiable_reductions(self._graph, stage)), add_sums=False
        )

    def _sweep_gradients(self, stage: Stage, cotangents: Values, *, add_sums: bool) -> None:
        program = self._program(stage)
        boundary = self._boundary(stage, gradients=True)
        leaves = [i for i in stage.globals if self._graph[i].differentiable]

        def work(item: tuple[TileGeometry, Crops]) -> tuple[Values, Values]:
            tile, crops = item
            with torch.enable_grad():
                sums = program.partial_sums(program.run(tile, crops, boundary))
            outputs = [i for i in cotangents if i in sums and sums[i].requires_grad]
            gradients: Values = {}
            if outputs and leaves:
                found = torch.autograd.grad(
                    [sums[i] for i in outputs],
                    [boundary[i] for i in leaves],
                    [cotangents[i] for i in outputs],
                    allow_unused=True,
                )
                gradients = {i: g for i, g in zip(leaves, found, strict=True) if g is not None}
            return {i: value.detach() for i, value in sums.items()}, gradients

        for sums, gradients in in_order(self._tiles(stage), work, self._prepared.plan.workers):
            for leaf, gradient in gradients.items():
                self._add(self._gradients, leaf, gradient)
            if add_sums:
                self._add_sums(sums)
            self._report("backward")

    def _program(self, stage: Stage) -> StageProgram:
        return StageProgram(self._graph, stage, self._prepared.device)

    def _boundary(self, stage: Stage, *, gradients: bool) -> Values:
        """The globals a stage reads, cut off the tape: for a tile they are leaves."""
        layout = self._prepared.plan.memory_format == "channels_last"
        boundary = {}
        for i in stage.globals:
            value = self._values[i].detach()
            if layout and value.ndim == 4 and value.is_contiguous():  # an expanded view stays one
                value = value.contiguous(memory_format=torch.channels_last)
            boundary[i] = value.requires_grad_(gradients and self._graph[i].differentiable)
        return boundary

    def _tiles(self, stage: Stage) -> Iterator[tuple[TileGeometry, Crops]]:
        grid = self._prepared.grid(stage)
        return read_ahead((grid[i] for i in grid.order()), lambda tile: self._read(stage, tile))

    def _read(self, stage: Stage, tile: TileGeometry) -> Crops:
        layout = getattr(
            torch, "channels_last" if self._prepared.plan.memory_format == "channels_last" else "contiguous_format"
        )
        crops = {}
        for i in stage.images:
            box = tile.box(i)
            if box is not None:
                crop = self._sources[self._graph[i].op].read(box)
                crops[i] = crop.to(self._prepared.device).contiguous(memory_format=layout)
        return crops

    def _report(self, phase: str) -> None:
        self._done += 1
        if self._trimmer is not None:
            self._trimmer.tile_done()
        self._events.emit(TileDone(phase, self._done, self._total))

    # Sums

    def _add(self, sums: Values, key: int, value: torch.Tensor) -> None:
        total = sums.get(key)
        if total is None:
            sums[key] = value.detach().to(torch.float64, copy=True, memory_format=torch.contiguous_format)
        else:
            total.add_(value.detach())

    def _add_sums(self, sums: Values) -> None:
        for reduction, value in sums.items():
            self._add(self._sums, reduction, value)

    def _finish_sums(self, stage: Stage) -> None:
        """Turn the finished sums into values of the graph and compute the globals that waited for them."""
        for reduction in stage.reductions:
            node = self._graph[reduction]
            total = self._sums.pop(reduction)
            value = total.to(node.dtype)
            self._values[reduction] = value.requires_grad_(node.differentiable and self._backward)
        self._compute_globals()

    # Globals

    def _compute_globals(self) -> None:
        """Every global whose operands are known. With gradients wanted, the tape reaches back to the sums."""
        with torch.set_grad_enabled(self._backward):
            for node in self._graph.nodes:
                if node.is_field or node.id in self._values or node.op == FIELD_SUM:
                    continue
                if all(i in self._values for i in node.operands):
                    self._values[node.id] = self._evaluate(node.id, self._values)

    def _evaluate(self, node_id: int, values: Values) -> torch.Tensor:
        node = self._graph[node_id]
        arguments = {name: substitute(value, values) for name, value in node.arguments.items()}
        if arguments.get("device") is not None:
            arguments["device"] = self._prepared.device
        result = call_operator(node.op, arguments)
        value: torch.Tensor = result[0] if isinstance(result, tuple) else result
        return value

    def _outputs(self) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
        """What the tape of the globals is pulled back from: the loss, and every global that fields read, with the
        cotangents summed over tiles so far."""
        tensors, cotangents = [], []
        output = self._values.get(self._graph.output)
        if output is not None and output.requires_grad:
            tensors.append(output)
            cotangents.append(torch.ones_like(output))
        for i, gradient in self._gradients.items():
            value = self._values[i]
            if not self._graph[i].is_source and value.requires_grad:
                tensors.append(value)
                cotangents.append(gradient.to(value.dtype))
        return tensors, cotangents

    def _pull_back(self, inputs: tuple[int, ...]) -> Values:
        """Cotangents of global leaves through the tape of the globals, of those that the tape reaches."""
        tensors, cotangents = self._outputs()
        leaves = [self._values[i] for i in inputs]
        if not tensors or not leaves:
            return {}
        gradients = torch.autograd.grad(tensors, leaves, cotangents, retain_graph=True, allow_unused=True)
        return {i: gradient for i, gradient in zip(inputs, gradients, strict=True) if gradient is not None}

    def _reduction_cotangents(self, reductions: tuple[int, ...]) -> Values:
        """Zero for the reductions that nothing depends on."""
        return {i: torch.zeros_like(self._values[i]) for i in reductions} | self._pull_back(reductions)

    def _constant_cotangents(self, stage: Stage) -> Values:
        """The cotangents of the last stage's reductions where they do not depend on any of its sums."""
        varying = differentiable_reductions(self._graph, stage)
        values = dict(self._values)
        leaves = {}
        for reduction in stage.reductions:
            node = self._graph[reduction]
            leaf = torch.zeros(node.shape, dtype=node.dtype, device=self._prepared.device)
            values[reduction] = leaves[reduction] = leaf.requires_grad_(node.differentiable)
        with torch.enable_grad():
            for node in self._graph.nodes:
                if not node.is_field and node.id not in values:
                    values[node.id] = self._evaluate(node.id, values)
        gradients = torch.autograd.grad(values[self._graph.output], [leaves[i] for i in varying], allow_unused=True)
        return {
            i: torch.zeros_like(leaves[i]) if gradient is None else gradient
            for i, gradient in zip(varying, gradients, strict=True)
        }

    def _finish_globals(self) -> None:
        """Add what reaches the parameters through the globals (a linear head, a normalised weight).

        A parameter that nothing reaches, here or in a tile, gets no gradient at all, as in PyTorch.
        """
        parameters = tuple(
            node.id for node in self._graph.nodes if node.op == "parameter" and self._values[node.id].requires_grad
        )
        for i, gradient in self._pull_back(parameters).items():
            self._add(self._gradients, i, gradient)
