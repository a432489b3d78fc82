"""Which micrometres per pixel are believed."""

from __future__ import annotations

import warnings

import pytest

from gigagrad.errors import ImageError
from gigagrad.images.georeference import GuessedResolutionWarning, choose_mpp, micrometres, number


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
        assert choose_mpp(given, "slide", claims, power) == expected


def test_a_guess_warns() -> None:
    with pytest.warns(GuessedResolutionWarning, match=r"slide names no micrometres per pixel.*20x objective = 0\.5"):
        assert choose_mpp(None, "slide", [1000.0], 20.0) == 0.5


@pytest.mark.parametrize("given", [0.0, -1.0, 25400.0, float("nan")])
def test_an_impossible_argument_is_refused(given: float) -> None:
    with pytest.raises(ImageError, match=r"expected micrometres per pixel from 0\.05 to 20"):
        choose_mpp(given, "slide", [0.5])


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
