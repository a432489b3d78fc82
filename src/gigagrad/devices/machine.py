"""Know the machine by a handful of rates, typical ones or those that `gigagrad calibrate` measured.

A profile is JSON in the user's cache folder, one for each processor, number of threads and PyTorch. The rates serve to
compare plans, and to say about how long a step will take; a running step corrects that from its own tiles
(docs/decisions/0012-time-model.md).
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
import os
import platform
import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from gigagrad.errors import GigagradError
from gigagrad.files import read_record, write_json

_LARGEST_CACHE_BYTES = 32 * 2**20
_CACHES = Path("/sys/devices/system/cpu/cpu0/cache")
_FORMAT = "gigagrad machine profile 9"
"""The format's name, which changes with the meaning of the rates, so that an older profile is measured again."""
_SHARED_SECONDS = 20e-6
"""The least of an operator's work that each thread which shares it gets: PyTorch parts no less than 32,768 numbers."""
_WAITING_TILES = 0.5
"""The time that a pass takes longer where every thread computes a tile of its own, in tiles' seconds: the first one is
read, and the last one added up, by one thread."""


_QUICK_PAGES_BYTES, _LATER_PAGES = 4e9, 1.5
"""After so many bytes new pages take so much longer: a step of Unet(resnet34) at 1024 px maps 3.6 GB and takes 0.9 s
more than its operators, at 2048 px it maps 16.1 GB and takes 15.8 s more."""
_NEW_PAGES_BYTES_PER_SECOND = 2.5e9
"""The rate at which the system clears new memory (docs/decisions/0018-large-blocks.md)."""


class ProfileError(GigagradError):
    """A saved machine profile cannot be used (damaged, or of another machine); `gigagrad calibrate` makes a new one."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Machine:
    """The machine as the cost model knows it. Rates are of one thread unless they say otherwise."""

    threads: int = 1
    cache_bytes: int = _LARGEST_CACHE_BYTES
    calibrated: bool = False
    """True where the rates were measured, on this machine or, for a plan for another one, on that."""
    flops_per_second: float = 100e9
    """The rate of convolutions of many channels, in float32."""
    cached_bytes_per_second: float = 40e9
    """Bytes in and out of an operator whose values stay in the cache."""
    memory_bytes_per_second: float = 12e9
    """Bytes in and out of an operator whose values do not stay in the cache."""
    seconds_per_operator: float = 60e-6
    """The cost of a call of an operator on a tile beside its work."""
    shared_efficiency: float = 0.9
    """The gain of each further thread when threads share the work of a tile's operators, if it is enough."""
    side_by_side_efficiency: float = 1.0
    """The gain of each further thread when every thread computes a tile of its own."""
    copy_bytes_per_second: float = 10e9
    """The rate of copies in memory: bytes of the copy, not of both sides."""
    disk_write_bytes_per_second: float = 500e6
    disk_read_bytes_per_second: float = 1e9
    file_bytes_per_second: float = 1e9
    """The rate of one thread's work for fields in files: copies between tiles and files, checksums and the system's
    part, in bytes of as much reading as writing."""
    codec_bytes_per_second: float = 0.0
    """The rate of the lossless codec, in bytes of the field, the slower direction; 0 where it was not measured."""
    codec_ratio: float = 1.0
    """Bytes of a field before a norm per byte that the lossless codec leaves of it."""

    @classmethod
    def detect(cls, threads: int, notice: Callable[[str], None] = lambda text: None) -> Machine:
        """Detect this machine: its cache as the kernel reports it, and the saved rates where there are usable ones.

        `notice` gets one sentence if there is a profile that cannot be used.
        """
        bare = cls(threads=threads, cache_bytes=cache_bytes())
        path = profile_path()
        try:
            return bare.with_rates(read_profile(path)) if os.path.exists(path) else bare
        except ProfileError as error:
            notice(f"{error}; planning without it, run 'gigagrad calibrate' to measure again")
            return bare

    @classmethod
    def from_profile(cls, path: Path) -> Machine:
        """Read the machine, this or another, on which `gigagrad calibrate` saved this profile. A profile says nothing
        of caches: the one of this machine is taken.

        Raises:
            ProfileError: the file is no such profile, or one of another version.
        """
        try:
            content = _read(path)
            threads = content["machine"].get("threads") if isinstance(content.get("machine"), dict) else None
            if type(threads) is not int or not 1 <= threads <= _MOST_THREADS:
                raise ProfileError(f"the machine profile {path} is damaged: it does not say how many threads it is for")
        except ProfileError as error:
            raise ProfileError(f"{error}; name a file that this version's 'gigagrad calibrate' saved") from error
        return cls(threads=threads, cache_bytes=cache_bytes()).with_rates(content["rates"])

    @classmethod
    def typical_gpu(cls) -> Machine:
        """Make a GPU that nobody has measured. An operator's call is what it was on an H200 beside a fast processor:
        most of a step there (docs/performance.md), so that large tiles pay.
        """
        return cls(
            flops_per_second=30e12,
            cached_bytes_per_second=2e12,
            memory_bytes_per_second=1e12,
            seconds_per_operator=150e-6,
        )

    def with_rates(self, rates: dict[str, float]) -> Machine:
        """Return this machine with measured rates (as `read_profile` returns them)."""
        return dataclasses.replace(self, calibrated=True, **rates)  # type: ignore[arg-type]  # all of them are floats

    @property
    def rates(self) -> dict[str, float]:
        """Return the rates that a profile holds."""
        return {name: getattr(self, name) for name in _RATES}

    @property
    def disk_bytes_per_second(self) -> float:
        """Return the rate of as much reading as writing."""
        return 2 / (1 / self.disk_read_bytes_per_second + 1 / self.disk_write_bytes_per_second)

    def operator_seconds(self, moved_bytes: float, flops: float) -> float:
        """Estimate one call by one thread that moves so many bytes in and out."""
        cached = moved_bytes <= self.cache_bytes // 2
        rate = self.cached_bytes_per_second if cached else self.memory_bytes_per_second
        return self.seconds_per_operator + moved_bytes / rate + flops / self.flops_per_second

    def wall_seconds(self, seconds: float, calls: float, workers: int, tile_count: int) -> float:
        """Estimate, by the clock, a pass that takes one thread so long, with so many calls of operators. Threads share
        the work of operators and not the calls; where each has tiles of its own, Python's lock lets one call at a time
        (docs/decisions/0027-one-tile-or-several.md).
        """
        calling = min(seconds, calls * self.seconds_per_operator)
        if workers == 1:
            work = seconds - calling
            sharing = min(self.threads, max(1.0, work / (max(calls, 1) * _SHARED_SECONDS)))
            return calling + work / (1 + self.shared_efficiency * (sharing - 1))
        tile = seconds / tile_count
        rounds = -(-tile_count // workers)
        side_by_side = seconds / (1 + self.side_by_side_efficiency * (workers - 1))
        return max(rounds * tile, side_by_side + _WAITING_TILES * tile, calling)

    def page_seconds(self, nbytes: float) -> float:
        """Estimate, by the clock, touching so many bytes for the first time."""
        return nbytes / _NEW_PAGES_BYTES_PER_SECOND

    def block_seconds(self, nbytes: float) -> float:
        """Estimate, by the clock, touching so many bytes in blocks that are taken from the system one by one, written
        and given back: behind the first gigabytes it serves them more slowly (docs/decisions/0018-large-blocks.md).
        """
        return self.page_seconds(nbytes + _LATER_PAGES * max(0.0, nbytes - _QUICK_PAGES_BYTES))

    def file_seconds(self, nbytes: float) -> float:
        """Estimate, by the clock, what moving so many bytes between tiles and files keeps from computing tiles: threads
        of their own do it, on the same cores.
        """
        return nbytes / self.file_bytes_per_second / self.threads


_MAY_BE_ZERO = ("shared_efficiency", "side_by_side_efficiency", "codec_bytes_per_second")
_LEAST_RATE, _MOST_RATE = 1e-12, 1e18
"""The bounds of rates: what is beyond them was not measured, and a file may hold any number."""
_MOST_THREADS = 4096
_RATES = tuple(field.name for field in dataclasses.fields(Machine) if field.type == "float")


def cache_bytes() -> int:
    """Return the last-level cache as the kernel reports it, but no more than 32 MiB, and that where it reports none.

    A guest on a large server is told of a cache of hundreds of MiB that all its neighbours use.
    """
    sizes = []
    for path in _CACHES.glob("index*/size"):
        text = path.read_text().strip()
        sizes.append(int(text[:-1]) * {"K": 2**10, "M": 2**20}.get(text[-1], 1))
    return min(max(sizes, default=_LARGEST_CACHE_BYTES), _LARGEST_CACHE_BYTES)


def machine_key() -> dict[str, str | int]:
    """Return what a profile depends on: the processor, the threads PyTorch uses, PyTorch itself."""
    return {"processor": _processor(), "threads": torch.get_num_threads(), "torch": str(torch.__version__)}


def profile_path() -> Path:
    """Return the path of this machine's profile: in the user's cache folder (`XDG_CACHE_HOME` is respected), or
    among temporary files where the user has no home.
    """
    home = os.path.join(os.path.expanduser("~"), ".cache")
    root = next(filter(os.path.isabs, (os.environ.get("XDG_CACHE_HOME", ""), home)), None) or tempfile.gettempdir()
    digest = hashlib.sha256(json.dumps(machine_key(), sort_keys=True).encode()).hexdigest()
    return Path(root) / "gigagrad" / f"machine-{digest[:12]}.json"


def write_profile(path: Path, machine: Machine) -> None:
    """Save the rates of a calibrated machine, atomically. Raises `WriteError`."""
    write_json(path, {"format": _FORMAT, "machine": machine_key(), "rates": machine.rates})


def read_profile(path: Path) -> dict[str, float]:
    """Read the rates in a profile of this machine. Raises `ProfileError` with the reason if it is none."""
    content = _read(path)
    if content.get("machine") != machine_key():
        raise ProfileError(f"the machine profile {path} belongs to {content.get('machine')}, this is {machine_key()}")
    return content["rates"]  # type: ignore[no-any-return]  # `_read` has looked


def _read(path: Path) -> dict[str, Any]:
    """Read a profile of any machine, with usable rates. Raises `ProfileError` with the reason if it is none."""
    try:
        content = read_record(path, _FORMAT)
    except ValueError as error:
        raise ProfileError(f"the machine profile {error}") from error
    rates = content.get("rates")
    if not isinstance(rates, dict) or rates.keys() != set(_RATES) or not all(map(_is_rate, rates, rates.values())):
        raise ProfileError(f"the machine profile {path} is damaged: it lacks a rate, or holds one that is no number")
    return content


def _is_rate(name: str, value: object) -> bool:
    if not isinstance(value, int | float) or isinstance(value, bool):
        return False
    return _LEAST_RATE <= value <= _MOST_RATE or (value == 0 and name in _MAY_BE_ZERO)


def _processor() -> str:
    """Return the processor's name; the kernel's, where there is one, is more telling than Python's."""
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8", errors="replace").splitlines()
    except OSError:
        lines = []
    fields = dict[str, str]()
    for line in lines:  # the first core speaks for all
        name, _, value = line.partition(":")
        fields.setdefault(name.strip(), value.strip())
    words = ("model name", "cpu family", "model", "CPU implementer", "CPU part")
    told = " ".join(fields[word] for word in words if word in fields)
    return told or platform.processor() or platform.machine()
