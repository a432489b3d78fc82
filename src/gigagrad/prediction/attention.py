"""Attention of the patches of a bag: what the head of a network counts each patch as, where that is in the slide.

    SLIDE.tif        a pyramid of float32 over the whole slide, 0 where there is no patch
    SLIDE.geojson    QuPath's tiles, with the measurements `attention` and `attention rank`
    SLIDE.png        ranks over the slide, as CLAM draws them (Lu et al., 2021): few patches have most of the attention
    patches.png      the patches with most and with least of it

The rank is the share of the bag's patches that have less attention.
"""

from __future__ import annotations

import inspect
import json
import uuid
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Final

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from gigagrad.cohorts import Row
from gigagrad.files import replacing
from gigagrad.images import Image, thumbnail, write_pyramid
from gigagrad.images.pixels import Array
from gigagrad.images.slide_bag import CaseBag, SlideBag
from gigagrad.prediction.attribution import FADED, Picture, blended, legend
from gigagrad.prediction.outlines import write_overlay

Values = NDArray[np.float64]

_NAMESPACE: Final = uuid.UUID("2b0f1f3c-5e0e-4f5c-9d41-0d7f4f1c8a55")
_MOST_CELLS: Final = 16
"""Cells of a map along a patch, where a finer grid than that would be needed to hit all corners."""
_FEWER_CELLS: Final = 8
_PICTURE_PX: Final = 2000
_SHOWN: Final = 8
"""Patches with most, and with least attention."""
_SHOWN_PX: Final = 192
_GAP_PX: Final = 8
_MOST_COLOUR: Final = 0.6
"""So that the tissue is seen below."""
_INK: Final = (20, 20, 24)


class WithAttention(nn.Module):
    """A model that returns its output and how much each patch counts, `(N,)`.

    That is what the last module called that has a method `attention` says of its own inputs, so that an encoder before
    it runs once. For models of which `attends` says that there is one.
    """

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model, self._names = model, _with_attention(model)

    def forward(self, bag_NCHW: Tensor) -> tuple[Tensor, Tensor]:
        called = list[tuple[Any, Any]]()
        modules = [self.model.get_submodule(name) for name in self._names]
        hooks = [each.register_forward_pre_hook(lambda *given: called.append(given)) for each in modules]
        try:
            output = self.model(bag_NCHW)
        finally:
            for hook in hooks:
                hook.remove()
        head, inputs = called[-1]
        return output, head.attention(*inputs)


def attends(model: nn.Module) -> bool:
    """Return whether a module of the model has a method `attention`."""
    return bool(_with_attention(model))


def _with_attention(model: nn.Module) -> list[str]:
    # Submodules of this name are no methods.
    return [name for name, module in model.named_modules() if inspect.ismethod(getattr(module, "attention", None))]


def ranks(attention_N: Values) -> Values:
    """Return the share of patches with less attention than each, those with as much counted half."""
    ordered = np.sort(attention_N)
    below, up_to = (np.searchsorted(ordered, attention_N, side) for side in ("left", "right"))
    found: Values = (below + up_to) / (2 * len(attention_N))
    return found


def write_attention(folder: Path, row: Row, bag: SlideBag | CaseBag, attention_N: Tensor, title: str) -> None:
    """Write the files of a row's bag into `folder`. Raises `WriteError`."""
    folder.mkdir(parents=True, exist_ok=True)
    values = attention_N.detach().to("cpu", torch.float64).numpy()
    shown = ranks(values)
    bags = bag.bags if isinstance(bag, CaseBag) else (bag,)
    ends = np.cumsum([len(each) for each in bags])
    for part, each, end in zip(row.members, bags, ends.tolist(), strict=True):
        of_slide = slice(end - len(each), end)
        with part.open() as slide:
            write_map(folder / f"{part.name}.tif", each, values[of_slide])
            write_tiles(folder / f"{part.name}.geojson", each, values[of_slide], shown[of_slide], slide)
            write_overlay(folder / f"{part.name}.png", draw_attention(slide, each, shown[of_slide], title))
    write_overlay(folder / "patches.png", draw_patches(bag, values))


def cell_px(corners: NDArray[np.int64], side: int) -> int:
    """Choose what a pixel of a map is in level 0: the largest that hits all corners, or an eighth of a patch."""
    found = int(np.gcd.reduce(corners, axis=None, initial=side))
    return found if side <= _MOST_CELLS * found else max(1, round(side / _FEWER_CELLS))


def painted(
    corners: NDArray[np.int64], side: int, values: Values, size: tuple[int, int], cell: tuple[float, float]
) -> NDArray[np.float64]:
    """Paint squares of level 0 on a plane `size` whose pixels are `cell` `(height, width)` of it; the mean where they
    overlap, 0 where there are none.
    """
    total, count = np.zeros(size), np.zeros(size, np.int32)
    # A patch over the edge may begin before it.
    first = np.maximum(np.rint(corners / cell[::-1]), 0).astype(np.int64).tolist()
    last = np.maximum(np.rint((corners + side) / cell[::-1]), 0).astype(np.int64).tolist()
    for (x0, y0), (x1, y1), value in zip(first, last, values.tolist(), strict=True):
        at = slice(y0, max(y1, y0 + 1)), slice(x0, max(x1, x0 + 1))
        total[at] += value
        count[at] += 1
    return total / np.maximum(count, 1)


def write_map(path: Path, bag: SlideBag, values: Values) -> None:
    """Write the attention of a slide's patches as a pyramid that begins at the slide's corner, and ends where it does.

    Raises `WriteError`.
    """
    cell = cell_px(bag.coords, bag.patch_size_level0)
    height, width = (-(-length // cell) for length in bag.level0_shape)
    plane = painted(bag.coords, bag.patch_size_level0, values, (height, width), (cell, cell))
    write_pyramid(
        path,
        [plane.astype(np.float32)],
        shape=(height, width, 1),
        dtype=np.float32,
        nearest=False,
        mpp=None if bag.level0_mpp is None else bag.level0_mpp * cell,
        overwrite=True,
        description=f"gigagrad attention of patches, a pixel is {cell} px of level 0; 0 where there is no patch",
    )


def write_tiles(path: Path, bag: SlideBag, values: Values, shown: Values, slide: Image) -> None:
    """Write the patches as QuPath's tiles, in pixels of level 0 from the corner of the slide's `bounds`. Raises
    `WriteError`.
    """
    corner = (0, 0) if slide.bounds is None else (slide.bounds.x0, slide.bounds.y0)
    places = zip((bag.coords - corner).tolist(), values.tolist(), shown.tolist(), strict=True)
    with replacing(path) as file:
        file.write(b'{"type": "FeatureCollection", "features": [')
        for number, ((x, y), value, rank) in enumerate(places):
            feature = {
                "type": "Feature",
                "id": str(uuid.uuid5(_NAMESPACE, f"{bag.name}/{number}")),
                "geometry": {"type": "Polygon", "coordinates": [_ring(x, y, bag.patch_size_level0)]},
                "properties": {
                    "objectType": "tile",
                    "measurements": {"attention": float(f"{value:.6g}"), "attention rank": round(rank, 4)},
                },
            }
            file.write(b",\n" if number else b"\n")
            file.write(json.dumps(feature, separators=(",", ":")).encode())
        file.write(b"\n]}\n")


def _ring(x: int, y: int, side: int) -> list[list[int]]:
    return [[x, y], [x + side, y], [x + side, y + side], [x, y + side], [x, y]]


def draw_attention(slide: Image, bag: SlideBag, shown: Values, title: str) -> Picture:
    """Draw, as `(h, w, 3)` uint8, the slide in pale grey at most 2000 px long, the patches of the upper half over it in
    colours that grow stronger with their rank, and a legend with `title` below.
    """
    grey = thumbnail(slide, _PICTURE_PX).mean(2, keepdims=True)
    size = grey.shape[0], grey.shape[1]
    cell = bag.level0_shape[0] / size[0], bag.level0_shape[1] / size[1]
    upper = np.clip(2 * shown - 1, 0, 1)
    share = painted(bag.coords, bag.patch_size_level0, upper, size, cell)
    picture = blended(grey + (255 - grey) * FADED, share, _MOST_COLOUR)
    return np.concatenate([picture, legend(title, size[1], "median patch", "most attention", _MOST_COLOUR)])


def draw_patches(bag: SlideBag | CaseBag, values: Values) -> Picture:
    """Draw, as `(h, w, 3)` uint8, the patches with most attention, and below them those with least, each with it."""
    from PIL import Image as Pillow
    from PIL import ImageDraw, ImageFont

    order = np.argsort(-values, kind="stable")
    chosen = {"most attention": order[:_SHOWN], "least attention": order[::-1][:_SHOWN]}
    font = ImageFont.load_default(14)
    line, step = 24, _SHOWN_PX + _GAP_PX
    across = min(_SHOWN, len(values))
    height = len(chosen) * (2 * line + step)
    page = Pillow.new("RGB", (across * step + _GAP_PX, height), "white")
    pen = ImageDraw.Draw(page)
    for row, (called, numbers) in enumerate(chosen.items()):
        top = row * (2 * line + step)
        pen.text((_GAP_PX, top + line / 2), called, fill=_INK, font=font, anchor="lm")
        pictures = _pictures([np.asarray(bag.read(number, number + 1))[0] for number in numbers.tolist()])
        for place, (number, picture) in enumerate(zip(numbers.tolist(), pictures, strict=True)):
            left = _GAP_PX + place * step
            page.paste(Pillow.fromarray(picture).resize((_SHOWN_PX, _SHOWN_PX)), (left, top + line))
            at = left, top + line + _SHOWN_PX + line / 2
            pen.text(at, f"{values[number]:.3g}", fill=_INK, font=font, anchor="lm")
    return np.asarray(page)


def _pictures(patches: list[Array]) -> Iterator[Picture]:
    """Turn patches `(C, h, w)` of any dtype into colours to look at; of numbers beyond bytes, all by one scale."""
    low, high = (min(patch.min() for patch in patches), max(patch.max() for patch in patches))
    for patch in patches:
        seen = patch[: 3 if len(patch) >= 3 else 1].astype(np.float64)
        if patch.dtype != np.uint8:
            seen = (seen - low) * (255 / ((high - low) or 1))
        yield np.ascontiguousarray(np.broadcast_to(seen, (3, *seen.shape[1:])).transpose(1, 2, 0).astype(np.uint8))
