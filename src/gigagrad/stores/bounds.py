"""What lossy storage of a field adds to the gradient of the convolution that reads it; derived in docs/math.md.

Per output channel, with errors independent and uniform in +-E on the non-zero values of the field (`Quantised`), the
expected norm of the error over all taps is `E / sqrt(3) * sqrt(taps * R) * |d|`: R is the share of non-zeros, d the
cotangent of the convolution's output. Both are by-products of a step, and change slowly from step to step.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor


def gradient_error(error_bound: float, share_nonzero: float, cotangent_norm: float, taps: int = 1) -> float:
    """The expected 2-norm of the error of a weight's gradient, for one output channel.

    `taps` counts its weights: input channels x kernel height x kernel width. `cotangent_norm` is the 2-norm over the
    whole image of the cotangent of that channel.
    """
    return error_bound / math.sqrt(3) * math.sqrt(taps * share_nonzero) * cotangent_norm


def half_gradient_error(dtype: torch.dtype, field_norm: float, cotangent_norm: float) -> float:
    """The largest error that a field stored in float16 or bfloat16 can cause in one weight's gradient.

    By the Cauchy-Schwarz inequality, for values that are not subnormal in `dtype`; `field_norm` is the 2-norm of the
    input channel. There is no dither and errors of equal values are equal, so an expectation that assumed otherwise
    would be wrong exactly on the flat parts of a slide.
    """
    return torch.finfo(dtype).eps / 2 * field_norm * cotangent_norm


@dataclass(frozen=True)
class Norms:
    """The sums that `gradient_error` needs, per output channel, over tiles and then over steps.

    `noisy_squares` adds up `R |d|^2` tile by tile: where tissue is, a field has other shares of zeros and other
    cotangents than on glass, and the product of two averages over the whole image would miss that.
    """

    noisy_squares: tuple[float, ...]

    @classmethod
    def of(cls, field: Tensor, cotangent: Tensor, gain: Tensor | None = None) -> Norms:
        """Of one tile: the crop `(N, C, h, w)` that the convolution reads, the cotangent `(N, O, h, w)` of its output.

        `gain (C,)` is for a norm and a ReLU between the stored field and the convolution: the factor of the norm per
        channel, `weight / sqrt(variance + eps)`. The crop is then what came out of the ReLU, and the prediction is that
        of the errors' scatter; docs/math.md says what comes on top.
        """
        share_C = torch.count_nonzero(field, dim=(0, 2, 3)).double() * field.shape[1] / field.numel()
        noisy = share_C.mean() if gain is None else (share_C * gain.double().square()).mean()
        return cls(tuple((cotangent.double().square().sum((0, 2, 3)) * noisy).tolist()))

    def __add__(self, other: Norms) -> Norms:
        pairs = zip(self.noisy_squares, other.noisy_squares, strict=True)
        return Norms(tuple(a + b for a, b in pairs))

    def refreshed(self, newest: Norms, weight: float = 0.1) -> Norms:
        """The exponential average over steps: `weight` is the newest step's."""
        pairs = zip(self.noisy_squares, newest.noisy_squares, strict=True)
        return Norms(tuple((1 - weight) * old + weight * new for old, new in pairs))

    def gradient_errors(self, error_bound: float, taps: int) -> tuple[float, ...]:
        """`gradient_error` of every output channel."""
        return tuple(gradient_error(error_bound, 1.0, math.sqrt(square), taps) for square in self.noisy_squares)
