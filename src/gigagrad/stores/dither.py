"""Draw dither: a number for every value of a field, a function of a seed and of the value's place in the whole field.

So any tiling, any recomputation and any number of workers see the same numbers, as for random operators.
"""

from __future__ import annotations

import math

import torch

from gigagrad.boxes import Box
from gigagrad.graphs.operators import scrambled

_PER_WORD = 4
_GROUP_BITS = 16
_X_BITS = 24


def dither(shape: torch.Size, box: Box, axes: tuple[int, int], seed: int, like: torch.Tensor) -> torch.Tensor:
    """Return uniform numbers in (-1/2, 1/2) for a crop of this `shape` on `box`, with the dtype and device of `like`.

    They are odd multiples of 2^-17: one hash of 64 bits serves four neighbouring values of a pixel, which makes it
    cheap. The axes other than y and x are whole in every crop; at most 2^18 values a pixel, x below 2^24 px.
    """
    spatial = {axis % len(shape) for axis in axes}
    rest = [size for axis, size in enumerate(shape) if axis not in spatial]
    values = math.prod(rest)
    words = -(-values // _PER_WORD)
    assert max(words >> _GROUP_BITS, box.x1 - 1 >> _X_BITS) == 0, (shape, box)
    device = like.device
    y = torch.arange(box.y0, box.y1, device=device)[:, None, None] << (_X_BITS + _GROUP_BITS)
    x = torch.arange(box.x0, box.x1, device=device)[:, None] << _GROUP_BITS
    key = scrambled(torch.tensor(seed, device=device), 0)  # seeds 0, 1, 2, ... must not be neighbours
    bits = scrambled(y + x + torch.arange(words, device=device), key)
    numbers = bits.view(torch.int16)[..., :values].to(like.dtype)
    numbers.add_(0.5).mul_(2.0**-16)
    return torch.unflatten(numbers, -1, rest).movedim((0, 1), axes)
