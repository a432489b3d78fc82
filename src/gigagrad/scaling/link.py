"""A link between ranks: how long a message takes on it, and a sum over all ranks.

A message of n bytes takes latency + n / bandwidth, and every rank sends and receives at once (Thakur, Rabenseifner and
Gropp, "Optimization of Collective Communication Operations in MPICH", 2005, section 3). Additions cost nothing here.
"""

from __future__ import annotations

import re
from contextlib import suppress
from dataclasses import dataclass

from gigagrad.errors import ConfigError
from gigagrad.units import parse_bytes, parse_seconds


@dataclass(frozen=True, slots=True)
class Link:
    """A rank's connection to the others, in either direction."""

    bytes_per_second: float
    latency_seconds: float = 0.0

    def __str__(self) -> str:
        return f"{8e-9 * self.bytes_per_second:.3g} Gbit/s, {1e6 * self.latency_seconds:.3g} us"

    def shared(self, ranks: int) -> Link:
        """Divide the link among so many ranks that send at once, as the GPUs of a machine do."""
        return Link(self.bytes_per_second / ranks, self.latency_seconds)

    def seconds(self, nbytes: float) -> float:
        """Return the seconds of a message."""
        return self.latency_seconds + nbytes / self.bytes_per_second

    def sum_seconds(self, nbytes: float, ranks: int) -> float:
        """Return the seconds of an all-reduce of `nbytes` in which each of n ranks adds up a share: 2 (n - 1) messages
        of 1/n of them (same paper, section 4.5, around a ring; in the same time each may give every other one its
        share).
        """
        return 2 * (ranks - 1) * self.seconds(nbytes / ranks)


def parse_link(text: str) -> Link:
    """Read `"10Gbit/s"` or `"25GB/s"`, and behind a comma the latency if there is one: `"10Gbit/s,50us"`.

    Raises `ConfigError` for anything else. `Gb/s` is refused: half of its readers take it for bytes.
    """
    match = re.fullmatch(r"([^,]+?)(bit|B)/s(?:\s*,(.+))?", text.strip())
    if match:
        amount, unit, latency = match.groups()
        with suppress(ValueError):
            rate = parse_bytes(f"{amount}B") / (8 if unit == "bit" else 1)
            return Link(rate, parse_seconds(latency) if latency else 0.0)
    raise ConfigError(f"cannot read {text!r} as a link; write it like '10Gbit/s', '25GB/s' or '10Gbit/s,50us'")
