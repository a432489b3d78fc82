"""Tensors as messages, wherever in one they begin."""

import torch

from gigagrad.ranks.ranks import packed, unpacked


def test_tensors_come_out_as_they_went_in():
    tensors = [
        torch.arange(3, dtype=torch.uint8),
        torch.randn(2, 3, dtype=torch.float64),
        torch.randn(5).bfloat16(),
        torch.randn(2, 3, 4, 5).contiguous(memory_format=torch.channels_last),
        torch.tensor(7),
        torch.empty(0, 4),
    ]
    message, place = packed(tensors), 0
    for tensor in tensors:
        found, place = unpacked(message, place, tuple(tensor.shape), tensor.dtype)
        assert found.dtype == tensor.dtype
        assert torch.equal(found, tensor)
    assert place == len(message)
    assert len(packed([])) == 0
