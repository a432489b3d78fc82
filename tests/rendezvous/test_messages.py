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
    message = packed(tensors)
    for found, tensor in zip(unpacked(message, ((one.shape, one.dtype) for one in tensors)), tensors, strict=True):
        assert found.dtype == tensor.dtype
        assert torch.equal(found, tensor)
    assert len(message) == sum(tensor.nbytes for tensor in tensors)
    assert len(packed([])) == 0
