"""Parts of crops and crops in a frame, against slicing and `F.pad`; crops as new tensors lie."""

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given
from hypothesis import strategies as st

from gigagrad.graphs.crops import aligned, crop_view, laid_out, pad

AXES = (-2, -1)
amounts = st.tuples(st.integers(-3, 3), st.integers(-3, 3))


def gradients(result, crop, cotangent):
    return torch.autograd.grad(result, crop, cotangent)[0]


@given(st.tuples(amounts, amounts), st.sampled_from([0.0, -torch.inf]), st.booleans(), st.booleans())
def test_a_frame_is_padding_of_either_sign(frame, value, channels_last, gaps):
    crop = torch.rand(1, 3, 9, 14, dtype=torch.float64)
    crop = crop.contiguous(memory_format=torch.channels_last) if channels_last else crop
    crop = (crop[..., 1:8, 2:13] if gaps else crop).detach().requires_grad_()
    (top, bottom), (left, right) = frame
    grown = F.pad(crop, [max(0, n) for n in (left, right, top, bottom)], value=value)
    expected = F.pad(grown, [min(0, n) for n in (left, right, top, bottom)])
    found = pad(crop, AXES, frame, value)
    assert torch.equal(found, expected)
    cotangent = torch.rand_like(expected)
    assert torch.equal(gradients(found, crop, cotangent), gradients(expected, crop, cotangent))


@given(st.data(), st.sampled_from([(-2, -1), (-3, -2)]))
def test_a_part_is_a_view_whose_gradient_is_zero_elsewhere(data, axes):
    crop = torch.rand(1, 7, 9, 8, dtype=torch.float64, requires_grad=True)
    starts = [data.draw(st.integers(0, 3)) for _ in axes]
    size = [data.draw(st.integers(1, crop.shape[axis] - start)) for axis, start in zip(axes, starts, strict=True)]
    expected = crop
    for axis, start, n in zip(axes, starts, size, strict=True):
        expected = expected.narrow(axis, start, n)
    found = crop_view(crop, axes, starts, size)
    assert torch.equal(found, expected)
    assert found.data_ptr() == expected.data_ptr()
    if found is not crop:
        cotangent = torch.rand_like(expected)
        assert torch.equal(gradients(found, crop, cotangent), gradients(expected, crop, cotangent))


@pytest.mark.parametrize("layout", [torch.contiguous_format, torch.channels_last])
def test_a_framed_part_lies_as_the_crop_does(layout):
    crop = torch.rand(1, 3, 9, 14).contiguous(memory_format=layout)[..., 1:8, 2:13]
    assert pad(crop, AXES, ((1, 0), (2, 1))).is_contiguous(memory_format=layout)


@pytest.mark.parametrize("layout", [torch.contiguous_format, torch.channels_last])
@pytest.mark.parametrize(
    "shape", [(1, 3, 5, 7), (1, 1, 5, 7), (1, 4, 1, 7), (1, 4, 5, 1), (1, 1, 1, 1), (5, 7), (3,), ()]
)
def test_a_crop_lies_as_a_new_tensor_wherever_it_was_cut_out(shape, layout):
    layout = layout if len(shape) == 4 else torch.contiguous_format
    fresh = torch.empty(shape, memory_format=layout)
    outer = [size + 3 * (axis > 1) for axis, size in enumerate(shape)]
    for offset in range(4):
        whole = torch.empty(outer, memory_format=layout).normal_()
        cut = whole
        for axis, size in enumerate(shape):
            cut = cut.narrow(axis, min(offset, outer[axis] - size), size)
        found = laid_out(cut, layout)
        assert torch.equal(found, cut)
        assert found.stride() == fresh.stride()
        assert found.data_ptr() % 64 == 0
        assert laid_out(found, layout).data_ptr() == found.data_ptr()


def test_what_is_at_an_odd_address_is_moved_unless_it_holds_integers():
    floats, integers = torch.randn(65)[1:], torch.arange(65)[1:]
    assert aligned(floats).data_ptr() % 64 == 0
    assert torch.equal(aligned(floats), floats)
    assert aligned(integers) is integers
