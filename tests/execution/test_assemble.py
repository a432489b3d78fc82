"""Tiles become strips, and only if they cover the image."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from gigagrad.boxes import Box, tiles
from gigagrad.errors import ModelError
from gigagrad.execution.assemble import assemble

side = st.integers(1, 40)


@given(side, side, side, side)
def test_strips_are_the_image(height, width, tile_height, tile_width):
    plane = np.arange(height * width, dtype=np.int64).astype(np.uint8).reshape(height, width)
    pieces = ((box, plane[box.y0 : box.y1, box.x0 : box.x1]) for box in tiles(height, width, tile_height, tile_width))
    strips = list(assemble(pieces, height, width))
    assert all(strip.shape[0] <= tile_height for strip in strips)
    assert np.array_equal(np.concatenate(strips), plane)


@pytest.mark.parametrize(
    "boxes",
    [
        [Box(0, 0, 4, 4)],
        [Box(0, 0, 8, 4), Box(0, 4, 8, 10)],
        [Box(0, 0, 4, 8), Box(8, 0, 12, 8)],
        [Box(0, 0, 8, 8), Box(8, 0, 16, 8)],
        [],
    ],
    ids=["too small", "too wide", "gap", "too high", "nothing"],
)
def test_a_model_that_changes_the_size_is_refused(boxes):
    with pytest.raises(ModelError, match="8 x 8 px slide pixel for pixel"):
        list(assemble(((box, np.zeros(box.shape, np.uint8)) for box in boxes), 8, 8))


def test_the_tiles_have_ended_before_the_last_strip_leaves():
    ended = []

    def pieces():
        for box in tiles(8, 8, 4, 4):
            yield box, np.zeros(box.shape, np.uint8)
        ended.append(True)

    strips = assemble(pieces(), 8, 8)
    next(strips)
    assert not ended
    next(strips)
    assert ended
