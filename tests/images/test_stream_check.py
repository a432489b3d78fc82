"""The marker walk accepts every sound stream and catches streams that were cut or overwritten."""

from __future__ import annotations

import io
from typing import Any

import imagecodecs
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from PIL import Image as Pillow

from gigagrad.images.stream_check import Jpeg, check_jpeg_2000, check_stream

JPEG, JPEG_2000 = 7, 33005
NOISE = np.random.default_rng(0).integers(0, 255, (64, 64, 3), np.uint8)


def encode(compression: int, pixels: np.ndarray, **options: Any) -> bytes:
    codec = imagecodecs.jpeg8_encode if compression == JPEG else imagecodecs.jpeg2k_encode
    return bytes(codec(pixels, **options))


def stream_fault(data: bytes, compression: int) -> str | None:
    """What the walk over the markers finds."""
    try:
        Jpeg.parse(data) if compression == JPEG else check_jpeg_2000(data)
    except ValueError as error:
        return str(error)
    return None


@pytest.mark.parametrize("pixels", [NOISE, np.full_like(NOISE, 255), NOISE[..., 0].copy()])
@pytest.mark.parametrize(
    ("compression", "options"),
    [
        (JPEG, {"level": 30}),
        (JPEG, {"level": 95, "optimize": True}),
        (JPEG, {"level": 75, "subsampling": "420"}),
        (JPEG_2000, {"codecformat": "J2K"}),
        (JPEG_2000, {"codecformat": "JP2", "reversible": True}),
    ],
)
def test_sound_streams_pass(compression: int, options: dict[str, Any], pixels: np.ndarray) -> None:
    data = encode(compression, pixels, **options)
    assert stream_fault(data, compression) is None
    assert stream_fault(data + bytes(3), compression) is None


@given(share=st.floats(0, 0.999), compression=st.sampled_from([JPEG, JPEG_2000]), padded=st.booleans())
def test_cut_streams_do_not(share: float, compression: int, padded: bool) -> None:
    data = encode(compression, NOISE)
    kept = int(len(data) * share)
    cut = data[:kept] + bytes(len(data) - kept if padded else 0)
    assert stream_fault(cut, compression) is not None


def damaged(compression: int, seed: int) -> bytes:
    """A stream with 2500 foreign bytes in it."""
    rng = np.random.default_rng(seed)
    data = bytearray(encode(compression, NOISE))
    at = int(rng.integers(2, len(data) - 2500))
    data[at : at + 2500] = rng.integers(0, 256, 2500, np.uint8).tobytes()
    return bytes(data)


@given(seed=st.integers(0, 2**32 - 1), compression=st.sampled_from([JPEG, JPEG_2000]))
def test_any_bytes_get_an_answer(seed: int, compression: int) -> None:
    """A damaged stream must neither hang the walk nor break it."""
    stream_fault(damaged(compression, seed), compression)


@pytest.mark.parametrize(("compression", "caught"), [(JPEG, 190), (JPEG_2000, 190)])
def test_overwritten_streams_are_mostly_caught(compression: int, caught: int) -> None:
    """Only mostly: foreign bytes may look like coded data."""
    assert sum(stream_fault(damaged(compression, seed), compression) is not None for seed in range(200)) >= caught


def test_other_codecs_are_not_judged() -> None:
    assert check_stream(b"anything", 8, whole=(64, 64), inside=(64, 64)) is None


def cut_and_closed(data: bytes, share: float) -> bytes:
    """The stream without the last part of its scan, and with a marker that says that it ends there."""
    scan = data.index(b"\xff\xda") + 14
    return data[: scan + int((len(data) - scan) * share)].rstrip(b"\xff") + b"\xff\xd9"


@pytest.mark.parametrize("pixels", [NOISE, np.full_like(NOISE, 90), NOISE[:, :, :1], NOISE[:61, :59]])
@pytest.mark.parametrize("options", [{"subsampling": "420"}, {"subsampling": "444"}, {"optimize": True}])
def test_a_jpeg_that_ends_before_its_pixels_says_at_which_row(pixels: np.ndarray, options: dict[str, Any]) -> None:
    def decode(stream: bytes) -> np.ndarray:
        decoded = imagecodecs.jpeg8_decode(stream)
        return decoded.reshape(*decoded.shape[:2], -1)

    data = encode(JPEG, np.ascontiguousarray(pixels.squeeze()), level=85, **({} if pixels.shape[2] == 1 else options))
    Jpeg.parse(data).check_ends(decode(data), decode)
    cut = cut_and_closed(data, 0.5)
    assert stream_fault(cut, JPEG) is None
    with pytest.raises(ValueError, match=r"it ends before its pixels, at row \d+ of \d\d"):
        Jpeg.parse(cut).check_ends(decode(cut), decode)


def test_a_grey_picture_that_is_whole_is_no_cut_one() -> None:
    data = encode(JPEG, np.full_like(NOISE, 128))
    Jpeg.parse(data).check_ends(imagecodecs.jpeg8_decode(data), imagecodecs.jpeg8_decode)


@pytest.mark.parametrize("options", [{"progressive": True}, {"restart_marker_blocks": 2}, {}])
def test_pictures_that_end_before_their_pixels(options: dict[str, Any]) -> None:
    def decode(stream: bytes) -> np.ndarray:
        return np.asarray(Pillow.open(io.BytesIO(stream)))

    file = io.BytesIO()
    Pillow.fromarray(NOISE).save(file, format="JPEG", **options)
    Jpeg.parse(file.getvalue()).check_ends(decode(file.getvalue()), decode)
    cut = cut_and_closed(file.getvalue(), 0.5)
    with pytest.raises(ValueError, match="it ends before its pixels"):
        Jpeg.parse(cut).check_ends(decode(cut), decode)


@pytest.mark.parametrize(
    ("compression", "encode_as"),
    [(7, "jpeg8"), (33005, "jpeg2k"), (34933, "png"), (50001, "webp")],
)
@pytest.mark.parametrize("lossless", [False, True])
def test_the_size_is_known_before_decoding(compression: int, encode_as: str, lossless: bool) -> None:
    pixels = np.ascontiguousarray(NOISE[:48])
    options = {"webp": {"lossless": lossless}, "jpeg2k": {"reversible": lossless}}.get(encode_as, {})
    data = bytes(getattr(imagecodecs, f"{encode_as}_encode")(pixels, **options))
    check_stream(data, compression, whole=(64, 64), inside=(48, 64))
    with pytest.raises(ValueError, match="48 x 64 px, the directory says 64 x 64"):
        check_stream(data, compression, whole=(64, 64), inside=(64, 64))


def test_rare_jpegs_and_endless_ones_are_refused() -> None:
    data = encode(JPEG, NOISE)
    assert stream_fault(data.replace(b"\xff\xc0", b"\xff\xc9", 1), JPEG) == "it is a JPEG of a rare kind (SOF9)"
    scan = data.index(b"\xff\xda")
    assert stream_fault(data[:scan] + data[scan:-2] * 101 + b"\xff\xd9", JPEG) == "it has 101 scans"
