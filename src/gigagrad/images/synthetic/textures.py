"""Draw small periodic pictures of tissue, from which slides of any size are painted.

Each is a square torus of hematoxylin and eosin amounts, 0..255, that repeats without a seam. The renderer bends them
by a smooth displacement and blends them, so that the repetition cannot be seen.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any, Final

import cv2
import numpy as np
from numpy.typing import NDArray

from gigagrad.images.pixels import Array

Plane = NDArray[np.float32]
Bytes = NDArray[np.uint8]

PERIOD: Final = 1024  # px
_REACH: Final = 64  # px; the largest thing drawn reaches less far beyond the border


@dataclass(frozen=True, slots=True)
class Textures:
    """Periodic textures of side `PERIOD`, at one resolution.

    Attributes:
        mpp: micrometres per pixel they were drawn for.
        stroma, epithelium, fat: `(PERIOD, PERIOD, 2)` uint8, amounts of hematoxylin and eosin.
        roughness: `(PERIOD, PERIOD)` float32 with mean 0 and standard deviation 1, for ragged outlines.
        grain: `(PERIOD, PERIOD, 3)` uint8, the camera's noise around `GRAIN_MEAN`.
    """

    mpp: float
    stroma: Bytes
    epithelium: Bytes
    fat: Bytes
    roughness: Plane
    grain: Bytes


GRAIN_MEAN: Final = 4


def make_textures(mpp: float = 0.5) -> Textures:
    """Draw all textures; about half a second. The same for every slide, whose own seed bends and mixes them."""
    rng = np.random.default_rng(20230710)
    grain = GRAIN_MEAN + 0.9 * _noise(rng, 0.7)[..., None] + 0.6 * np.stack([_noise(rng, 1.5) for _ in range(3)], -1)
    return Textures(
        mpp=mpp,
        stroma=_stroma(rng, mpp),
        epithelium=_epithelium(rng, mpp),
        fat=_fat(rng, mpp),
        roughness=_noise(rng, 6 / mpp / 2) * np.float32(0.8) + _noise(rng, 2.0 / mpp) * np.float32(0.6),
        grain=as_bytes(grain),
    )


def _stroma(rng: np.random.Generator, mpp: float) -> Bytes:
    """Draw wavy collagen bundles with slits between them and thin spindle nuclei along them."""
    um = 1 / mpp  # px per micrometre
    bend = _noise(rng, 25 * um) * np.float32(9 * um)
    bundles = _shift_rows(_noise(rng, 1.6 * um, stretch=9), bend)
    fibrils = _shift_rows(_noise(rng, 0.6 * um, stretch=12), bend)
    slits = np.clip((-bundles - 1.25) * 2.2, 0, 1)
    eosin = (118 + 26 * bundles + 13 * fibrils + 10 * _noise(rng, 12 * um)) * (1 - 0.85 * slits)
    angle = np.degrees(np.arctan(np.gradient(bend, axis=1)))
    nuclei = _draw(
        (x, y, rng.uniform(4, 8) * um, rng.uniform(1.0, 1.9) * um, angle[int(y), int(x)] + rng.normal(0, 12),
         rng.integers(120, 205))
        for x, y in _scatter(rng, 19 * um)
    )  # fmt: skip
    hematoxylin = np.maximum(16 + 5 * bundles, nuclei * (1 + 0.10 * _noise(rng, 0.6 * um)))
    return _pair(hematoxylin, np.where(nuclei > 60, 0.6 * eosin + 20, eosin))


def _epithelium(rng: np.random.Generator, mpp: float) -> Bytes:
    """Draw packed cells with round, speckled nuclei, paler seams between the cells and a few lumens."""
    um = 1 / mpp
    centres = _scatter(rng, 10.5 * um)
    nuclei = _draw(
        (x, y, rng.uniform(3.0, 4.9) * um, rng.uniform(2.2, 3.5) * um, rng.uniform(0, 180), rng.integers(95, 185))
        for x, y in centres
    )
    first, second = _two_nearest(10.5 * um, centres)
    seams = np.exp(-(((second - first) / (1.1 * um)) ** 2))
    lumens = _draw(
        (x, y, rng.uniform(4, 13) * um, rng.uniform(3, 8) * um, rng.uniform(0, 180), 255)
        for x, y in _scatter(rng, 110 * um)
    )
    tissue = 1 - np.clip(_blur(lumens, 1.5 * um) / 200, 0, 1)
    rim = np.clip(nuclei - _blur(nuclei, 1.2 * um), 0, 60)
    speckle = _noise(rng, 0.55 * um)
    hematoxylin = np.where(nuclei > 40, nuclei * (0.88 + 0.10 * speckle) + 0.7 * rim, 42 + 7 * _noise(rng, 3 * um))
    eosin = (96 + 12 * _noise(rng, 1.2 * um) + 12 * _noise(rng, 15 * um)) * (1 - 0.42 * seams)
    return _pair(_blur(hematoxylin, 0.35 * um) * tissue, np.where(nuclei > 40, 62, eosin) * tissue)


def _fat(rng: np.random.Generator, mpp: float) -> Bytes:
    """Draw empty vacuoles of fat cells in a net of thin membranes, with a flat nucleus here and there."""
    um = 1 / mpp
    pitch = 46 * um
    centres = _scatter(rng, pitch)
    first, second = _two_nearest(pitch, centres)
    wall = second - first + 1.6 * um * _noise(rng, 5 * um)
    membrane = np.exp(-((np.maximum(wall, 0) / (3.2 * um)) ** 2))
    knots = np.clip((30 * um - second + first) / (30 * um), 0, 1) * np.clip(_noise(rng, 30 * um) - 1, 0, 1)
    nuclei = _draw(
        (x + rng.normal(0, 2) * um, y + pitch / 2, rng.uniform(2.5, 4) * um, rng.uniform(1, 1.8) * um,
         rng.uniform(0, 180), 170)
        for x, y in centres[::3]
    )  # fmt: skip
    return _pair(np.maximum(18 * membrane, nuclei * (membrane > 0.35)), 122 * membrane + 60 * knots)


def _noise(rng: np.random.Generator, sigma_px: float, stretch: float = 1.0) -> Plane:
    """Draw periodic Gaussian noise, mean 0, standard deviation 1; features are `stretch` times longer along x."""
    frequency_y = np.fft.fftfreq(PERIOD)[:, None]
    frequency_x = np.fft.rfftfreq(PERIOD)[None] * stretch
    response = np.exp(-2 * (np.pi * sigma_px) ** 2 * (frequency_y**2 + frequency_x**2))
    response[0, 0] = 0
    white = rng.standard_normal((PERIOD, PERIOD), np.float32)
    noise = np.fft.irfft2(np.fft.rfft2(white) * response, s=(PERIOD, PERIOD))
    return np.asarray(noise / noise.std(), np.float32)


def _blur(plane: Array, sigma_px: float) -> Plane:
    wrapped = np.pad(np.asarray(plane, np.float32), _REACH, mode="wrap")
    return np.asarray(cv2.GaussianBlur(wrapped, (0, 0), sigma_px)[_REACH:-_REACH, _REACH:-_REACH], np.float32)


def _shift_rows(plane: Plane, rows_px: Plane) -> Plane:
    """Shift `plane`: every pixel is fetched from `rows_px` rows below, around the torus."""
    y, x = np.mgrid[0:PERIOD, 0:PERIOD].astype(np.float32)
    source = np.pad(plane, ((0, 1), (0, 0)), mode="wrap")
    moved = cv2.remap(source, x, np.mod(y + rows_px, PERIOD).astype(np.float32), cv2.INTER_LINEAR)
    return np.asarray(moved, np.float32)


def _scatter(rng: np.random.Generator, pitch_px: float) -> Array:
    """Scatter points `(n, 2)` as x, y: one in each cell of a square grid of about this pitch, well off its centre."""
    count = max(1, round(PERIOD / pitch_px))
    y, x = np.mgrid[0:count, 0:count]
    corner = np.stack([x, y], axis=-1).reshape(-1, 2)
    return (corner + rng.uniform(0.08, 0.92, corner.shape)) * (PERIOD / count)


def _draw(ellipses: Iterable[tuple[Any, ...]]) -> Plane:
    """Draw smooth ellipses `(x, y, half length, half width, degrees, value)` on a torus, the largest wins."""
    side = PERIOD + 2 * _REACH
    canvas = np.zeros((side, side), np.uint8)
    for x, y, length, width, degrees, value in ellipses:
        centre = (round((x + _REACH) * 16), round((y + _REACH) * 16))
        axes = (round(length * 16), round(width * 16))
        cv2.ellipse(canvas, centre, axes, float(degrees), 0, 360, int(value), cv2.FILLED, cv2.LINE_AA, 4)
    for _ in range(2):  # fold what reaches beyond the border back in, first along y, then along x
        canvas[_REACH : 2 * _REACH] = np.maximum(canvas[_REACH : 2 * _REACH], canvas[-_REACH:])
        canvas[-2 * _REACH : -_REACH] = np.maximum(canvas[-2 * _REACH : -_REACH], canvas[:_REACH])
        canvas = canvas[_REACH:-_REACH].T
    return canvas.astype(np.float32)


def _two_nearest(pitch_px: float, centres: Array) -> tuple[Plane, Plane]:
    """Measure the distances in px from every pixel to the nearest and the second nearest of `_scatter`ed centres."""
    count = max(1, round(PERIOD / pitch_px))
    pitch = PERIOD / count
    grid = centres.reshape(count, count, 2).astype(np.float32)
    y, x = np.mgrid[0:PERIOD, 0:PERIOD].astype(np.float32)
    row, column = (y / pitch).astype(int), (x / pitch).astype(int)
    first = np.full((PERIOD, PERIOD), np.inf, np.float32)
    second = first.copy()
    for dy in (-1, 0, 1):
        for dx in (-1, 0, 1):
            near = grid[(row + dy) % count, (column + dx) % count]
            aside = np.abs(near[..., 0] - x), np.abs(near[..., 1] - y)
            distance = np.hypot(*(np.minimum(a, PERIOD - a) for a in aside))
            second = np.minimum(second, np.maximum(first, distance))
            first = np.minimum(first, distance)
    return first, second


def as_bytes(values: Array) -> Bytes:
    """Round to at most what a byte holds."""
    return np.clip(np.rint(values), 0, 255).astype(np.uint8)


def _pair(hematoxylin: Array, eosin: Array) -> Bytes:
    return as_bytes(np.stack([hematoxylin, eosin], axis=-1))
