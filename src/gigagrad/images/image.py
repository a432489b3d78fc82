"""Define what every image is to the rest of the library: a shape, a dtype and `read(box)`; and views of an image.

A reader derives from `Image`, calls `Image.__init__` and implements `_read_inside`, which is only ever asked for
non-empty boxes inside the image. Everything a caller may rely on is enforced here, once: the exact box comes back
whatever part of it lies outside, the outside has the image's fill value, and the pixels belong to the caller.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, Final, SupportsIndex, final

import numpy as np
from numpy.typing import NDArray

from gigagrad.boxes import Box
from gigagrad.errors import ImageError, did_you_mean
from gigagrad.images.pixels import (
    LUMA_BT601,
    ROWS_AT_ONCE,
    Array,
    Level,
    Pixels,
    choose_level,
    grid_parts,
    is_floating,
    is_nodata,
)

if TYPE_CHECKING:
    import torch

    from gigagrad.images.georeference import Georeference

from typing import Self

_NODATA_BLOCK_PX = 512
"""Side of the blocks in which pixels are looked at for data."""
_UM_SHOWN_IN_METRES = 1e4
_SEEN_BY_VIEWS = (
    *("dtype", "name", "fill", "mpp", "georeference", "bounds", "nodata", "channel_names"),
    *("cache_bytes", "thread_bytes", "decode_seconds"),
)


class Closing:
    """Base of what is opened, read and closed: an image, a bag. `name` is how messages call it."""

    name: str
    _closed = False

    def _require_open(self) -> None:
        if self._closed:
            raise ImageError(f"{self.name} is closed; open it again to read from it")

    @final
    def close(self) -> None:
        """Release files and caches. Closing twice is fine; reading afterwards is an `ImageError`."""
        if not self._closed:
            self._closed = True
            self._release()

    def _release(self) -> None:
        """Give back what the reader holds; called once."""

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


class Image(Closing, ABC):
    """Pixels that can be read box by box, from one level of a file or from memory. Its attributes are constant.

    Attributes:
        shape: `(C, H, W)` of the chosen level.
        dtype: of what `read` returns; a `torch.dtype` only where the source is a tensor.
        mpp: micrometres per pixel of the chosen level, None if unknown.
        name: a stem for output folders and messages.
        levels: all resolutions of the source, level 0 (the largest) first.
        georeference: where the pixels of the chosen level lie on earth, None if unknown.
        bounds: what was scanned, in pixels of level 0; None where that is all of it, or where the file does not say.
            QuPath shows this part alone, and counts pixels from its corner.
        nodata: the value of samples that hold no data; beside another value, NaN holds none either. None where all do,
            and where alpha says otherwise, or a mask of the file, whose samples are 0 then; `missing` tells in every
            case.
        channel_names: one of each channel, "" for one without; empty where none is known.
        fill: the value of every pixel outside the image (see `opening.open_image` for the rule).
        cache_bytes: the most that reading may keep in memory beside the pixels it returns.
        thread_bytes: what each thread that reads holds beside that, at most, while it decodes.
        decode_seconds: about what one thread takes to decode all of it; 0 where pixels are only copied.
    """

    def __init__(
        self,
        *,
        shape: tuple[int, int, int],
        dtype: np.dtype[Any] | torch.dtype,
        name: str,
        fill: int | float = 0,
        mpp: float | None = None,
        levels: tuple[Level, ...] | None = None,
        level: int = 0,
        georeference: Georeference | None = None,
        bounds: Box | None = None,
        nodata: int | float | None = None,
        channel_names: tuple[str, ...] = (),
        open_level: Callable[..., Image | None] | None = None,
        cache_bytes: int = 0,
        thread_bytes: int = 0,
        decode_seconds: float = 0.0,
    ) -> None:
        """Describe an image: `mpp` and `georeference` are of level 0, `level` is the chosen one;
        `open_level(level=...)` opens a file again, at any level."""
        if min(shape) < 1:
            raise ImageError(f"{name} has no pixels: its shape (C, H, W) is {shape}; every axis must be at least 1")
        self.shape: Final = shape
        self.dtype: Final = dtype
        self.name = name
        self.fill: Final = fill
        self.cache_bytes: Final = cache_bytes
        self.thread_bytes: Final = thread_bytes
        self.decode_seconds: Final = decode_seconds
        self.levels: Final = levels or (Level(shape[1:], 1.0),)
        self.mpp: Final = None if mpp is None else mpp * self.levels[level].downsample
        self.georeference: Final = georeference and georeference.resized(self.levels[0].shape, self.levels[level].shape)
        self.bounds: Final = bounds
        self.nodata: Final = nodata
        self.channel_names: Final = channel_names
        self._open_level, self._level = open_level, level

    @property
    def channels(self) -> int:
        return self.shape[0]

    @property
    def height(self) -> int:
        """Return the rows of the chosen level, in pixels."""
        return self.shape[1]

    @property
    def width(self) -> int:
        """Return the columns of the chosen level, in pixels."""
        return self.shape[2]

    @property
    def block_shape(self) -> tuple[int, int] | None:
        """Return the `(height, width)` of the blocks that are decoded as a whole, None without such."""
        return None

    @final
    def read(self, box: Box) -> Pixels:
        """Read the pixels of exactly `box`, shape `(C, box.height, box.width)`, with `fill` outside the image.

        The result is the caller's own (writing to it changes nothing else) and may be a transposed view, so do not
        assume it contiguous. Safe to call from several threads at once.

        Raises `ImageError` if the image is closed or the file turns out to be corrupt there.
        """
        self._require_open()
        inside = box.clamp(self.height, self.width)
        if inside == box and not box.empty:
            pixels = self._read_inside(box)
            assert pixels.shape == (self.channels, *box.shape), (pixels.shape, box)
            return pixels
        canvas = self._blank(*box.shape)
        if not inside.empty:
            at = inside.shift(-box.y0, -box.x0)
            # The two kinds of array assign to each other's views alike; their stubs do not know that.
            canvas[:, at.y0 : at.y1, at.x0 : at.x1] = self._read_inside(inside)  # type: ignore[assignment]
        return canvas

    def view(self, box: Box) -> Pixels:
        """Read pixels that are not to be written to: an image in memory gives its own. Otherwise as `read`."""
        return self.read(box)

    def read_squares(self, corners: Sequence[tuple[int, int]], side: int) -> Array:
        """Read squares of `side` px whose top left pixels are at `(x, y)`: `(n, C, side, side)`, as `read` reads them.

        Channels are last in memory. For images whose pixels are arrays.
        """
        assert isinstance(self.dtype, np.dtype)
        squares_NHWC = np.empty((len(corners), side, side, self.channels), self.dtype)
        for square, (x, y) in zip(squares_NHWC, corners, strict=True):
            square[...] = np.asarray(self.view(Box(y, x, y + side, x + side))).transpose(1, 2, 0)
        return squares_NHWC.transpose(0, 3, 1, 2)

    @property
    def lends_blocks(self) -> bool:
        """Return whether `block` decodes a block and keeps none, so that a caller's cache saves it work."""
        return self.block_shape is not None and not self.cache_bytes

    def block(self, row: int, column: int) -> Array:
        """Read a block, `(h, w, C)`, at least as large as the part of it that lies inside the image."""
        assert self.block_shape is not None
        height, width = self.block_shape
        box = Box.whole(height, width).shift(row * height, column * width).clamp(self.height, self.width)
        return np.asarray(self.read(box)).transpose(1, 2, 0)

    @abstractmethod
    def _read_inside(self, box: Box) -> Pixels:
        """Read fresh pixels `(C, box.height, box.width)` of a non-empty box that lies inside the image; thread-safe."""

    def _blank(self, height: int, width: int) -> Pixels:
        """Make `(C, height, width)` pixels of fill, channels last in memory as files have them."""
        assert isinstance(self.dtype, np.dtype)
        return np.full((height, width, self.channels), self.fill, self.dtype).transpose(2, 0, 1)

    @final
    def at_level(self, level: int) -> Image:
        """Open another level of the source, as a new image to close. Raises `ImageError` where there is none."""
        choose_level(self.levels, level, self.name)
        if self._open_level is None:
            raise ImageError(f"{self.name} has but one level; open its source with open_image(level=...)")
        return _opened(self._open_level, level)

    def halved(self, halvings: int) -> Image | None:
        """Open this level with both sides halved so often, odd ones rounded up, as its compression stores it, for a
        part of the time; None where it stores nothing smaller.

        Pixels lie where the means of squares of `2**halvings` px do, and are about those: to look at, not to compute
        with. Another image to close.
        """
        return None

    @final
    def grey(self) -> Image:
        """View this image in one channel: the luma of ITU-R BT.601 in this dtype, integers rounded; itself if it has
        one.

        For networks that grey their input anyway. JPEG tiles of a TIFF are decoded to the luma that they store, in half
        the time: within 2 of 255 that of their colours, except where these had to be cut to what RGB can show.
        Closing it leaves this image open. Raises `ImageError` if there are neither one nor three channels.
        """
        if self.channels not in (1, 3):
            raise ImageError(f"{self.name} has {self.channels} channels; grey is made of three: red, green and blue")
        return self if self.channels == 1 else GreyImage(self)

    @final
    def bands(self, chosen: Sequence[int | str]) -> Image:
        """View these channels in this order: numbers, counted from 1 as GDAL counts bands, or names in any case.

        Closing it leaves this image open. Raises `ImageError` for a channel that there is not, or not only once.
        """
        numbers = [band_number(self, band) for band in chosen]
        return self if numbers == list(range(1, self.channels + 1)) else BandsImage(self, numbers)

    @final
    def filled(self) -> Image:
        """View this image with 0 in the place of samples that hold no data, as networks want it; itself if all do.

        `missing` still tells them. Closing it leaves this image open.
        """
        return self if self.nodata is None else FilledImage(self)

    def missing(self, box: Box) -> NDArray[np.bool_] | None:
        """Tell where no channel holds data, `(box.height, box.width)`; None if that is nowhere in `box`.

        Holds `missing_bytes` at most beside it.
        """
        return None if self.nodata is None else self.missing_by(self.nodata, box)

    def missing_by(self, nodata: int | float, box: Box) -> NDArray[np.bool_] | None:
        """Tell where all channels hold `nodata`; None if that is nowhere in `box`."""
        empty = np.zeros(box.shape, bool)
        for cell, to, _ in grid_parts(box, _NODATA_BLOCK_PX, _NODATA_BLOCK_PX):
            pixels = np.asarray(self.read(box.intersect(cell)))
            empty[to.y0 : to.y1, to.x0 : to.x1] = is_nodata(pixels, nodata).all(axis=0)
        return empty if empty.any() else None

    @property
    def missing_bytes(self) -> int:
        """Return the bytes that `missing` holds while it looks."""
        return 0 if self.nodata is None else self.looking_bytes

    @property
    def looking_bytes(self) -> int:
        """Return the bytes of a block, and of what is known of its samples while `missing_by` finds it out."""
        assert isinstance(self.dtype, np.dtype), "tensors have data everywhere"
        return self.channels * _NODATA_BLOCK_PX**2 * (self.dtype.itemsize + 3)

    def _read_channels(self, box: Box, channels: Sequence[int]) -> Pixels:
        """Read fresh pixels of channels, counted from 0, of a non-empty box inside this image; thread-safe."""
        return self._read_inside(box)[list(channels)]

    @property
    def _grey_seconds(self) -> float:
        """Estimate the time that one thread takes to decode all of it in grey."""
        return self.decode_seconds

    def _read_grey(self, box: Box) -> Pixels:
        """Read fresh luma `(1, box.height, box.width)` of a non-empty box inside this RGB image; thread-safe."""
        colours = self._read_inside(box)
        grey = self._blank(*box.shape)[:1]
        for row in range(0, box.height, ROWS_AT_ONCE):
            rows = slice(row, row + ROWS_AT_ONCE)
            light: Any = sum(colours[channel, rows] * weight for channel, weight in enumerate(LUMA_BT601))
            grey[0, rows] = light if is_floating(self.dtype) else light.round()
        return grey

    def __reduce_ex__(self, protocol: SupportsIndex) -> Any:
        """Reopen the file in copies and pickles of its image; others are copied with their pixels."""
        if self._open_level is None:
            return super().__reduce_ex__(protocol)
        self._require_open()
        return _opened, (self._open_level, self._level)

    def __repr__(self) -> str:
        scale = "mpp unknown" if self.mpp is None else f"{self.mpp:g} um/px"
        if self.mpp is not None and self.mpp >= _UM_SHOWN_IN_METRES:
            scale = f"{self.mpp / 1e6:g} m/px"
        return f"<{type(self).__name__} {self.name}: {' x '.join(map(str, self.shape))} {self.dtype}, {scale}>"

    def _repr_html_(self) -> str:
        from gigagrad.images.thumbnails import image_html

        return image_html(self)


class View(Image):
    """A view of another image, but for what a subclass makes of its pixels. Closing it leaves `image` open."""

    def __init__(
        self,
        image: Image,
        shape: tuple[int, int, int] | None = None,
        levels: tuple[Level, ...] | None = None,
        **changed: Any,
    ) -> None:
        self._image = image
        kept: dict[str, Any] = {name: getattr(image, name) for name in _SEEN_BY_VIEWS}
        super().__init__(shape=shape or image.shape, levels=levels or image.levels, **kept | changed)

    @property
    def block_shape(self) -> tuple[int, int] | None:
        return self._image.block_shape

    def _blank(self, height: int, width: int) -> Pixels:
        if self.dtype != self._image.dtype:
            return super()._blank(height, width)
        return self._image._blank(height, width)[: self.channels]  # an array or a tensor, as the image gives


def _opened(open_level: Callable[..., Image | None], level: int) -> Image:
    image = open_level(level=level)
    assert image is not None, "a source that could be opened can be opened again"
    return image


class _AskingView(View):
    """A view that asks its image where there is no data, unless it has a value for that itself."""

    def missing(self, box: Box) -> NDArray[np.bool_] | None:
        return self._image.missing(box) if self.nodata is None else super().missing(box)

    @property
    def missing_bytes(self) -> int:
        return self._image.missing_bytes if self.nodata is None else super().missing_bytes


class BandsImage(_AskingView):
    """Some channels of an image. Use `Image.bands`."""

    def __init__(self, image: Image, numbers: Sequence[int]) -> None:
        self._channels = [number - 1 for number in numbers]
        names = tuple(image.channel_names[channel] for channel in self._channels) if image.channel_names else ()
        super().__init__(image, (len(numbers), *image.shape[1:]), channel_names=names)

    def _read_inside(self, box: Box) -> Pixels:
        self._image._require_open()
        return self._image._read_channels(box, self._channels)

    def _blank(self, height: int, width: int) -> Pixels:
        return self._image._blank(height, width)[self._channels]


class GreyImage(_AskingView):
    """The luma of an RGB image. Use `Image.grey`."""

    def __init__(self, image: Image) -> None:
        shape, seconds = (1, *image.shape[1:]), image._grey_seconds
        super().__init__(image, shape, nodata=None, channel_names=(), decode_seconds=seconds)

    def _read_inside(self, box: Box) -> Pixels:
        self._image._require_open()
        return self._image._read_grey(box)


class FilledImage(_AskingView):
    """An image with 0 where there is no data. Use `Image.filled`."""

    def __init__(self, image: Image) -> None:
        super().__init__(image, nodata=None)

    def _read_inside(self, box: Box) -> Pixels:
        nodata, pixels = self._image.nodata, np.asarray(self._image.read(box))
        assert nodata is not None
        for row in range(0, box.height, ROWS_AT_ONCE):
            rows = pixels[:, row : row + ROWS_AT_ONCE]
            rows[is_nodata(rows, nodata)] = 0
        return pixels


def band_number(image: Image, band: int | str) -> int:
    """Find the number, from 1, of a channel that is given by it or by name (488 may be one). Raises `ImageError`."""
    names = image.channel_names
    if isinstance(band, int) and 1 <= band <= image.channels:
        return band
    exact = [number for number, name in enumerate(names, 1) if name == str(band)]
    numbers = exact or [number for number, name in enumerate(names, 1) if name.casefold() == str(band).casefold()]
    if len(numbers) == 1:
        return numbers[0]
    if numbers:
        raise ImageError(f"{image.name} has {len(numbers)} bands {band}; choose one by its number: {numbers}")
    if isinstance(band, int):
        raise ImageError(f"{image.name} has no band {band}; choose from 1 to {image.channels}")
    named = list(filter(None, names))
    known = f"it has {', '.join(named[:20])} and the numbers" if named else "its bands have no names, but numbers from"
    raise ImageError(f"{image.name} has no band {band!r}{did_you_mean(band, named)}; {known} 1 to {image.channels}")
