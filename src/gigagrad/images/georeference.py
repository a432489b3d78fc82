"""Find how much a pixel shows, in micrometres, and where on earth it lies, as GeoTIFF has it.

The tags are those of OGC GeoTIFF 1.1 (19-008r4): affine transform and coordinate reference system. What they say of the
reference system is kept as it stands, to be written again; nothing is reprojected.

Micrometres per pixel are the caller's argument, else what the file says, else 10 / objective power (with a warning),
else unknown. Files without a real resolution often claim one all the same (1 dot per inch is 25 400 um/px), so only
values between 0.05 and 20 um/px, which covers every slide scanner and its overview levels, are taken from a file. A
georeference is no such claim: pixels of 30 cm or 30 m are what it is for.

The number is the width of a pixel. Where its height is another, that is told, since nothing is resampled to squares.
"""

from __future__ import annotations

import math
import re
import warnings
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, NamedTuple, Self

import numpy as np
from numpy.typing import NDArray

from gigagrad.errors import ImageError

if TYPE_CHECKING:
    from gigagrad.images.image import Image

PIXEL_SCALE, TIEPOINT, TRANSFORMATION = 33550, 33922, 34264
KEY_DIRECTORY, DOUBLE_PARAMS, ASCII_PARAMS = 34735, 34736, 34737
GDAL_NODATA: Final = 42113
TAGS: Final = (PIXEL_SCALE, TIEPOINT, TRANSFORMATION, KEY_DIRECTORY, DOUBLE_PARAMS, ASCII_PARAMS)

_MODEL_TYPE, _RASTER_TYPE, _GEODETIC_CRS, _PROJECTED_CRS, _LINEAR_UNITS = 1024, 1025, 2048, 3072, 3076
_PROJECTED, _PIXEL_IS_AREA, _PIXEL_IS_POINT = 1, 1, 2
_USER_DEFINED: Final = 32767
_METRES_PER_UNIT: Final = {9001: 1.0, 9002: 0.3048, 9003: 1200 / 3937}
"""The length of a unit by EPSG's code: the metre, the foot and the US survey foot."""
_WGS84: Final = 4326

_LONGEST_WORLD_FILE: Final = 4096

SMALLEST_MPP = 0.05
LARGEST_MPP = 20.0

_SQUARE = 1.02
"""The ratio of a pixel's sides up to which it is a square: scanners measure both, and differ by some thousandths."""
_NEAR = 1.5
"""The factor within which a level is near: of two a factor of two apart, one is at most the square root of two away."""

_UNITS_OF_UM = {
    1e-6: ("pm", "picometer"),
    1e-4: ("\u00e5", "angstrom"),
    1e-3: ("nm", "nanometer"),
    # With the micro sign, with the Greek letter, and with UTF-8 taken for Latin-1.
    1.0: ("um", "\u00b5m", "\u03bcm", "\u00e2\u00b5m", "micrometer", "micrometre", "micron", "microns"),
    25.4: ("thou",),
    1e3: ("mm", "millimeter"),
    1e4: ("cm", "centimeter"),
    25.4e3: ("in", "inch"),
    1e5: ("dm", "decimeter"),
    1e6: ("m", "meter"),
}
_UM_PER_UNIT = {unit: um for um, units in _UNITS_OF_UM.items() for unit in units}

Tags = dict[int, tuple[str, Any]]
"""Values by TIFF tag, each with its type as struct writes it."""
Affine = tuple[float, float, float, float, float, float]


@dataclass(frozen=True, slots=True)
class Georeference:
    """The place of each pixel: `x = a * column + b * row + c` and `y = d * column + e * row + f`.

    `transform` is `(a, b, c, d, e, f)`, in the order of rasterio; columns and rows are counted from the outer corner of
    the first pixel. `keys`, `doubles` and `text` are the GeoTIFF's description of the reference system, empty where it
    has none.
    """

    transform: Affine
    keys: tuple[int, ...] = ()
    doubles: tuple[float, ...] = ()
    text: bytes = b""

    @classmethod
    def of_tags(cls, tags: Mapping[int, Any]) -> Self | None:
        """Read the values of `TAGS`; None where they place no pixel, ground control points among them."""
        keys = _directory(tags.get(KEY_DIRECTORY))
        transform = _transform(*(_numbers(tags.get(tag)) for tag in (PIXEL_SCALE, TIEPOINT, TRANSFORMATION)))
        if transform is None:
            return None
        text = tags.get(ASCII_PARAMS, b"")
        text = text.encode("ascii", "replace") if isinstance(text, str) else bytes(text)
        place = cls(transform, keys, _numbers(tags.get(DOUBLE_PARAMS)), text)
        if place._key(_RASTER_TYPE) == _PIXEL_IS_POINT:
            entries = np.array(keys).reshape(-1, 4)
            entries[entries[:, 0] == _RASTER_TYPE, 3] = _PIXEL_IS_AREA
            place = replace(place.of_pixels((1, 0, -0.5, 0, 1, -0.5)), keys=tuple(entries.ravel().tolist()))
        return place

    def to_tags(self) -> Tags:
        """Return the tags that `of_tags` makes this of."""
        a, b, c, d, e, f = self.transform
        tags: Tags = {TRANSFORMATION: ("d", (a, b, 0, c, d, e, 0, f, *[0] * 7, 1))}
        if b == d == 0 and a > 0 > e:  # as most files and all readers have it
            tags = {PIXEL_SCALE: ("d", (a, -e, 0)), TIEPOINT: ("d", (0, 0, 0, c, f, 0))}
        described = {
            KEY_DIRECTORY: ("H", self.keys),
            DOUBLE_PARAMS: ("d", self.doubles),
            ASCII_PARAMS: ("s", self.text),
        }
        return tags | {tag: (kind, value) for tag, (kind, value) in described.items() if value}

    @property
    def epsg(self) -> int | None:
        """Return EPSG's code of the reference system, None where it has none."""
        code = self._key(_PROJECTED_CRS if self._key(_MODEL_TYPE) == _PROJECTED else _GEODETIC_CRS)
        return code if code is not None and 0 < code < _USER_DEFINED else None

    @property
    def crs_name(self) -> str | None:
        """Return the reference system as GeoJSON of 2008 names it, x before y; None where EPSG has no code for it."""
        if self.epsg == _WGS84:
            return "urn:ogc:def:crs:OGC:1.3:CRS84"
        return None if self.epsg is None else f"urn:ogc:def:crs:EPSG::{self.epsg}"

    @property
    def mpp(self) -> float | None:
        """Return how many micrometres a pixel is wide there; None for degrees and units that are not named."""
        if self._key(_MODEL_TYPE) != _PROJECTED:
            return None
        metres = _METRES_PER_UNIT.get(self._key(_LINEAR_UNITS) or 0)
        return None if metres is None else 1e6 * metres * math.hypot(self.transform[0], self.transform[3])

    def of_pixels(self, affine: Affine) -> Self:
        """Return the place of an image whose pixel at (column, row) lies at `affine` of them in this one."""
        combined = np.array((*self.transform, 0, 0, 1)).reshape(3, 3) @ np.array((*affine, 0, 0, 1)).reshape(3, 3)
        return replace(self, transform=tuple(combined.ravel().tolist()[:6]))

    def resized(self, shape: tuple[int, int], to: tuple[int, int]) -> Self:
        """Return the place of the same picture, `(height, width)` of `shape`, in another number of pixels."""
        return self if shape == to else self.of_pixels((shape[1] / to[1], 0, 0, 0, shape[0] / to[0], 0))

    def points(self, pixels_N2: NDArray[np.float64]) -> NDArray[np.float64]:
        """Convert `(column, row)` of each point to `(x, y)`."""
        a, b, c, d, e, f = self.transform
        column, row = pixels_N2.T
        return np.stack((a * column + b * row + c, d * column + e * row + f), axis=1)

    def pixels(self, points_N2: NDArray[np.float64]) -> NDArray[np.float64]:
        """Convert `(x, y)` of each point to `(column, row)`."""
        a, b, c, d, e, f = self.transform
        x, y = points_N2.T - np.array([[c], [f]])
        return np.stack((e * x - b * y, a * y - d * x), axis=1) / (a * e - b * d)

    def _key(self, number: int) -> int | None:
        """Find a key whose value stands in the directory itself."""
        entries = (self.keys[at : at + 4] for at in range(4, len(self.keys), 4))
        return next((value for key, place, _, value in entries if (key, place) == (number, 0)), None)


def geotiff_tags(place: Georeference | None, nodata: int | float | None) -> Tags:
    """Return the tags by which a TIFF tells GDAL and others its place, and which value means that there is no data."""
    tags: Tags = {} if nodata is None else {GDAL_NODATA: ("s", str(nodata).encode())}
    return tags if place is None else tags | place.to_tags()


def world_file(path: Path) -> Georeference | None:
    """Read the place of an image from the world file beside it, whose reference system nobody knows; None without one.

    `a.tif` has `a.tfw`, `a.tifw` or `a.wld`: six lines, of which the last two are the middle of the first pixel. Raises
    `ImageError` for a file that is none.
    """
    suffix = path.suffix.lower()
    for world in (f".{suffix[1]}{suffix[-1]}w", f"{suffix}w", ".wld") if suffix else ():
        beside = path.with_suffix(world.upper() if path.suffix.isupper() else world)
        try:
            with beside.open("rb") as file:
                lines = file.read(_LONGEST_WORLD_FILE).split()
            a, d, b, e, c, f = (float(line) for line in lines)
        except FileNotFoundError:
            continue
        except (OSError, ValueError) as error:
            raise ImageError(
                f"{beside} is no world file, which has six numbers in as many lines ({error}); mend it or move it away"
            ) from error
        if (transform := _invertible((a, b, c, d, e, f))) is None:
            raise ImageError(f"{beside} places no pixel: its numbers span no area; mend it or move it away")
        return Georeference(transform).of_pixels((1, 0, -0.5, 0, 1, -0.5))
    return None


def _numbers(value: Any) -> tuple[float, ...]:
    try:
        return tuple(map(float, np.ravel(value))) if value is not None else ()
    except (TypeError, ValueError):
        return ()


def _directory(value: Any) -> tuple[int, ...]:
    """Return the keys as they stand, none of a directory whose entries are not four numbers each."""
    numbers = [int(number) for number in _numbers(value)]
    entries = 1 + numbers[3] if len(numbers) >= 4 else 0
    return tuple(numbers) if numbers and len(numbers) == 4 * entries else ()


def _transform(scale: tuple[float, ...], tie: tuple[float, ...], matrix: tuple[float, ...]) -> Affine | None:
    affine: Affine
    if len(matrix) == 16:
        affine = (matrix[0], matrix[1], matrix[3], matrix[4], matrix[5], matrix[7])
    elif len(scale) >= 2 and len(tie) == 6:
        column, row, _, x, y, _ = tie
        affine = (scale[0], 0.0, x - column * scale[0], 0.0, -scale[1], y + row * scale[1])
    else:
        return None
    return _invertible(affine)


def _invertible(affine: Affine) -> Affine | None:
    flat = affine[0] * affine[4] == affine[1] * affine[3]
    return None if flat or not all(map(math.isfinite, affine)) else affine


class GuessedResolutionWarning(UserWarning):
    """The file names no micrometres per pixel; they were guessed from the objective's magnification."""


class NonSquarePixelsWarning(UserWarning):
    """The file's pixels are wider than high, or higher than wide, and are read as they are."""


class PixelSize(NamedTuple):
    """The sides of a pixel in micrometres, None where unknown."""

    width: float | None
    height: float | None = None


def plausible(mpp: float | None) -> bool:
    return mpp is not None and math.isfinite(mpp) and SMALLEST_MPP <= mpp <= LARGEST_MPP


def micrometres(value: float | None, unit: str) -> float | None:
    """Convert a length to micrometres; None for a missing value or a unit that is no length (`pixel`, say)."""
    unit = unit.strip()
    factor = None if unit == "Mm" else _UM_PER_UNIT.get(unit.lower())  # megametres, in OME-XML
    return None if value is None or factor is None else value * factor


def number(text: object) -> float | None:
    """Return the first number in a metadata field, None if there is none. A decimal comma counts as a point."""
    match = re.search(r"[-+]?\d+(?:[.,]\d*)?(?:[eE][-+]?\d+)?|[-+]?[.,]\d+", str(text))
    return float(match.group().replace(",", ".")) if match else None


def choose_mpp(
    given: float | None,
    name: str,
    claims: Iterable[PixelSize] = (),
    objective_power: float | None = None,
    *,
    georeference: Georeference | None = None,
) -> float | None:
    """Choose level 0's micrometres per pixel by the precedence above, None if nothing credible is known.

    `claims` are what the file says, the most trusted first; they do not count beside a `georeference`. Warns where
    the pixels of a claim are not square. Raises `ImageError` for an impossible `given`.
    """
    if georeference is not None and (given is None or 0 < given < math.inf):
        return georeference.mpp if given is None else given
    if given is not None:
        if not plausible(given):
            raise ImageError(
                f"{name}: got mpp {given:g}, expected micrometres per pixel from {SMALLEST_MPP:g} to {LARGEST_MPP:g}; "
                "typical slides have 0.25 (40x) or 0.5 (20x)"
            )
        return given
    for claim in claims:
        if plausible(claim.width):
            return _width(claim, name)
    guess = 10 / objective_power if objective_power else None
    if guess is None or not plausible(guess):
        return None
    warnings.warn(
        f"{name} names no micrometres per pixel; took 10 / its {objective_power:g}x objective = {guess:g} (say --mpp "
        "to be sure)",
        GuessedResolutionWarning,
        stacklevel=3,
    )
    return guess


def _width(size: PixelSize, name: str) -> float | None:
    """Return the width of pixels, and warn where they are not square."""
    width, height = size
    if width and height and not 1 / _SQUARE <= width / height <= _SQUARE:
        warnings.warn(
            f"{name}: pixels are {width:.4g} um wide and {height:.4g} um high; they are read as they are, and their "
            "width is taken for the resolution (resample the slide to squares, or say --mpp)",
            NonSquarePixelsWarning,
            stacklevel=4,
        )
    return width


def require_mpp(image: Image) -> float:
    """Return the image's micrometres per pixel. Raises `ImageError` naming `--mpp` where they are unknown."""
    if image.mpp is None:
        raise ImageError(
            f"{image.name} has no micrometres per pixel (mpp) in its metadata; give them with --mpp, or "
            "open_image(path, mpp=...)"
        )
    return image.mpp


def level_near(slide: Image, target_mpp: float) -> int:
    """Return the level whose micrometres per pixel come nearest to `target_mpp`, by ratio. `slide` is open at level 0.

    Raises `ImageError` where the slide's resolution is unknown, and where no level is within a factor of 1.5.
    """
    finest = require_mpp(slide)
    offered = [finest * level.downsample for level in slide.levels]
    level = min(range(len(offered)), key=lambda index: abs(math.log(offered[index] / target_mpp)))
    if not 1 / _NEAR <= offered[level] / target_mpp <= _NEAR:
        have = ", ".join(f"{mpp:.3g}" for mpp in offered)
        raise ImageError(
            f"{slide.name} has no level near {target_mpp:g} um/px; its levels have {have}; choose one with --level"
        )
    return level
