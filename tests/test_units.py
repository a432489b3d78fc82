"""Amounts as people write and read them."""

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from gigagrad.units import (
    format_bytes,
    format_pixels,
    format_seconds,
    parse_bytes,
    parse_seconds,
    parse_size,
    printable_bytes,
)


@pytest.mark.parametrize(
    ("text", "count"),
    [
        ("2 GiB", 2**31),
        ("2GiB", 2**31),
        ("1.5g", 3 * 2**29),
        ("800MB", 800 * 10**6),
        ("512 mib", 2**29),
        (".5 kb", 500),
        (" 7 ", 7),
        ("12b", 12),
        ("1 TiB", 2**40),
        (4096, 4096),
    ],
)
def test_parse_bytes(text, count):
    assert parse_bytes(text) == count


@pytest.mark.parametrize("text", ["", "GiB", "2 GiX", "-1 GiB", "0", "0.0 GB", "1e9", "two", 0, -5, 2.5, None])
def test_what_is_no_amount(text):
    with pytest.raises(ValueError, match=r"memory|bytes"):
        parse_bytes(text)


@given(st.integers(1, 2**44))
def test_printed_bytes_are_read_back_within_their_digits(count):
    assert abs(parse_bytes(format_bytes(count)) - count) <= 0.006 * count


@given(st.integers(1, 2**50))
@example(1_041_265_245)
def test_printable_bytes_lose_nothing_when_they_are_printed(count):
    found = printable_bytes(count)
    assert count <= found == parse_bytes(format_bytes(found)) <= 1.0105 * count + 1


@pytest.mark.parametrize(
    ("count", "text"),
    [
        (0, "0 B"),
        (1023, "1023 B"),
        (1024, "1 KiB"),
        (1536, "1.5 KiB"),
        (2**30 * 5 // 4, "1.25 GiB"),
        (2**51, "2048 TiB"),
        (2**40, "1 TiB"),
    ],
)
def test_format_bytes(count, text):
    assert format_bytes(count) == text


@pytest.mark.parametrize(("text", "size"), [("16000x64000", (16000, 64000)), (" 3 X 4 ", (3, 4))])
def test_parse_size(text, size):
    assert parse_size(text) == size


@pytest.mark.parametrize("text", ["", "3", "3x", "0x4", "4x0", "3x4x5", "-3x4"])
def test_what_is_no_size(text):
    with pytest.raises(ValueError, match="HEIGHTxWIDTH"):
        parse_size(text)


@pytest.mark.parametrize(
    ("text", "seconds"),
    [("50us", 50e-6), (" 1.5 ms ", 1.5e-3), ("2s", 2.0), (".5s", 0.5), ("7ns", 7e-9), ("0us", 0), ("1.5h", 5400)],
)
def test_parse_seconds(text, seconds):
    assert parse_seconds(text) == pytest.approx(seconds)


@pytest.mark.parametrize("text", ["", "50", "us", "-1s", "5 mins", "1e-3s"])
def test_what_is_no_duration(text):
    with pytest.raises(ValueError, match="duration"):
        parse_seconds(text)


@pytest.mark.parametrize(
    ("seconds", "text"),
    [
        (0.0123, "12 ms"),
        (1, "1.0 s"),
        (59.9, "59.9 s"),
        (61, "1 min 01 s"),
        (3600, "1 h 00 min"),
        (12_000, "3 h 20 min"),
        (657 * 3600 + 3000, "27 d 9 h"),
    ],
)
def test_format_seconds(seconds, text):
    assert format_seconds(seconds) == text


@pytest.mark.parametrize(
    ("count", "text"),
    [
        (12, "12 px"),
        (999, "999 px"),
        (1000, "1 kpx"),
        (999_999, "1 Mpx"),
        (64 * 10**6, "64 Mpx"),
        (1_024_000_000, "1.02 Gpx"),
        (4 * 10**12, "4 Tpx"),
    ],
)
def test_format_pixels(count, text):
    assert format_pixels(count) == text
