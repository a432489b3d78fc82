"""Place images and labels on the device that computes, where it has room for all of them: each block of a file is
decoded once, and no tile waits for a crop.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping, Sequence
from math import prod
from typing import Any

import torch

from gigagrad.boxes import Box, tiles
from gigagrad.devices import Device
from gigagrad.devices.streams import Streams
from gigagrad.execution.sources import Source, read_ahead
from gigagrad.images import Image, open_image
from gigagrad.images.bag import ArrayBag
from gigagrad.threads import SideThreads

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
