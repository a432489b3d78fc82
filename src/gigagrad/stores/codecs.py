"""Encode the bytes of kept fields without loss.

They encode and decode, and no more: a store compares the checksum of what it reads with that of what it wrote before a
codec's own parser sees a byte.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import Any

import imagecodecs
import numpy as np
import numpy.typing as npt

from gigagrad.errors import StoreError

Bytes = npt.NDArray[np.uint8]

_imagecodecs: Any = imagecodecs  # takes any buffer; its type stubs name only three kinds


class Codec(ABC):
    """A codec from bytes of a field to fewer, and back to the same ones. Any number of threads may share one."""

    @abstractmethod
    def encode(self, data: Bytes, itemsize: int) -> bytes:
        """Encode `data` (uint8, C-contiguous); `itemsize`, the bytes of one number, tells which bytes are alike."""

    @abstractmethod
    def decode(self, encoded: Bytes | bytes, out: Bytes) -> None:
        """Fill `out` (uint8, C-contiguous) with what was encoded.

        Raises `StoreError` where the codec itself finds that `encoded` is not what it made of that many bytes.
        """


@dataclass(frozen=True)
class Blosc(Codec):
    """Blosc2: the bits of like significance side by side (bitshuffle), then Zstandard at its fastest level.

    Signs, exponents and runs of zeros shrink; mantissas of raw floats do not. Each call runs on the calling thread
    alone and without the interpreter's lock, so that the caller decides how many run at once.
    """

    level: int = 1

    def encode(self, data: Bytes, itemsize: int) -> bytes:
        encoded: bytes = _imagecodecs.blosc2_encode(
            data, level=self.level, compressor="zstd", shuffle="bitshuffle", typesize=itemsize, numthreads=1
        )
        return encoded

    def decode(self, encoded: Bytes | bytes, out: Bytes) -> None:
        try:
            _imagecodecs.blosc2_decode(encoded, numthreads=1, out=out)
        except (_imagecodecs.Blosc2Error, ValueError) as error:
            raise StoreError(
                f"a kept field is damaged: Blosc refuses {len(encoded)} bytes that should decode to {out.nbytes} "
                f"({error}); check the scratch disk, and run again with another `scratch` folder"
            ) from error


def faster_codec(link_bytes_per_second: float, codec_bytes_per_second: float, ratio: float) -> Codec | None:
    """Return `Blosc` where it moves a field sooner than the bare link does.

    `codec_bytes_per_second` counts decoded bytes, the slower of both directions, 0 where it is not known; `ratio` is
    decoded over encoded bytes. The two times are added: while it encodes, the processor is not computing tiles, so
    nothing hides that time.
    """
    if not codec_bytes_per_second:
        return None
    seconds_per_byte = 1 / codec_bytes_per_second + 1 / (ratio * link_bytes_per_second)
    return Blosc() if seconds_per_byte < 1 / link_bytes_per_second else None
