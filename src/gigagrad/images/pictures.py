"""Read PNG and JPEG files through Pillow. They can only be decoded whole, so they are for small images."""

from __future__ import annotations

import io
import warnings
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from gigagrad.errors import ImageError
from gigagrad.images.georeference import choose_mpp, world_file
from gigagrad.images.pixels import Array, in_our_words
from gigagrad.images.stream_check import Jpeg, check_png, png_size
from gigagrad.images.views import ArrayImage
from gigagrad.units import format_bytes

if TYPE_CHECKING:
    import PIL.Image

_LARGEST_PICTURE_PX = 2**26  # 8192 x 8192: 192 MiB of RGB
_LARGEST_PICTURE_BYTES = 2**29  # as many pixels of 8 bytes
_PNG, _JPEG = b"\x89PNG\r\n\x1a\n", b"\xff\xd8\xff"
_PNG_BITS, _PNG_GREY = 24, 0
# Every block of 8 x 8 px has at least one bit.
_MOST_PX_PER_JPEG_BYTE = 8 * 64


def is_picture(head: bytes) -> bool:
    """Return whether a file that begins with `head` is a PNG or a JPEG."""
    return head.startswith((_PNG, _JPEG))


def open_picture(path: Path, *, mpp: float | None = None, ids: bool = False) -> ArrayImage:
    """Open a PNG or JPEG as an image: grey ones have 1 channel, all others 3 (transparency over white); of `ids` one
    with a palette has 1, its indices. `mpp` is over what a world file says.

    Raises `ImageError` for a damaged file, for one that ends before its pixels and for one of more than 67 Mpx.
    """
    if (size := path.stat().st_size) > _LARGEST_PICTURE_BYTES:
        raise _too_large(path, format_bytes(size), format_bytes(_LARGEST_PICTURE_BYTES))
    # Pillow raises errors of any class for damaged files, and its own size limit warns or
    # raises by the global settings of the process; ours comes first.
    with in_our_words(f"cannot read {path}"), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        data = path.read_bytes()
        pixels = _png(data, path, ids) if data.startswith(_PNG) else _jpeg(data, path)
        place = world_file(path)
        mpp = choose_mpp(mpp, path.name, georeference=place)
        return ArrayImage(pixels, mpp=mpp, name=path.stem, georeference=place)


def _png(data: bytes, path: Path, ids: bool) -> Array:
    _check_size(*png_size(data), path)
    check_png(data)
    if data[_PNG_BITS] == 16 and data[_PNG_BITS + 1] != _PNG_GREY:
        raise ImageError(f"{path} is a PNG of 16-bit colours, which would be cut to 8 bits; convert it to a TIFF")
    picture = _decoded(data)
    return np.array(picture)[None] if ids and picture.mode == "P" else _colours(picture)


def _jpeg(data: bytes, path: Path) -> Array:
    jpeg = Jpeg.parse(data)
    _check_size(jpeg.height, jpeg.width, path)
    if jpeg.height * jpeg.width > len(data) * _MOST_PX_PER_JPEG_BYTE:
        raise ValueError(
            f"it ends before its pixels: it says that it is {jpeg.height} x {jpeg.width} px, which {len(data)} bytes "
            "cannot hold"
        )
    picture = _decoded(data)
    jpeg.check_ends(_stored(picture), lambda other: _stored(_decoded(other)))
    return _colours(picture)


def _check_size(height: int, width: int, path: Path) -> None:
    if height * width > _LARGEST_PICTURE_PX:
        raise _too_large(path, f"{height} x {width} px", f"{_LARGEST_PICTURE_PX} px")


def _too_large(path: Path, got: str, most: str) -> ImageError:
    return ImageError(
        f"{path} is too large for a PNG or JPEG, which must be decoded whole ({got}); expected at most {most}; convert "
        "it to a tiled TIFF"
    )


def _decoded(data: bytes) -> PIL.Image.Image:
    import PIL.Image

    picture = PIL.Image.open(io.BytesIO(data), formats=("PNG", "JPEG"))
    picture.load()
    return picture


def _stored(picture: PIL.Image.Image) -> Array:
    """Return `(H, W, C)`, in the colours of the file."""
    pixels = np.asarray(picture)
    return pixels.reshape(*pixels.shape[:2], -1)


def _colours(picture: PIL.Image.Image) -> Array:
    """Return `(C, H, W)`, grey or RGB."""
    if picture.mode in ("1", "L", "I;16", "I", "F"):
        grey = picture.convert("L") if picture.mode == "1" else picture
        return np.array(grey)[None]
    if picture.has_transparency_data:
        import PIL.Image

        white = PIL.Image.new("RGBA", picture.size, "white")
        picture = PIL.Image.alpha_composite(white, picture.convert("RGBA"))
    return np.array(picture.convert("RGB")).transpose(2, 0, 1)
