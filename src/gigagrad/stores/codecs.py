"""Lossless codecs for the bytes of kept fields.

What is encoded begins with a small header of our own: which codec wrote it, how many bytes it stands for, and a
checksum of everything else. It is checked before a codec's own parser sees a byte, so damaged scratch is an error and
never a wrong number. The checksum (CRC-32, at memory speed) is taken of the encoded bytes, which are fewer.
"""

from __future__ import annotations

import struct
from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import Any, ClassVar

import imagecodecs
import numpy as np
import numpy.typing as npt

from gigagrad.errors import StoreError

Bytes = npt.NDArray[np.uint8]
Encoded = bytes | bytearray | memoryview

_imagecodecs: Any = imagecodecs  # takes any buffer; its type stubs name only three kinds
_HEADER = struct.Struct("<4sQI")  # codec, decoded bytes, checksum of both and of the payload
_CHECKED = struct.Struct("<4sQ")


class Codec(ABC):
    """From the bytes of a field to fewer bytes and back, the same ones. Any number of threads may share one."""

    name: ClassVar[bytes]

    def encode(self, data: Bytes | memoryview, itemsize: int) -> bytes:
        """`data` (uint8, C-contiguous) encoded; `itemsize`, the bytes of one number, tells which bytes are alike."""
        data = np.frombuffer(data, np.uint8)
        payload = self._encode(data, itemsize)
        checked = _CHECKED.pack(self.name, data.nbytes)
        return b"".join((_HEADER.pack(self.name, data.nbytes, _checksum(checked, payload)), payload))

    def decode(self, data: Encoded, out: Bytes) -> None:
        """Fill `out` (uint8, C-contiguous) with what was encoded.

        Raises `StoreError` when the bytes are not those that `encode` returned for this codec and that many bytes.
        """
        data = memoryview(data)
        if len(data) < _HEADER.size:
            raise _damaged(f"{len(data)} bytes", f"a header of {_HEADER.size} bytes and a payload")
        name, nbytes, checksum = _HEADER.unpack_from(data)
        payload = data[_HEADER.size :]
        found = _checksum(_CHECKED.pack(name, nbytes), payload)
        if found != checksum:
            raise _damaged(f"{len(data)} bytes with checksum {found:08x}", f"checksum {checksum:08x}")
        if (name, nbytes) != (self.name, out.nbytes):
            raise _damaged(f"{nbytes} bytes encoded by {name!r}", f"{out.nbytes} bytes encoded by {self.name!r}")
        self._decode(payload, out)

    def max_encoded_bytes(self, nbytes: int) -> int:
        """The longest that `nbytes` can become."""
        return _HEADER.size + self._max_payload_bytes(nbytes)

    @abstractmethod
    def _encode(self, data: Bytes, itemsize: int) -> Bytes | bytes: ...

    @abstractmethod
    def _decode(self, payload: memoryview, out: Bytes) -> None: ...

    @abstractmethod
    def _max_payload_bytes(self, nbytes: int) -> int: ...


@dataclass(frozen=True)
class Blosc(Codec):
    """Blosc2: the bits of like significance side by side (bitshuffle), then Zstandard at its fastest level.

    Signs, exponents and runs of zeros shrink; mantissas of raw floats do not. Each call runs on the calling thread
    alone and without the interpreter's lock, so that the caller decides how many run at once.
    """

    name: ClassVar[bytes] = b"blz1"
    level: int = 1

    _LARGEST: ClassVar[int] = 2**31 - 1 - 32
    _OVERHEAD: ClassVar[int] = 32

    def _encode(self, data: Bytes, itemsize: int) -> bytes:
        assert data.nbytes <= self._LARGEST, f"a brick of {data.nbytes} bytes; Blosc takes {self._LARGEST}"
        encoded: bytes = _imagecodecs.blosc2_encode(
            data, level=self.level, compressor="zstd", shuffle="bitshuffle", typesize=itemsize, numthreads=1
        )
        return encoded

    def _decode(self, payload: memoryview, out: Bytes) -> None:
        try:
            _imagecodecs.blosc2_decode(payload, numthreads=1, out=out)
        except (_imagecodecs.Blosc2Error, ValueError) as error:
            raise _damaged(f"what Blosc refuses ({error})", f"{out.nbytes} bytes encoded by it") from error

    def _max_payload_bytes(self, nbytes: int) -> int:
        return nbytes + self._OVERHEAD


def faster_codec(link_bytes_per_second: float, codec_bytes_per_second: float, ratio: float) -> Codec | None:
    """`Blosc` where it moves a field sooner than the bare link does.

    `codec_bytes_per_second` counts decoded bytes, the slower of both directions, 0 where it is not known; `ratio` is
    decoded over encoded bytes. The two times are added: while it encodes, the processor is not computing tiles, so
    nothing hides that time.
    """
    if not codec_bytes_per_second:
        return None
    seconds_per_byte = 1 / codec_bytes_per_second + 1 / (ratio * link_bytes_per_second)
    return Blosc() if seconds_per_byte < 1 / link_bytes_per_second else None


def _checksum(header: bytes, payload: Bytes | Encoded) -> int:
    checksum: int = _imagecodecs.deflate_crc32(payload, value=_imagecodecs.deflate_crc32(header))
    return checksum


def _damaged(got: str, expected: str) -> StoreError:
    return StoreError(
        f"a kept field is damaged: got {got}, expected {expected}; "
        "check the scratch disk, and run again with another `scratch` folder"
    )
