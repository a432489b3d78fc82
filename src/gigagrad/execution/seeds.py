"""The seeds of an engine's runs."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from gigagrad.devices import Device


class Seeds:
    """With `seed`, the n-th run draws what the n-th run of any other engine with it draws; without, what PyTorch's own
    generators give.
    """

    def __init__(self, device: Device, seed: int | None) -> None:
        self._device, self._seed = device, seed
        self._runs = 0

    @contextmanager
    def of_this_run(self) -> Iterator[None]:
        """The generators are as before when it is over, unless they were drawn from."""
        if self._seed is None:
            yield
            return
        # Any two (seed, run) pairs start apart: the multiplier is odd and larger than any number of runs.
        seed = (self._seed * 1_000_003 + self._runs) % 2**63
        self._runs += 1
        with self._device.seeded(seed):
            yield
