"""The part of a field that one rank holds."""

from __future__ import annotations

import pytest
import torch

from gigagrad.boxes import Box
from gigagrad.stores import FieldSpec, MemoryTier, Windows

SPEC = FieldSpec("field", (1, 4, 12, 10), torch.float32, (-2, -1), layout=torch.channels_last)
BOXES = (Box(0, 0, 5, 10), Box(5, 0, 8, 6))


@pytest.fixture
def windows() -> Windows:
    tier, found = MemoryTier(), []
    for box in BOXES:
        spec = FieldSpec("window", (1, 4, *box.shape), SPEC.dtype, SPEC.axes, layout=SPEC.layout)
        found.append((box, tier.open_store(spec)))
    return Windows(SPEC, found)


def test_a_crop_in_two_windows_is_put_together_in_the_fields_layout(windows: Windows) -> None:
    crop = torch.rand(1, 4, 6, 4)
    windows.write(Box(2, 1, 8, 5), crop)
    read = windows.read(Box(2, 1, 8, 5))
    assert torch.equal(read, crop)
    assert read.is_contiguous(memory_format=torch.channels_last)
    assert torch.equal(windows.read(Box(5, 2, 8, 4)), crop[..., 3:, 1:3])


def test_what_lies_outside_is_left_out_when_written_and_refused_when_read(windows: Windows) -> None:
    whole = torch.rand(1, 4, 12, 10)
    windows.write(Box.whole(12, 10), whole)
    windows.add(Box.whole(12, 10), whole)
    for box in BOXES:
        assert torch.equal(windows.read(box), 2 * whole[..., box.y0 : box.y1, box.x0 : box.x1])
    with pytest.raises(AssertionError, match="not all held here"):
        windows.read(Box(4, 5, 6, 7))


def test_a_window_that_is_the_whole_field_gives_it_whole() -> None:
    store = MemoryTier().open_store(SPEC)
    windows = Windows(SPEC, [(Box.whole(12, 10), store)])
    windows.write(Box(1, 1, 3, 3), torch.ones(1, 4, 2, 2))
    assert windows.whole().sum() == 16
