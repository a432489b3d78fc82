"""Blosc for chunks that anybody may have written.

A Blosc chunk says how long it is, and the library believes it: of a chunk that is cut off it reads on, into whatever
memory follows, and that becomes pixels. numcodecs does not tell it where a chunk ends; the classes here look first.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import cached_property
from typing import Any

import numpy as np
from numcodecs.blosc import Blosc
from zarr import Array
from zarr.codecs import BloscCodec
from zarr.core.array import AsyncArray

from gigagrad.units import format_bytes

# A chunk must be decoded whole, as a tile of a TIFF.
LARGEST_CHUNK_BYTES = 256 * 2**20
_HEADER_BYTES = 16


class WholeBlosc(Blosc):  # type: ignore[misc]  # numcodecs has no types
    """Blosc that refuses a chunk of another length than its header says."""

    def decode(self, buf: Any, out: Any = None) -> Any:
        data = np.frombuffer(buf, np.uint8)
        held = int.from_bytes(data[4:8].tobytes(), "little")
        claimed = int.from_bytes(data[12:_HEADER_BYTES].tobytes(), "little")
        if len(data) < _HEADER_BYTES or claimed != len(data):
            raise ValueError(f"a Blosc chunk has {len(data)} bytes, its header says {claimed}")
        if held > LARGEST_CHUNK_BYTES:
            raise ValueError(f"a Blosc chunk claims to hold {format_bytes(held)}")
        return super().decode(buf, out)


class WholeBloscCodec(BloscCodec):  # type: ignore[misc]  # nor does mypy see zarr's
    """The same for Zarr 3."""

    @cached_property
    def _blosc_codec(self) -> Blosc:
        settings = super()._blosc_codec.get_config()
        return WholeBlosc(**{key: value for key, value in settings.items() if key != "id"})


def codecs_of(metadata: Any) -> Iterator[Any]:
    """All codecs of an array, those inside shards too."""
    waiting = [getattr(metadata, "compressor", None), *(getattr(metadata, "filters", None) or ())]
    waiting += getattr(metadata, "codecs", ())
    while waiting:
        if (codec := waiting.pop()) is not None:
            yield codec
            waiting += [*getattr(codec, "codecs", ()), *getattr(codec, "index_codecs", ())]


def codec_name(codec: Any) -> str:
    return str(codec.codec_id if hasattr(codec, "codec_id") else codec.to_dict()["name"])


def with_whole_chunks(array: Any) -> Any:
    """The same array, read by the classes above."""
    for codec in codecs_of(array.metadata):
        for plain, whole in ((Blosc, WholeBlosc), (BloscCodec, WholeBloscCodec)):
            if type(codec) is plain:
                # Codecs are frozen and nest; what differs is the class alone.
                object.__setattr__(codec, "__class__", whole)
    return Array(AsyncArray(metadata=array.metadata, store_path=array.store_path))
