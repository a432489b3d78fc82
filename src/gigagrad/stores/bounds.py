"""Bound what lossy storage of a field adds to the gradient of the convolution that reads it; derived in docs/math.md.

Per output channel, with errors independent and uniform in +-E on the non-zero values of the field (`Quantised`), the
expected norm of the error over all taps is `E / sqrt(3) * sqrt(taps * R) * |d|`: R is the share of non-zeros, d the
cotangent of the convolution's output. Both are by-products of a step, and change slowly from step to step.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

_STRIP_ROWS = 32


def gradient_error(error_bound: float, share_nonzero: float, cotangent_norm: float, taps: int = 1) -> float:
    """Return the expected 2-norm of the error of a weight's gradient, for one output channel.

    `taps` counts its weights: input channels x kernel height x kernel width. `cotangent_norm` is the 2-norm over the
    whole image of the cotangent of that channel.
    """
    return error_bound / math.sqrt(3) * math.sqrt(taps * share_nonzero) * cotangent_norm


def half_gradient_error(dtype: torch.dtype, field_norm: float, cotangent_norm: float) -> float:
    """Return the largest error that a field stored in float16 or bfloat16 can cause in one weight's gradient.

    By the Cauchy-Schwarz inequality, for values that are not subnormal in `dtype`; `field_norm` is the 2-norm of the
    input channel. There is no dither and errors of equal values are equal, so an expectation that assumed otherwise
    would be wrong exactly on the flat parts of a slide.
    """
    return torch.finfo(dtype).eps / 2 * field_norm * cotangent_norm


def noisy_shares(field: Tensor, gain: Tensor | None = None) -> Tensor:
    """Return, as `(C,)`, the share of a convolution's input `(N, C, h, w)` that carries an error, times `gain (C,)`
    squared.

    `gain` is for a norm and a ReLU between the stored field and the convolution: the factor of the norm per channel,
    `weight / sqrt(variance + eps)`. `field` is then what came out of the ReLU, and the prediction is that of the
    errors' scatter; docs/math.md says what comes on top.
    """
    count_C = torch.zeros(field.shape[1], dtype=torch.float64)
    for strip in torch.split(field, _STRIP_ROWS, dim=2):  # a comparison of all values at once would take memory
        count_C += torch.count_nonzero(strip, dim=(0, 2, 3)).to(count_C)
    share_C = count_C * field.shape[1] / field.numel()
    return share_C if gain is None else share_C * gain.to(share_C).square()


@dataclass(frozen=True)
class Norms:
    """The sums that `gradient_error` needs, per output channel, over tiles.

    `noisy_squares` adds up `R |d|^2` tile by tile: where tissue is, a field has other shares of zeros and other
    cotangents than on glass, and the product of two averages over the whole image would miss that.
    """

    noisy_squares: tuple[float, ...]

    @classmethod
    def of(cls, shares: Tensor, cotangent: Tensor, groups: int = 1) -> Norms:
        """Sum over one tile: `noisy_shares (C,)` of what the convolution reads, the cotangent `(N, O, h, w)` of its
        output.

        Each of the convolution's `groups` sees its own channels only.
        """
        noisy_O = shares.reshape(groups, -1).mean(1).repeat_interleave(cotangent.shape[1] // groups)
        norms_O = torch.linalg.vector_norm(cotangent, dim=(0, 2, 3)).double()
        return cls(tuple((norms_O.square() * noisy_O.to(norms_O)).tolist()))

    def __add__(self, other: Norms) -> Norms:
        pairs = zip(self.noisy_squares, other.noisy_squares, strict=True)
        return Norms(tuple(a + b for a, b in pairs))

    def scaled(self, factor: float) -> Norms:
        """Return the sums of cotangents `factor` times as large."""
        return Norms(tuple(factor * factor * square for square in self.noisy_squares))

    def gradient_errors(self, error_bound: float, taps: int) -> tuple[float, ...]:
        """Return the `gradient_error` of every output channel."""
        return tuple(gradient_error(error_bound, 1.0, math.sqrt(square), taps) for square in self.noisy_squares)
