"""Copy crops between the host and a device with its own memory, through pinned memory and beside the computation.

Whoever reads a tile's inputs asks for their copies on a stream of their own; the stream that computes waits for them,
the thread that runs the tile loop does not. What tiles give to fields on the host is copied on another stream, and a
thread writes or adds it there.

Pinned memory is the host's and no part of the budget. PyTorch's allocator hands the same blocks out again, from step to
step, each size rounded up to a power of two; at most as many bytes are in use as crops are on their way: those of
`readers + READ_AHEAD + 1` tiles up, and of `WRITES_BEHIND + 1` down.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from typing import TypeVar

import torch

from gigagrad.allowances import READ_AHEAD, WRITES_BEHIND
from gigagrad.boxes import Box
from gigagrad.devices.streams import Event, Streams
from gigagrad.execution.executor import ahead
from gigagrad.stores import Store
from gigagrad.threads import SideThreads, Task, operator_threads, wait_for

Item = TypeVar("Item")
Read = TypeVar("Read")


class Staging:
    """The copies of one run."""

    def __init__(self, streams: Streams, device: torch.device, readers: int) -> None:
        """Copy by this device's streams. The host's threads copy to and from pinned memory, as far as `readers` and the
        one that writes leave some.
        """
        self._streams, self._device = streams, device
        self._threads = max(1, torch.get_num_threads() // (readers + 1))
        self._writer = SideThreads(1, "gigagrad-write")
        self._pins = True

    def upload(self, crop: torch.Tensor) -> torch.Tensor:
        """Return a crop on the device, as the current stream will find it."""
        if crop.device.type == self._device.type:
            return crop
        pinned = self._pinned_like(crop)
        if pinned is None:
            return crop.to(self._device)
        with operator_threads(self._threads):
            pinned.copy_(crop)
        return pinned.to(self._device, non_blocking=True)

    def download(
        self, crop: torch.Tensor, take: Callable[[torch.Tensor], object], earlier: Task[None] | None
    ) -> Task[None]:
        """Have `take` called with a crop on the host, in the order of these calls; where the earlier task has failed,
        this one fails alike.
        """
        arrived, host = self._to_host(crop)

        def taken() -> None:
            if earlier is not None:
                earlier.result()
            if arrived is not None:
                arrived.synchronize()
            with operator_threads(self._threads):
                take(host)

        return self._writer.submit(taken)

    def read_ahead(
        self,
        tiles: Iterable[Item],
        read: Callable[[Item], Read],
        pool: SideThreads,
        tensors: Callable[[Read], Iterable[torch.Tensor]],
    ) -> Iterator[tuple[Item, Read]]:
        """Yield `(tile, read(tile))` for every tile in order, with `tensors` that the current stream may use; the pool
        reads the next ones meanwhile, on the stream of uploads.

        A tile is read when the device has computed all but the last few before it, as far as crops are read ahead: so
        no more crops are on the device than the plan counts, however far ahead of it the host is.
        """
        streams, most = self._streams, pool.count + READ_AHEAD
        begun = streams.record()  # from here on fields on the device hold what was written before
        computed = list[Event]()
        """The newest tile that is computed, once it is."""

        def read_on(given: tuple[Item, list[Event]]) -> tuple[Item, Read, Event]:
            tile, earlier = given
            for event in earlier:
                event.synchronize()
            with streams.uploading():
                streams.wait(begun)
                return tile, read(tile), streams.record()

        try:
            for tile, found, arrived in ahead(((tile, computed[:]) for tile in tiles), read_on, pool, most):
                streams.wait(arrived)
                for tensor in tensors(found):
                    streams.use(tensor)
                yield tile, found
                computed[:] = [streams.record()]
        finally:  # after an error, too: nothing is given back that a read may still use
            with streams.uploading():
                last = streams.record()
            streams.wait(last)

    def close(self) -> None:
        """End the thread. What it has not written is not."""
        self._writer.shutdown(cancel=True)

    def _to_host(self, crop: torch.Tensor) -> tuple[Event | None, torch.Tensor]:
        """Copy a crop to the host; where it comes with an event, it is there when that has happened."""
        if crop.device.type == "cpu":
            return None, crop
        pinned = self._pinned_like(crop)
        if pinned is None:
            return None, crop.cpu()
        dense = crop.clone()  # whoever made the crop may use its memory again; and one with gaps would not go this way
        streams = self._streams
        made = streams.record()
        with streams.downloading():
            streams.wait(made)
            streams.use(dense)
            pinned.copy_(dense, non_blocking=True)
            return streams.record(), pinned

    def _pinned_like(self, tensor: torch.Tensor) -> torch.Tensor | None:
        """Return pinned memory for a tensor; None where the system gives no more of it."""
        if not (self._pins and tensor.numel()):
            return None
        try:
            return self._streams.pinned_like(tensor)
        except RuntimeError:  # the host locks no more pages: slower, but it goes on
            self._pins = False
            return None


class StagedStore(Store):
    """A field of another store on the host, whose crops come from a device and are read on it. Writing happens behind,
    crop after crop in their order; reading waits for it.
    """

    def __init__(self, inner: Store, staging: Staging) -> None:
        super().__init__(inner.shape, inner.dtype, inner.axes)
        self._inner, self._staging = inner, staging
        self._newest: Task[None] | None = None
        self._behind: deque[tuple[int, Task[None]]] = deque()
        self._largest_bytes = 0
        self._order = threading.Lock()

    def read(self, box: Box) -> torch.Tensor:
        self._wait()
        return self._staging.upload(self._inner.read(box))

    def write(self, box: Box, crop: torch.Tensor) -> None:
        self._change(self._inner.write, box, crop)

    def add(self, box: Box, crop: torch.Tensor) -> None:
        self._change(self._inner.add, box, crop)

    def flush(self) -> None:
        self._wait()
        self._inner.flush()

    def close(self) -> None:
        if self._newest is not None:
            wait_for([self._newest])
        self._inner.close()

    def retire(self) -> None:
        if self._newest is not None:
            wait_for([self._newest])
        self._inner.retire()

    def _wait(self) -> None:
        """Wait for what is behind. Raises what its writing raised."""
        newest = self._newest
        if newest is not None:
            newest.result()

    def _change(self, change: Callable[[Box, torch.Tensor], None], box: Box, crop: torch.Tensor) -> None:
        crop = crop.detach()
        with self._order:
            self._make_room(crop.nbytes)
            earlier = self._newest
            if earlier is not None and earlier.done():
                earlier.result()
            self._newest = self._staging.download(crop, lambda host: change(box, host), earlier)
            self._behind.append((crop.nbytes, self._newest))

    def _make_room(self, nbytes: int) -> None:
        """Wait until no more is behind than `WRITES_BEHIND` crops of tiles: one may come in pieces."""
        self._largest_bytes = max(self._largest_bytes, nbytes)
        while self._behind and sum(size for size, _ in self._behind) > WRITES_BEHIND * self._largest_bytes:
            wait_for([self._behind.popleft()[1]])
