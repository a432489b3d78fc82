"""Links as people write them, and what messages and sums take on them."""

import pytest

from gigagrad.errors import ConfigError
from gigagrad.scaling import Link, parse_link


@pytest.mark.parametrize(
    ("text", "link"),
    [
        ("10Gbit/s", Link(1.25e9)),
        ("25GB/s", Link(25e9)),
        ("10Gbit/s,50us", Link(1.25e9, 50e-6)),
        (" 1.5 GiB/s , 2 ms ", Link(1.5 * 2**30, 2e-3)),
        ("8bit/s", Link(1.0)),
    ],
)
def test_parse_link(text, link):
    assert parse_link(text) == link


@pytest.mark.parametrize(
    "text", ["", "10", "10Gbit", "10Gb/s", "10Gbps", "GB/s", "0GB/s", "10GB/s,", "10GB/s,5", "1GB/s,1s,1s"]
)
def test_what_is_no_link(text):
    with pytest.raises(ConfigError, match="as a link; write it like '10Gbit/s'"):
        parse_link(text)


def test_a_message_and_a_share():
    link = Link(1e9, 1e-3)
    assert link.seconds(2e9) == 2.001
    assert link.shared(4).seconds(2e9) == 8.001


def test_sums_by_the_papers_formula():
    link, nbytes = Link(1e9, 1e-3), 3e9
    for ranks in (2, 3, 7, 8, 1000):
        ring = 2 * (ranks - 1) * 1e-3 + 2 * (ranks - 1) / ranks * 3
        assert link.sum_seconds(nbytes, ranks) == pytest.approx(ring)
    assert link.sum_seconds(nbytes, 1) == 0


def test_a_link_is_printed_as_it_may_be_typed():
    link = parse_link("10Gbit/s,50us")
    assert str(link) == "10 Gbit/s, 50 us"
    assert parse_link(str(link)) == link
