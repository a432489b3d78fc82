"""Define what every image is to the rest of the library: a shape, a dtype and `read(box)`.

A reader derives from `Image`, calls `Image.__init__` and implements `_read_inside`, which is only ever asked for
non-empty boxes inside the image. Everything a caller may rely on is enforced here, once: the exact box comes back
whatever part of it lies outside, the outside has the image's fill value, and the pixels belong to the caller.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import pairwise
from typing import TYPE_CHECKING, Any, Final, Self, SupportsIndex, TypeAlias, final

import numpy as np
from numpy.typing import NDArray

from gigagrad.boxes import Box
from gigagrad.errors import ImageError

if TYPE_CHECKING:
    import torch

    from gigagrad.images.georeference import Georeference

LUMA_BT601 = (0.299, 0.587, 0.114)
"""The weights of red, green and blue in grey: ITU-R BT.601, which JPEG's luma follows, too."""
_LUMA_ROWS = 64
"""Rows that are converted at a time, so that next to no floats are held beside the pixels."""
_LONGEST_AXIS = 2**31 - 1
_LONGEST_QUOTATION = 300
_MOST_CHANNELS = 2**16 - 1
_UM_SHOWN_IN_METRES = 1e4

Array: TypeAlias = np.ndarray[Any, np.dtype[Any]]
Pixels: TypeAlias = "Array | torch.Tensor"


@dataclass(frozen=True, slots=True)
class Level:
    """A resolution of an image: `shape` is `(height, width)` in pixels, `downsample` is relative to level 0."""

    shape: tuple[int, int]
    downsample: float


class Image(ABC):
    """Pixels that can be read box by box, from one level of a file or from memory.

    Attributes (constant after construction):
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
        self.name: Final = name
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
        self._closed = False

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

    def _require_open(self) -> None:
        if self._closed:
            raise ImageError(f"{self.name} is closed; open it again to read from it")

    @abstractmethod
    def _read_inside(self, box: Box) -> Pixels:
        """Read fresh pixels `(C, box.height, box.width)` of a non-empty box that lies inside the image; thread-safe."""

    def _blank(self, height: int, width: int) -> Pixels:
        """Make `(C, height, width)` pixels of fill, channels last in memory as files have them."""
        assert isinstance(self.dtype, np.dtype)
        return np.full((height, width, self.channels), self.fill, self.dtype).transpose(2, 0, 1)

    @final
    def at_level(self, level: int) -> Image:
        """Open another level of the same source, as a new image to close. Raises `ImageError` if there is no such
        level."""
        choose_level(self.levels, level, self.name)
        if self._open_level is None:
            raise ImageError(f"{self.name} has but one level; open its source with open_image(level=...)")
        return _opened(self._open_level, level)

    @final
    def grey(self) -> Image:
        """View this image in one channel: the luma of ITU-R BT.601 in this dtype, integers rounded; itself if it has
        one.

        For networks that grey their input anyway. JPEG tiles of a TIFF are decoded to the luma that they store, in half
        the time: within 2 of 255 that of their colours, except where these had to be cut to what RGB can show.
        Closing it leaves this image open. Raises `ImageError` if there are neither one nor three channels.
        """
        from gigagrad.images.views import GreyImage

        if self.channels not in (1, 3):
            raise ImageError(f"{self.name} has {self.channels} channels; grey is made of three: red, green and blue")
        return self if self.channels == 1 else GreyImage(self)

    @final
    def bands(self, chosen: Sequence[int | str]) -> Image:
        """View these channels in this order: numbers, counted from 1 as GDAL counts bands, or names in any case.

        Closing it leaves this image open. Raises `ImageError` for a channel that there is not, or not only once.
        """
        from gigagrad.images.views import BandsImage, band_number

        numbers = [band_number(self, band) for band in chosen]
        return self if numbers == list(range(1, self.channels + 1)) else BandsImage(self, numbers)

    @final
    def filled(self) -> Image:
        """View this image with 0 in the place of samples that hold no data, as networks want it; itself if all do.

        `missing` still tells them. Closing it leaves this image open.
        """
        from gigagrad.images.views import FilledImage

        return self if self.nodata is None else FilledImage(self)

    def missing(self, box: Box) -> NDArray[np.bool_] | None:
        """Tell where no channel holds data, `(box.height, box.width)`; None if that is nowhere in `box`.

        Holds `missing_bytes` at most beside it.
        """
        from gigagrad.images.nodata import missing_in

        return None if self.nodata is None else missing_in(self, self.nodata, box)

    @property
    def missing_bytes(self) -> int:
        """Return the bytes that `missing` holds while it looks."""
        from gigagrad.images.nodata import held_bytes

        return 0 if self.nodata is None else held_bytes(self)

    def _read_channels(self, box: Box, channels: Sequence[int]) -> Pixels:
        """Read fresh pixels of channels, counted from 0, of a non-empty box that lies inside this image;
        thread-safe."""
        return self._read_inside(box)[list(channels)]

    @property
    def _grey_seconds(self) -> float:
        """Estimate the time that one thread takes to decode all of it in grey."""
        return self.decode_seconds

    def _read_grey(self, box: Box) -> Pixels:
        """Read fresh luma `(1, box.height, box.width)` of a non-empty box that lies inside this RGB image;
        thread-safe."""
        colours = self._read_inside(box)
        grey = self._blank(*box.shape)[:1]
        for row in range(0, box.height, _LUMA_ROWS):
            rows = slice(row, row + _LUMA_ROWS)
            light: Any = sum(colours[channel, rows] * weight for channel, weight in enumerate(LUMA_BT601))
            grey[0, rows] = light if is_floating(self.dtype) else light.round()
        return grey

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
        from gigagrad.images.notebooks import image_html

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
        kept: dict[str, Any] = {
            "dtype": image.dtype,
            "name": image.name,
            "fill": image.fill,
            "mpp": image.mpp,
            "georeference": image.georeference,
            "bounds": image.bounds,
            "nodata": image.nodata,
            "channel_names": image.channel_names,
            "cache_bytes": image.cache_bytes,
            "thread_bytes": image.thread_bytes,
            "decode_seconds": image.decode_seconds,
        }
        super().__init__(shape=shape or image.shape, levels=levels or image.levels, **kept | changed)

    def _blank(self, height: int, width: int) -> Pixels:
        # An array or a tensor, whichever the image gives.
        return self._image._blank(height, width)


def _opened(open_level: Callable[..., Image | None], level: int) -> Image:
    image = open_level(level=level)
    assert image is not None, "a source that could be opened can be opened again"
    return image


def is_floating(dtype: np.dtype[Any] | torch.dtype) -> bool:
    """Return whether an image of this dtype holds floats."""
    return dtype.kind == "f" if isinstance(dtype, np.dtype) else dtype.is_floating_point


def as_slice(numbers: Sequence[int]) -> slice | list[int]:
    """Return numbers at equal distances as a slice, by which NumPy copies at once; others as they are."""
    step = numbers[1] - numbers[0] if len(numbers) > 1 else 1
    if not step or any(after - before != step for before, after in pairwise(numbers)):
        return list(numbers)
    stop = numbers[-1] + step
    return slice(numbers[0], stop if stop >= 0 else None, step)


def check_size(shape: Sequence[int], name: str) -> None:
    """Raise `ImageError` for a `(C, H, W)` that no file holds; what a file declares has not been paid for."""
    if min(shape) < 1 or shape[0] > _MOST_CHANNELS or max(shape) > _LONGEST_AXIS:
        raise ImageError(
            f"{name} declares {' x '.join(map(str, shape))} (C x H x W); expected 1 to {_MOST_CHANNELS} channels and "
            f"1 to {_LONGEST_AXIS} px along each axis; the file is corrupt"
        )


def fill_of(dtype: np.dtype[Any], channels: int, *, says_colour: bool = False) -> int:
    """Return what lies outside: white (the dtype's largest value) for a colour slide, 0 for a mask or anything else.

    A colour slide has unsigned integers and either three channels of uint8 or a file that calls itself colour.
    """
    colour = says_colour or (channels == 3 and dtype == np.uint8)
    return int(np.iinfo(dtype).max) if colour and dtype.kind == "u" else 0


@contextmanager
def in_our_words(problem: str, remedy: str = "the file is truncated or corrupt") -> Iterator[None]:
    """Raise what a library raises at a damaged file, whatever its class, as an `ImageError` of one line."""
    try:
        yield
    except ImageError:
        raise
    except Exception as error:
        said = " ".join(str(error).split())[:_LONGEST_QUOTATION] or type(error).__name__
        raise ImageError(f"{problem}: {said}; {remedy}") from error


def choose_level(levels: tuple[Level, ...], level: int, name: str) -> Level:
    """Return the level that a caller asked for. Raises `ImageError` with the list of levels there are."""
    if 0 <= level < len(levels):
        return levels[level]
    have = ", ".join(f"{index} ({entry.shape[0]} x {entry.shape[1]})" for index, entry in enumerate(levels))
    raise ImageError(f"{name} has no level {level}; choose one of: {have}")


def levels_of(shapes: list[tuple[int, int]]) -> tuple[Level, ...]:
    """Make levels from their `(height, width)`, level 0 first; downsample is the mean of both axes, as in OpenSlide."""
    height, width = shapes[0]
    return tuple(Level((h, w), (height / h + width / w) / 2) for h, w in shapes)
