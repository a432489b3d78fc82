"""Rules of nearest, bilinear and bicubic resizing.

Along one axis every output is a weighted sum of a few input pixels. Which pixels and which weights depends on the whole
field's size and on the rounding inside PyTorch, so nearest neighbours are read off PyTorch itself (it resizes a ramp of
indices), and the weights follow its source coordinate `(o + 1/2) scale - 1/2`, or `o scale` with align_corners. A tile
that is the whole field is resized by PyTorch's own kernel, and so is any crop whose pixels are copied a whole number of
times: the same numbers, and faster.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass
from functools import lru_cache
from math import prod

import torch
import torch.nn.functional as F

from gigagrad.boxes import Span
from gigagrad.graphs.crops import OnDevices, View
from gigagrad.graphs.graph import Axes, Ref
from gigagrad.graphs.op_rules import (
    Bound,
    Call,
    Gains,
    NotTileable,
    OpRule,
    Saved,
    Site,
    plain,
    register,
    require_nchw,
    scaled_gains,
)
from gigagrad.graphs.ops.windows import select, trim
from gigagrad.work import Work

RESIZING = {
    "aten.upsample_nearest2d.vec": "nearest",
    "aten._upsample_nearest_exact2d.vec": "nearest-exact",
    "aten.upsample_bilinear2d.vec": "bilinear",
    "aten.upsample_bicubic2d.vec": "bicubic",
}
_SMALL = 128
"""Height and width together of the largest output that PyTorch resizes by another kernel (2.9 to 2.13, on the CPU)."""
_CUBIC_A = -0.75  # the constant of PyTorch's bicubic kernel (Keys, 1981)


@dataclass(frozen=True, slots=True)
class Resize:
    """Resizing along one axis: sizes in pixels, `factor` the user's scale_factor if one was given.

    `dtype` is the one PyTorch computes source coordinates in: float64 for float64 fields, else float32.
    """

    mode: str
    dtype: torch.dtype
    size: int
    out_size: int
    factor: float | None
    align_corners: bool
    small: bool
    """True where PyTorch resizes the whole field by the kernel for small ones, in which nearest neighbours of an axis
    that comes out once or twice as long are counted, whatever the factor."""

    @property
    def scale(self) -> float:
        """Return input pixels per output pixel, as PyTorch computes it: of equal sizes its linear kernel copies,
        whatever the factor that led to them.
        """
        if self.mode == "bilinear" and self.size == self.out_size:
            return 1.0
        if self.align_corners:
            return (self.size - 1) / (self.out_size - 1) if self.out_size > 1 else 0.0
        return 1 / self.factor if self.factor else self.size / self.out_size

    @property
    def whole_factor(self) -> int:
        """Return n if the field grows exactly n times (and PyTorch computes with 1 / n), else 0."""
        factor = self.out_size // self.size
        exact = factor * self.size == self.out_size and self.scale == 1 / factor
        return factor if exact and not self.align_corners and factor & (factor - 1) == 0 else 0


@lru_cache(maxsize=64)
def _nearest(resize: Resize) -> torch.Tensor:
    """Return the index of the input pixel that each output pixel copies.

    The ramp is resized as an image, because PyTorch's 1-d kernel rounds differently from its 2-d one.
    """
    assert resize.size < 2**24, "indices beyond 2^24 are not exact in float32"
    rows = 1 if resize.small else _SMALL
    ramp_NCHW = torch.arange(resize.size, dtype=resize.dtype).expand(1, 1, rows, -1)
    if resize.factor:
        out_NCHW = F.interpolate(ramp_NCHW, scale_factor=(1.0, resize.factor), mode=resize.mode)
    else:
        out_NCHW = F.interpolate(ramp_NCHW, size=(rows, resize.out_size), mode=resize.mode)
    assert out_NCHW.shape[-1] == resize.out_size
    return out_NCHW[0, 0, 0].to(torch.int64)


def _taps(resize: Resize, out: Span) -> tuple[torch.Tensor, torch.Tensor]:
    """Return input indices (clamped to the field) and weights, each of shape (taps, outputs)."""
    if resize.mode.startswith("nearest"):
        index = _nearest(resize)[out.start : out.stop][None]
        return index, torch.ones(index.shape, dtype=resize.dtype)
    position = torch.arange(out.start, out.stop, dtype=resize.dtype)
    scale = torch.tensor(resize.scale, dtype=resize.dtype)
    source = position * scale if resize.align_corners else (position + 0.5) * scale - 0.5
    offsets: tuple[int, ...]
    if resize.mode == "bilinear":
        source = source.clamp(min=0)
        first = source.floor().clamp(max=resize.size - 1)
        part = (source - first).clamp(0, 1)
        # Of equal sizes the second neighbour is the first again: 0 times an infinite one would be NaN.
        offsets = (0, 0 if resize.size == resize.out_size else 1)
        weights = torch.stack([1 - part, part])
    else:
        first = source.floor()
        part = source - first
        offsets = (-1, 0, 1, 2)
        weights = torch.stack([_cubic(part - offset) for offset in offsets])
    index = torch.stack([first + offset for offset in offsets]).to(torch.int64).clamp(0, resize.size - 1)
    return index, weights


def _cubic(distance: torch.Tensor) -> torch.Tensor:
    """Compute Keys' cubic convolution kernel."""
    d, a = distance.abs(), _CUBIC_A
    near = ((a + 2) * d - (a + 3)) * d * d + 1
    far = ((a * d - 5 * a) * d + 8 * a) * d - 4 * a
    return torch.where(d <= 1, near, torch.where(d < 2, far, torch.zeros_like(d)))


def _copies(resizes: tuple[Resize, Resize]) -> bool:
    """Tell whether every pixel is copied, the same number of times along each axis."""
    return resizes[0].mode.startswith("nearest") and all(resize.whole_factor for resize in resizes)


class Resampling(OpRule):
    saved = Saved.NOTHING
    work = Work.REORDERED
    on_images = True

    def axes(self, call: Call, rank: int) -> Axes:
        if not call.node.dtype.is_floating_point and not RESIZING[call.node.op].startswith("nearest"):
            raise NotTileable(
                f"it interpolates {call.node.dtype} pixels, with rounding of its own; convert to float before"
            )
        return require_nchw(call)

    @staticmethod
    def resize(call: Call, axis: int) -> Resize:
        factors = call["scale_factors"]
        return Resize(
            RESIZING[call.node.op],
            torch.float64 if call.node.dtype == torch.float64 else torch.float32,
            call.operands[0].size(axis),
            call.node.size(axis),
            float(factors[axis]) if factors else None,
            bool(call.node.arguments.get("align_corners")),
            small=call.node.size(0) + call.node.size(1) <= _SMALL,
        )

    def needs(self, call: Call, axis: int, out: Span) -> tuple[Span | None, ...]:
        resize = self.resize(call, axis)
        factor = resize.whole_factor
        if factor and resize.mode != "bicubic":
            margin = 0 if resize.mode.startswith("nearest") else 1
            return (Span(out.start // factor - margin, -(-out.stop // factor) + margin).clamp(resize.size),)
        # Source coordinates grow with the output's, so the ends of the span see the outermost pixels.
        index = torch.cat([_taps(resize, Span(o, o + 1))[0] for o in (out.start, out.stop - 1)])
        return (Span(int(index.min()), int(index.max()) + 1),)

    def workspace_bytes(self, call: Call, out_pixels: int, operands: tuple[tuple[Span, Span] | None, ...]) -> int:
        """Count, with explicit weights, a copy for each tap and sums, of one axis, then of the other; in float32 at
        least.
        """
        resizes = self._resizes(call)
        bilinear = resizes[0].mode == "bilinear"
        whole = bilinear and out_pixels == call.node.size(0) * call.node.size(1)
        if whole or _copies(resizes):
            return 0
        taps = {"nearest": 1, "nearest-exact": 1, "bilinear": 2, "bicubic": 4}[resizes[0].mode]
        inside = operands[0]
        assert inside is not None
        pixels = max(out_pixels, inside[0].length * inside[1].length)
        wider = max(1, 4 // call.node.dtype.itemsize) if taps > 1 else 1
        return (taps + 3) * wider * call.node.bytes_per_pixel * pixels

    def bind(self, call: Call, site: Site) -> Bound:
        resizes, inside = self._resizes(call), site.inside
        if _copies(resizes):
            return self._by_whole_factor(resizes, inside, site.out)
        sizes = [Span(0, resize.size) for resize in resizes], [Span(0, resize.out_size) for resize in resizes]
        if resizes[0].mode == "bilinear" and (list(inside), list(site.out)) == sizes:
            return plain(call)
        # Shorter types are interpolated in float32, as PyTorch does, and rounded once at the end.
        wide = call.node.dtype if resizes[0].mode.startswith("nearest") else resizes[0].dtype
        y, x = (self._by_weights(axis, resizes[axis], inside[axis], site.out[axis]) for axis in (0, 1))
        return lambda operands: x(y(operands[0].to(wide))).to(call.node.dtype)

    def form(self, call: Call, axis: int, out: Span, operands: tuple[Span | None, ...]) -> Hashable | None:
        """Return None but for whole copies: the numbers of other pixels, and the rounding of their weights, depend on
        the place.
        """
        resizes, inside = self._resizes(call), operands[0]
        assert inside is not None
        return out.start - inside.start * resizes[axis].whole_factor if _copies(resizes) else None

    def error_gains(self, call: Call, read: Sequence[Gains], value: Callable[[Ref], torch.Tensor]) -> Gains | None:
        """Scale the errors by how often a value appears at most: `(sum over copies)^2 <= copies * sum of squares`."""
        resizes = self._resizes(call)
        if resizes[0].mode == "bicubic":
            return None
        return scaled_gains(read[0], prod(max(1.0, resize.out_size / resize.size) for resize in resizes) ** 0.5)

    @classmethod
    def _resizes(cls, call: Call) -> tuple[Resize, Resize]:
        return cls.resize(call, 0), cls.resize(call, 1)

    @staticmethod
    def _by_weights(axis: int, resize: Resize, inside: Span, out: Span) -> View:
        """Bind the sum of a few pixels along one axis."""
        index, weights = _taps(resize, out)
        indices = OnDevices(index - inside.start)
        shares = OnDevices(weights.reshape(len(index), *((-1, 1) if axis == 0 else (-1,))))

        def resized(crop_NCHW: torch.Tensor) -> torch.Tensor:
            taps, factors = indices.on(crop_NCHW.device), shares.on(crop_NCHW.device)
            parts = [select(crop_NCHW, axis - 2, tap) for tap in taps]
            if len(parts) == 1:
                return parts[0]
            # Not as a step from one to the next: infinite minus infinite would be NaN where PyTorch adds their shares.
            total = parts[0] * factors[0]
            for part, weight in zip(parts[1:], factors[1:], strict=True):
                total = torch.addcmul(total, part, weight)
            return total

        return resized

    @staticmethod
    def _by_whole_factor(resizes: tuple[Resize, Resize], inside: tuple[Span, Span], out: tuple[Span, Span]) -> Bound:
        """Bind copies of every pixel."""
        factors, mode = [resize.whole_factor for resize in resizes], resizes[0].mode
        size = [factor * span.length for factor, span in zip(factors, inside, strict=True)]
        starts = [out[axis].start - inside[axis].start * factors[axis] for axis in (0, 1)]
        return lambda operands: trim(F.interpolate(operands[0], size=size, mode=mode), starts, out)


register(Resampling(), list(RESIZING))
