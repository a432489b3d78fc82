"""The marker walk accepts every sound stream and catches streams that were cut or overwritten."""

from __future__ import annotations

from typing import Any

import imagecodecs
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from gigagrad.images.stream_check import stream_fault

JPEG, JPEG_2000 = 7, 33005
NOISE = np.random.default_rng(0).integers(0, 255, (64, 64, 3), np.uint8)


def encode(compression: int, pixels: np.ndarray, **options: Any) -> bytes:
    codec = imagecodecs.jpeg8_encode if compression == JPEG else imagecodecs.jpeg2k_encode
    return bytes(codec(pixels, **options))


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
    assert stream_fault(b"anything", 8) is None
