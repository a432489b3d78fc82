"""Cut slides into bags of patches: which patches there are, from which level they are read, and in which order.

Corners are those of TRIDENT and CLAM: `(x, y)` of a patch's top left pixel, in pixels of level 0. Patches of another
resolution than any level are read from the coarsest level that is fine enough and made smaller by Pillow's bicubic
filter, which averages what it leaves out: so does TRIDENT for the patches whose features it computes
(`WSIPatcher.get_tile_xy` with `pil=True`). CLAM reads levels as they are.

A bag that is read from its first patch to its last decodes each block of the file once (`file_order`).
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Final, Self

import numpy as np
from numpy.typing import NDArray

from gigagrad.boxes import tiles
from gigagrad.errors import ConfigError, ImageError
from gigagrad.images.bag import Bag
from gigagrad.images.coordinates import MOST_PATCHES, Corners
from gigagrad.images.image import Image
from gigagrad.images.pixels import CACHE_BYTES, Array, Pixels, TileCache, is_floating
from gigagrad.images.tissue import PAPER_RECIPE, Recipe, tissue_mask

Shares = NDArray[np.float64]

SCANNERS_DIFFER: Final = 0.05
"""The difference in resolution, relative, up to which a level, or a whole multiple of its pixels, is what is asked for:
scanners of one magnification differ by as much."""
_MOST_ENLARGED: Final = 1.5
"""The factor from which on level 0 is too coarse: what is asked for is of another magnification."""
_CELL_PX: Final = 16
"""Side of the squares in which tissue is looked for, in pixels of level 0: 4 um at 40x, 8 um at 20x."""
_CELLS_PER_PATCH: Final = 8
"""The fewest of them along a patch."""
_ROUNDED: Final = 1.02
"""The factor by which a level may be coarser than its name, as its size was rounded."""
_READ_PX: Final = 2048
_FEWEST_BLOCKS: Final = 9
"""Blocks that have to fit into a cache for it to be of use: those that a patch may meet."""
_SETTLED: Final = 4
"""One in so many bytes of a cache is for blocks that no later patch wants: another thread may read an earlier one."""
_RESAMPLED_BYTES: Final = 2**21
"""Pixels that are resampled at a time, about: regions of 448 px in RGB three by three, in 0.9 of the time."""
_COPIES: Final = 3
"""Copies of a region: as read, in other numbers, and between both axes."""


@dataclass(frozen=True, slots=True)
class Sampling:
    """The way in which patches are read from a slide.

    Attributes:
        size: pixels a side of a patch.
        side: what that is in pixels of level 0.
        level: which level is read, and its `downsample`.
        region: what a patch is in pixels of that level; of another number than `size`, it is resampled.
    """

    size: int
    side: int
    level: int
    downsample: float
    region: int

    @classmethod
    def choose(cls, slide: Image, size: int, side: float, slack: float = SCANNERS_DIFFER) -> Self:
        """Choose the coarsest level that shows `side` pixels of level 0 in `size` px or more.

        Within `slack`, relative, one pixel of a patch is a whole number of the level's. Raises `ImageError` where level
        0 is far coarser.
        """
        wanted = side / size
        if wanted * _MOST_ENLARGED < 1:
            raise ImageError(
                f"{slide.name} has {side:.4g} px of level 0 where patches of {size} px are asked for, {1 / wanted:.3g} "
                "times as fine as it was scanned; ask for a coarser resolution (mpp) or smaller patches"
            )
        fine = [index for index, each in enumerate(slide.levels) if each.downsample <= wanted * (1 + slack)]
        level = max(fine, key=lambda index: slide.levels[index].downsample, default=0)
        downsample = slide.levels[level].downsample
        whole = max(1, round(wanted / downsample))
        if abs(whole * downsample / wanted - 1) <= slack:
            return cls(size, round(size * whole * downsample), level, downsample, size * whole)
        return cls(size, round(side), level, downsample, round(side / downsample))

    @property
    def resolution(self) -> float:
        """Return the pixels of level 0 that a pixel of a patch is."""
        return self.downsample * self.region / self.size

    def at(self, corners: Corners) -> Corners:
        """Return the corners in pixels of the level, the nearest ones."""
        return np.rint(corners / self.downsample).astype(np.int64)

    def inside(self, corners: Corners, slide: Image) -> NDArray[np.bool_]:
        """Tell of which patches all pixels lie in the slide."""
        x, y = self.at(corners).T
        height, width = slide.levels[self.level].shape
        within: NDArray[np.bool_] = (x >= 0) & (y >= 0) & (x + self.region <= width) & (y + self.region <= height)
        return within


def _block_bytes(image: Image) -> int:
    """Return the bytes of one of its blocks."""
    assert isinstance(image.dtype, np.dtype)
    height, width = image.block_shape or (1, 1)
    return height * width * image.channels * image.dtype.itemsize


class SlideBag(Bag):
    """Patches of one slide. Use `gigagrad.open_bag`.

    Attributes, beside those of every bag:
        coords: `(N, 2)` int64, x and y of each patch's top left pixel in level 0.
        patch_size_level0: pixels of level 0 that a patch is wide and high.
        rows: `(N,)` int64, which of the corners that were given each patch is: patches are in the order of the file.
        tissue_share: `(N,)`, how much of each patch is tissue; None where nobody looked.
        overlap: pixels that neighbours have in common, in those of a patch; 0 where corners were given.
        level0_shape, level0_mpp: `(height, width)` of the slide, and micrometres per pixel, None if unknown.
        over_edge: `(N,)`, which patches reach beyond the slide; what lies there is as `Image.read` fills it.
        block_cache: where blocks of the image are kept, None where it keeps them itself.
        image_bytes: of all pixels of the level that is read.
    """

    def __init__(
        self,
        image: Image,
        corners: Corners,
        sampling: Sampling,
        *,
        name: str,
        mpp: float | None = None,
        overlap: int = 0,
        tissue_share: Shares | None = None,
        owned: bool = True,
    ) -> None:
        """Read patches from `image`, open at the level of `sampling`; if `owned`, closing the bag closes it.

        `mpp` is that of level 0. Raises `ImageError` for an image in a tensor.
        """
        if not isinstance(image.dtype, np.dtype):
            raise ImageError(f"{name} is a tensor; give its slide as a NumPy array: tensor.numpy()")
        region, size = sampling.region, sampling.size
        seen = image.filled()
        self.block_cache: TileCache | None = None
        self.image_bytes: Final = image.height * image.width * image.channels * image.dtype.itemsize
        if seen.lends_blocks and _block_bytes(image) * _FEWEST_BLOCKS <= CACHE_BYTES:
            self.block_cache = _cache_for(self.image_bytes)
        at = sampling.at(corners)
        rows = file_order(at, region, image)
        region_bytes = image.channels * region**2 * (0 if region == size else 1 if image.dtype == np.uint8 else 8)
        self._at_once = max(1, _RESAMPLED_BYTES // max(1, region_bytes))
        area = min(1.0, len(corners) * region**2 / (image.height * image.width))
        super().__init__(
            shape=(len(corners), image.channels, size, size),
            dtype=image.dtype,
            name=name,
            mpp=None if mpp is None else mpp * sampling.resolution,
            cache_bytes=seen.cache_bytes or (0 if self.block_cache is None else CACHE_BYTES),
            thread_bytes=image.thread_bytes + _COPIES * self._at_once * region_bytes,
            decode_seconds=image.decode_seconds * area,
        )
        self.coords: Final = _fixed(corners[rows])
        self.patch_size_level0: Final = sampling.side
        self.overlap: Final = overlap
        self.level0_shape: Final = image.levels[0].shape
        self.level0_mpp: Final = mpp
        self.rows: Final = _fixed(rows)
        self.tissue_share: Final = None if tissue_share is None else _fixed(tissue_share[rows])
        self.over_edge: Final = _fixed(~sampling.inside(corners[rows], image))
        self._image, self._seen, self._owned = image, seen, owned
        self._at, self._sampling = at[rows], sampling
        self._last_of: NDArray[np.int64] | None = None
        if self.block_cache is not None:
            self._last_of = last_of_blocks(self._at, region, image)

    def _read_inside(self, start: int, stop: int) -> Pixels:
        region, size = self._sampling.region, self._sampling.size
        corners = self._at[start:stop].tolist()
        if region == size:
            return self._squares(start, corners, size)
        assert isinstance(self.dtype, np.dtype)
        patches_NHWC = np.empty((stop - start, size, size, self.shape[1]), self.dtype)
        for first in range(0, stop - start, self._at_once):
            some = slice(first, first + self._at_once)
            regions = self._squares(start + first, corners[some], region)
            patches_NHWC[some] = resampled(regions, size).transpose(0, 2, 3, 1)
        return patches_NHWC.transpose(0, 3, 1, 2)

    def _squares(self, start: int, corners: list[tuple[int, int]], side: int) -> Array:
        """Read the regions of the patches from `start` on, block by block, each of which is looked for once."""
        image, cache, last_of = self._seen, self.block_cache, self._last_of
        if cache is None or last_of is None or image.block_shape is None:
            return image.read_squares(corners, side)
        assert isinstance(self.dtype, np.dtype)
        height, width = image.block_shape
        squares_NHWC = np.empty((len(corners), side, side, image.channels), self.dtype)
        # In numbers, and few calls: other threads wait for Python meanwhile.
        squares_of: dict[tuple[Image, int, int], list[tuple[Array, int, int]]] = {}
        for square, (x, y) in zip(squares_NHWC, corners, strict=True):
            bottom, right = min(y + side, image.height), min(x + side, image.width)
            if x < 0 or y < 0 or right < x + side or bottom < y + side:
                square[...] = image.fill
            for row in range(max(y, 0) // height, -(-bottom // height)):
                for column in range(max(x, 0) // width, -(-right // width)):
                    squares_of.setdefault((image, row, column), []).append((square, x, y))
        for key in cache.in_turn(squares_of):
            block, (_, row, column) = cache.get(key, _block_of), key
            top, left = row * height, column * width
            bottom, right = min(top + height, image.height), min(left + width, image.width)
            for square, x, y in squares_of[key]:
                y0, y1 = (y if y > top else top), (y + side if y + side < bottom else bottom)
                x0, x1 = (x if x > left else left), (x + side if x + side < right else right)
                square[y0 - y : y1 - y, x0 - x : x1 - x] = block[y0 - top : y1 - top, x0 - left : x1 - left]
            if last_of[row, column] < start + len(corners):
                cache.settle(key)
        return squares_NHWC.transpose(0, 3, 1, 2)

    def _release(self) -> None:
        if self.block_cache is not None:
            self.block_cache.clear()
        if self._owned:
            self._image.close()


def _cache_for(image_bytes: int) -> TileCache:
    """Make a cache for images of so many bytes. If they fit, blocks stay for the next time that the bag is read."""
    return TileCache(CACHE_BYTES, settled_bytes=None if image_bytes <= CACHE_BYTES else CACHE_BYTES // _SETTLED)


def _block_of(key: tuple[Image, int, int]) -> Array:
    image, row, column = key
    return image.block(row, column)


def _fixed(array: Any) -> Any:
    array.flags.writeable = False
    return array


def resampled(pixels_NCHW: Array, size: int) -> Array:
    """Return pixels as `(N, C, size, size)`, by the filter of Pillow's `resize`: of bytes, within 1 of its.

    PyTorch has that filter for bytes, several times as fast.
    """
    import torch
    from torch.nn.functional import interpolate

    dtype = pixels_NCHW.dtype
    exact = torch.from_numpy(pixels_NCHW if dtype == np.uint8 else pixels_NCHW.astype(np.float64))
    resized: Array = interpolate(exact, (size, size), mode="bicubic", antialias=True).numpy()
    if dtype != np.uint8 and not is_floating(dtype):
        limits = (0, 1) if dtype.kind == "b" else (np.iinfo(dtype).min, np.iinfo(dtype).max)
        resized = np.rint(resized).clip(*limits)
    return resized.astype(dtype, copy=False)


def file_order(at: Corners, region: int, image: Image) -> NDArray[np.int64]:
    """Order squares of `region` px at `(x, y)` of an image so that its cache lasts to decode each block once.

    They go row by row, in strips that are as wide as the cache allows and end where no square crosses from one block to
    the next. Where there is no such place, blocks on the border of two strips are decoded twice.
    """
    strip = np.zeros(len(at), np.int64)
    block = image.block_shape
    if block is not None and len(at):
        height, width = block
        # What two rows of squares meet lies between them in time.
        rows = 2 * -(-region // height) + 1
        most = max(1, CACHE_BYTES // (rows * _block_bytes(image)))
        first, last = at[:, 0] // width, (at[:, 0] + region - 1) // width
        strip = np.searchsorted(_cuts(first, last, most), first, side="right")
    return np.lexsort((at[:, 0], at[:, 1], strip))


def _cuts(first: NDArray[np.int64], last: NDArray[np.int64], most: int) -> list[int]:
    """Find the columns of blocks with which strips of up to `most` columns begin, but for the first."""
    begin, end = int(first.min()), int(last.max())
    crossing = np.zeros(end - begin + 2, np.int64)
    np.add.at(crossing, first + 1 - begin, 1)
    np.add.at(crossing, last + 1 - begin, -1)
    crossing = np.cumsum(crossing)  # how many squares reach from the column before into each
    cuts, left = list[int](), 0
    while left + most <= end - begin:
        # The last of those that the fewest cross.
        choice = crossing[left + 1 : left + most + 1][::-1]
        left += most - int(choice.argmin())
        cuts.append(begin + left)
    return cuts


def last_of_blocks(at: Corners, region: int, image: Image) -> NDArray[np.int64]:
    """Find the last of the squares, in their order, that wants each block of an image; -1 where none does."""
    shape = image.block_shape or (1, 1)
    rows, columns = (-(-length // size) for length, size in zip((image.height, image.width), shape, strict=True))
    found = np.full((rows, columns), -1, np.int64)
    first, last = at[:, ::-1] // shape, (at[:, ::-1] + region - 1) // shape
    for offset in np.ndindex(*(last - first).max(axis=0) + 1):
        y, x = np.minimum(first + np.array(offset), last).clip(0, (rows - 1, columns - 1)).T
        np.maximum.at(found, (y, x), np.arange(len(at)))
    return found


def grid(slide: Image, sampling: Sampling, step: int | None = None) -> Corners:
    """Lay patches over a slide, `step` of their own pixels apart (None: side by side), column by column as TRIDENT.

    The last ones may reach beyond the slide. Raises `ConfigError` for a step below 1, `ImageError` for too many.
    """
    if step is not None and step < 1:
        raise ConfigError(f"got step {step}, expected 1 px or more, or None for patches side by side")
    apart = sampling.side if step is None else max(1, round(step * sampling.resolution))
    height, width = slide.levels[0].shape
    count = -(-height // apart) * -(-width // apart)
    if count > MOST_PATCHES:
        raise ImageError(f"{slide.name} has {count} patches {apart} px apart; expected {MOST_PATCHES} at most")
    x, y = np.meshgrid(np.arange(0, width, apart), np.arange(0, height, apart), indexing="ij")
    return np.stack((x.ravel(), y.ravel()), axis=1).astype(np.int64)


@contextmanager
def at_level(image: Image, level: int) -> Iterator[Image]:
    """Open another level of an image for the block; itself where it is open at that level."""
    if image.shape[1:] == image.levels[level].shape:
        yield image
    else:
        with image.at_level(level) as other:
            yield other


def coarse_level(slide: Image, side: int) -> tuple[int, int]:
    """Choose the level in which tissue of patches of `side` px of level 0 is looked for, and the pixels a cell is wide.

    Cells are about 16 px of level 0, less where patches are small.
    """
    cell = max(1, min(_CELL_PX, side // _CELLS_PER_PATCH))
    coarse = [index for index, level in enumerate(slide.levels) if level.downsample <= cell * _ROUNDED]
    level = max(coarse, key=lambda index: slide.levels[index].downsample)
    return level, max(1, round(cell / slide.levels[level].downsample))


def tissue_cells(image: Image, cell: int) -> NDArray[np.float64]:
    """Label tissue by our own recipe, in cells of `cell` px."""
    recipe = Recipe(downsample=cell, threshold=PAPER_RECIPE.threshold)
    return tissue_mask(image, recipe).astype(np.float64)


def mask_cells(mask: Image, cell: int) -> NDArray[np.float64]:
    """Average a mask of 0 and 1, in which anything else is 0, over cells of `cell` px."""
    cells = np.zeros((-(-mask.height // cell), -(-mask.width // cell)))
    step = max(1, _READ_PX // cell) * cell
    for box in tiles(mask.height, mask.width, step, step):
        there = (np.asarray(mask.read(box)) == 1).any(axis=0)
        down, across = np.arange(0, box.height, cell), np.arange(0, box.width, cell)
        sums = np.add.reduceat(np.add.reduceat(there, down, axis=0, dtype=np.int64), across, axis=1)
        high, wide = (np.minimum(cell, length - starts) for length, starts in ((box.height, down), (box.width, across)))
        y, x = box.y0 // cell, box.x0 // cell
        cells[y : y + len(down), x : x + len(across)] = sums / np.outer(high, wide)
    return cells


def shares(cells: NDArray[np.float64], cell_px: tuple[float, float], corners: Corners, side: int) -> Shares:
    """Return how much of each square of level 0 is tissue, where `cells` of `(height, width)` px of it are by as much.

    By a summed-area table, read between its points: exact for squares that cut cells.
    """
    table = np.zeros((cells.shape[0] + 1, cells.shape[1] + 1))
    table[1:, 1:] = cells.cumsum(axis=0).cumsum(axis=1)
    x, y = corners.T
    top, bottom = (np.clip(edge / cell_px[0], 0, cells.shape[0]) for edge in (y, y + side))
    left, right = (np.clip(edge / cell_px[1], 0, cells.shape[1]) for edge in (x, x + side))
    total = _between(table, bottom, right) - _between(table, top, right)
    total += _between(table, top, left) - _between(table, bottom, left)
    return np.clip(total * cell_px[0] * cell_px[1] / side**2, 0, 1)


def _between(table: NDArray[np.float64], row: Shares, column: Shares) -> Shares:
    y, x = (
        np.minimum(place.astype(np.int64), size - 2) for place, size in zip((row, column), table.shape, strict=True)
    )
    down, across = row - y, column - x
    above = table[y, x] * (1 - across) + table[y, x + 1] * across
    below = table[y + 1, x] * (1 - across) + table[y + 1, x + 1] * across
    between: Shares = above * (1 - down) + below * down
    return between


class CaseBag(Bag):
    """The patches of several slides, one slide's after the other's. Closing it closes their bags.

    Attributes, beside those of every bag: `coords`, `patch_size_level0`, `rows`, `tissue_share` and `over_edge` as a
    `SlideBag` has them, `patch_size_level0` of each patch, and
        bags: the slides' own bags.
        slide_of_patch: `(N,)` int64, an index into them.
    """

    def __init__(self, bags: Sequence[SlideBag], *, name: str | None = None) -> None:
        """Join bags. Raises `ImageError` where their patches differ in size, channels or dtype."""
        first = bags[0]
        for bag in bags:
            if (bag.shape[1:], bag.dtype) != (first.shape[1:], first.dtype):
                raise ImageError(f"{bag!r} and {first!r} have patches of other sizes or kinds; expected one of all")
        # Slides are read one after the other: blocks of one make room for those of the next.
        cache = _cache_for(sum(bag.image_bytes for bag in bags))
        own_bytes = sum(bag.cache_bytes for bag in bags if bag.block_cache is None)
        shared_bytes = min(CACHE_BYTES, sum(bag.cache_bytes for bag in bags) - own_bytes)
        for bag in bags:
            bag.block_cache = bag.block_cache and cache
        counts = [len(bag) for bag in bags]
        mpps = {bag.mpp for bag in bags}
        super().__init__(
            shape=(sum(counts), *first.shape[1:]),
            dtype=first.dtype,
            name=name or first.name,
            mpp=first.mpp if None not in mpps else None,
            cache_bytes=own_bytes + shared_bytes,
            thread_bytes=max(bag.thread_bytes for bag in bags),
            decode_seconds=sum(bag.decode_seconds for bag in bags),
        )
        self.bags: Final = tuple(bags)
        self.slide_of_patch: Final = _fixed(np.repeat(np.arange(len(bags)), counts))
        self.coords: Final = _fixed(np.concatenate([bag.coords for bag in bags]))
        self.patch_size_level0: Final = _fixed(np.repeat([bag.patch_size_level0 for bag in bags], counts))
        self.rows: Final = _fixed(np.concatenate([bag.rows for bag in bags]))
        looked = [bag.tissue_share for bag in bags if bag.tissue_share is not None]
        self.tissue_share: Final = _fixed(np.concatenate(looked)) if len(looked) == len(bags) else None
        self.over_edge: Final = _fixed(np.concatenate([bag.over_edge for bag in bags]))
        self._starts = [0, *np.cumsum(counts).tolist()]

    def _read_inside(self, start: int, stop: int) -> Pixels:
        parts = [
            np.asarray(bag.read(max(start, begin) - begin, min(stop, end) - begin))
            for bag, begin, end in zip(self.bags, self._starts, self._starts[1:], strict=False)
            if begin < stop and start < end
        ]
        # Channels last, as each of them lies in memory.
        return (
            parts[0]
            if len(parts) == 1
            else np.concatenate([part.transpose(0, 2, 3, 1) for part in parts]).transpose(0, 3, 1, 2)
        )

    def _release(self) -> None:
        for bag in self.bags:
            bag.close()
