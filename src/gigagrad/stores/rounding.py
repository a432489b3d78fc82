"""Round kept fields to fewer bits a value, as a declared choice.

A rounding is elementwise, idempotent, and the same however the field is cut into boxes. So the forward pass can go on
from `round(values)` in any tile, with any halo, and every later sweep reads exactly the same field from the store.

Quantisation uses subtractive dither (Roberts, 1962): a number is added before rounding and subtracted afterwards, which
makes the errors uniform and independent of the values and of each other (Schuchman, 1964; Lipshitz, Wannamaker and
Vanderkooy, 1992). Rounding errors of a smooth field are otherwise alike from pixel to pixel, and a sum of millions of
them, which is what a gradient is, grows with their number instead of its root. docs/math.md has the derivation.
"""

from __future__ import annotations

import dataclasses
import math
from abc import ABC, abstractmethod
from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from gigagrad.boxes import Box, split
from gigagrad.errors import ConfigError, StoreError
from gigagrad.graphs.operators import scrambled
from gigagrad.stores.store import Store

_HALVES = {"float16": torch.float16, "bfloat16": torch.bfloat16}
_PER_WORD = 4
_GROUP_BITS = 16
_X_BITS = 24
_STRIP_VALUES = 1 << 17  # so many values at a time stay in the processor's cache through some twenty operations


class Rounding(ABC):
    """A way to pack values. `values` and `packed` are crops on `box`; `axes` are the positions of y and x, below 0."""

    @abstractmethod
    def packed_dtype(self, dtype: torch.dtype) -> torch.dtype:
        """Return what values of the floating-point `dtype` are packed as."""

    @abstractmethod
    def pack(self, values: Tensor, box: Box, axes: tuple[int, int]) -> Tensor:
        """Pack a crop, to the same shape; 0 stands for 0. Raises `StoreError` for values it cannot hold."""

    @abstractmethod
    def unpack(self, packed: Tensor, box: Box, axes: tuple[int, int], dtype: torch.dtype) -> Tensor:
        """Return the values that a packed crop stands for; `dtype` is what was packed."""

    @abstractmethod
    def keyed(self, key: int) -> Rounding:
        """Return this rounding with errors of its own: give every field of every step another key."""

    def round(self, values: Tensor, box: Box, axes: tuple[int, int]) -> Tensor:
        """Return what comes back of `values` after packing."""
        return self.unpack(self.pack(values, box, axes), box, axes, values.dtype)


@dataclass(frozen=True)
class Half(Rounding):
    """float16 (11 significant bits, up to 65504) or bfloat16 (8 bits, the range of float32), to nearest even."""

    dtype: torch.dtype

    def __post_init__(self) -> None:
        assert self.dtype in _HALVES.values(), self.dtype

    def __str__(self) -> str:
        return str(self.dtype).removeprefix("torch.")

    def packed_dtype(self, dtype: torch.dtype) -> torch.dtype:
        return self.dtype

    def pack(self, values: Tensor, box: Box, axes: tuple[int, int]) -> Tensor:
        packed = values.to(self.dtype)
        overflown = packed.isinf() & values.isfinite()
        if overflown.any():
            largest = values[overflown].abs().max().item()
            raise StoreError(
                f"a kept field holds {largest:.6g} in {box}; storage={str(self)!r} holds values up to "
                f"{torch.finfo(self.dtype).max:.6g}; use storage='bfloat16', 'error ...' or none"
            )
        return packed

    def unpack(self, packed: Tensor, box: Box, axes: tuple[int, int], dtype: torch.dtype) -> Tensor:
        return packed.to(dtype)

    def keyed(self, key: int) -> Half:
        return self


@dataclass(frozen=True)
class Quantised(Rounding):
    """Multiples of a step, shifted by dither: every value is off by at most `error_bound`, and 0 stays 0.

    The code is one integer as wide as the number: 0 for 0; else the multiple with its sign in the lowest bit (2, 3, 4,
    5, ... for 0, -1, 1, -2, ...), so that small values of either sign have zeros in the high bits, which a codec
    removes; and for values of many steps, infinities and NaN the bits of the number itself, which no multiple in range
    looks like. Nothing is ever clipped, so no range has to be known beforehand; the width is the codec's business.
    """

    error_bound: float
    seed: int = 0

    SMALLEST = 1e-30
    LARGEST = 1e30

    def __post_init__(self) -> None:
        if not self.SMALLEST <= self.error_bound <= self.LARGEST:
            raise ConfigError(
                f"got an error bound of {self.error_bound}; expected {self.SMALLEST:g} to {self.LARGEST:g}; "
                "write e.g. storage='error 0.01'"
            )

    def __str__(self) -> str:
        return f"error {self.error_bound!r}"

    def packed_dtype(self, dtype: torch.dtype) -> torch.dtype:
        return torch.int64 if dtype == torch.float64 else torch.int32

    def keyed(self, key: int) -> Quantised:
        return dataclasses.replace(self, seed=key)

    def step(self, dtype: torch.dtype) -> float:
        """Return the distance of two multiples for values of `dtype`; errors are uniform in +-step / 2."""
        return _grid(self.error_bound, dtype).step

    def pack(self, values: Tensor, box: Box, axes: tuple[int, int]) -> Tensor:
        grid = _grid(self.error_bound, values.dtype)
        packed = torch.empty_like(values, dtype=self.packed_dtype(values.dtype))
        for strip, y in _strips(values, box, axes):
            crop = values.narrow(axes[0], y, strip.height).to(grid.working)
            noise = dither(crop.shape, strip, axes, self.seed, crop)
            packed.narrow(axes[0], y, strip.height).copy_(_codes(crop, noise, grid, packed.dtype))
        return packed

    def unpack(self, packed: Tensor, box: Box, axes: tuple[int, int], dtype: torch.dtype) -> Tensor:
        grid = _grid(self.error_bound, dtype)
        values = torch.empty_like(packed, dtype=dtype)
        like = torch.empty((), dtype=grid.working, device=packed.device)
        for strip, y in _strips(packed, box, axes):
            codes = packed.narrow(axes[0], y, strip.height)
            noise = dither(codes.shape, strip, axes, self.seed, like)
            values.narrow(axes[0], y, strip.height).copy_(_values(codes, noise, grid))
        return values


@dataclass(frozen=True)
class _Grid:
    """The grid of an error bound for a dtype. From `limit` on a value is kept as it is; other codes end at `codes`."""

    working: torch.dtype
    step: float
    limit: float
    codes: int


# How many steps a quantised value may span, and what its rounding to the dtype may then cost in steps. With p bits of
# significand and n steps the last rounding is off by n 2^-p; the arithmetic in front of it, in float32 or float64, by a
# few times n 2^-24 or n 2^-53. Idempotence needs the sum below 1/2, the error bound needs it taken off the step.
_SPANS = {
    torch.float64: (2**20, 2.0**-7),
    torch.float32: (2**14, 2.0**-7),
    torch.float16: (2**7, 2.0**-4),
    torch.bfloat16: (2**4, 2.0**-4),
}


def _grid(error_bound: float, dtype: torch.dtype) -> _Grid:
    steps, spare = _SPANS[dtype]
    step = 2 * error_bound / (1 + 2 * spare)
    info = torch.finfo(dtype)
    # No value may be rounded beyond the dtype's largest, nor where subnormal numbers lie too far apart for the step.
    limit = min(steps * step, info.max - step) if step >= 16 * info.smallest_normal * info.eps else 0.0
    return _Grid(torch.float64 if dtype == torch.float64 else torch.float32, step, limit, 2 * (steps + 2))


def _strips(crop: Tensor, box: Box, axes: tuple[int, int]) -> Iterator[tuple[Box, int]]:
    """Yield boxes of a few rows, with their first row inside the crop."""
    assert (crop.shape[axes[0]], crop.shape[axes[1]]) == box.shape
    rows = max(1, _STRIP_VALUES * box.height // max(1, crop.numel()))
    for y in split(box.height, rows):
        yield Box.of(y.shift(box.y0), box.x), y.start


# Comparisons and `where` take PyTorch several times as long as arithmetic does, so the usual case, in which no value is
# kept as it is, goes without: signs serve as masks.


def _codes(values: Tensor, noise: Tensor, grid: _Grid, dtype: torch.dtype) -> Tensor:
    low, high = torch.aminmax(values)
    if -grid.limit < low and high < grid.limit:  # NaN is not
        return _multiples(values, noise, grid, dtype)
    exact = ~(values.abs() < grid.limit)
    codes = _multiples(values.masked_fill(exact, 0), noise, grid, dtype)
    return torch.where(exact, values.view(dtype), codes)


def _multiples(values: Tensor, noise: Tensor, grid: _Grid, dtype: torch.dtype) -> Tensor:
    """Code 0 as 0, else as 2 |q + 1/4| + 3/2: 2 q + 2 for the multiples q = 0, 1, ..., and 1 - 2 q for -1, -2, ..."""
    codes = (values * (1 / grid.step)).add_(noise).round_()
    return codes.add_(0.25).abs_().mul_(2).add_(1.5).mul_(values.sign().abs_()).to(dtype)


def _values(codes: Tensor, noise: Tensor, grid: _Grid) -> Tensor:
    some = codes.sign()
    multiples = codes.sub(some, alpha=2)
    odd = (multiples & 1).neg_()
    values = multiples.bitwise_right_shift_(1).bitwise_xor_(odd).to(grid.working)
    values.sub_(noise.mul_(some)).mul_(grid.step)
    low, high = torch.aminmax(codes)
    if low >= 0 and high <= grid.codes:
        return values
    exact = (codes < 0) | (codes > grid.codes)
    return torch.where(exact, codes.view(grid.working), values)


def dither(shape: torch.Size, box: Box, axes: tuple[int, int], seed: int, like: torch.Tensor) -> torch.Tensor:
    """Return uniform numbers in (-1/2, 1/2) for a crop of this `shape` on `box`, with the dtype and device of `like`.

    They are a function of the seed and of a value's place in the whole field, so any tiling, any recomputation and any
    number of workers see the same, as for random operators; and odd multiples of 2^-17: one hash of 64 bits serves four
    neighbouring values of a pixel, which makes it cheap. The axes other than y and x are whole in every crop; at most
    2^18 values a pixel, x below 2^24 px.
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


class RoundedStore(Store):
    """A field of `dtype` in an `inner` store of the rounding's packed dtype. What is read is `rounding.round` of it.

    For fields of the forward pass only: `add` is refused, because cotangents stay exact, and so are integers.
    """

    def __init__(self, inner: Store, rounding: Rounding, dtype: torch.dtype) -> None:
        assert dtype.is_floating_point, f"a field of {dtype} is stored as it is"
        packed = rounding.packed_dtype(dtype)
        assert inner.dtype == packed, f"the inner store holds {inner.dtype}; {rounding} packs {dtype} as {packed}"
        super().__init__(inner.shape, dtype, inner.axes)
        self._inner = inner
        self._rounding = rounding

    def read(self, box: Box) -> torch.Tensor:
        return self._rounding.unpack(self._inner.read(box), box, self.axes, self.dtype)

    def write(self, box: Box, crop: torch.Tensor) -> None:
        self._inner.write(box, self._rounding.pack(crop, box, self.axes))

    def add(self, box: Box, crop: torch.Tensor) -> None:
        raise AssertionError("sums are never rounded: a cotangent belongs in a store of its own dtype")

    def flush(self) -> None:
        self._inner.flush()

    def close(self) -> None:
        self._inner.close()

    def retire(self) -> None:
        self._inner.retire()


def parse_storage(text: str | None) -> Rounding | None:
    """Read `"float16"`, `"bfloat16"` or `"error 0.01"` as a rounding; None and `"exact"` mean that fields stay as they
    are.

    Raises `ConfigError` for anything else, naming the accepted forms.
    """
    if text is None or text == "exact":
        return None
    if text in _HALVES:
        return Half(_HALVES[text])
    word, _, number = text.strip().partition(" ")
    try:
        bound = float(number) if word == "error" else math.nan
    except ValueError:
        bound = math.nan
    if math.isnan(bound):
        raise ConfigError(
            f"got storage={text!r}; expected 'exact', 'float16', 'bfloat16' or 'error E' with the largest error E that "
            "a stored value may have, e.g. 'error 0.01'"
        )
    return Quantised(bound)


# What rounding adds to the gradient of the convolution that reads a field: docs/math.md derives it.

_STRIP_ROWS = 32


def gradient_error(error_bound: float, share_nonzero: float, cotangent_norm: float, taps: int = 1) -> float:
    """Return the expected 2-norm of the error of a weight's gradient, for one output channel.

    Errors are independent and uniform in +-`error_bound` on the non-zero values of the field (`Quantised`).

    `taps` counts its weights: input channels x kernel height x kernel width. `cotangent_norm` is the 2-norm over the
    whole image of the cotangent of that channel.
    """
    return error_bound / math.sqrt(3) * math.sqrt(taps * share_nonzero) * cotangent_norm


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


def noisy_squares(shares: Tensor, cotangent: Tensor, groups: int = 1) -> Tensor:
    """Return, as `(O,)` in float64 on the CPU, the squares of `gradient_error` but for its constants, of one tile: the
    2-norm of the cotangent `(N, O, h, w)` squared, times `noisy_shares (C,)` of what the convolution reads.

    They are added up tile by tile: where tissue is, a field has other shares of zeros and other cotangents than on
    glass, and the product of two averages over the whole image would miss that. Each of the convolution's `groups` sees
    its own channels only.
    """
    noisy_O = shares.reshape(groups, -1).mean(1).repeat_interleave(cotangent.shape[1] // groups)
    norms_O = torch.linalg.vector_norm(cotangent, dim=(0, 2, 3)).double()
    squares_O: Tensor = norms_O.square() * noisy_O.to(norms_O)
    return squares_O.cpu()
