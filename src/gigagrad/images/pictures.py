"""PNG and JPEG files through Pillow. They can only be decoded whole, so they are for small images."""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from gigagrad.errors import ImageError
from gigagrad.images.arrays import ArrayImage
from gigagrad.images.image import Array

if TYPE_CHECKING:
    import PIL.Image

_LARGEST_PICTURE_PX = 2**26  # 8192 x 8192: 192 MiB of RGB
_SIGNATURES = (b"\x89PNG\r\n\x1a\n", b"\xff\xd8\xff")


def is_picture(head: bytes) -> bool:
    """Whether a file that begins with `head` is a PNG or a JPEG."""
    return head.startswith(_SIGNATURES)


def open_picture(path: Path, *, mpp: float | None = None) -> ArrayImage:
    """A PNG or JPEG as an image: grey ones have 1 channel, all others 3 (transparency over white).

    Raises `ImageError` for a damaged file and for one of more than 67 Mpx.
    """
    import PIL.Image

    with warnings.catch_warnings():
        # Pillow's own size limit warns or raises by the global settings of the process; ours comes first.
        warnings.simplefilter("ignore", PIL.Image.DecompressionBombWarning)
        try:
            with PIL.Image.open(path, formats=("PNG", "JPEG")) as picture:
                if picture.width * picture.height > _LARGEST_PICTURE_PX:
                    raise PIL.Image.DecompressionBombError(f"{picture.height} x {picture.width} px")
                return ArrayImage(_pixels(picture), mpp=mpp, name=path.stem)
        except PIL.Image.DecompressionBombError as error:
            raise ImageError(
                f"{path} is too large for a PNG or JPEG, which must be decoded whole ({error}); expected at most "
                f"{_LARGEST_PICTURE_PX} px; convert it to a tiled TIFF"
            ) from error
        # Pillow's plugins raise OSError, SyntaxError, ValueError and more for damaged files.
        except Exception as error:
            raise ImageError(f"cannot read {path}: {error}; the file is truncated or corrupt") from error


def _pixels(picture: PIL.Image.Image) -> Array:
    """`(C, H, W)`, decoded now."""
    if picture.mode in ("1", "L", "I;16", "I", "F"):
        grey = picture.convert("L") if picture.mode == "1" else picture
        return np.array(grey)[None]
    if picture.has_transparency_data:
        import PIL.Image

        white = PIL.Image.new("RGBA", picture.size, "white")
        picture = PIL.Image.alpha_composite(white, picture.convert("RGBA"))
    return np.array(picture.convert("RGB")).transpose(2, 0, 1)
