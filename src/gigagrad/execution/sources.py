"""Images as a run reads them: crops as tensors with a batch axis, read ahead in threads while tiles compute.

Where the device that computes has room for all of them, they are placed there (`placed`): each block of a file is
decoded once, and no tile waits for a crop.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from math import prod
from typing import Any, TypeVar

import numpy as np
import torch

from gigagrad.allowances import READ_AHEAD
from gigagrad.boxes import Box, tiles
from gigagrad.devices import Device
from gigagrad.devices.streams import Streams
from gigagrad.errors import TargetError
from gigagrad.execution.executor import ahead
from gigagrad.graphs import InputSpec, LossModule
from gigagrad.images import Image, open_image
from gigagrad.images.bag import ArrayBag, Bag
from gigagrad.images.opening import open_ids
from gigagrad.images.pixels import Pixels
from gigagrad.plans.problem import Reading
from gigagrad.threads import SideThreads

Read = TypeVar("Read")


@dataclass(frozen=True, slots=True, eq=False)
class Source:
    """One input of the graph: an image that is read box by box, or a small tensor that is passed as it is."""

    spec: InputSpec
    image: Image | Bag | None
    tensor: torch.Tensor | None
    opened_here: bool = False
    given: torch.Tensor | None = None
    """The tensor that asks for its gradient."""
    is_placed: bool = False
    """True where its pixels lie on the device that computes."""

    @property
    def box(self) -> Box:
        """Return all of it: rows and columns of an image in pixels, or of a bag in patches, one in each row."""
        return Box.whole(self.spec.shape[0], 1) if self.spec.bag else Box.whole(*self.spec.shape[-2:])

    def read(self, box: Box) -> torch.Tensor:
        """Read the crop as a tensor `(1, C, h, w)` on the CPU, sharing the reader's memory where it can. Of a bag: the
        patches `box.y`, `(patches, 1, C, h, w)`.
        """
        return self._read(box, own=True)

    def view(self, box: Box) -> torch.Tensor:
        """Read a crop that is not to be written to: the memory may be the caller's own."""
        return self._read(box, own=False)

    def whole(self, *, own: bool = False) -> torch.Tensor:
        """Read all of it, as the model takes it; to be written to only if it is to be its `own`."""
        found = self._read(self.box, own=own)
        return found.flatten(0, 1) if self.spec.bag else found

    def _read(self, box: Box, *, own: bool) -> torch.Tensor:
        assert self.image is not None
        if isinstance(self.image, Bag):
            patches = self._tensor(self.image.read(box.y0, box.y1))
            return (patches.clone() if own else patches)[:, None]
        return self._tensor(self.image.read(box) if own else self.image.view(box))[None]

    def _tensor(self, pixels: Pixels) -> torch.Tensor:
        if isinstance(pixels, np.ndarray):
            shared = all(stride >= 0 and stride % pixels.itemsize == 0 for stride in pixels.strides)
            pixels = torch.from_numpy(pixels if shared and pixels.flags.writeable else pixels.copy())
        return pixels.to(self.spec.read_dtype)

    def close(self) -> None:
        if self.opened_here and self.image is not None:
            self.image.close()

    @property
    def cache_bytes(self) -> int:
        """Bytes that the reader may hold decoded."""
        return self.image.cache_bytes if self.image is not None else 0


@contextmanager
def opened_sources(
    composite: LossModule, image: Any, target: Any, *, asked: bool = False
) -> Iterator[dict[str, Source]]:
    """Yield the inputs of a graph by name; what is opened here is closed. `asked`: the gradient for the first image is.

    Raises ImageError, TargetError.
    """
    sources: dict[str, Source] = {}
    dtype_of = composite.dtype_of
    try:
        for index, one in enumerate(image if isinstance(image, tuple | list) else (image,)):
            sources[f"image{index or ''}"] = image_source(one, dtype_of, asked=asked and not index)
        if composite.loss is not None:
            if target is None:
                raise TargetError("this engine has a loss, which needs a target: an image or a label tensor")
            for index, one in enumerate(target if isinstance(target, tuple) else (target,)):
                sources[f"target{index or ''}"] = target_source(one, sources["image"], dtype_of)
        yield sources
    finally:
        for source in sources.values():
            source.close()


def image_source(
    image: Any,
    dtype_of: Callable[[torch.dtype], torch.dtype] = lambda given: given,
    *,
    asked: bool = False,
    ids: bool = False,
) -> Source:
    """Open an image argument: an `Image`, a path, a Zarr array, or an array or tensor `(C, H, W)` or `(1, C, H, W)`; or
    a bag: a `Bag`, or an array or tensor `(N, C, h, w)`.

    A tensor that requires a gradient gets one; `asked`: somebody else wants it. `dtype_of` says in which dtype an image
    of a given one is read; `ids`: that a file with a palette holds class ids.
    """
    given = image if isinstance(image, torch.Tensor) and image.requires_grad else None
    if isinstance(image, torch.Tensor | np.ndarray) and image.ndim == 4:
        image = image[0] if image.shape[0] == 1 else ArrayBag(image)
    opened: Image | Bag
    if isinstance(image, Bag):
        if ids:
            raise TargetError("a target is an image or a label tensor, no bag of patches; give a label for each bag")
        opened = image
    else:
        opened = image if isinstance(image, Image) else open_ids(image) if ids else open_image(image)
    dtype = dtype_of(torch_dtype(opened.dtype))
    bag = isinstance(opened, Bag)
    shape = opened.shape if isinstance(opened, Bag) else (1, *opened.shape)
    spec = InputSpec(shape, dtype, field=True, differentiable=asked or given is not None, bag=bag)
    return Source(spec, opened, None, opened_here=opened is not image, given=given)


def target_source(
    target: Any, image: Source, dtype_of: Callable[[torch.dtype], torch.dtype] = lambda given: given
) -> Source:
    """Open a target argument: dense (an image of any kind) or a label (a number, a 1-d tensor, any other small tensor).

    A 2-d array is dense if it has the image's height and width, and a label otherwise. A tensor that requires a
    gradient gets one. The target of a bag is a label.
    """
    if isinstance(target, bool | int | float):
        target = torch.tensor([target])
    bag = image.spec.bag
    if isinstance(target, np.ndarray) and (bag or target.ndim < 3):
        target = torch.from_numpy(np.ascontiguousarray(target))
    if isinstance(target, torch.Tensor) and (
        bag or target.ndim < 2 or (target.ndim == 2 and tuple(target.shape) != image.spec.shape[-2:])
    ):
        label, given = target.detach().to(dtype_of(target.dtype)), target if target.requires_grad else None
        spec = InputSpec(tuple(label.shape), label.dtype, field=False, differentiable=given is not None)
        return Source(spec, None, label, given=given)
    if bag:
        raise TargetError(f"the target of a bag is a label, a number or a tensor, got {type(target).__name__}")
    return image_source(target, dtype_of, ids=True)


def reading_of(sources: Mapping[str, Source], device: Device, threads: int) -> Reading:
    """Return what reading these takes; `threads` compute tiles where the device is the host, whose own read beside
    others.
    """
    images = {name: source.image for name, source in sources.items() if source.image is not None}
    return Reading(
        seconds={name: image.decode_seconds for name, image in images.items()},
        thread_bytes=max((image.thread_bytes for image in images.values()), default=0),
        threads=threads if device.is_host else torch.get_num_threads(),
        beside=device.is_host,
    )


def torch_dtype(dtype: np.dtype[Any] | torch.dtype) -> torch.dtype:
    """Return the dtype of tensors that hold such pixels."""
    return dtype if isinstance(dtype, torch.dtype) else torch.from_numpy(np.empty(0, dtype)).dtype


def read_ahead(tiles: Iterable[Any], read: Callable[[Any], Read], pool: SideThreads) -> Iterator[tuple[Any, Read]]:
    """Yield `(tile, read(tile))` for every tile in order; the pool reads the next ones meanwhile."""
    return ahead(tiles, lambda tile: (tile, read(tile)), pool, pool.count + READ_AHEAD)


_BAND_BYTES = 32 * 2**20
"""Bytes of an image that are read at a time."""

Sources = Mapping[str, Source]


def placed(sources: Sources, device: Device) -> dict[str, Source]:
    """Copy images and labels to the device; return sources that read them there. Raises as reading an image does."""
    here, streams = device.torch_device, device.streams()
    return reading(sources, [upload(source, empty_for(source, here), streams) for source in sources.values()])


def empty_for(source: Source, device: str | torch.device) -> torch.Tensor:
    """Return memory for all of a source."""
    if source.tensor is not None:
        return torch.empty_like(source.tensor, device=device)
    return torch.empty(source.spec.shape, dtype=source.spec.read_dtype, device=device)


def reading(sources: Sources, tensors: Sequence[torch.Tensor]) -> dict[str, Source]:
    """Return sources that read these tensors."""
    found = {}
    for (name, source), tensor in zip(sources.items(), tensors, strict=True):
        if source.tensor is not None:
            there: dict[str, Any] = {"tensor": tensor}
        else:
            there = {"image": ArrayBag(tensor) if source.spec.bag else open_image(tensor[0])}
        found[name] = dataclasses.replace(source, opened_here=False, is_placed=True, **there)
    return found


def upload(source: Source, placed: torch.Tensor, streams: Streams | None) -> torch.Tensor:
    """Copy all of a source to where it is read: on a device of its own band by band, through pinned memory."""
    if source.tensor is not None:
        return placed.copy_(source.tensor)
    for box, band in _bands(source):
        part = placed[box.y0 : box.y1, None] if source.spec.bag else placed[:, :, box.y0 : box.y1, box.x0 : box.x1]
        if streams is None or band.device == placed.device:
            part.copy_(band)
            continue
        try:
            pinned = streams.pinned_like(band)
        except RuntimeError:  # the host locks no more pages
            part.copy_(band)
        else:
            part.copy_(pinned.copy_(band), non_blocking=True)
    return placed


def _bands(source: Source) -> Iterator[tuple[Box, torch.Tensor]]:
    """Read an image in boxes of whole rows of blocks, or of whole blocks where one row is too large, so that each is
    decoded once; a bag so many patches at a time. None is to be written to. Files are read by several threads.
    """
    assert source.image is not None
    height, width = source.box.shape
    pixel_bytes = prod(source.spec.shape) // (height * width) * source.spec.read_dtype.itemsize
    block = (source.image.block_shape if isinstance(source.image, Image) else None) or (1, 1)
    rows = _whole(_BAND_BYTES // (width * pixel_bytes), block[0])
    columns = min(width, _whole(_BAND_BYTES // (rows * pixel_bytes), block[1]))
    boxes = [*tiles(height, width, rows, columns)]
    if not source.image.decode_seconds:
        yield from ((box, source.view(box)) for box in boxes)
        return
    readers = SideThreads(min(torch.get_num_threads(), len(boxes)), "gigagrad-upload")
    try:
        yield from read_ahead(boxes, source.read, readers)
    finally:
        readers.shutdown(cancel=True)


def _whole(length: int, block: int) -> int:
    """Round a length down to whole blocks, at least one."""
    return max(1, length // block) * block
