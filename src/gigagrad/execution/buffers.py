"""Hold the fields that a run keeps from pass to pass and their cotangents: where each lies, from which pass to which.

A tile's inputs are read here, whatever tier or image they come from.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from typing import TypeVar

import torch

from gigagrad.boxes import Box
from gigagrad.execution.prepared import Prepared
from gigagrad.execution.scalars import ScalarGraph
from gigagrad.execution.seeds import ROUNDINGS, seed_of
from gigagrad.execution.sources import Source, read_ahead
from gigagrad.execution.staging import StagedStore, Staging
from gigagrad.execution.tile_program import TileInputs
from gigagrad.graphs import SCATTER
from gigagrad.graphs.crops import batched, box_view, laid_out
from gigagrad.plans import EXACT, Segment, TileGeometry
from gigagrad.plans.program import Buffer, Key
from gigagrad.plans.segments import adding
from gigagrad.stores import FieldSpec, OpenTier, Quantised, RoundedStore, Rounding, Store, Strips, Windows, crop_shape
from gigagrad.threads import SideThreads

Item = TypeVar("Item")
Inputs = tuple[TileInputs, bytes]
"""The inputs of a tile, and the hash of what it reads of images."""


class Buffers:
    """The stores of one run, by field. Values of kept fields are in `kept`, sums of cotangents in `cotangents`."""

    def __init__(
        self, prepared: Prepared, sources: Mapping[str, Source], scalars: ScalarGraph, rank: int, draws: int
    ) -> None:
        self.kept: dict[int, Store] = {}
        self.stored: dict[int, Store] = {}
        """The kept fields as they are stored, without what rounds them."""
        self.cotangents: dict[int, Store] = {}
        self.roundings = self._draw_roundings(prepared, draws)
        self._prepared = prepared
        self._graph = prepared.graph
        self._sources = sources
        self._scalars, self._rank = scalars, rank
        self._tiers = {field.node: field.tier for field in prepared.plan.kept}
        self._handed = prepared.problem.handed
        self._open: dict[str, OpenTier] = {}
        streams, device = prepared.device.streams(), prepared.device.torch_device
        self._staging = None if streams is None else Staging(streams, device, prepared.plan.readers)
        # They live from pass to pass: what a new thread's first operators set up takes longer than a small tile.
        self._readers = SideThreads(prepared.plan.readers, "gigagrad-read")

    def open(self) -> None:
        """Open the tiers. Raises StoreError if one has no room for what the plan keeps there."""
        plan, problem = self._prepared.plan, self._prepared.problem
        for tier in problem.tiers:
            if tier.in_budget or plan.bytes_in(tier.name):
                self._open[tier.name] = tier.open(plan.bytes_in(tier.name), problem.machine)

    def close(self) -> None:
        """End the threads and remove the files; what is in memory stays."""
        with ExitStack() as stack:  # goes on past errors
            for tier in self._open.values():
                stack.callback(tier.close)
            if self._staging is not None:  # it writes to them
                stack.callback(self._staging.close)
            stack.callback(self._readers.shutdown, cancel=True)

    def forget(self) -> None:
        """Give back what is in memory too: there will be no results. After `close`."""
        self.stored.clear()
        for stores in (self.kept, self.cotangents):
            while stores:
                stores.popitem()[1].close()

    # From pass to pass

    def fresh_bytes(self, buffers: Sequence[Buffer]) -> int:
        """Return what they add to the memory that tiles are computed in."""
        memory = self._prepared.problem.memory
        here = [buffer for buffer in buffers if buffer.tier == memory.name and buffer.size_bytes]
        return memory.fresh_bytes(spec for buffer in here for _, spec in self._windows(buffer))

    def allocate(self, buffers: Sequence[Buffer]) -> None:
        """Open a store for each. Raises StoreError."""
        for buffer in buffers:
            (self.cotangents if buffer.cotangent else self.kept)[buffer.node] = self._store(buffer)

    def release(self, keys: Sequence[Key]) -> None:
        """Give buffers back. The cotangents of global values laid out like images are handed to the scalars: their last
        reader is through.
        """
        for field, cotangent in keys:
            node = self._graph[field]
            store = (self.cotangents if cotangent else self.kept).pop(field)
            if not cotangent:
                del self.stored[field]
            elif node.op == SCATTER:
                whole = batched(self._ordered(store.whole()), node)
                self._scalars.accumulate(node.operands[0], self._scalars.scale.out_of(whole))
            if self._scalars.backward:
                store.retire()
            else:  # whoever takes a stream may hold a view of what its last tiles have read
                store.close()

    def handed_in(self, segment: Segment) -> int | None:
        """Return the image whose gradient is handed over, if the backward pass of this segment is the last that adds to
        it.
        """
        if self._handed is None:
            return None
        last = adding(self._prepared.segments, self._prepared.plan.passes, self._handed)[-1:]
        return self._handed if last == [segment.index] else None

    def take(self, image: int, y1: int) -> Iterator[tuple[Box, torch.Tensor]]:
        """Yield the strip of an image's gradient down to this row, if there is a new one: nothing is added to it any
        more.
        """
        store = self.cotangents[image]
        assert isinstance(store, Strips)
        if (strip := store.take(y1)) is not None:
            yield strip

    def _store(self, buffer: Buffer) -> Store:
        spec = self._spec(buffer)
        if buffer.cotangent and buffer.node == self._handed:
            return Strips(spec, self._prepared.device.torch_device, whole=buffer.size_bytes > 0)
        rounding, tier = self._rounding(buffer), self._open[buffer.tier]
        windows = [(box, tier.open_store(window)) for box, window in self._windows(buffer)]
        whole = len(windows) == 1 and windows[0][1].shape == spec.shape
        store = windows[0][1] if whole else Windows(spec, windows)
        if self._staging is not None and buffer.tier != self._prepared.problem.memory.name:
            store = StagedStore(store, self._staging)
        if not buffer.cotangent:
            self.stored[buffer.node] = store
        return store if rounding is None else RoundedStore(store, rounding, self._graph[buffer.node].dtype)

    def _windows(self, buffer: Buffer) -> list[tuple[Box, FieldSpec]]:
        """Return what this rank holds of a buffer, each window as a field of its own: worked out once for all runs."""
        key = buffer.node, buffer.cotangent, self._rank
        if key not in self._prepared.windows:
            self._prepared.windows[key] = self._find_windows(buffer)
        return self._prepared.windows[key]

    def _find_windows(self, buffer: Buffer) -> list[tuple[Box, FieldSpec]]:
        spec, found = self._spec(buffer), []
        for number, box in enumerate(buffer.held[self._rank]):
            shape = crop_shape(spec.shape, spec.axes, box)
            found.append((box, dataclasses.replace(spec, name=f"{spec.name}-{number}", shape=shape)))
        return found

    def _rounding(self, buffer: Buffer) -> Rounding | None:
        return None if buffer.cotangent else self.roundings.get(buffer.node)

    def _spec(self, buffer: Buffer) -> FieldSpec:
        node, rounding = self._graph[buffer.node], self._rounding(buffer)
        dtype = node.dtype if rounding is None else rounding.packed_dtype(node.dtype)
        name = f"{'cotangent' if buffer.cotangent else 'field'}-{buffer.node}"
        coded = isinstance(rounding, Quantised)
        return FieldSpec(name, node.stored_shape, dtype, node.stored_axes, layout=self._prepared.layout, coded=coded)

    @staticmethod
    def _draw_roundings(prepared: Prepared, draws: int) -> dict[int, Rounding]:
        """Return how each packed field is rounded in this run: errors are drawn anew for every field and run."""
        packed = [field.node for field in prepared.plan.kept if field.storage != EXACT]
        if prepared.rounding is None or not packed:
            return {}
        first = seed_of(draws, ROUNDINGS) % 2**40
        return {node: prepared.rounding.keyed(first + node) for node in packed}

    # From tile to tile

    def inputs(
        self, segment: Segment, tile: TileGeometry, *, backward: bool, cotangents_only: bool = False
    ) -> TileInputs:
        """Read the inputs of a tile, on the device; for a backward pass also the cotangents of what it kept, and its
        values. `cotangents_only`: no more is asked for.
        """
        crops, cotangents, stored = {}, {}, {}
        for i in segment.reads if not cotangents_only else ():
            box = tile.box(i)
            if box is not None:
                crops[i] = self._ordered(self._crop(i, box))
        if backward:
            reduced = self._prepared.bound(segment.index).reduced
            for i in segment.kept:
                box = tile.wanted(i)
                if i in self.cotangents and not box.empty:
                    # Reductions read them once, and what comes of both is new: views will do, where there are some.
                    ready = torch.Tensor.detach if i in reduced and self._in_memory(i) else self._ordered
                    cotangents[i] = ready(self.cotangents[i].read(box))
                    if not cotangents_only:
                        stored[i] = ready(self.kept[i].read(box))
        return TileInputs(crops, cotangents, stored)

    def read_ahead(self, tiles: Iterable[Item], read: Callable[[Item], Inputs]) -> Iterator[tuple[Item, Inputs]]:
        """Yield `(tile, read(tile))` for every tile in order; threads read the next ones meanwhile."""
        if self._staging is None:
            return read_ahead(tiles, read, self._readers)
        return self._staging.read_ahead(tiles, read, self._readers, lambda found: found[0].tensors)

    def wait_for(self, segment: Segment, *, backward: bool) -> bool:
        """Say whether reading the inputs of a tile takes the time of whoever asks: on a GPU only what comes from
        elsewhere does, and a host copies crops itself.
        """
        if self._prepared.device.is_host:
            return True
        images = [self._graph[i].arguments["name"] for i in segment.reads if self._graph[i].is_source]
        fields = (*segment.reads, *segment.kept) if backward else segment.reads
        placed = all(self._sources[name].is_placed for name in images)
        return not placed or not all(map(self._in_memory, fields))

    def images(self, segment: Segment, tile: TileGeometry) -> dict[int, torch.Tensor]:
        """Read what a tile needs of images."""
        boxes = {i: tile.box(i) for i in segment.reads if self._graph[i].is_source}
        return {i: self._crop(i, box) for i, box in boxes.items() if box is not None}

    def _crop(self, node_id: int, box: Box) -> torch.Tensor:
        """Read a crop of a field that is there: an image, a global value laid out like one, or a kept field."""
        node = self._graph[node_id]
        if node.is_source:
            return self._sources[node.arguments["name"]].view(box)
        if node.op == SCATTER:
            view = self._scalars.values[node.operands[0]].detach().reshape(node.stored_shape)
            return box_view(view, node.stored_axes, box, node.box)
        return self.kept[node_id].read(box)

    def whole(self, field: int) -> torch.Tensor:
        """Return a kept field, for whole-field operators."""
        return batched(self._ordered(self.kept[field].whole()), self._graph[field])

    def _in_memory(self, field: int) -> bool:
        """Say whether it is where tiles are computed, in their layout."""
        memory = self._prepared.problem.memory.name
        return self._tiers.get(field, memory) == memory

    def _ordered(self, crop: torch.Tensor) -> torch.Tensor:
        crop = crop.detach()
        here = crop.to(self._prepared.device.torch_device) if self._staging is None else self._staging.upload(crop)
        return laid_out(here, self._prepared.layout)
