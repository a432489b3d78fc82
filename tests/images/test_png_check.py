"""PNG has checksums: whatever is not as it was written is noticed, and where pixels are missing, the row is named."""

from __future__ import annotations

import io
import struct
import zlib

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from PIL import Image as Pillow

from gigagrad.images.stream_check import check_png, png_size

NOISE = np.random.default_rng(0).integers(0, 255, (41, 37, 4), np.uint8)


def png(pixels: np.ndarray, mode: str | None = None) -> bytes:
    file = io.BytesIO()
    picture = Pillow.fromarray(pixels)
    (picture.convert(mode) if mode else picture).save(file, format="PNG")
    return file.getvalue()


def made_of(header: bytes, raw: bytes) -> bytes:
    """A PNG of this header and these rows, whose checksums are right."""
    chunks = ((b"IHDR", header), (b"IDAT", zlib.compress(raw)), (b"IEND", b""))
    parts = (
        struct.pack(">L", len(body)) + kind + body + struct.pack(">L", zlib.crc32(kind + body)) for kind, body in chunks
    )
    return b"\x89PNG\r\n\x1a\n" + b"".join(parts)


@pytest.mark.parametrize(
    ("pixels", "mode"),
    [(NOISE, None), (NOISE[..., :3], None), (NOISE[..., 0], None), (NOISE[..., 0], "1"), (NOISE[..., :3], "P")],
)
def test_sound_pictures_pass(pixels: np.ndarray, mode: str | None) -> None:
    data = png(np.ascontiguousarray(pixels), mode)
    assert png_size(data) == (41, 37)
    check_png(data)
    check_png(data + b"what follows the end is nobody's business")


@pytest.mark.parametrize("interlaced", [0, 1])
def test_pixels_that_are_missing_are_placed(interlaced: int) -> None:
    """Eight by eight pixels of grey; interlaced, each of the seven passes has rows of its own."""
    rows = [9] * 8 if not interlaced else [2, 2, 3, 3, 3, *[5] * 6, *[9] * 4]
    header = struct.pack(">LLBBBBB", 8, 8, 8, 0, 0, 0, interlaced)
    whole = made_of(header, bytes(sum(rows)))
    check_png(whole)
    assert np.asarray(Pillow.open(io.BytesIO(whole))).shape == (8, 8)
    with pytest.raises(ValueError, match="at row 4 of 8" if not interlaced else "in pass 6 of 7"):
        check_png(made_of(header, bytes(sum(rows) // 2)))


@given(at=st.integers(8, 10_000), value=st.integers(1, 255))
def test_any_changed_byte_is_noticed(at: int, value: int) -> None:
    data = bytearray(png(NOISE))
    data[8 + at % (len(data) - 8)] ^= value
    with pytest.raises(ValueError, match=r"checksum|cut off|header"):
        check_png(bytes(data))


@given(share=st.floats(0, 0.999))
def test_cut_pictures_are_noticed(share: float) -> None:
    data = png(NOISE)
    with pytest.raises(ValueError, match=r"cut off|header"):
        check_png(data[: int(len(data) * share)])
