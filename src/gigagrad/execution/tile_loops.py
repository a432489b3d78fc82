"""Loop over the tiles of a segment in order: read, compute, add, write.

Tiles are disjoint, so what they add up to is the whole image's. Sums are in float64 and made of the chunks that a plan
fixes (plans/chunks.py), so that two runs of one plan give the same bits, whoever computes the tiles.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterable, Iterator, Sequence
from contextlib import ExitStack
from functools import partial
from itertools import islice
from typing import TypeVar

import torch

from gigagrad.execution.buffers import Buffers
from gigagrad.execution.comm import Comm, PassResult
from gigagrad.execution.gradient_scale import multiplied
from gigagrad.execution.journal import ChunkRecord, Entry, Journal, first_reached, written
from gigagrad.execution.needed import Needed, Within
from gigagrad.execution.prepared import Pass, Prepared
from gigagrad.execution.probes import Memory, Progress
from gigagrad.execution.rounding_error import RoundingErrors, Watch, error_gains
from gigagrad.execution.scalars import ScalarGraph, Values
from gigagrad.execution.sinks import Piece
from gigagrad.execution.tile_program import Activations, PassContext, TileInputs
from gigagrad.graphs.crops import aligned
from gigagrad.plans import Chunks, Segment, TileGeometry, Tiles, estimate
from gigagrad.plans.plan import amount_of
from gigagrad.plans.saving import is_saved
from gigagrad.stores import Quantised

Result = TypeVar("Result")
Item = tuple[TileGeometry, TileInputs]
"""A tile, and what it is computed from."""


class TileLoops:
    """The loops over tiles of one run. They read and write `buffers`; reductions become values of `scalars`."""

    def __init__(
        self,
        prepared: Prepared,
        buffers: Buffers,
        scalars: ScalarGraph,
        comm: Comm,
        memory: Memory,
        progress: Progress,
        journal: Journal,
        within: Within | None,
        needed: Needed | None,
    ) -> None:
        self._prepared, self._graph = prepared, prepared.graph
        self._buffers, self._scalars, self._comm = buffers, scalars, comm
        self._memory, self._progress, self._journal = memory, progress, journal
        self._within, self._needed = within, needed
        roundings = buffers.roundings.items()
        self._quantised = frozenset(i for i, rounding in roundings if isinstance(rounding, Quantised))
        self.errors = RoundingErrors(prepared.graph)
        self._holds_weights = amount_of(prepared.plan.fixed, estimate.WEIGHTS) > 0
        self._weights: Values = {}
        """Weights in the layout of tiles, for all passes."""
        self._saved: dict[tuple[int, int], Activations] = {}
        """Activations that wait for the backward pass, by segment and tile."""

    def forward(self, step: Tiles) -> Generator[Piece, None, PassResult]:
        """Compute the tiles without gradients. Yields the boxes and crops of the output field, if it is this segment's.

        What tiles keep does not overlap, so whoever computes a tile writes it; only sums wait for their turn.
        """
        bound = self._prepared.bound(step.segment)
        segment, programs = bound.segment, bound.programs
        fields = [i for i in segment.reads if self._graph[i].differentiable]
        context = self._context(bound, fields)
        sums_of_chunks = self._comm.new_sums(step)

        def work(item: Item) -> tuple[TileGeometry, Values, Piece | None]:
            tile, inputs = item
            if not self._is_needed(segment, tile):
                return tile, {}, self._piece(segment, tile, None)
            program = programs.at(tile)
            with torch.no_grad():
                if tile.id in saved:
                    self._saved[segment.index, tile.id] = activations = program.activations(tile, inputs.crops, context)
                    shares = {i: share.detach() for i, share in activations.shares.items()}
                else:
                    shares = program.run(tile, inputs.crops, context.globals, context)
                for i in segment.kept:
                    if i in shares:
                        self._buffers.kept[i].write(tile.wanted(i), shares[i])
                output = None if segment.output is None else shares.get(segment.output)
                return tile, program.partial_sums(tile, shares), self._piece(segment, tile, output)

        chunks, own = self._comm.own(step)
        saved = self._to_save(step, chunks, own)
        stores = {i: self._buffers.stored[i] for i in segment.kept}
        record = ChunkRecord(chunks, stores, written, [(sums_of_chunks, bound.reductions)])
        for chunk, found in self._by_chunk(segment, chunks, own, work, backward=False):
            if isinstance(found, Entry):
                record.take(chunk, found)
                self._tell("forward", len(chunks.tiles(chunk)))
                continue
            for tile, sums, piece in found:
                sums_of_chunks.add(chunk, sums)
                if self._is_needed(segment, tile):
                    self._tell("forward")
                if piece is not None:
                    yield piece
            self._journal.write(chunk, record.tensors(chunk))
        return PassResult(step, stores, self._comm.new_sums(step), sums_of_chunks)

    def outputs(self, step: Tiles, tiles: Iterable[TileGeometry]) -> Iterator[Piece]:
        """Compute the output field on some tiles of its segment, which are computed as in `forward`."""
        bound = self._prepared.bound(step.segment)
        segment, output = bound.segment, bound.segment.output
        assert output is not None
        context = self._context(bound)

        def work(item: Item) -> Piece:
            tile, inputs = item
            with torch.no_grad():
                shares = bound.programs.at(tile).run(tile, inputs.crops, context.globals, context)
            return tile.wanted(output), shares[output]

        def read_for(tile: TileGeometry) -> Item:
            self._progress.tile_begins("forward", segment, tile)
            return tile, self._buffers.inputs(segment, tile, backward=False)

        read = map(read_for, tiles)
        with self._memory.guard.computing_tiles():
            yield from self._memory.executor.in_order(read, work)

    def gradients(self, step: Tiles, cotangents: Values) -> Generator[Piece, None, PassResult]:
        """Compute the vector-Jacobian products of all tiles: sums for global values; the cotangents of fields that the
        segment reads are added to theirs. In one pass its reductions are computed as well. Yields the strips of an
        image's gradient that is handed over.
        """
        bound, merge = self._prepared.bound(step.segment), step.phase == "one pass"
        segment, programs, times = bound.segment, bound.programs, self._scalars.scale.times
        known = {} if merge else {i: self._scalars.values[i].detach() for i in segment.reductions}
        fields = [i for i in segment.reads if i in self._buffers.cotangents]
        cotangents = {i: multiplied(cotangent, times) for i, cotangent in cotangents.items()}
        context = self._context(bound, fields, cotangents, known)
        gains = error_gains(self._graph, segment, self._quantised, context.globals)
        handed = self._buffers.handed_in(segment)
        chunks, own = self._comm.own(step)
        if handed is not None:
            chunks = Chunks(chunks.grid, len(chunks), by_rows=True)
        finished = [] if handed is None else chunks.grid.finished_rows(handed)
        overlaps = {i: self._comm.new_overlap(step, chunks, i, self._buffers.cotangents[i]) for i in fields}

        def work(item: Item) -> tuple[TileGeometry, Values, Values, Values, Watch]:
            tile, inputs = item
            watch = Watch(self._graph, gains)
            saved = self._saved.pop((segment.index, tile.id), None)
            sums, shares, crops = programs.at(tile).gradients(tile, inputs, context, watch, saved)
            del saved
            return tile, sums, shares, crops, watch

        gradients, merged = self._comm.new_sums(step), self._comm.new_sums(step)
        summed = [(gradients, bound.gradients)]
        if merge:
            summed.append((merged, bound.reductions))
        stores = {i: self._buffers.cotangents[i] for i in overlaps}
        record = ChunkRecord(chunks, stores, first_reached, summed, overlaps)
        for chunk, found in self._by_chunk(segment, chunks, own, work, backward=True):
            for overlap in overlaps.values():
                overlap.begin(chunk)
            count = len(chunks.tiles(chunk))
            if isinstance(found, Entry):
                record.take(chunk, found)
                self._tell("backward", count)
                continue
            left = count
            for tile, sums, shares, crops, watch in found:  # enumerate would hold the last ones
                left -= 1
                self.errors.add(watch.norms)
                gradients.add(chunk, shares)
                for field, gradient in crops.items():
                    box = tile.box(field)
                    assert box is not None
                    overlaps[field].add(box, gradient)
                if not left:  # at once: what an image's gradient waits for is held
                    for overlap in overlaps.values():
                        overlap.end()
                if merge:
                    merged.add(chunk, sums)
                del sums, shares, crops  # the next tile would be computed beside them
                self._tell("backward")
                if handed is not None:
                    rows, waits = finished[(tile.id + 1) // chunks.grid.shape[1]], overlaps[handed].waits_from
                    yield from self._buffers.take(handed, rows if waits is None else min(rows, waits))
            self._journal.write(chunk, record.tensors(chunk))
        if handed is not None:
            yield from self._buffers.take(handed, finished[-1])
        return PassResult(step, stores, gradients, merged, overlaps)

    def close(self) -> None:
        """Give back what serves all passes."""
        self._weights.clear()
        self._saved.clear()

    def _is_needed(self, segment: Segment, tile: TileGeometry) -> bool:
        return self._needed is None or tile.id in self._needed[segment.index]

    def _piece(self, segment: Segment, tile: TileGeometry, output: torch.Tensor | None) -> Piece | None:
        """Return the whole tile of the output field, of which this much was computed; None for an empty one."""
        if segment.output is None:
            return None
        if self._within is None:
            return None if output is None else (tile.wanted(segment.output), output)
        box = self._prepared.grid(segment)[tile.id].wanted(segment.output)
        if output is not None:
            return box, self._within.piece(box, tile.wanted(segment.output), output)
        dtype, device = self._graph[segment.output].dtype, self._prepared.device.torch_device
        return None if box.empty else (box, self._within.blank(box, dtype, device))

    def _to_save(self, step: Tiles, chunks: Chunks, own: range) -> frozenset[int]:
        """Return the tiles whose activations stay until the backward pass: none beside a journal, which has no place
        for them, so that a step that goes on would compute again what was finished.
        """
        if self._journal.is_kept:
            return frozenset()
        described = self._prepared.plan.segments[step.segment]
        saved, count = described.saved_tiles, described.tile_count
        positions = (position for chunk in own for position in chunks.tiles(chunk)) if saved else ()
        return frozenset(chunks.tile(position).id for position in positions if is_saved(position, saved, count))

    def _context(
        self, bound: Pass, fields: Sequence[int] = (), cotangents: Values | None = None, known: Values | None = None
    ) -> PassContext:
        segment = bound.segment
        return PassContext(
            layout=self._prepared.layout,
            roundings={i: self._buffers.roundings[i] for i in segment.kept if i in self._buffers.roundings},
            make_room=partial(self._memory.guard.reserve, for_tile=True) if self._prepared.device.is_host else None,
            globals={i: self._weights[i] if i in self._weights else self._global(i) for i in segment.globals},
            leaves=bound.leaves,
            fields=fields,
            cotangents=cotangents or {},
            known=known or {},
        )

    def _global(self, node_id: int) -> torch.Tensor:
        """Return a global value, detached, as kernels read it."""
        value = self._scalars.values[node_id].detach()
        if value.is_contiguous():  # an expanded view stays one
            value = aligned(value.contiguous(memory_format=self._prepared.layout) if value.ndim == 4 else value)
        if self._holds_weights and self._graph[node_id].is_source:
            self._weights[node_id] = value
        return value

    def _by_chunk(
        self, segment: Segment, chunks: Chunks, own: range, work: Callable[[Item], Result], *, backward: bool
    ) -> Iterator[tuple[int, Entry | Iterator[Result]]]:
        """Yield for each chunk that has tiles what its tiles give, or what the journal has of it."""
        there = [chunk for chunk in chunks.filled if chunk in own]
        with ExitStack() as stack:
            entries = {chunk: self._entry(segment, chunks, chunk) for chunk in there} if self._journal.is_kept else {}
            for entry in filter(None, entries.values()):
                stack.callback(entry.close)
            missing = [chunk for chunk in there if not entries.get(chunk)]
            results = self._results(segment, chunks, missing, work, backward=backward)
            for chunk in there:
                yield chunk, entries.get(chunk) or islice(results, len(chunks.tiles(chunk)))
            more = next(results, None)  # and so it ends here, not when it is garbage
            assert more is None

    def _entry(self, segment: Segment, chunks: Chunks, chunk: int) -> Entry | None:
        """Return what the journal has of a chunk, if it was computed from what the images hold now."""
        entry = self._journal.entry(chunk)
        if entry is None:
            return None
        for position in chunks.tiles(chunk):
            self._journal.reads(chunk, self._journal.hash_of(self._buffers.images(segment, chunks.tile(position))))
        if self._journal.has_read(chunk) == entry.read_by:
            self._journal.taken += 1
            return entry
        entry.close()
        self._journal.forget_later()
        return None

    def _results(
        self, segment: Segment, chunks: Chunks, chosen: Sequence[int], work: Callable[[Item], Result], *, backward: bool
    ) -> Iterator[Result]:
        """Yield what `work` makes of every tile and what it reads, in the order of the chunks."""
        guard = self._memory.guard
        tiles = ((chunk, chunks.tile(position)) for chunk in chosen for position in chunks.tiles(chunk))
        if self._needed is not None:
            parts = self._needed[segment.index]
            tiles = ((chunk, parts.get(tile.id, tile)) for chunk, tile in tiles)

        def read_for(numbered: tuple[int, TileGeometry]) -> tuple[TileInputs, bytes]:
            if not self._is_needed(segment, numbered[1]):
                return TileInputs({}, {}, {}), b""
            saved = backward and (segment.index, numbered[1].id) in self._saved
            inputs = self._buffers.inputs(segment, numbered[1], backward=backward, cotangents_only=saved)
            images = {i: crop for i, crop in inputs.crops.items() if self._graph[i].is_source}
            return inputs, self._journal.hash_of(images)

        def in_turn(numbered: tuple[int, TileGeometry], found: tuple[TileInputs, bytes]) -> Item:
            (chunk, tile), (inputs, tile_hash) = numbered, found
            self._journal.reads(chunk, tile_hash)
            if self._is_needed(segment, tile):
                self._progress.tile_begins("backward" if backward else "forward", segment, tile)
            return tile, inputs

        alone = sum(len(chunks.tiles(chunk)) for chunk in chosen) == 1  # then nothing is computed meanwhile
        at_once = alone or not self._buffers.wait_for(segment, backward=backward)
        ready = ((each, read_for(each)) for each in tiles) if at_once else self._buffers.read_ahead(tiles, read_for)
        read = (in_turn(*each) for each in ready)

        def work_and_look(item: Item) -> Result:
            result = work(item)
            guard.tile_done()
            return result

        with guard.computing_tiles():
            yield from self._memory.executor.in_order(read, work_and_look)

    def _tell(self, phase: str, tiles: int = 1) -> None:
        for _ in range(tiles):
            self._memory.tile_done()
            self._progress.tile_done(phase)
