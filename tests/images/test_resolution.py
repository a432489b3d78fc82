"""Which micrometres per pixel are believed."""

from __future__ import annotations

import json
import re
import warnings
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tifffile

from gigagrad.errors import ImageError
from gigagrad.images import open_image, write_pyramid
from gigagrad.images.georeference import (
    GuessedResolutionWarning,
    NonSquarePixelsWarning,
    PixelSize,
    choose_mpp,
    micrometres,
    number,
)
from gigagrad.images.openslide import open_openslide

_PIXELS = np.zeros((32, 48, 3), np.uint8)


@pytest.mark.parametrize(
    ("given", "claims", "power", "expected"),
    [
        (0.3, [0.5], 20.0, 0.3),
        (None, [0.5, 0.6], 20.0, 0.5),
        (None, [None, 0.6], 20.0, 0.6),
        (None, [1000.0, 0.6], 20.0, 0.6),
        (None, [0.0499, 20.1, float("nan"), float("inf"), -0.5, 0.0], None, None),
        (None, [0.05], None, 0.05),
        (None, [20.0], None, 20.0),
        (None, [], None, None),
        (None, [], 0.0, None),
        (None, [], 400.0, None),
    ],
)
def test_precedence_and_range(given: float, claims: list[float], power: float | None, expected: float | None) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert choose_mpp(given, "slide", map(PixelSize, claims), power) == expected


def test_a_guess_warns() -> None:
    with pytest.warns(GuessedResolutionWarning, match=r"slide names no micrometres per pixel.*20x objective = 0\.5"):
        assert choose_mpp(None, "slide", [PixelSize(1000.0)], 20.0) == 0.5


def _tiff(folder: Path, across: float, down: float) -> Path:
    options: dict[str, Any] = {"resolution": (1e4 / across, 1e4 / down), "resolutionunit": "CENTIMETER"}
    tifffile.imwrite(folder / "a.tif", _PIXELS, tile=(16, 16), photometric="rgb", **options)
    return folder / "a.tif"


def _ome(folder: Path, across: float, down: float) -> Path:
    sizes = {"PhysicalSizeX": across * 1e3, "PhysicalSizeXUnit": "nm", "PhysicalSizeY": down}
    tifffile.imwrite(folder / "a.ome.tif", _PIXELS, photometric="rgb", metadata={"axes": "YXS", **sizes})
    return folder / "a.ome.tif"


def _zarr(folder: Path, across: float, down: float) -> Path:
    path = write_pyramid(folder / "a.zarr", [_PIXELS], shape=_PIXELS.shape, dtype=np.uint8, nearest=True, mpp=across)
    described = path / ".zattrs"
    attributes = json.loads(described.read_text())
    attributes["multiscales"][0]["datasets"][0]["coordinateTransformations"][0]["scale"][-2] = down
    described.write_text(json.dumps(attributes))
    return path


@pytest.mark.parametrize(
    ("write", "read"),
    [*((write, open_image) for write in (_tiff, _ome, _zarr)), (_tiff, open_openslide)],
)
@pytest.mark.parametrize(("down", "told"), [(0.25, True), (0.52, True), (0.505, False), (0.5, False)])
def test_pixels_that_are_no_squares_are_told(write: Any, read: Any, down: float, told: bool, tmp_path: Path) -> None:
    """Their height counted for nothing, and nothing said so."""
    path = write(tmp_path, 0.5, down)
    with warnings.catch_warnings(record=True) as heard:
        warnings.simplefilter("always")
        with read(path) as image, read(path, mpp=0.3) as given:
            assert (image.mpp, given.mpp) == (pytest.approx(0.5), 0.3)
    text = rf"a[.a-z]*: pixels are 0\.5 um wide and {down:g} um high"
    assert [bool(re.match(text, str(warning.message))) for warning in heard] == [True] * told
    assert all(warning.category is NonSquarePixelsWarning for warning in heard)


@pytest.mark.parametrize("given", [0.0, -1.0, 25400.0, float("nan")])
def test_an_impossible_argument_is_refused(given: float) -> None:
    with pytest.raises(ImageError, match=r"expected micrometres per pixel from 0\.05 to 20"):
        choose_mpp(given, "slide", [PixelSize(0.5)])


@pytest.mark.parametrize(
    ("text", "value"),
    [("0.4990", 0.499), (" 20x", 20), ("0,25", 0.25), ("5e-1 um", 0.5), (".5", 0.5), ("", None), ("x", None)],
)
def test_numbers_in_metadata(text: str, value: float | None) -> None:
    assert number(text) == value


@pytest.mark.parametrize(
    ("unit", "value"), [("um", 2), ("\u00b5m", 2), ("\u03bcm", 2), ("NM", 0.002), ("mm", 2000), ("pixel", None)]
)
def test_units(unit: str, value: float | None) -> None:
    found = micrometres(2, unit)
    assert found == (value if value is None else pytest.approx(value))
