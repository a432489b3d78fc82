"""Show an image in a notebook: what it is, and a small picture where that costs little."""

from __future__ import annotations

import base64
import html
import io

import numpy as np

from gigagrad.errors import ImageError
from gigagrad.images.image import Image
from gigagrad.images.thumbnails import thumbnail

_SIDE_PX = 320
_MOST_PIXELS = 2**24
"""The most pixels of the level that a picture is made from; a larger one would be read for seconds."""


def image_html(image: Image) -> str:
    """Return the image's text, under it a thumbnail; only the text where the image is closed or unreadable, or no level
    of it is small enough."""
    text = f"<div><code>{html.escape(repr(image))}</code></div>"
    smallest = min((height * width for height, width in (level.shape for level in image.levels)), default=0)
    if min(smallest, image.height * image.width) > _MOST_PIXELS:
        return text
    try:
        data = base64.b64encode(_png(thumbnail(image, _SIDE_PX))).decode()
    except ImageError:
        return text
    return f'{text}<img alt="{html.escape(image.name)}" src="data:image/png;base64,{data}">'


def _png(pixels_HWC: np.ndarray[tuple[int, ...], np.dtype[np.uint8]]) -> bytes:
    """Encode colours of the first three channels, else grey of the first; a mask of few values is stretched to be
    seen."""
    from PIL import Image as Pictures

    shown = pixels_HWC[..., :3] if pixels_HWC.shape[2] >= 3 else pixels_HWC[..., 0]
    if shown.ndim == 2 and 0 < int(shown.max()) < 32:
        shown = (shown.astype(np.uint16) * 255 // int(shown.max())).astype(np.uint8)
    out = io.BytesIO()
    Pictures.fromarray(np.ascontiguousarray(shown)).save(out, "PNG")
    return out.getvalue()
