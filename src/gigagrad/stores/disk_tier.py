"""Fields in files of a scratch folder, brick by brick."""

from __future__ import annotations

import shutil
from pathlib import Path

from gigagrad.allowances import FREE_SHARE, ROWS_AT_ONCE
from gigagrad.devices import Machine
from gigagrad.errors import StoreError
from gigagrad.stores.bricks import Bricks
from gigagrad.stores.codecs import Blosc, Codec, faster_codec
from gigagrad.stores.disk import DiskStore
from gigagrad.stores.scratch import Scratch
from gigagrad.stores.store import Store
from gigagrad.stores.tier import FieldSpec, OpenTier, Size, Tier


class DiskTier(Tier):
    """Files in `folder`, of at most `room_bytes` in all; without that, of what is free there."""

    name = "disk"
    place = "scratch files"
    encodes = True
    remedy = "make room in the scratch folder, name another one, or raise scratch_bytes"

    def __init__(self, folder: Path, room_bytes: int | None = None) -> None:
        self._folder, self._room_bytes = folder, room_bytes

    def room_bytes(self) -> int:
        try:
            free = int(shutil.disk_usage(self._folder).free * FREE_SHARE)
        except OSError as error:
            raise StoreError(f"cannot use scratch folder '{self._folder}': {error.strerror or error}") from error
        return free if self._room_bytes is None else min(free, self._room_bytes)

    def open(self, needed_bytes: int, machine: Machine) -> OpenTier:
        codec = faster_codec(machine.disk_bytes_per_second, machine.codec_bytes_per_second, machine.codec_ratio)
        return _OpenFolder(Scratch(self._folder, needed_bytes), codec)

    def field_bytes(self, size: Size, pixel_bytes: int) -> int:
        return Bricks(*size, pixel_bytes).file_bytes

    def crop_bytes(self, size: Size, crop: Size, pixel_bytes: int) -> float:
        """Of the bricks that it touches."""
        nbytes = crop[0] * crop[1] * pixel_bytes
        return Bricks(*size, pixel_bytes).read_ratio(*crop) * nbytes if nbytes else 0.0

    def buffer_bytes(self, size: Size, crop: Size, pixel_bytes: int) -> int:
        return ROWS_AT_ONCE * Bricks(*size, pixel_bytes).row_bytes(crop[1])

    def link_seconds(self, nbytes: float, machine: Machine) -> float:
        return nbytes / machine.disk_bytes_per_second

    def processor_seconds(self, nbytes: float, machine: Machine) -> float:
        return machine.file_seconds(nbytes)


class _OpenFolder:
    def __init__(self, scratch: Scratch, codec: Codec | None) -> None:
        self._scratch, self._codec = scratch, codec

    def open_store(self, field: FieldSpec) -> Store:
        codec = Blosc() if field.coded else self._codec
        return DiskStore(field.shape, field.dtype, field.axes, scratch=self._scratch, name=field.name, codec=codec)

    def close(self) -> None:
        self._scratch.close()
