"""Check that a PNG holds all the pixels that it declares. Pillow leaves rows black where the stream ends early.

A walk over the chunks (W3C PNG, sections 5 and 10) with their checksums, and one pass of inflation that keeps nothing.
Unlike JPEG, PNG has a checksum for every byte: what passes here is as it was written.
"""

from __future__ import annotations

import zlib
from collections.abc import Iterator
from itertools import accumulate

_SIGNATURE_BYTES = 8
_SAMPLES_OF_COLOUR = {0: 1, 2: 3, 3: 1, 4: 2, 6: 4}
_BITS = (1, 2, 4, 8, 16)
# First row and column, and the steps between rows and between columns, of the passes.
_WHOLE = ((0, 0, (1, 1)),)
_ADAM7 = (
    *((0, 0, (8, 8)), (0, 4, (8, 8)), (4, 0, (8, 4)), (0, 2, (4, 4)), (2, 0, (4, 2)), (0, 1, (2, 2)), (1, 0, (2, 1))),
)
_INFLATED_AT_ONCE = 2**20


def png_size(data: bytes) -> tuple[int, int]:
    """Return `(height, width)` as the header says."""
    return int.from_bytes(data[20:24], "big"), int.from_bytes(data[16:20], "big")


def check_png(data: bytes) -> None:
    """Raise `ValueError` for a PNG with a damaged chunk, and for one that ends before its pixels: with the row."""
    chunks = list(_chunks(data))
    if not chunks or chunks[0][0] != b"IHDR" or len(chunks[0][1]) != 13:
        raise ValueError("it does not begin with a header")
    height, width = png_size(data)
    bits, colour, interlaced = data[24], data[25], data[28]
    if bits not in _BITS or colour not in _SAMPLES_OF_COLOUR or interlaced > 1:
        raise ValueError(f"its header is damaged ({bits} bits, colour {colour}, interlace {interlaced})")
    pixel_bits = _SAMPLES_OF_COLOUR[colour] * bits
    sizes = [_pass_bytes(height - y, width - x, step, pixel_bits) for y, x, step in (_ADAM7 if interlaced else _WHOLE)]
    expected = sum(sizes)
    got = _inflated_bytes([bytes(body) for kind, body in chunks if kind == b"IDAT"], expected)
    if got < expected:
        passes = sum(end <= got for end in accumulate(sizes))
        place = f"in pass {passes + 1} of 7" if interlaced else f"at row {got * height // expected} of {height}"
        raise ValueError(f"it ends before its pixels, {place}")


def _pass_bytes(height: int, width: int, step: tuple[int, int], pixel_bits: int) -> int:
    """Count the bytes of every `step`th row and column, each row with a byte that says how it was filtered."""
    rows, columns = (max(0, -(-size // every)) for size, every in zip((height, width), step, strict=True))
    return rows * (1 + -(-columns * pixel_bits // 8)) if columns else 0


def _chunks(data: bytes) -> Iterator[tuple[bytes, memoryview]]:
    """Yield kind and content of every chunk up to the end of the picture."""
    view, at = memoryview(data), _SIGNATURE_BYTES
    while at + 12 <= len(data):
        length, kind = int.from_bytes(data[at : at + 4], "big"), data[at + 4 : at + 8]
        end = at + 12 + length
        if end > len(data):
            break
        if zlib.crc32(view[at + 4 : end - 4]) != int.from_bytes(data[end - 4 : end], "big"):
            raise ValueError(f"the checksum of its chunk {kind!r} at byte {at} is wrong")
        yield kind, view[at + 8 : end - 4]
        if kind == b"IEND":
            return
        at = end
    raise ValueError(f"it is cut off at byte {len(data)}")


def _inflated_bytes(parts: list[bytes], enough: int) -> int:
    """Count the bytes that a zlib stream holds; no more than about `enough` are counted, and none is kept."""
    stream, got = zlib.decompressobj(), 0
    try:
        for part in parts:
            while part and got < enough and not stream.eof:
                got += len(stream.decompress(part, _INFLATED_AT_ONCE))
                part = stream.unconsumed_tail
    except zlib.error as error:
        raise ValueError(f"its pixels are damaged after {got} of {enough} bytes ({error})") from error
    return got
