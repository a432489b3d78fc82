"""Run a plan over one image: pass after pass, from the first segment's tiles to the last gradient.

Map-reduce autodiff. Forward, each segment maps over its tiles, merges partial reductions and keeps the fields that the
plan names. Between passes the global values are computed once. Backward, each tile runs again with autograd on: its
vector-Jacobian product, for the final cotangents of the segment's reductions and of its kept fields, is added into one
float64 sum per parameter and into the cotangents of the fields it read.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from math import prod
from pathlib import Path
from typing import Any

import torch
from torch.utils._pytree import tree_unflatten

from gigagrad.events import Events
from gigagrad.execution.buffers import Buffers
from gigagrad.execution.comm import Comm, PassResult
from gigagrad.execution.executor import Executor
from gigagrad.execution.gradient_scale import multiplied
from gigagrad.execution.journal import Journal, key_of
from gigagrad.execution.needed import Within, needed_tiles
from gigagrad.execution.prepared import Prepared
from gigagrad.execution.probes import Memory, Progress
from gigagrad.execution.scalars import ScalarGraph, Values
from gigagrad.execution.sinks import Piece
from gigagrad.execution.sources import Source
from gigagrad.execution.tile_loops import TileLoops
from gigagrad.execution.tracebacks import empty_frames
from gigagrad.graphs import FIELD_BINS, GATHER
from gigagrad.graphs.crops import as_stored, batched, laid_out
from gigagrad.plans import Grid, Segment, TileGeometry, Tiles
from gigagrad.plans.program import Allocate, Buffer, Exchange, Gather, Release, Scalars, Step
from gigagrad.plans.segments import Cotangents, differentiable_reductions, last_cotangents
from gigagrad.ranks import Ranks, SingleRank
from gigagrad.stores import Quantised
from gigagrad.threads import uninterrupted

_LARGE_BYTES = 16 * 2**20
"""Whole fields from this size on take longer than freed memory takes to be given back and taken again."""


class Run:
    """One forward, or forward and backward, of one image. `stored` looks up parameters and buffers.

    An interrupt may come at the first instruction of `__exit__`, too: `with Run(...) as run, closing(run)` closes it
    whenever a single one comes.
    """

    def __init__(
        self,
        prepared: Prepared,
        sources: Mapping[str, Source],
        stored: Callable[[str], torch.Tensor],
        events: Events,
        *,
        overflows: int = 0,
        draws: int = 0,
        seeds: Values | None = None,
        ranks: Ranks | None = None,
        journal: Path | None = None,
        within: Within | None = None,
        peak_bytes: int | None = None,
    ) -> None:
        """Prepare a run; `draws`: what random operators draw from, `seeds`: what some have drawn. `ranks`: who computes
        this run's chunks, all with the same plan; by itself unless others are named. `journal`: a folder where finished
        chunks are written down, until the run is over. `within`: the part of the output that is wanted, all of it where
        None. `peak_bytes`: what the process may hold meanwhile, the plan's peak where None.
        """
        ranks = ranks or SingleRank()
        plan, device = prepared.plan, prepared.device
        self._prepared, self._graph = prepared, prepared.graph
        self._closing = threading.Lock()
        self._threads, self._with_grad = torch.get_num_threads(), torch.is_grad_enabled()
        kept = {field.node for field in plan.kept}
        self._comm = Comm(prepared, ranks)
        share = self._comm.share
        self._scalars = ScalarGraph(
            prepared.graph,
            kept,
            device,
            backward=prepared.problem.backward,
            overflows=overflows,
            draws=draws,
            seeds=seeds,
            share=share,
        )
        self._buffers = Buffers(prepared, sources, self._scalars, ranks.index, draws)
        _put_what_is_known(self._scalars, prepared, sources, stored)
        place = None if journal is None else journal / key_of(prepared, self._scalars, draws, overflows)
        self.journal, self._first = Journal(place), ranks.index == 0
        guard = device.memory_guard(peak_bytes or plan.predicted_peak_bytes, plan.budget_bytes)
        self._memory = Memory(prepared, guard, Executor(plan.workers, plan.threads), events)
        needed = None if within is None else needed_tiles(prepared, within)
        self._progress = Progress(prepared, events, needed)
        self._tile_loops = TileLoops(
            prepared,
            self._buffers,
            self._scalars,
            self._comm,
            self._memory,
            self._progress,
            self.journal,
            within,
            needed,
        )
        self.pass_seconds: tuple[float, ...] | None = None
        """Seconds that each pass took, once `run` is over; None where chunks of it were in the journal, and in a
        stream: whoever takes the pieces has a part in that."""
        self._index, self._started = 0, False
        self._keeps = False
        """True where memory that it freed may stay for the next step: not behind an error, or a prediction."""
        large = any(node.whole and node.nbytes >= _LARGE_BYTES for node in prepared.graph.nodes)
        self._makes_room = large and device.is_host

    def __enter__(self) -> Run:
        """Open the buffers. Raises StoreError if a tier has no room for what the plan keeps there."""
        try:
            self._buffers.open()
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
        self._buffers.forget()
        self._scalars.forget()
        empty_frames(error)
        self._prepared.device.trim()  # there may be no next step that takes what this one freed

    def close(self) -> None:
        """End the threads and remove the files; results stay. May be called again, by any thread."""
        uninterrupted(self._close)

    def _close(self) -> None:
        with self._closing, ExitStack() as stack:  # goes on past errors, the last one first
            stack.callback(self._memory.guard.close, keeps=self._keeps)
            stack.callback(self._buffers.close)
            stack.callback(self._memory.executor.close)
            self._tile_loops.close()

    def run(self) -> None:
        """Run every pass of the plan. Raises StoreError, and CotangentOverflow if the run should begin anew."""
        for _ in self._without_autocast(self._passes()):
            pass
        if self._first:  # all have met behind their last chunks
            self.journal.close()
        self.pass_seconds = None if self.journal.taken else self._progress.pass_seconds
        self._keeps = self._scalars.backward

    def stream(self) -> Iterator[Piece]:
        """Yield the boxes and crops of what is delivered in pieces, in row-major order: the output field, or the
        gradient of an image that is handed over. Raises as `run`.
        """
        threads = torch.get_num_threads()
        for piece in self._without_autocast(self._passes()):
            within = torch.get_num_threads()
            torch.set_num_threads(threads)  # what is done with it is the caller's
            yield piece
            # Not if it ends here: of generators that are garbage, the outer one may be closed after the inner one.
            torch.set_num_threads(within)

    def up_to_output(self) -> tuple[Grid, Callable[[Iterable[TileGeometry]], Iterator[Piece]]]:
        """Run what comes before the tiles of the output field; return their grid, and what computes some of them.

        Raises as `run`.
        """
        steps = self._prepared.plan.steps
        last = max(index for index, step in enumerate(steps) if isinstance(step, Tiles))
        for _ in self._without_autocast(self._passes(steps[:last])):
            pass
        step, before = steps[last], steps[last - 1] if last else None
        assert isinstance(step, Tiles)
        self._begin(before.buffers if isinstance(before, Allocate) else ())
        grid = self._prepared.grid(self._prepared.segments[step.segment])
        return grid, lambda tiles: self._without_autocast(self._tile_loops.outputs(step, tiles))

    def _without_autocast(self, pieces: Iterator[Piece]) -> Iterator[Piece]:
        """Yield pieces, computed in the dtypes that the graph says: it holds the casts of the caller's autocast, and
        none where the model switches that off.
        """
        while True:
            kinds = {
                kind for kind in ("cpu", self._prepared.device.torch_device.type) if torch.is_autocast_enabled(kind)
            }
            try:
                for kind in kinds:
                    torch.set_autocast_enabled(kind, False)
                piece = next(pieces, None)
            finally:
                for kind in kinds:
                    torch.set_autocast_enabled(kind, True)
            if piece is None:
                return
            yield piece

    def _passes(self, steps: Sequence[Step] | None = None) -> Iterator[Piece]:
        coming: tuple[Buffer, ...] = ()
        result: PassResult | None = None
        sums: tuple[Values, Values] = {}, {}  # of gradients and of reductions, until something is made of them
        for step in self._prepared.plan.steps if steps is None else steps:
            if isinstance(step, Allocate):
                coming = step.buffers  # taken when there is room for all that their pass takes at once
            elif isinstance(step, Tiles):
                self._begin(coming)
                coming, tiles = (), step
                result = yield from self._compute_tiles(step)
            elif isinstance(step, Exchange):
                assert result is not None
                sums, result = self._comm.exchange(step, result), None
            elif isinstance(step, Gather):
                self._comm.gather(step, [self._scalars.gradients] if step.gradients else sums)
            elif isinstance(step, Scalars):
                self._backward_rest() if step.segment is None else self._compute(tiles, *sums)
            elif isinstance(step, Release):
                self._buffers.release(step.keys)
        if self._scalars.backward:
            self._check((*self._scalars.gradients.values(), *self.input_gradients.values()))

    def _begin(self, buffers: tuple[Buffer, ...]) -> None:
        """Begin the next pass, which takes these buffers."""
        self._memory.begin_pass(self._index, self._buffers.fresh_bytes(buffers))
        self._progress.begin_pass(self._index)
        self._buffers.allocate(buffers)
        self.journal.begin(self._index)
        self._index += 1

    def _compute_tiles(self, step: Tiles) -> Generator[Piece, None, PassResult]:
        if step.phase == "forward":
            return (yield from self._tile_loops.forward(step))
        segment = self._prepared.segments[step.segment]
        cotangents = self._known_cotangents(segment) if step.phase == "one pass" else self._cotangents(segment)
        self._settle(segment, cotangents)
        return (yield from self._tile_loops.gradients(step, cotangents))

    def _known_cotangents(self, segment: Segment) -> Values:
        """Return the cotangents of the last segment's reductions, forward and backward at once: known beforehand, but
        for a factor.
        """
        if last_cotangents(self._graph, segment) is Cotangents.AFFINE:
            return self._scalars.constant_cotangents(segment)
        (varying,) = differentiable_reductions(self._graph, segment)
        node = self._graph[varying]
        return {varying: torch.ones(node.shape, dtype=node.dtype, device=self._prepared.device.torch_device)}

    def _cotangents(self, segment: Segment) -> Values:
        """Return the cotangents of a segment's reductions, when all values are known; add those of gathered fields to
        theirs.
        """
        self._start()
        self._backward_from(self._scalars.level_of(segment))
        cotangents = {}
        for reduction in differentiable_reductions(self._graph, segment):
            found = self._scalars.cotangent(reduction)
            cotangents[reduction] = torch.zeros_like(self._scalars.values[reduction]) if found is None else found
        for field in segment.kept:
            for gathering in self._graph.gathers(field):
                whole = self._scalars.take_cotangent(gathering)
                if whole is not None:
                    node = self._graph[field]
                    self._buffers.cotangents[field].add(node.box, as_stored(whole, node, node.extent))
        return cotangents

    def _compute(self, step: Tiles, totals: Values, reduced: Values) -> None:
        """Turn finished reductions and gathered fields into values of the graph, compute what waited for them, and give
        the gradients of a pass to what they are gradients of; both sums are emptied.
        """
        segment = self._prepared.segments[step.segment]
        if step.phase != "backward":
            for reduction in segment.reductions:
                self._scalars.put(reduction, laid_out(reduced.pop(reduction).to(self._graph[reduction].dtype)))
            for field in segment.kept:
                for gathering in self._graph.gathers(field):
                    self._scalars.put(gathering, self._buffers.whole(field))
            self._scalars.compute()
        if step.phase == "forward":
            return
        if (times := self._scalars.scale.times) != 1:
            self._scale(segment, totals, 1 / times)
        # What all ranks have, so that all begin anew; shares are looked at when they are put together.
        self._check(total for node_id, total in totals.items() if self._comm.is_whole(node_id))
        if step.phase == "one pass":
            self._start()
            if last_cotangents(self._graph, segment) is Cotangents.SCALED:
                self._backward_from(self._scalars.level_of(segment))
                found = self._scalars.cotangent(differentiable_reductions(self._graph, segment)[0])
                self._scale(segment, totals, 0.0 if found is None else found.reshape(()))
        for node_id in tuple(totals):
            is_parameter = self._graph[node_id].op == "parameter"
            accumulate = self._scalars.accumulate_share if is_parameter else self._scalars.accumulate
            accumulate(node_id, totals.pop(node_id))
        self._scalars.backward_parameters()

    def _scale(self, segment: Segment, totals: Values, times: float | torch.Tensor) -> None:
        """Multiply what a pass has summed: the cotangents turned out to be so many times as large."""
        for node_id, total in totals.items():
            totals[node_id] = total.to(self._prepared.device.sum_dtype) * times
        self._tile_loops.errors.scale(segment.fields, times)

    def _backward_rest(self) -> None:
        """Run backward what is left of the scalars."""
        self._start()
        self._backward_from(0)

    def _start(self) -> None:
        if not self._started:
            self._scalars.start()
            self._started = True

    def _backward_from(self, level: int) -> None:
        """Run the scalars backward; the gradients of what whole-field operators read are new, all at once."""
        if self._makes_room:  # what tiles left lies under the peak
            self._prepared.device.trim()
        self._memory.guard.reserve(self._scalars.coming_bytes)
        self._scalars.backward_from(level)

    def _settle(self, segment: Segment, cotangents: Values) -> None:
        """Settle the scale of cotangents in float16, by those that enter fields now and the pixels of a tile that sum
        them.
        """
        if not cotangents or not self._scalars.scale.is_needed:
            return
        tile, pixels, entering = self._prepared.grid(segment)[0], 1, []
        for i, cotangent in cotangents.items():
            reduction, field = self._graph[i], self._graph[self._graph[i].operands[0]]
            pixels = max(pixels, tile.wanted(field.id).area)
            # A bin is an average of pixels: each of them gets a share of its cotangent.
            share = prod(reduction.shape) / prod(field.shape) if reduction.op == FIELD_BINS else 1
            entering.append(multiplied(cotangent, share))
        self._scalars.scale.settle(entering, pixels=pixels)

    def _check(self, gradients: Iterable[torch.Tensor]) -> None:
        """Raises CotangentOverflow where the run should begin anew."""
        if self._scalars.scale.is_needed and self._scalars.values[self._graph.output].isfinite().all():
            self._scalars.scale.check(gradients)

    # Results

    @property
    def output(self) -> torch.Tensor:
        """The value of a graph whose output has no spatial axes (the loss, a class score), detached."""
        return self._scalars.values[self._graph.output].detach()

    @property
    def outputs(self) -> Any:
        """Everything the model returned, nested as it did."""
        values = [self._scalars.values[i].detach() for i in self._graph.outputs]
        structure = self._graph.structure
        return values[0] if structure is None else tree_unflatten(values, structure)

    @property
    def values(self) -> Values:
        """The global values by node, as far as they are still there."""
        return self._scalars.values

    @property
    def gradients(self) -> dict[int, torch.Tensor]:
        """The finished gradients by parameter node."""
        return self._scalars.gradients

    @property
    def input_gradients(self) -> dict[str, torch.Tensor]:
        """The gradients of the images and labels that asked for one, by the name of the input."""
        found = {}
        for node in self._graph.nodes:
            if node.op == "target" and not node.is_field and node.differentiable:
                label = self._scalars.cotangent(node.id)
                if label is not None:
                    found[node.arguments["name"]] = label
            elif node.is_field and node.is_source and node.differentiable:
                store = self._buffers.cotangents.get(node.id)
                gradient = batched(store.whole(), node) if store is not None else None
                for gathering in self._graph.gathers(node.id):
                    whole = self._scalars.cotangent(gathering)
                    if whole is not None:
                        gradient = whole if gradient is None else gradient + whole
                if gradient is not None:
                    found[node.arguments["name"]] = self._scalars.scale.out_of(gradient).to(gradient.dtype)
        return found

    @property
    def rounding_errors(self) -> dict[str, float]:
        """Errors that quantised storage is expected to have added to gradients: see `RoundingErrors.by_weight`."""
        rounding = self._prepared.rounding
        return self._tile_loops.errors.by_weight(rounding.error_bound) if isinstance(rounding, Quantised) else {}

    @property
    def updates(self) -> dict[str, torch.Tensor]:
        """The new values of the buffers that the model writes."""
        return {name: self._scalars.values[node].detach() for name, node in self._graph.updates.items()}


def _put_what_is_known(
    scalars: ScalarGraph, prepared: Prepared, sources: Mapping[str, Source], stored: Callable[[str], torch.Tensor]
) -> None:
    """Put parameters, buffers, constants, labels, and the images that whole-field operators read."""
    graph, device = prepared.graph, prepared.device.torch_device
    for node in graph.nodes:
        if node.is_source and not node.is_field:
            name = node.arguments["name"]
            source = sources.get(name)
            value = None if source is None else source.tensor
            if value is None:
                known = node.op == "constant" and name in graph.constants
                value = prepared.constant(name) if known else stored(name)
            scalars.put(node.id, value.to(device))
        elif node.op == GATHER and graph[node.operands[0]].is_source:
            name = graph[node.operands[0]].arguments["name"]
            scalars.put(node.id, laid_out(sources[name].whole(own=True).to(device)))
    scalars.compute()
