"""Check that a compressed tile is whole: decoders of JPEG and JPEG 2000 say so too easily.

They paint over what they cannot decode, and their warnings do not reach Python. These checks walk a stream's markers
(ITU-T T.81 annex B, T.800 annex A) and look for byte pairs that its entropy coding cannot produce. A tile that was cut
off, or overwritten with a few hundred foreign bytes, is caught, for a few percent of the cost of decoding it. Damage
that happens to form no marker (a flipped bit, zeros in the middle) is not: these formats have no checksum.
"""

from __future__ import annotations

import re
import zlib
from collections.abc import Callable, Iterator
from contextlib import suppress
from functools import lru_cache
from itertools import accumulate
from operator import mul
from typing import NamedTuple

from gigagrad.images.pixels import LUMA_BT601, Array

JPEG_COMPRESSIONS = frozenset({6, 7, 34892, 33007})
JPEG_2000_COMPRESSIONS = frozenset({33003, 33004, 33005, 34712})
_PNG_COMPRESSION = 34933
_WEBP_COMPRESSIONS = frozenset({34927, 50001})


def check_stream(data: bytes, compression: int, *, whole: tuple[int, int], inside: tuple[int, int]) -> Jpeg | None:
    """Return the stream, if it is a JPEG. Raises `ValueError` for one that is not sound or of another size than its
    tile.

    `compression` is the TIFF tag's value. A tile is `whole` in `(height, width)`, and `inside` of it lies in the image;
    streams have the one or the other. Decoders take as much memory as a stream asks for, so this comes first.
    """
    jpeg = Jpeg.parse(data) if compression in JPEG_COMPRESSIONS else None
    size = (jpeg.height, jpeg.width) if jpeg else None
    if compression in JPEG_2000_COMPRESSIONS:
        size = check_jpeg_2000(data)
    elif compression == _PNG_COMPRESSION:
        size = png_size(data)
    elif compression in _WEBP_COMPRESSIONS:
        size = _webp_size(data)
    if size and not (size[0] in (whole[0], inside[0]) and size[1] in (whole[1], inside[1])):
        raise ValueError(f"it says that it is {size[0]} x {size[1]} px, the directory says {whole[0]} x {whole[1]}")
    return jpeg


def _webp_size(data: bytes) -> tuple[int, int]:
    """Return `(height, width)` of a canvas (VP8X), a lossless stream (VP8L) or a lossy one; else (0, 0)."""
    kind, body = data[12:16], data[20:30]
    if kind == b"VP8X":
        return int.from_bytes(body[7:10], "little") + 1, int.from_bytes(body[4:7], "little") + 1
    if kind == b"VP8L":
        bits = int.from_bytes(body[1:5], "little")
        return (bits >> 14 & 0x3FFF) + 1, (bits & 0x3FFF) + 1
    if kind == b"VP8 ":
        return int.from_bytes(body[8:10], "little") & 0x3FFF, int.from_bytes(body[6:8], "little") & 0x3FFF
    return 0, 0


_CUT_OFF = "it is cut off"

_JPEG_START, _JPEG_END, _JPEG_SCAN, _JPEG_RESTARTS = b"\xff\xd8", 0xD9, 0xDA, 0xDD
# Entropy-coded data hides its own 0xFF bytes as FF 00; restart markers (D0 to D7) and fill bytes are part of it.
_JPEG_NEXT_MARKER = re.compile(rb"\xff[^\x00\xd0-\xd7\xff]")
_JPEG_RESTART = re.compile(rb"\xff[\xd0-\xd7]")
_JPEG_FRAMES = frozenset(range(0xC0, 0xD0)) - {0xC4, 0xC8, 0xCC}
# Baseline, extended, progressive and lossless, all in Huffman codes; arithmetic ones may end anywhere.
_JPEG_FRAMES_READ = frozenset(range(0xC0, 0xC4))
# Frame headers, tables, scans, comments and application data: every marker that has a length field.
_JPEG_WITH_LENGTH = frozenset({*range(0xC0, 0xD0), *range(0xDA, 0xF0), 0xFE}) - {0xC8}
# Each scan passes over the whole picture and may cost a hundred bytes; encoders write about ten.
_JPEG_MOST_SCANS = 100
_JPEG_SCAN_BEGINS, _JPEG_ENDS = bytes([0xFF, _JPEG_SCAN]), bytes([0xFF, _JPEG_END])
# Bytes before a first scan that are remembered: tables take about 600.
_JPEG_USUAL_HEAD = 4096
# Colour of the last pixels may be mixed with that of decoded neighbours, light is not.
_NEARLY_GREY = 2
# What no sound stream can have between its last pixel and its end; free of markers.
_JUNK = bytes((73 * index + 41) % 251 for index in range(64))


class Jpeg(NamedTuple):
    """A sound JPEG stream: complete, or one of TIFF's abbreviated ones, whose tables stand elsewhere."""

    data: bytes
    bits: int
    height: int
    width: int
    scan_ends: tuple[int, ...]
    restarts: bool

    @classmethod
    def parse(cls, data: bytes) -> Jpeg:
        """Walk over the markers, once. Raises `ValueError` that says what is wrong, in a few words."""
        if not data.startswith(_JPEG_START):
            raise ValueError("it does not begin like a JPEG")
        marker, at, frames, restarts = _first_scan(data)
        ends = list[int]()
        while marker == _JPEG_SCAN:
            following = _JPEG_NEXT_MARKER.search(data, at)
            ends.append(following.start() if following else len(data))
            if data.startswith(_JPEG_ENDS, ends[-1]):
                break
            marker, at, more, again = _next_scan(data, ends[-1])
            frames, restarts = frames + more, restarts or again
        if not ends or not frames:
            raise ValueError("it holds no image")
        if len(frames) != 1:
            raise ValueError(f"it holds {len(frames)} images")
        ((kind, bits, height, width),) = frames
        if kind not in _JPEG_FRAMES_READ:
            raise ValueError(f"it is a JPEG of a rare kind (SOF{kind - 0xC0})")
        if len(ends) > _JPEG_MOST_SCANS:
            raise ValueError(f"it has {len(ends)} scans")
        return cls(data, bits, height, width, tuple(ends), restarts)

    def check_ends(self, pixels_HWC: Array, decode: Callable[[bytes], Array]) -> None:
        """Raise `ValueError` with the row where the stream has no more data for its pixels.

        A decoder fills what is missing with mid-grey and says nothing. So where the last pixel is mid-grey (or there
        are several scans, of which the last may refine what is there), the stream is decoded once more with a few bytes
        put in where its data ends: the picture of a whole stream does not change by that.
        """
        last = pixels_HWC[-1, -1].tolist()
        light = sum(map(mul, last, LUMA_BT601)) if len(last) >= 3 else last[0]
        if len(self.scan_ends) == 1 and abs(light - (1 << (self.bits - 1))) > _NEARLY_GREY:
            return
        pieces, begin = [], 0
        for end in self.scan_ends:
            pieces += [self.data[begin:end], _JUNK]
            if self.restarts:
                pieces += [bytes([0xFF, 0xD0 + len(_JPEG_RESTART.findall(self.data, begin, end)) % 8]), _JUNK]
            begin = end
        try:
            longer = decode(b"".join((*pieces, self.data[begin:])))
        except Exception as error:
            raise ValueError("it ends before its pixels") from error
        changed = (longer != pixels_HWC).any(axis=(1, 2))
        if changed.any():
            raise ValueError(f"it ends before its pixels, at row {int(changed.argmax())} of {len(changed)}")


_Frame = tuple[int, int, int, int]
"""The marker of a frame, its bits a sample, its height and width."""


def _first_scan(data: bytes) -> tuple[int, int, tuple[_Frame, ...], bool]:
    """Walk to a stream's first scan as `_next_scan` does. The tiles of a file mostly begin with the same bytes."""
    scan = data.find(_JPEG_SCAN_BEGINS)
    end = scan + 2 + int.from_bytes(data[scan + 2 : scan + 4], "big")
    if scan >= 0 and end <= min(len(data), _JPEG_USUAL_HEAD):
        with suppress(ValueError):  # those two bytes were part of something else
            known = _scan_of_head(data[:end])
            if known[:2] == (_JPEG_SCAN, end):
                return known
    return _next_scan(data, len(_JPEG_START))


@lru_cache
def _scan_of_head(head: bytes) -> tuple[int, int, tuple[_Frame, ...], bool]:
    return _next_scan(head, len(_JPEG_START))


def _next_scan(data: bytes, at: int) -> tuple[int, int, tuple[_Frame, ...], bool]:
    """Walk over the markers from `at` on: the marker of a scan or of the end, the position behind its header, the
    frames before, and whether restarts are announced. Raises `ValueError`.
    """
    frames, restarts = list[_Frame](), False
    while True:
        if at + 2 > len(data):
            raise ValueError(_CUT_OFF)
        marker = data[at + 1]
        if data[at] != 0xFF or (marker not in _JPEG_WITH_LENGTH and marker not in (0xFF, _JPEG_END)):
            raise ValueError(f"it has foreign bytes at {at}")
        if marker == 0xFF:
            at += 1
            continue
        if marker in _JPEG_FRAMES:
            height, width = (int.from_bytes(data[place : place + 2], "big") for place in (at + 5, at + 7))
            frames.append((marker, data[at + 4] if at + 4 < len(data) else 0, height, width))
        restarts |= marker == _JPEG_RESTARTS
        at += 2 + max(2, int.from_bytes(data[at + 2 : at + 4], "big"))
        if marker in (_JPEG_SCAN, _JPEG_END):
            return marker, at, tuple(frames), restarts


_J2K_FILE, _J2K_START = b"\x00\x00\x00\x0cjP  ", b"\xff\x4f\xff\x51"
_J2K_CODING = b"\xff\x52"
_J2K_TILE_PART, _J2K_TILE_DATA, _J2K_END = b"\xff\x90", b"\xff\x93", b"\xff\xd9"
# Coded data never has FF followed by more than 8F, except for the two packet markers.
_J2K_STRAY = re.compile(rb"\xff[\x90\x93-\xff]")


def check_jpeg_2000(data: bytes) -> tuple[int, int]:
    """Return `(height, width)` of a codestream, bare or in a JP2 file. Raises `ValueError` for an unsound one."""
    start = data.find(_J2K_START) if data.startswith(_J2K_FILE) else 0
    if start < 0 or not data.startswith(_J2K_START, start):
        raise ValueError("it does not begin like a JPEG 2000")
    places = range(start + 8, start + 24, 4)
    width, height, left, top = (int.from_bytes(data[place : place + 4], "big") for place in places)
    at = start + 2
    part_end = parts = 0
    while at + 2 <= len(data):
        marker = data[at : at + 2]
        if marker == _J2K_END:
            if not parts:
                raise ValueError("it holds no image")
            return height - top, width - left
        if marker[0] != 0xFF:
            raise ValueError(f"it has foreign bytes at {at}")
        if marker == _J2K_TILE_DATA:
            stray = _J2K_STRAY.search(data, at + 2, part_end)
            if stray or part_end > len(data):
                raise ValueError(f"it has foreign bytes at {stray.start()}" if stray else _CUT_OFF)
            parts += 1
            at = part_end
            continue
        if marker == _J2K_TILE_PART:
            length = int.from_bytes(data[at + 6 : at + 10], "big")
            # Length 0 means: up to the end of the stream.
            part_end = at + length if length else data.rfind(_J2K_END)
        at += 2 + int.from_bytes(data[at + 2 : at + 4], "big")
    raise ValueError(_CUT_OFF)


def jpeg_2000_halvings(data: bytes) -> int:
    """Return how often a codestream halves its picture: it stores that many smaller ones, each in the next; 0 where it
    does not say."""
    at = data.find(_J2K_START) + 2
    while at + 9 < len(data):
        if data[at : at + 2] == _J2K_CODING:
            return data[at + 9]
        at += 2 + int.from_bytes(data[at + 2 : at + 4], "big")
    return 0


# A PNG (W3C PNG, sections 5 and 10) has a checksum for every byte: what passes here is as it was written. Pillow leaves
# rows black where the stream ends early, so one pass of inflation, which keeps nothing, counts what is there.
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
