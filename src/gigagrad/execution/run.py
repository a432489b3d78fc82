"""Runs a plan over one image: sweeps of the stages, sums of the reductions, cotangents, gradients.

Map-reduce autodiff. Forward, each stage maps over its tiles, merges partial reductions and keeps the fields that the
plan names. Between sweeps the global values are computed once, on a tape. Backward, each tile runs again with autograd
on: its vector-Jacobian product, for the final cotangents of the stage's reductions and of its kept fields, is added
into one float64 sum per parameter and into the cotangents of the fields it read. Tiles are disjoint, so the total is
the whole image's gradient.

Tiles run in a fixed order and sums are in float64, so that two runs of one plan give the same bits.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack
from math import prod
from typing import Any, TypeVar

import torch
from torch.utils._pytree import tree_unflatten

from gigagrad.boxes import Box
from gigagrad.events import Events, Notice, TileDone
from gigagrad.execution.allocator import Trimmer
from gigagrad.execution.cotangent_unit import multiplied
from gigagrad.execution.fields import Fields
from gigagrad.execution.parallel import TileThreads, in_order
from gigagrad.execution.prepared import Prepared
from gigagrad.execution.rounding_error import RoundingErrors, Watch, error_gains
from gigagrad.execution.sources import Source, read_ahead
from gigagrad.execution.tape import Tape, Values, add
from gigagrad.execution.tile import StageProgram, TileInputs
from gigagrad.execution.tracebacks import empty_frames
from gigagrad.graphs import FIELD_BINS, FIELD_MAX, GATHER
from gigagrad.plans import Stage, TileGeometry
from gigagrad.plans.memory import gradient_sum_bytes, largest_block_bytes
from gigagrad.plans.schedule import Cotangents, differentiable_reductions, last_cotangents
from gigagrad.stores import Quantised
from gigagrad.threads import SideThreads, uninterrupted

Totals = dict[int, torch.Tensor]
Swept = TypeVar("Swept")


_PRIOR = 0.1
"""The share of a step's tiles that the plan's own seconds stand for."""


class Run:
    """One forward, or forward and backward, of one image. `stored` looks up parameters and buffers.

    An interrupt may come at the first instruction of `__exit__`, too: `with Run(...) as run, closing(run)` closes it
    whenever a single one comes.
    """

    def __init__(
        self,
        prepared: Prepared,
        sources: dict[str, Source],
        stored: Callable[[str, str], torch.Tensor],
        events: Events,
        *,
        backward: bool,
        overflows: int = 0,
    ) -> None:
        self._prepared = prepared
        self._graph = prepared.graph
        self._sources = sources
        self._events = events
        self._closing = threading.Lock()
        self._threads, self._with_grad = torch.get_num_threads(), torch.is_grad_enabled()
        plan = prepared.plan
        kept = {field.node for field in plan.kept}
        self._tape = Tape(prepared.graph, kept, prepared.device, backward=backward, overflows=overflows)
        self._unit = self._tape.unit
        self._fields = Fields(prepared, sources, self._tape)
        roundings = self._fields.roundings.items()
        self._quantised = frozenset(i for i, rounding in roundings if isinstance(rounding, Quantised))
        self._rounding_errors = RoundingErrors(prepared.graph)
        # Kept from sweep to sweep: what a new thread's first operators set up takes longer than a small tile.
        self._reader = SideThreads(1, "gigagrad-read")
        self._workers = TileThreads(plan.workers) if plan.workers > 1 else None
        self._sums: Totals = {}
        on_cpu = prepared.device.type == "cpu"
        self._trimmer = Trimmer(plan.predicted_peak_bytes, plan.budget_bytes) if on_cpu else None
        self._tile_bytes = 0
        self._done = 0
        self._total = plan.tile_count
        self._began = 0.0
        # Of the step's predicted time: what is over, and what each tile of the pass adds to it.
        self._share = self._share_of_tile = 0.0
        for node in self._graph.nodes:
            if node.is_source and not node.is_field:
                name = node.arguments["name"]
                source = sources.get(name)
                constant = self._graph.constants.get(name) if node.op == "constant" else None
                value = source.tensor if source is not None else constant
                value = stored(node.op, name) if value is None else value
                self._tape.put(node.id, value.to(prepared.device))
            elif node.op == GATHER and self._graph[node.operands[0]].is_source:
                image = self._graph[node.operands[0]]
                whole = Box.whole(image.size(0), image.size(1))
                self._tape.put(node.id, sources[image.arguments["name"]].read(whole).to(prepared.device))
        self._tape.compute()

    def __enter__(self) -> Run:
        """Raises StoreError if the scratch folder has no room for what the plan keeps there."""
        try:
            self._fields.open()
        except BaseException:
            self.close()
            raise
        return self

    def __exit__(self, kind: object, error: BaseException | None, *_: object) -> None:
        self.close()
        if error is None:
            return
        if not isinstance(error, GeneratorExit):  # it may have come as a block was left that would have set these back
            torch.set_num_threads(self._threads)
            torch.set_grad_enabled(self._with_grad)
        # Notebooks keep the last traceback: with it only what they may want to see, not what the run held.
        self._fields.forget()
        self._tape.forget()
        self._sums.clear()
        empty_frames(error)

    def close(self) -> None:
        """End the threads and remove the files; results stay. May be called again, by any thread."""
        uninterrupted(self._close)

    def _close(self) -> None:
        with self._closing, ExitStack() as stack:  # goes on past errors, the last one first
            if self._trimmer is not None:
                stack.callback(self._trimmer.close)
            stack.callback(self._fields.close)
            for pool in (self._workers, self._reader):
                if pool is not None:
                    stack.callback(pool.shutdown, cancel=True)

    @property
    def output(self) -> torch.Tensor:
        """The value of a graph whose output has no spatial axes (the loss, a class score), off the tape."""
        return self._tape.values[self._graph.output].detach()

    @property
    def outputs(self) -> Any:
        """Everything the model returned, nested as it did."""
        values = [self._tape.values[i].detach() for i in self._graph.outputs]
        structure = self._graph.structure
        return values[0] if structure is None else tree_unflatten(values, structure)

    @property
    def gradients(self) -> dict[int, torch.Tensor]:
        """The finished gradients by parameter node."""
        return self._tape.gradients

    @property
    def input_gradients(self) -> dict[str, torch.Tensor]:
        """The gradients of the images that asked for one, by the name of the input."""
        found = {}
        for node in self._graph.nodes:
            if node.is_field and node.is_source and node.differentiable:
                store = self._fields.cotangents.get(node.id)
                gradient = store.whole() if store is not None else None
                for gathering in self._gathers(node.id):
                    whole = self._tape.cotangent(gathering)
                    if whole is not None:
                        gradient = whole if gradient is None else gradient + whole
                if gradient is not None:
                    found[node.arguments["name"]] = self._unit.out_of(gradient).to(gradient.dtype)
        return found

    @property
    def rounding_errors(self) -> dict[str, float]:
        """What quantised storage is expected to have added to gradients: see `RoundingErrors.by_weight`."""
        rounding = self._prepared.rounding
        return self._rounding_errors.by_weight(rounding.error_bound) if isinstance(rounding, Quantised) else {}

    @property
    def updates(self) -> dict[str, torch.Tensor]:
        """The new values of the buffers that the model writes."""
        return {name: self._tape.values[node].detach() for name, node in self._graph.updates.items()}

    def run(self) -> None:
        """Every pass of the plan (of a plan that delivers no field: see `stream`).

        Raises StoreError, and CotangentOverflow if the run should begin anew.
        """
        started = False
        for index, step in enumerate(self._prepared.plan.passes):
            stage = self._prepared.stages[step.stage]
            self._begin(index)
            if step.phase == "forward":
                for _ in self._sweep_forward(stage):
                    pass
            elif step.phase == "one pass":
                self._sweep_both(stage)
                started = True
            else:
                if not started:
                    self._tape.start()
                    started = True
                self._sweep_backward(stage)
            self._fields.end(index)
        if self._tape.backward:
            if not started:
                self._tape.start()
            self._pull(0)
            if self._unit.is_needed:
                self._check((*self.gradients.values(), *self.input_gradients.values()))

    def stream(self) -> Iterator[tuple[Box, torch.Tensor]]:
        """The boxes and crops of the output field, tile by tile in row-major order."""
        threads = torch.get_num_threads()
        for index, step in enumerate(self._prepared.plan.passes):
            self._begin(index)
            for piece in self._sweep_forward(self._prepared.stages[step.stage]):
                within = torch.get_num_threads()
                torch.set_num_threads(threads)  # what is done with it is the caller's
                yield piece
                # Not if it ends here: of generators that are garbage, the outer one may be closed after the inner one.
                torch.set_num_threads(within)
            self._fields.end(index)

    # Sweeps

    def _sweep_forward(self, stage: Stage) -> Iterator[tuple[Box, torch.Tensor]]:
        program = self._program(stage)
        boundary = self._boundary(stage, gradients=False)

        def work(item: tuple[TileGeometry, TileInputs]) -> tuple[TileGeometry, Values, Values]:
            tile, inputs = item
            with torch.no_grad():
                shares = program.run(tile, inputs.crops, boundary)
                sums = program.partial_sums(tile, shares)
                wanted = (*stage.kept, *([stage.output] if stage.output is not None else []))
                return tile, sums, {i: shares[i] for i in wanted if i in shares}

        for tile, sums, fields in self._swept(stage, work, backward=False):
            self._merge(sums)
            for i in stage.kept:
                if i in fields:
                    self._fields.kept[i].write(tile.wanted(i), fields[i])
            self._report("forward")
            if stage.output is not None and stage.output in fields:
                yield tile.wanted(stage.output), fields[stage.output]
        for i in stage.kept:
            self._fields.kept[i].flush()
        self._finish(stage)

    def _sweep_both(self, stage: Stage) -> None:
        rule = last_cotangents(self._graph, stage)
        varying = differentiable_reductions(self._graph, stage)
        if rule is Cotangents.AFFINE:
            cotangents = self._tape.constant_cotangents(stage)
        else:
            node = self._graph[varying[0]]
            cotangents = {varying[0]: torch.ones(node.shape, dtype=node.dtype, device=self._prepared.device)}
        totals = self._sweep_gradients(stage, cotangents, merge=True)
        self._finish(stage)
        self._check(totals.values())
        self._tape.start()
        if rule is Cotangents.SCALED:
            self._pull(self._tape.level_of(stage))
            found = self._tape.cotangent(varying[0])
            scale = 0.0 if found is None else found.item()
            for total in totals.values():
                total.mul_(scale)
            self._rounding_errors.scale(stage.fields, scale)
        self._give(totals)

    def _sweep_backward(self, stage: Stage) -> None:
        self._pull(self._tape.level_of(stage))
        cotangents = {}
        for reduction in differentiable_reductions(self._graph, stage):
            found = self._tape.cotangent(reduction)
            value = self._tape.values[reduction]
            cotangents[reduction] = torch.zeros_like(value) if found is None else found
        for field in stage.kept:
            for gathering in self._gathers(field):
                whole = self._tape.cotangent(gathering)
                if whole is not None:
                    node = self._graph[field]
                    self._fields.cotangents[field].add(Box.whole(node.size(0), node.size(1)), whole)
        totals = self._sweep_gradients(stage, cotangents, merge=False)
        self._check(totals.values())
        self._give(totals)

    def _sweep_gradients(self, stage: Stage, cotangents: Values, *, merge: bool) -> Totals:
        """The vector-Jacobian products of all tiles. Returns the sums of the global values' shares."""
        program = self._program(stage)
        boundary = self._boundary(stage, gradients=True)
        leaves = [i for i in stage.globals if self._graph[i].differentiable]
        fields = [i for i in stage.reads if i in self._fields.cotangents]
        gains = error_gains(self._graph, stage, self._quantised, boundary)
        self._settle(stage, cotangents)
        cotangents = {i: multiplied(cotangent, self._unit.times) for i, cotangent in cotangents.items()}

        def work(item: tuple[TileGeometry, TileInputs]) -> tuple[TileGeometry, Values, Values, Values, Watch]:
            tile, inputs = item
            watch = Watch(self._graph, gains)
            crops = {i: inputs.crops[i] for i in fields if i in inputs.crops}
            for crop in crops.values():
                crop.requires_grad_()
            sums, outputs, seeds = program.run_for_gradient(tile, inputs, boundary, cotangents, watch)
            gradients: Values = {}
            wanted = {**{i: boundary[i] for i in leaves}, **crops}
            if outputs and wanted:
                found = torch.autograd.grad(outputs, list(wanted.values()), seeds, allow_unused=True)
                gradients = {i: g for i, g in zip(wanted, found, strict=True) if g is not None}
            return (
                tile,
                sums,
                {i: g for i, g in gradients.items() if i in boundary},
                {i: g for i, g in gradients.items() if i in crops},
                watch,
            )

        totals: Totals = {}
        for tile, sums, shares, crops, watch in self._swept(stage, work, backward=True):
            self._rounding_errors.add(watch.norms)
            for leaf, gradient in shares.items():
                add(totals, leaf, gradient)
            for field, gradient in crops.items():
                box = tile.box(field)
                assert box is not None
                self._fields.cotangents[field].add(box, gradient)
            if merge:
                self._merge(sums)
            del sums, shares, crops  # the next tile would be computed beside them
            self._report("backward")
        for field in fields:
            self._fields.cotangents[field].flush()
        if self._unit.times != 1:
            for total in totals.values():
                total.div_(self._unit.times)
            self._rounding_errors.scale(stage.fields, 1 / self._unit.times)
        return totals

    def _settle(self, stage: Stage, cotangents: Values) -> None:
        """The unit of cotangents in float16, by those that enter fields now and the pixels of a tile that sum them."""
        if not cotangents or not self._unit.is_needed:
            return
        tile, pixels, entering = self._prepared.grid(stage)[0], 1, []
        for i, cotangent in cotangents.items():
            reduction, field = self._graph[i], self._graph[self._graph[i].operands[0]]
            pixels = max(pixels, tile.wanted(field.id).area)
            # A bin is an average of pixels: each of them gets a share of its cotangent.
            share = prod(reduction.shape) / prod(field.shape) if reduction.op == FIELD_BINS else 1
            entering.append(multiplied(cotangent, share))
        self._unit.settle(entering, pixels=pixels)

    def _check(self, gradients: Iterable[torch.Tensor]) -> None:
        if self._unit.is_needed and self.output.isfinite().all():
            self._unit.check(gradients)

    def _pull(self, level: int) -> None:
        """Pull back on the tape; the gradients of what whole-field operators read are new, all at once."""
        if self._trimmer is not None:
            self._trimmer.make_room(self._tape.coming_bytes)
        self._tape.pull(level)

    def _give(self, totals: Totals) -> None:
        for node_id in tuple(totals):
            self._tape.give(node_id, totals.pop(node_id))
        self._tape.pull_parameters()

    def _program(self, stage: Stage) -> StageProgram:
        roundings = {i: self._fields.roundings[i] for i in stage.kept if i in self._fields.roundings}
        make_room = self._trimmer.block_coming if self._trimmer is not None else None
        return StageProgram(self._graph, stage, self._prepared.device, roundings, make_room)

    def _boundary(self, stage: Stage, *, gradients: bool) -> Values:
        """The globals a stage reads, cut off the tape: for a tile they are leaves."""
        boundary = {}
        for i in stage.globals:
            value = self._tape.values[i].detach()
            if value.ndim == 4 and value.is_contiguous():  # an expanded view stays one
                value = value.contiguous(memory_format=self._prepared.layout)
            boundary[i] = value.requires_grad_(gradients and self._graph[i].differentiable)
        return boundary

    def _gathers(self, field: int) -> list[int]:
        return [node.id for node in self._graph.nodes if node.op == GATHER and node.operands[0] == field]

    def _begin(self, index: int) -> None:
        """Room for what the pass will take, and its stores."""
        plan = self._prepared.plan
        step = plan.passes[index]
        planned, stage = plan.stages[step.stage], self._prepared.stages[step.stage]
        self._began = self._began or time.perf_counter()
        self._share_of_tile = plan.pass_shares[index] / planned.tile_count
        if self._trimmer is not None:
            self._tile_bytes = planned.tile_peak_bytes
            largest = largest_block_bytes(self._prepared.grid(stage))
            self._trimmer.begin_pass(plan.workers * self._tile_bytes, planned.beside_bytes, largest)
            if self._workers is not None:
                self._workers.let_go()
            sums = 0 if step.phase == "forward" else gradient_sum_bytes(self._graph, stage)
            self._trimmer.make_room(sums + self._fields.bytes_from(index))
        self._fields.begin(index)

    def _swept(
        self, stage: Stage, work: Callable[[tuple[TileGeometry, TileInputs]], Swept], *, backward: bool
    ) -> Iterator[Swept]:
        """What `work` makes of every tile and what it reads, in the grid's order."""
        grid = self._prepared.grid(stage)
        tiles = (grid[i] for i in grid.order())
        read = read_ahead(tiles, lambda tile: self._fields.inputs(stage, tile, backward=backward), self._reader)
        trimmer = self._trimmer
        if trimmer is None:
            yield from in_order(read, work, self._workers)
            return

        def work_and_look(item: tuple[TileGeometry, TileInputs]) -> Swept:
            swept = work(item)
            trimmer.tile_done()
            return swept

        with trimmer.tiles_at_work():
            yield from in_order(read, work_and_look, self._workers)

    def _report(self, phase: str) -> None:
        self._done += 1
        self._share += self._share_of_tile
        if self._trimmer is not None:
            self._hold_back(self._trimmer)
        self._events.emit(TileDone(phase, self._done, self._total, self._seconds_left()))

    def _seconds_left(self) -> float:
        """What the plan says of the rest, scaled to what the tiles took so far; the plan counts as much as a tenth of
        the step would, for its beginning is not typical of it (docs/decisions/0012-time-model.md).
        """
        planned, gone = self._prepared.plan.predicted_seconds, time.perf_counter() - self._began
        slower = (gone + _PRIOR * planned) / ((self._share + _PRIOR) * planned)
        return max(0.0, 1 - self._share) * planned * slower

    def _hold_back(self, trimmer: Trimmer) -> None:
        """Fewer tiles at a time, for the rest of the pass, where another one might not fit in the budget."""
        workers = self._workers
        if workers is not None and workers.at_a_time > 1 and trimmer.is_short(self._tile_bytes, workers.at_a_time):
            workers.hold_one()
            told = (
                "the process holds more than was planned; to stay within the budget, fewer tiles are computed at a time"
            )
            self._events.emit_once(Notice(told))

    # Reductions

    def _merge(self, partial: Values) -> None:
        for reduction, value in partial.items():
            if self._graph[reduction].op == FIELD_MAX:
                known = self._sums.get(reduction)
                self._sums[reduction] = value if known is None else torch.maximum(known, value)
            else:
                add(self._sums, reduction, value)

    def _finish(self, stage: Stage) -> None:
        """Turn the finished reductions and gathered fields into values of the graph, and compute what waited."""
        for reduction in stage.reductions:
            self._tape.put(reduction, self._sums.pop(reduction).to(self._graph[reduction].dtype))
        for field in stage.kept:
            for gathering in self._gathers(field):
                self._tape.put(gathering, self._fields.kept[field].whole())
        self._tape.compute()
