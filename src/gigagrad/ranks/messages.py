"""Pack tensors into messages, and unpack them."""

from __future__ import annotations

from collections.abc import Iterable
from math import prod

import torch

from gigagrad.ranks.ranks import Message


def as_bytes(tensor: torch.Tensor) -> Message:
    """Return a tensor's bytes on the CPU; its own memory where it lies there without gaps."""
    return tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8)


def packed(tensors: Iterable[torch.Tensor]) -> Message:
    """Concatenate the bytes of tensors on the CPU."""
    flat = [as_bytes(tensor) for tensor in tensors]
    return torch.cat(flat) if flat else torch.empty(0, dtype=torch.uint8)


def unpacked(message: Message, place: int, shape: tuple[int, ...], dtype: torch.dtype) -> tuple[torch.Tensor, int]:
    """Return the tensor that begins at a place of a message, and where the next one does; a copy only where the place
    does not suit its numbers.
    """
    end = place + prod(shape) * dtype.itemsize
    flat = message[place:end] if place % dtype.itemsize == 0 else message[place:end].clone()
    return flat.view(dtype).reshape(shape), end


def copy_into(tensors: Iterable[torch.Tensor], message: Message) -> None:
    """Copy into `tensors` what was packed of tensors like these."""
    place = 0
    for tensor in tensors:
        value, place = unpacked(message, place, tuple(tensor.shape), tensor.dtype)
        tensor.detach().copy_(value)
