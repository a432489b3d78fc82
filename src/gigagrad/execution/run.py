"""Runs a plan over one image: sweeps of the stages, sums of the reductions, cotangents, gradients.

Map-reduce autodiff. Forward, each stage maps over its tiles, merges partial reductions and keeps the fields that the
plan names. Between sweeps the global values are computed once, on a tape. Backward, each tile runs again with autograd
on: its vector-Jacobian product, for the final cotangents of the stage's reductions and of its kept fields, is added
into one float64 sum per parameter and into the cotangents of the fields it read. Tiles are disjoint, so the total is
the whole image's gradient.

Tiles run in a fixed order and sums are in float64, so that two runs of one plan give the same bits.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch.utils._pytree import tree_unflatten

from gigagrad.boxes import Box
from gigagrad.events import Events, TileDone
from gigagrad.execution.parallel import in_order
from gigagrad.execution.prepared import Prepared
from gigagrad.execution.process import Trimmer
from gigagrad.execution.rounding_error import RoundingErrors, Watch, error_gains
from gigagrad.execution.sources import Source, read_ahead
from gigagrad.execution.tape import Tape, Values, add
from gigagrad.execution.tile import StageProgram, TileInputs
from gigagrad.graphs import FIELD_MAX, GATHER, SCATTER
from gigagrad.plans import DISK, EXACT, HOST, MEMORY, Lifetime, Stage, TileGeometry, lifetimes
from gigagrad.plans.memory import gradient_sum_bytes
from gigagrad.plans.schedule import Cotangents, differentiable_reductions, last_cotangents
from gigagrad.stores import Blosc, DiskStore, HostStore, Quantised, RoundedStore, Rounding, Scratch, Store
from gigagrad.threads import SideThreads, operator_threads

Totals = dict[int, torch.Tensor]


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
        plan = prepared.plan
        self._tiers = {field.node: field.tier for field in plan.kept}
        self._roundings = self._draw_roundings()
        self._quantised = frozenset(i for i, rounding in self._roundings.items() if isinstance(rounding, Quantised))
        self._rounding_errors = RoundingErrors(prepared.graph)
        self._scratch: Scratch | None = None
        # Kept from sweep to sweep: what a new thread's first operators set up takes longer than a small tile.
        self._reader = SideThreads(1, "gigagrad-read")
        self._workers = SideThreads(plan.workers, "gigagrad-tile") if plan.workers > 1 else None
        self._lifetimes = lifetimes(prepared.graph, prepared.stages, plan.passes)
        self._kept: dict[int, Store] = {}
        self._cotangents: dict[int, Store] = {}
        self._sums: Totals = {}
        self._trimmer = Trimmer(plan.predicted_peak_bytes) if prepared.device.type == "cpu" else None
        self._done = 0
        self._total = plan.tile_count
        self._tape = Tape(prepared.graph, set(self._tiers), prepared.device, backward=backward)
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
                self._tape.put(node.id, self._source(image.id).read(whole).to(prepared.device))
        self._tape.compute()

    def __enter__(self) -> Run:
        """Raises StoreError if the scratch folder has no room for what the plan keeps there."""
        plan, folder = self._prepared.plan, self._prepared.scratch
        if plan.scratch_bytes:
            assert folder is not None
            self._scratch = Scratch(folder, plan.scratch_bytes)
        return self

    def __exit__(self, *_: object) -> None:
        self._reader.shutdown()
        if self._workers is not None:
            self._workers.shutdown()
        if self._scratch is not None:
            self._scratch.close()

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
                store = self._cotangents.get(node.id)
                gradient = store.whole() if store is not None else None
                for gathering in self._gathers(node.id):
                    whole = self._tape.cotangent(gathering)
                    if whole is not None:
                        gradient = whole if gradient is None else gradient + whole
                if gradient is not None:
                    found[node.arguments["name"]] = gradient
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
        """Every pass of the plan (of a plan that delivers no field: see `stream`). Raises StoreError."""
        started = False
        for index, step in enumerate(self._prepared.plan.passes):
            stage = self._prepared.stages[step.stage]
            self._allocate(index)
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
            self._hand_over(index)
            self._release(index)
        if self._tape.backward:
            if not started:
                self._tape.start()
            self._tape.pull(0)

    def stream(self) -> Iterator[tuple[Box, torch.Tensor]]:
        """The boxes and crops of the output field, tile by tile in row-major order."""
        threads = torch.get_num_threads()
        for index, step in enumerate(self._prepared.plan.passes):
            self._allocate(index)
            for piece in self._sweep_forward(self._prepared.stages[step.stage]):
                with operator_threads(threads):  # what is done with it is the caller's
                    yield piece
            self._release(index)

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

        tiles = self._tiles(stage, backward=False)
        for tile, sums, fields in in_order(tiles, work, self._workers):
            self._merge(sums)
            for i in stage.kept:
                if i in fields:
                    self._kept[i].write(tile.wanted(i), fields[i])
            self._report("forward")
            if stage.output is not None and stage.output in fields:
                yield tile.wanted(stage.output), fields[stage.output]
        for i in stage.kept:
            self._kept[i].flush()
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
        self._tape.start()
        if rule is Cotangents.SCALED:
            self._tape.pull(self._tape.level_of(stage))
            found = self._tape.cotangent(varying[0])
            scale = 0.0 if found is None else found.item()
            for total in totals.values():
                total.mul_(scale)
            self._rounding_errors.scale(stage.fields, scale)
        self._give(totals)

    def _sweep_backward(self, stage: Stage) -> None:
        self._tape.pull(self._tape.level_of(stage))
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
                    self._cotangents[field].add(Box.whole(node.size(0), node.size(1)), whole)
        self._give(self._sweep_gradients(stage, cotangents, merge=False))

    def _sweep_gradients(self, stage: Stage, cotangents: Values, *, merge: bool) -> Totals:
        """The vector-Jacobian products of all tiles. Returns the sums of the global values' shares."""
        program = self._program(stage)
        boundary = self._boundary(stage, gradients=True)
        leaves = [i for i in stage.globals if self._graph[i].differentiable]
        fields = [i for i in stage.reads if i in self._cotangents]
        gains = error_gains(self._graph, stage, self._quantised, boundary)

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
        tiles = self._tiles(stage, backward=True)
        for tile, sums, shares, crops, watch in in_order(tiles, work, self._workers):
            self._rounding_errors.add(watch.norms)
            for leaf, gradient in shares.items():
                add(totals, leaf, gradient)
            for field, gradient in crops.items():
                box = tile.box(field)
                assert box is not None
                self._cotangents[field].add(box, gradient)
            if merge:
                self._merge(sums)
            del sums, shares, crops  # the next tile would be computed beside them
            self._report("backward")
        for field in fields:
            self._cotangents[field].flush()
        return totals

    def _give(self, totals: Totals) -> None:
        for node_id in tuple(totals):
            self._tape.give(node_id, totals.pop(node_id))
        self._tape.pull_parameters()

    def _program(self, stage: Stage) -> StageProgram:
        roundings = {i: self._roundings[i] for i in stage.kept if i in self._roundings}
        return StageProgram(self._graph, stage, self._prepared.device, roundings)

    def _draw_roundings(self) -> dict[int, Rounding]:
        """How each packed field is rounded in this run: errors are drawn anew for every field and run."""
        rounding = self._prepared.rounding
        packed = [field.node for field in self._prepared.plan.kept if field.storage != EXACT]
        if rounding is None or not packed:
            return {}
        first = int(torch.randint(2**40, ()))
        return {node: rounding.keyed(first + node) for node in packed}

    def _boundary(self, stage: Stage, *, gradients: bool) -> Values:
        """The globals a stage reads, cut off the tape: for a tile they are leaves."""
        boundary = {}
        for i in stage.globals:
            value = self._tape.values[i].detach()
            if value.ndim == 4 and value.is_contiguous():  # an expanded view stays one
                value = value.contiguous(memory_format=self._prepared.layout)
            boundary[i] = value.requires_grad_(gradients and self._graph[i].differentiable)
        return boundary

    # Fields

    def _tiles(self, stage: Stage, *, backward: bool) -> Iterator[tuple[TileGeometry, TileInputs]]:
        grid = self._prepared.grid(stage)
        tiles = (grid[i] for i in grid.order())
        return read_ahead(tiles, lambda tile: self._read(stage, tile, backward=backward), self._reader)

    def _read(self, stage: Stage, tile: TileGeometry, *, backward: bool) -> TileInputs:
        crops, cotangents, stored = {}, {}, {}
        for i in stage.reads:
            box = tile.box(i)
            if box is not None:
                crops[i] = self._ordered(self._field(i, box))
        if backward:
            for i in stage.kept:
                box = tile.wanted(i)
                if i in self._cotangents and not box.empty:
                    cotangents[i] = self._ordered(self._cotangents[i].read(box))
                    stored[i] = self._ordered(self._kept[i].read(box))
        return TileInputs(crops, cotangents, stored)

    def _field(self, node_id: int, box: Box) -> torch.Tensor:
        """The crop of a field that is there: an image, a global value laid out like one, or a kept field."""
        node = self._graph[node_id]
        if node.is_source:
            return self._source(node_id).read(box)
        if node.op == SCATTER:
            view = self._tape.values[node.operands[0]].detach()
            assert node.axes is not None
            for axis, span in zip(node.axes, (box.y, box.x), strict=True):
                view = view.narrow(axis, span.start, span.length)
            return view
        return self._kept[node_id].read(box)

    def _ordered(self, crop: torch.Tensor) -> torch.Tensor:
        crop = crop.detach().to(self._prepared.device)
        return crop.contiguous(memory_format=self._prepared.layout if crop.ndim == 4 else torch.contiguous_format)

    def _source(self, node_id: int) -> Source:
        return self._sources[self._graph[node_id].arguments["name"]]

    def _gathers(self, field: int) -> list[int]:
        return [node.id for node in self._graph.nodes if node.op == GATHER and node.operands[0] == field]

    def _allocate(self, index: int) -> None:
        """The stores that begin their life with this pass."""
        beginning = [life for life in self._lifetimes if life.first == index]
        if self._trimmer is not None:
            plan, graph = self._prepared.plan, self._graph
            step = plan.passes[index]
            planned, stage = plan.stages[step.stage], self._prepared.stages[step.stage]
            self._trimmer.begin_pass(plan.workers * planned.tile_peak_bytes + planned.beside_bytes)
            in_memory = [life.field for life in beginning if self._tiers.get(life.field, MEMORY) == MEMORY]
            sums = 0 if step.phase == "forward" else gradient_sum_bytes(graph, stage)
            self._trimmer.make_room(sums + sum(graph[field].nbytes for field in in_memory))
        for life in beginning:
            stores = self._cotangents if life.cotangent else self._kept
            stores[life.field] = self._store(life)

    def _store(self, life: Lifetime) -> Store:
        node = self._graph[life.field]
        assert node.axes is not None
        rounding = None if life.cotangent else self._roundings.get(life.field)
        dtype = node.dtype if rounding is None else rounding.packed_dtype(node.dtype)
        tier, prepared = self._tiers.get(life.field, MEMORY), self._prepared
        store: Store
        if tier == DISK:
            assert self._scratch is not None
            name = f"{'cotangent' if life.cotangent else 'field'}-{life.field}"
            codec = Blosc() if isinstance(rounding, Quantised) else prepared.codec  # codes take fewer bytes only so
            store = DiskStore(node.shape, dtype, node.axes, scratch=self._scratch, name=name, codec=codec)
        else:
            device = torch.device("cpu") if tier == HOST else prepared.device
            store = HostStore(node.shape, dtype, node.axes, device=device, memory_format=prepared.layout)
        return store if rounding is None else RoundedStore(store, rounding, node.dtype)

    def _release(self, index: int) -> None:
        """The stores whose life ends with this pass; the images' own gradients are results and stay."""
        for life in self._lifetimes:
            if life.last == index and not self._graph[life.field].is_source:
                (self._cotangents if life.cotangent else self._kept).pop(life.field).close()

    def _hand_over(self, index: int) -> None:
        """The cotangents of global values laid out like images, to the tape, once their last reader is through."""
        for life in self._lifetimes:
            node = self._graph[life.field]
            if life.cotangent and life.last == index and node.op == SCATTER:
                self._tape.give(node.operands[0], self._cotangents[life.field].whole())

    def _report(self, phase: str) -> None:
        self._done += 1
        if self._trimmer is not None:
            self._trimmer.tile_done()
        self._events.emit(TileDone(phase, self._done, self._total))

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
                self._tape.put(gathering, self._kept[field].whole())
        self._tape.compute()
