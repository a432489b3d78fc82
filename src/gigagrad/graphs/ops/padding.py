"""Rule of `aten.pad` in its modes: constant, reflect, replicate, circular.

A tile inside the image needs no padding and reads its own span. At the border, constant padding adds what lies outside;
the other modes copy pixels of the image, so the span needed is the hull of the pixels copied. Circular padding
therefore makes a border tile read across the whole axis: exact, and as hungry as that sounds.
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from typing import Any

import torch

from gigagrad.boxes import Span
from gigagrad.graphs.crops import OnDevices, View, bound_pad
from gigagrad.graphs.graph import Axes
from gigagrad.graphs.op_rules import Bound, Call, NotTileable, OpRule, Saved, Site, aten, common_axes, register
from gigagrad.graphs.ops.windows import inside_or_nearest, select


def _fold(index: int, size: int, mode: str) -> int:
    """Return the pixel of `[0, size)` that a padded position copies."""
    if mode == "replicate":
        return min(max(index, 0), size - 1)
    if mode == "circular":
        return index % size
    assert mode == "reflect"
    return -index if index < 0 else 2 * (size - 1) - index if index >= size else index


class Padding(OpRule):
    saved = Saved.NOTHING

    def axes(self, call: Call, rank: int) -> Axes:
        axes = common_axes(call)
        for position in range(len(call["pad"]) // 2):
            if -1 - position not in axes and any(self._amount(call, -1 - position)):
                raise NotTileable("it pads an axis that is not the image's")
        return axes

    @staticmethod
    def _amount(call: Call, axis: int) -> tuple[int, int]:
        """Return the pixels added before and after along a negative axis; negative amounts crop."""
        first = 2 * (-axis - 1)
        pad = call["pad"]
        return (pad[first], pad[first + 1]) if first < len(pad) else (0, 0)

    def _raw(self, call: Call, axis: int, out: Span) -> Span:
        """Return the output's span beside the unpadded field."""
        return out.shift(-self._amount(call, call.operands[0].spatial[axis])[0])

    def needs(self, call: Call, axis: int, out: Span) -> tuple[Span | None, ...]:
        raw, mode, size = self._raw(call, axis, out), call["mode"], call.operands[0].size(axis)
        if mode == "constant":
            return (inside_or_nearest(raw, size),)
        outside = [*range(raw.start, min(raw.stop, 0)), *range(max(raw.start, size), raw.stop)]
        folded = [_fold(index, size, mode) for index in outside]
        inside = raw.clamp(size)
        hull = Span(min(folded), max(folded) + 1) if folded else inside
        return (hull.hull(inside),)

    def workspace_bytes(self, call: Call, out_pixels: int, operands: tuple[tuple[Span, Span] | None, ...]) -> int:
        """Count the other axis' result, where pixels are copied one axis after the other."""
        return 0 if call["mode"] == "constant" else call.node.bytes_per_pixel * out_pixels

    def bind(self, call: Call, site: Site) -> Bound:
        along = [self._along(call, axis, site) for axis in (0, 1)]
        padded = [one for one in along if one is not None]

        def run(operands: Sequence[Any]) -> torch.Tensor:
            crop: torch.Tensor = operands[0]
            for pad in padded:
                crop = pad(crop)
            return crop

        return run

    def form(self, call: Call, axis: int, out: Span, operands: tuple[Span | None, ...]) -> Hashable | None:
        """Return what is missing, and of copied pixels the place; there are few such tiles."""
        raw, inside = self._raw(call, axis, out), operands[0]
        assert inside is not None
        return (
            (inside.start - raw.start, raw.stop - inside.stop) if call["mode"] == "constant" or raw == inside else raw
        )

    def _along(self, call: Call, axis: int, site: Site) -> View | None:
        """Bind the padding along one axis; None where there is none."""
        mode, field, inside = call["mode"], call.operands[0], site.inside[axis]
        raw, size, dim = self._raw(call, axis, site.out[axis]), field.size(axis), field.spatial[axis]
        if raw == inside:
            return None
        if mode == "constant":
            missing = inside.start - raw.start, raw.stop - inside.stop
            frame = (missing, (0, 0)) if axis == 0 else ((0, 0), missing)
            return bound_pad(field.spatial, frame, value=call["value"] or 0)
        indices = OnDevices(torch.tensor([_fold(i, size, mode) - inside.start for i in range(raw.start, raw.stop)]))
        return lambda crop: select(crop, dim, indices.on(crop.device))


register(Padding(), aten("pad"))
