"""Find micrometres per pixel: where they come from and which of them to believe.

Precedence: the caller's argument, then what the file says, then 10 / objective power (with a warning), then unknown.
Files without a real resolution often claim one all the same (1 dot per inch is 25 400 um/px), so only values between
0.05 and 20 um/px, which covers every slide scanner and its overview levels, are taken from a file. A georeference is
no such claim: pixels of 30 cm or 30 m are what it is for.
"""

from __future__ import annotations

import math
import re
import warnings
from collections.abc import Iterable

from gigagrad.errors import ImageError
from gigagrad.images.georeference import Georeference
from gigagrad.images.image import Image

SMALLEST_MPP = 0.05
LARGEST_MPP = 20.0

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


class GuessedResolutionWarning(UserWarning):
    """The file names no micrometres per pixel; they were guessed from the objective's magnification."""


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
    claims: Iterable[float | None] = (),
    objective_power: float | None = None,
    *,
    georeference: Georeference | None = None,
) -> float | None:
    """Choose level 0's micrometres per pixel by the precedence above, None if nothing credible is known.

    `claims` are what the file says, the most trusted first; they do not count beside a `georeference`. Raises
    `ImageError` for an impossible `given`.
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
        if plausible(claim):
            return claim
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


def require_mpp(image: Image) -> float:
    """Return the image's micrometres per pixel. Raises `ImageError` naming `--mpp` where they are unknown."""
    if image.mpp is None:
        raise ImageError(f"{image.name} has no micrometres per pixel (mpp) in its metadata; give them with --mpp")
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
