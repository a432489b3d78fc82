"""What planning knows of the machine: rates, and where `gigagrad calibrate` has measured them, a fitted model of time.

The model is plain data, `seconds = sum(rate x amount)` over the kinds of work that work.py counts, so that planning can
ask it for thousands of tiles. It is saved once per machine, as JSON in the user's cache folder; without it, or if it
belongs to another processor, another number of threads or another PyTorch, planning uses defaults, which serve to
compare plans but not to promise seconds.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
import math
import os
import platform
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from gigagrad.errors import GigagradError
from gigagrad.files import write_json
from gigagrad.plans.work import Work

_LARGEST_CACHE_BYTES = 32 * 2**20
_CACHES = Path("/sys/devices/system/cpu/cpu0/cache")
_FORMAT = "gigagrad machine profile 7"
"""Changes with the meaning of the kinds of work, so that an older profile is measured again."""

_RATES = (
    "copy_bytes_per_second",
    "disk_write_bytes_per_second",
    "disk_read_bytes_per_second",
    "file_bytes_per_second",
    "codec_bytes_per_second",
    "codec_ratio",
)
"""The fields of `Machine` that a profile holds beside the model of time."""
_WAYS_TO_WAIT = ("spinning", "passive")


class ProfileError(GigagradError):
    """A saved machine profile cannot be used (damaged, or of another machine); `gigagrad calibrate` makes a new one."""


@dataclass(frozen=True, slots=True)
class Seconds:
    """Of one thread, in two parts."""

    kernels: float
    """What operators compute, which threads can share."""
    calls: float = 0.0
    """Python, and what every call of an operator costs."""

    @property
    def total(self) -> float:
        return self.kernels + self.calls


@dataclass(frozen=True, slots=True)
class Sharing:
    """How well threads work beside each other (docs/decisions/0012-time-model.md)."""

    shared_efficiency: float = 0.5
    """What each further thread adds when threads share the operators of one tile (bench/tile_shape.py)."""
    side_by_side_efficiency: float = 1.0
    """What each further thread adds when every thread computes a tile of its own."""
    waiting_tiles: float = 0.5
    """What a pass takes longer then, in tiles' seconds: the first one is read, and the last one added up, by one
    thread."""

    def wall_seconds(self, seconds: Seconds, threads: int, workers: int, tile_count: int) -> float:
        """Threads that share operators share all but Python's part. Whole tiles share out well unless they are few."""
        if workers == 1:
            return seconds.calls + seconds.kernels / (1 + self.shared_efficiency * (threads - 1))
        tile = seconds.total / tile_count
        rounds = -(-tile_count // workers)
        side_by_side = seconds.total / (1 + self.side_by_side_efficiency * (workers - 1))
        return max(rounds * tile, side_by_side + self.waiting_tiles * tile)


@dataclass(frozen=True, slots=True)
class TimeModel:
    """Seconds of one thread per unit of work, for float32 on the CPU."""

    rates: Mapping[str, float]
    """By kind of work (see work.py); what calibration has not met costs what it typically does."""
    error: float
    """Mean relative error on networks that the fit had not seen."""

    def seconds(self, work: Work) -> float:
        return self.split(work).total

    def split(self, work: Work) -> Seconds:
        """The same in two parts: every operator is called by Python, which one thread does at a time."""
        rates, seconds = self.rates, {True: 0.0, False: 0.0}
        for kind, amount in work.items():
            rate = rates[kind] if kind in rates else typical_rate(kind)
            seconds[kind.endswith(".calls")] += rate * amount
        return Seconds(seconds[False], seconds[True])


_TYPICAL_RATES = {"flops": 1 / 100e9, "hot": 1 / 40e9, "calls": 20e-6, "taps": 1 / 10e9}
_TYPICAL_BYTE = 1 / 12e9


def typical_rate(kind: str) -> float:
    """Seconds per unit of a kind of work on no machine in particular: where a fit begins, and what it leans on."""
    return _TYPICAL_RATES.get(kind.rpartition(".")[2], _TYPICAL_BYTE)


@dataclass(frozen=True, slots=True, kw_only=True)
class Machine:
    """What the cost model knows of the machine. Rates are of one thread unless they say otherwise."""

    threads: int = 1
    cache_bytes: int = _LARGEST_CACHE_BYTES
    cached_bytes_per_second: float = 40e9
    memory_bytes_per_second: float = 12e9
    flops_per_second: float = 100e9
    seconds_per_operator: float = 60e-6
    spinning: Sharing = Sharing()
    """How threads share, as OpenMP's usually wait for each other."""
    passive: Sharing = Sharing()
    """The same where they sleep meanwhile (`OMP_WAIT_POLICY=passive`, as under the command line)."""
    copy_bytes_per_second: float = 10e9
    """Of copies in memory: bytes of the copy, not of both sides."""
    disk_write_bytes_per_second: float = 500e6
    disk_read_bytes_per_second: float = 1e9
    file_bytes_per_second: float = 1e9
    """What one thread's work for fields in files comes to: copies between tiles and files, checksums and the system's
    part, in bytes of as much reading as writing."""
    codec_bytes_per_second: float = 0.0
    """Of the lossless codec, in bytes of the field, the slower of both directions; 0 where it was not measured."""
    codec_ratio: float = 1.0
    """Bytes of a field before a norm per byte that the lossless codec leaves of it."""
    model: TimeModel | None = None
    """The fitted model of time; None where `gigagrad calibrate` has not been run."""

    @classmethod
    def detect(cls, threads: int, notice: Callable[[str], None] = lambda text: None) -> Machine:
        """This machine: its cache as the kernel reports it, and the saved profile where there is a usable one.

        `notice` gets one sentence if there is a profile that cannot be used.
        """
        bare = cls(threads=threads, cache_bytes=cache_bytes())
        path = profile_path()
        try:
            return bare.with_profile(read_profile(path)) if path.exists() else bare
        except ProfileError as error:
            notice(f"{error}; planning without it, run 'gigagrad calibrate' to measure again")
            return bare

    def with_profile(self, profile: Mapping[str, Any]) -> Machine:
        """This machine with the rates and the model of a profile (as `read_profile` returns it)."""
        model = TimeModel(profile["seconds_per_unit"], profile["error"])
        spinning, passive = (Sharing(**profile["sharing"][way]) for way in _WAYS_TO_WAIT)
        return dataclasses.replace(self, model=model, spinning=spinning, passive=passive, **profile["rates"])

    @property
    def disk_bytes_per_second(self) -> float:
        """Of as much reading as writing."""
        return 2 / (1 / self.disk_read_bytes_per_second + 1 / self.disk_write_bytes_per_second)

    def wall_seconds(self, seconds: Seconds, workers: int, tile_count: int) -> float:
        """By the clock, a pass that takes one thread so long."""
        passive = os.environ.get("OMP_WAIT_POLICY", "").lower() == "passive"
        sharing = self.passive if passive else self.spinning
        return sharing.wall_seconds(seconds, self.threads, workers, tile_count)

    def file_seconds(self, nbytes: float) -> float:
        """By the clock, what moving so many bytes between tiles and files keeps from computing tiles: threads of their
        own do it, on the same cores.
        """
        return nbytes / self.file_bytes_per_second / self.threads


def cache_bytes() -> int:
    """The last-level cache as the kernel reports it, but no more than 32 MiB, and that where it reports none.

    A guest on a large server is told of a cache of hundreds of MiB that all its neighbours use.
    """
    sizes = []
    for path in _CACHES.glob("index*/size"):
        text = path.read_text().strip()
        sizes.append(int(text[:-1]) * {"K": 2**10, "M": 2**20}.get(text[-1], 1))
    return min(max(sizes, default=_LARGEST_CACHE_BYTES), _LARGEST_CACHE_BYTES)


def machine_key() -> dict[str, str | int]:
    """What a profile depends on: the processor, the threads PyTorch uses, PyTorch itself."""
    return {"processor": _processor(), "threads": torch.get_num_threads(), "torch": str(torch.__version__)}


def profile_path() -> Path:
    """Where this machine's profile is, or would be: in the user's cache folder (`XDG_CACHE_HOME` is respected)."""
    given = os.environ.get("XDG_CACHE_HOME", "")
    root = Path(given) if os.path.isabs(given) else Path.home() / ".cache"
    digest = hashlib.sha256(json.dumps(machine_key(), sort_keys=True).encode()).hexdigest()
    return root / "gigagrad" / f"machine-{digest[:12]}.json"


def write_profile(path: Path, machine: Machine) -> None:
    """Save the rates and the model of a calibrated machine, atomically. Raises `WriteError`."""
    assert machine.model is not None
    write_json(
        path,
        {
            "format": _FORMAT,
            "machine": machine_key(),
            "rates": {name: getattr(machine, name) for name in _RATES},
            "sharing": {way: dataclasses.asdict(getattr(machine, way)) for way in _WAYS_TO_WAIT},
            "seconds_per_unit": dict(machine.model.rates),
            "error": machine.model.error,
        },
    )


def read_profile(path: Path) -> dict[str, Any]:
    """The content of a profile of this machine. Raises `ProfileError` with the reason if it is none."""
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise ProfileError(f"the machine profile {path} cannot be read ({type(error).__name__})") from error
    if not isinstance(content, dict) or content.get("format") != _FORMAT:
        raise ProfileError(f"the machine profile {path} is not in the format of this version ('{_FORMAT}')")
    if content.get("machine") != machine_key():
        raise ProfileError(f"the machine profile {path} belongs to {content.get('machine')}, this is {machine_key()}")
    rates, units, sharing = content.get("rates"), content.get("seconds_per_unit"), content.get("sharing")
    ways = [sharing.get(way) for way in _WAYS_TO_WAIT] if isinstance(sharing, dict) else [None]
    numbers = [content.get("error")]
    for table in (rates, units, *ways):
        numbers += table.values() if isinstance(table, dict) else [None]
    complete = isinstance(rates, dict) and rates.keys() == set(_RATES)
    complete = complete and all(
        isinstance(way, dict) and way.keys() == {field.name for field in dataclasses.fields(Sharing)} for way in ways
    )
    if not complete or not all(map(_is_rate, numbers)):
        raise ProfileError(f"the machine profile {path} is damaged: it lacks a rate, or holds one that is no number")
    return content


def _is_rate(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value) and value >= 0


def _processor() -> str:
    """The processor's name; the kernel's, where there is one, is more telling than Python's."""
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8", errors="replace").splitlines()
    except OSError:
        lines = []
    found = dict[str, str]()
    for line in lines:  # the first core speaks for all
        name, _, value = line.partition(":")
        found.setdefault(name.strip(), value.strip())
    words = ("model name", "cpu family", "model", "CPU implementer", "CPU part")
    told = " ".join(found[word] for word in words if word in found)
    return told or platform.processor() or platform.machine()
