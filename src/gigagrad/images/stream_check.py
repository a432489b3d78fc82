"""Is a compressed tile whole? Decoders of JPEG and JPEG 2000 answer "yes" too easily.

They paint over what they cannot decode, and their warnings do not reach Python. These checks walk a stream's markers
(ITU-T T.81 annex B, T.800 annex A) and look for byte pairs that its entropy coding cannot produce. A tile that was cut
off, or overwritten with a few hundred foreign bytes, is caught, for a few percent of the cost of decoding it. Damage
that happens to form no marker (a flipped bit, zeros in the middle) is not: these formats have no checksum.
"""

from __future__ import annotations

import re

JPEG_COMPRESSIONS = frozenset({6, 7, 34892, 33007})
JPEG_2000_COMPRESSIONS = frozenset({33003, 33004, 33005, 34712})


def stream_fault(data: bytes, compression: int) -> str | None:
    """What is wrong with a tile's stream, in a few words; None if it looks sound or cannot be judged from outside.

    `compression` is the TIFF tag's value.
    """
    if compression in JPEG_COMPRESSIONS:
        return _jpeg_fault(data)
    if compression in JPEG_2000_COMPRESSIONS:
        return _jpeg_2000_fault(data)
    return None


_CUT_OFF = "it is cut off"

_JPEG_START, _JPEG_END, _JPEG_SCAN = b"\xff\xd8", 0xD9, 0xDA
# Entropy-coded data hides its own 0xFF bytes as FF 00; restart markers (D0 to D7) and fill bytes are part of it.
_JPEG_NEXT_MARKER = re.compile(rb"\xff[^\x00\xd0-\xd7\xff]")
# Frame headers, tables, scans, comments and application data: every marker that has a length field.
_JPEG_WITH_LENGTH = frozenset({*range(0xC0, 0xD0), *range(0xDA, 0xF0), 0xFE}) - {0xC8}


def _jpeg_fault(data: bytes) -> str | None:
    """For complete streams and for TIFF's abbreviated ones, whose tables stand elsewhere."""
    if not data.startswith(_JPEG_START):
        return "it does not begin like a JPEG"
    at, scans = 2, 0
    while at + 2 <= len(data):
        if data[at] != 0xFF:
            return f"it has foreign bytes at {at}"
        marker = data[at + 1]
        if marker == 0xFF:
            at += 1
        elif marker == _JPEG_END:
            return None if scans else "it holds no image"
        elif marker not in _JPEG_WITH_LENGTH:
            return f"it has foreign bytes at {at}"
        else:
            at += 2 + int.from_bytes(data[at + 2 : at + 4], "big")
            if marker == _JPEG_SCAN:
                scans += 1
                found = _JPEG_NEXT_MARKER.search(data, at)
                at = found.start() if found else len(data)
    return _CUT_OFF


_J2K_FILE, _J2K_START = b"\x00\x00\x00\x0cjP  ", b"\xff\x4f\xff\x51"
_J2K_TILE_PART, _J2K_TILE_DATA, _J2K_END = b"\xff\x90", b"\xff\x93", b"\xff\xd9"
# Coded data never has FF followed by more than 8F, except for the two packet markers.
_J2K_STRAY = re.compile(rb"\xff[\x90\x93-\xff]")


def _jpeg_2000_fault(data: bytes) -> str | None:
    """For a bare codestream, and for one inside a JP2 file."""
    at = data.find(_J2K_START) if data.startswith(_J2K_FILE) else 0
    if at < 0 or not data.startswith(_J2K_START, at):
        return "it does not begin like a JPEG 2000"
    at += 2
    part_end = parts = 0
    while at + 2 <= len(data):
        marker = data[at : at + 2]
        if marker == _J2K_END:
            return None if parts else "it holds no image"
        if marker[0] != 0xFF:
            return f"it has foreign bytes at {at}"
        if marker == _J2K_TILE_DATA:
            stray = _J2K_STRAY.search(data, at + 2, part_end)
            if stray or part_end > len(data):
                return f"it has foreign bytes at {stray.start()}" if stray else _CUT_OFF
            parts += 1
            at = part_end
            continue
        if marker == _J2K_TILE_PART:
            length = int.from_bytes(data[at + 6 : at + 10], "big")
            # Length 0 means: up to the end of the stream.
            part_end = at + length if length else data.rfind(_J2K_END)
        at += 2 + int.from_bytes(data[at + 2 : at + 4], "big")
    return _CUT_OFF
