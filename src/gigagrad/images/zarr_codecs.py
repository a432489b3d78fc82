"""Decode chunks that anybody may have written: none reads beyond its chunk or unpacks more than a chunk may hold.

A Blosc chunk says how long it is, and the library believes it: of a chunk that is cut off it reads on, into whatever
memory follows, and that becomes pixels. The others unpack whatever a chunk says or turns out to hold: 32 KiB can become
1 GiB. numcodecs tells none of them where to stop; the classes here do.
"""

from __future__ import annotations

import bz2
import lzma
import math
import zlib
from collections.abc import Callable, Iterator
from functools import cached_property
from typing import Any

import imagecodecs
import numpy as np
from numcodecs import bz2 as numcodecs_bz2
from numcodecs import gzip as numcodecs_gzip
from numcodecs import lzma as numcodecs_lzma
from numcodecs import zlib as numcodecs_zlib
from numcodecs.blosc import Blosc
from numcodecs.compat import ensure_bytes, ndarray_copy
from numcodecs.lz4 import LZ4
from numcodecs.zstd import Zstd
from zarr import Array
from zarr.codecs import BloscCodec
from zarr.core.array import AsyncArray

from gigagrad.units import format_bytes

# A chunk must be decoded whole, as a tile of a TIFF.
LARGEST_CHUNK_BYTES = 256 * 2**20
_LONGER, _SMALL_BYTES = 8, 2**16
"""The most that filters, checksums and the index of a shard add to a chunk."""
_BLOSC_HEADER_BYTES = 16
_GZIP = 16 + zlib.MAX_WBITS
_INNER = ("_gzip_codec", "_zstd_codec", "_codec")
"""The attributes in which a codec of Zarr 3 keeps the codec of numcodecs that it calls."""


class _Bounded:
    """A codec that unpacks `_most_bytes` at most."""

    __slots__ = ()  # and after the plain class, whose instances become ones
    _most_bytes = LARGEST_CHUNK_BYTES

    def _check(self, held: int, more: str = "") -> None:
        if held > self._most_bytes:
            raise ValueError(
                f"a chunk holds {more or format_bytes(held)}; expected at most {format_bytes(self._most_bytes)}"
            )

    def _unpack(self, new: Callable[[], Any], buf: Any, out: Any, *, several: bool = True) -> Any:
        """Unpack what the streams of a chunk hold. A chunk that ends before its stream does is refused."""
        data, parts, held = ensure_bytes(buf), [], 0
        while True:
            stream = new()
            parts.append(stream.decompress(data, self._most_bytes - held + 1))
            held += len(parts[-1])
            self._check(held, "more")
            if not stream.eof:
                raise ValueError("a chunk ends before its compressed stream")
            data = stream.unused_data.lstrip(b"\0")
            if not data or not several:
                return ndarray_copy(b"".join(parts) if len(parts) > 1 else parts[0], out)


class WholeBlosc(Blosc, _Bounded):  # type: ignore[misc]  # numcodecs has no types
    """Blosc that refuses a chunk of another length than its header says."""

    def decode(self, buf: Any, out: Any = None) -> Any:
        data = np.frombuffer(buf, np.uint8)
        held = int.from_bytes(data[4:8].tobytes(), "little")
        claimed = int.from_bytes(data[12:_BLOSC_HEADER_BYTES].tobytes(), "little")
        if len(data) < _BLOSC_HEADER_BYTES or claimed != len(data):
            raise ValueError(f"a Blosc chunk has {len(data)} bytes, its header says {claimed}")
        self._check(held)
        return super().decode(buf, out)


class WholeBloscCodec(BloscCodec):  # type: ignore[misc]  # nor does mypy see zarr's
    """Blosc for Zarr 3 that refuses such a chunk."""

    @cached_property
    def _blosc_codec(self) -> Blosc:
        settings = super()._blosc_codec.get_config()
        return WholeBlosc(**{key: value for key, value in settings.items() if key != "id"})


class BoundedLZ4(LZ4, _Bounded):  # type: ignore[misc]
    """LZ4 that looks at the length in front of a chunk."""

    def decode(self, buf: Any, out: Any = None) -> Any:
        held = int.from_bytes(ensure_bytes(buf)[:4], "little")
        self._check(held)
        return super().decode(buf, out)


class BoundedZstd(Zstd, _Bounded):  # type: ignore[misc]
    """Zstandard that stops. A frame need not say how much it holds, and then the library unpacks until memory ends."""

    def decode(self, buf: Any, out: Any = None) -> Any:
        room: Any = np.empty(self._most_bytes, np.uint8)  # untouched pages take no memory
        try:
            decoded = imagecodecs.zstd_decode(ensure_bytes(buf), out=room)
        except imagecodecs.ZstdError as error:
            raise ValueError(f"a chunk is no Zstandard frame of at most {format_bytes(self._most_bytes)}") from error
        return ndarray_copy(decoded, out) if out is not None else np.array(decoded)


class BoundedGZip(numcodecs_gzip.GZip, _Bounded):  # type: ignore[misc]
    def decode(self, buf: Any, out: Any = None) -> Any:
        return self._unpack(lambda: zlib.decompressobj(_GZIP), buf, out)


class BoundedZlib(numcodecs_zlib.Zlib, _Bounded):  # type: ignore[misc]
    def decode(self, buf: Any, out: Any = None) -> Any:
        return self._unpack(zlib.decompressobj, buf, out, several=False)


class BoundedBZ2(numcodecs_bz2.BZ2, _Bounded):  # type: ignore[misc]
    def decode(self, buf: Any, out: Any = None) -> Any:
        return self._unpack(bz2.BZ2Decompressor, buf, out)


class BoundedLZMA(numcodecs_lzma.LZMA, _Bounded):  # type: ignore[misc]
    def decode(self, buf: Any, out: Any = None) -> Any:
        return self._unpack(lambda: lzma.LZMADecompressor(self.format, filters=self.filters), buf, out)


_BOUNDED = (WholeBlosc, WholeBloscCodec, BoundedLZ4, BoundedZstd, BoundedGZip, BoundedZlib, BoundedBZ2, BoundedLZMA)
_BY_PLAIN = {bounded.__bases__[0]: bounded for bounded in _BOUNDED}


def codecs_of(metadata: Any) -> Iterator[Any]:
    """Yield all codecs of an array, those inside shards too."""
    waiting = [getattr(metadata, "compressor", None), *(getattr(metadata, "filters", None) or ())]
    waiting += getattr(metadata, "codecs", ())
    while waiting:
        if (codec := waiting.pop()) is not None:
            yield codec
            waiting += [*getattr(codec, "codecs", ()), *getattr(codec, "index_codecs", ())]


def codec_name(codec: Any) -> str:
    return str(codec.codec_id if hasattr(codec, "codec_id") else codec.to_dict()["name"])


def with_bounded_chunks(array: Any) -> Any:
    """Return the array as read by the classes above."""
    stored = math.prod(array.shards or array.chunks) * np.dtype(array.dtype).itemsize
    most = min(LARGEST_CHUNK_BYTES, _LONGER * stored + _SMALL_BYTES)
    for codec in codecs_of(array.metadata):
        for one in (codec, *(getattr(codec, name, None) for name in _INNER)):
            if (bounded := _BY_PLAIN.get(type(one))) is not None:
                # Codecs are frozen and nest; what differs is the class alone.
                object.__setattr__(one, "__class__", bounded)
                object.__setattr__(one, "_most_bytes", most)
    return Array(AsyncArray(metadata=array.metadata, store_path=array.store_path))
