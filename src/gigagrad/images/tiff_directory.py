"""What a TIFF's directory says about the slide: can we read this layout, is it colour, how large is a pixel."""

from __future__ import annotations

import re
from typing import Any

from gigagrad.errors import ImageError
from gigagrad.images.resolution import choose_mpp, micrometres, number
from gigagrad.images.stream_check import JPEG_2000_COMPRESSIONS, JPEG_COMPRESSIONS

_APERIO_YCBCR = 33003  # JPEG 2000 whose colour transform is left to the reader
_MINISBLACK, _RGB, _YCBCR = 1, 2, 6
_INCH, _CENTIMETRE = 2, 3

# Scans whose tiles overlap, are missing or do not form one plain grid; their vendors' rules are OpenSlide's knowledge.
_VENDORS_FOR_OPENSLIDE = ("is_ndpi", "is_bif", "is_scn", "is_philips")
_TRESTLE_SOFTWARE = "MedScan"

# Stacks of microscopes in layouts of their own. Their readers walk tables of the file (and other files) that nobody has
# checked, and what they hold is rarely one plane.
_STACKS = (
    *("is_lsm", "is_mmstack", "is_ndtiff", "is_fluoview", "is_stk", "is_sis", "is_scanimage", "is_nih", "is_mdgel"),
    *("is_avs", "is_eer"),
)

# An allow list, since one changed byte of a JPEG XR tile is a division by zero that ends the process: codecs that are
# tested against hostile streams year in, year out, that write no more than the tile's size or tell before they decode
# how large a picture they hold (`stream_check.check_stream`), and that notice an early end (CCITT does not).
_CODECS = frozenset(
    {
        *JPEG_COMPRESSIONS,
        *JPEG_2000_COMPRESSIONS,
        *(1, 5, 8, 32773, 32946),  # none, LZW, deflate, PackBits, deflate
        *(34925, 34926, 50000),  # LZMA, Zstandard
        *(34927, 50001),  # WebP
        34933,  # PNG
    }
)

# What may stand before the axes Y and X: channels, samples, or the unnamed first axis of a (C, H, W) array.
_CHANNEL_AXES = ("", "C", "S", "Q")


def better_by_openslide(tif: Any) -> bool:
    """Whether this tifffile.TiffFile is of a kind whose pixels only OpenSlide puts together rightly."""
    page = tif.pages[0]
    return (
        any(getattr(tif, vendor) for vendor in _VENDORS_FOR_OPENSLIDE)
        or str(page.software).startswith(_TRESTLE_SOFTWARE)
        or int(page.compression) == _APERIO_YCBCR
        or (int(page.photometric) == _YCBCR and int(page.compression) in JPEG_2000_COMPRESSIONS)
    )


def check_kind(tif: Any, name: str) -> None:
    """Raises `ImageError` for the stacks of microscopes, before their tables are read."""
    if kinds := [flag.removeprefix("is_") for flag in _STACKS if getattr(tif, flag)]:
        raise ImageError(
            f"{name} is a microscope's stack ({kinds[0].upper()}), not one image; extract the plane you mean into a "
            "TIFF of its own"
        )


def check_layout(series: Any, name: str) -> None:
    """Raises `ImageError` unless the tifffile series is a 2-D image of channels that can be decoded."""
    if not series.shape or 0 in series.shape:
        raise ImageError(f"{name} describes no image in its directory; the file is truncated or corrupt")
    axes = str(series.axes)
    if axes.removesuffix("S").removesuffix("YX") not in _CHANNEL_AXES or "YX" not in axes:
        raise ImageError(
            f"{name} holds an array with axes {axes} of shape {series.shape}; expected one 2-D image with channels "
            "(axes YX, YXS, CYX); extract the plane you mean into its own file"
        )
    page = series.keyframe
    if page.dtype is None or page.dtype.kind not in "buif":
        raise ImageError(f"{name} has {page.bitspersample}-bit pixels; expected integers or floats")
    colours = (_MINISBLACK, _RGB, _YCBCR) if int(page.compression) in JPEG_COMPRESSIONS else (_MINISBLACK, _RGB)
    if int(page.photometric) not in colours:
        raise ImageError(
            f"{name} stores its colours as {getattr(page.photometric, 'name', page.photometric)}; expected RGB or "
            "MINISBLACK (or YCBCR as JPEG); convert it to RGB"
        )
    if int(page.compression) not in _CODECS:
        label = getattr(page.compression, "name", int(page.compression))
        raise ImageError(
            f"{name} is compressed as {label}, which cannot be decoded here, as it is not safe against damaged files; "
            "convert it to a tiled TIFF with JPEG or deflate"
        )
    import tifffile

    try:
        tifffile.TIFF.DECOMPRESSORS[int(page.compression)]
    # The look-up imports the codec, and imagecodecs has an error of its own for one that it was built without.
    except Exception as error:
        raise ImageError(
            f"{name} is compressed as {page.compression.name}, which this installation of imagecodecs cannot decode "
            f"({error}); convert it to a tiled TIFF with JPEG or deflate"
        ) from error


def is_colour(page: Any) -> bool:
    return int(page.photometric) in (_RGB, _YCBCR)


def base_mpp(tif: Any, page: Any, given: float | None, name: str) -> float | None:
    """Level 0's micrometres per pixel, from OME-XML, an Aperio description or the resolution tags."""
    # The resolution is asked for before the guess, so an Aperio file's objective counts only where nothing else does.
    description = str(page.description or "")
    claims = [_aperio(description, "MPP"), _ome(tif.ome_metadata), _resolution_tags(page)]
    return choose_mpp(given, name, claims, _aperio(description, "AppMag"))


def _aperio(description: str, key: str) -> float | None:
    match = re.search(rf"\|\s*{key}\s*=\s*([^|]+)", description)
    return number(match.group(1)) if match else None


def _ome(xml: str | None) -> float | None:
    pixels = re.search(r"<(?:\w+:)?Pixels\b[^>]*>", xml or "")
    if pixels is None:
        return None
    attributes = dict(re.findall(r'(\w+)\s*=\s*"([^"]*)"', pixels.group()))
    size = number(attributes.get("PhysicalSizeX", ""))
    return micrometres(size, attributes.get("PhysicalSizeXUnit", "um"))


def _resolution_tags(page: Any) -> float | None:
    tag = page.tags.get("XResolution")
    unit = {_INCH: 25_400.0, _CENTIMETRE: 10_000.0}.get(int(page.resolutionunit))
    if tag is None or unit is None:
        return None
    numerator, denominator = tag.value
    return unit * denominator / numerator if numerator else None
