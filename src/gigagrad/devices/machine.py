"""Know the machine by a handful of rates, typical ones or those that `gigagrad calibrate` measured.

A profile is JSON in the user's cache folder, one for each processor, number of threads and PyTorch, and one for each
GPU beside a processor. The rates serve to compare plans, and to say about how long a step will take; a running step
corrects that from its own tiles (docs/decisions/0012-time-model.md).
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
import math
import os
import platform
import tempfile
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar, Final, Self

import torch

from gigagrad.devices.gpus import CARDS, MIDDLING, find_card
from gigagrad.errors import ConfigError, GigagradError
from gigagrad.files import read_record, write_json
from gigagrad.work import Work

_LARGEST_CACHE_BYTES = 32 * 2**20
_CACHES = Path("/sys/devices/system/cpu/cpu0/cache")
_FASTEST = Path("/sys/devices/system/cpu/cpu0/cpufreq/cpuinfo_max_freq")
_SHARED_SECONDS = 20e-6
"""The least of an operator's work that each thread which shares it gets: PyTorch parts no less than 32,768 numbers."""
_COPIES = 2
"""Times that the values of a convolution lie in memory: as they are, and in the library's layout."""
_WAITING_TILES = 0.5
"""The time that a pass takes longer where every thread computes a tile of its own, in tiles' seconds: the first one is
read, and the last one added up, by one thread."""


_QUICK_PAGES_BYTES, _LATER_PAGES = 4e9, 1.5
"""After so many bytes new pages take so much longer: a step of Unet(resnet34) at 1024 px maps 3.6 GB and takes 0.9 s
more than its operators, at 2048 px it maps 16.1 GB and takes 15.8 s more."""


CALLS_OF_A_PASS: Final = 25
"""Calls of operators that take a GPU's host as long as a pass beside its tiles."""


class ProfileError(GigagradError):
    """A saved machine profile cannot be used (damaged, or of another machine); `gigagrad calibrate` makes a new one."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Machine:
    """The machine as the cost model knows it. Rates are of one thread unless they say otherwise."""

    profile_format: ClassVar[str] = "gigagrad machine profile 11"
    """The format's name, which changes with the meaning of the rates, so that an older profile is measured again."""
    calibrate_command: ClassVar[str] = "gigagrad calibrate"

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
    reordered_bytes_per_second: float = 5e9
    """Bytes in and out of a convolution: its library brings them into a layout of its own."""
    reordered_memory_bytes_per_second: float = 5e9
    """Bytes of convolutions whose values and copies do not stay in the cache: a thread's part where all share them."""
    ragged_bytes_per_second: float = 5e9
    """Bytes of convolutions whose channels fill no whole vectors: a thread's part where all share them."""
    unfolded_flops_per_second: float = 2e9
    """The rate of convolutions by unfolded windows, in products of one channel."""
    statistics_bytes_per_second: float = 2.5e9
    """Bytes in and out of what finds means and variances."""
    window_bytes_per_second: float = 0.6e9
    """Bytes in and out of a pool."""
    new_bytes_per_second: float = 2.5e9
    """The rate at which the system clears new memory, for all threads (docs/decisions/0018-large-blocks.md)."""
    seconds_per_operator: float = 60e-6
    """The cost of a call of an operator on a tile beside its work."""
    seconds_per_autograd_call: float = 60e-6
    """The cost of a kernel that plain autograd calls beside its work, Python's part included."""
    seconds_per_tile: float = 0.3e-3
    """The cost of a tile beside calls of operators on fields: crops, sums, moments and their gradients."""
    seconds_per_pass: float = 1.5e-3
    """The cost of a pass beside its tiles, whoever computes these (`bench/beside_plain.py`)."""
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
        return cls(threads=threads, cache_bytes=cache_bytes())._as_saved(notice)

    def _as_saved(self, notice: Callable[[str], None], card: str = "") -> Self:
        """Return this machine with the saved rates, where there are usable ones."""
        path = profile_path(card)
        try:
            return self.with_rates(read_profile(path, card)) if os.path.exists(path) else self
        except ProfileError as error:
            notice(f"{error}; planning without it, run '{self.calibrate_command}' to measure again")
            return self

    @classmethod
    def from_profile(cls, path: Path) -> Self:
        """Read the machine, this or another, on which `gigagrad calibrate` saved this profile. A profile says nothing
        of caches: the one of this machine is taken.

        Raises:
            ProfileError: the file is no such profile, or one of another version.
        """
        try:
            content = _read(path, cls)
            own = content["machine"] if isinstance(content.get("machine"), dict) else {}
            return cls._from_key(path, own).with_rates(content["rates"])
        except ProfileError as error:
            raise ProfileError(f"{error}; name a file that this version's '{cls.calibrate_command}' saved") from error

    @classmethod
    def _from_key(cls, path: Path, key: dict[str, Any]) -> Self:
        """Make the machine that a profile is for. Raises `ProfileError` where it does not say."""
        threads = key.get("threads")
        if type(threads) is not int or not 1 <= threads <= _MOST_THREADS:
            raise ProfileError(f"the machine profile {path} is damaged: it does not say how many threads it is for")
        return cls(threads=threads, cache_bytes=cache_bytes())

    def with_rates(self, rates: dict[str, float]) -> Self:
        """Return this machine with measured rates (as `read_profile` returns them)."""
        return dataclasses.replace(self._with(rates), calibrated=True)

    def _with(self, rates: dict[str, float]) -> Self:
        return dataclasses.replace(self, **rates)  # type: ignore[arg-type]  # all of them are floats

    @property
    def rates(self) -> dict[str, float]:
        """Return the rates that a profile holds."""
        return {name: getattr(self, name) for name in _rates_of(type(self))}

    @property
    def key(self) -> dict[str, str | int]:
        """Return what its profile depends on."""
        return machine_key()

    @property
    def basis(self) -> str:
        """Say where its rates are from."""
        return (
            "this machine's rates" if self.calibrated else f"typical rates; '{self.calibrate_command}' measures these"
        )

    @property
    def disk_bytes_per_second(self) -> float:
        """Return the rate of as much reading as writing."""
        return 2 / (1 / self.disk_read_bytes_per_second + 1 / self.disk_write_bytes_per_second)

    def operator_seconds(
        self, moved_bytes: float, flops: float, work: Work = Work.VALUES, *, cached: bool = True, ragged: float = 0.0
    ) -> float:
        """Estimate one call by one thread that moves so many bytes in and out; `cached` they may be in the cache, as
        those of tiles are, and so many of them are `ragged` (`work.is_ragged`).
        """
        products, slowly = self.flops_per_second, 0.0
        if work is Work.VALUES:
            cached = cached and moved_bytes <= self.cache_bytes // 2
            rate = self.cached_bytes_per_second if cached else self.memory_bytes_per_second
        elif work is Work.STATISTICS:
            rate = self.statistics_bytes_per_second
        elif work is Work.WINDOWS:
            rate = self.window_bytes_per_second
        else:
            cached = cached or _COPIES * moved_bytes <= self.cache_bytes // 2
            rate = self.reordered_bytes_per_second if cached else self.reordered_memory_bytes_per_second
            products = self.unfolded_flops_per_second if work is Work.UNFOLDED else products
            slowly = ragged * max(0.0, 1 / self.ragged_bytes_per_second - 1 / rate)
        return self.seconds_per_operator + moved_bytes / rate + slowly + flops / products

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

    def replaying(self) -> Self:
        """Return this machine where it replays recorded steps."""
        return self

    def by_autograd(self) -> Self:
        """Return this machine where plain autograd calls its operators."""
        return dataclasses.replace(self, seconds_per_operator=self.seconds_per_autograd_call)

    def host_seconds(self, tiles: float = 0) -> float:
        """Estimate what a pass takes beside the operators of its tiles, of which a rank has so many."""
        return self.seconds_per_pass + tiles * self.seconds_per_tile

    def page_seconds(self, nbytes: float) -> float:
        """Estimate, by the clock, touching so many bytes for the first time."""
        return nbytes / self.new_bytes_per_second

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


@dataclass(frozen=True, slots=True, kw_only=True)
class Gpu(Machine):
    """A GPU as the cost model knows it: the host asks for one operator while the card computes those before, and the
    card's allocator hands out memory without touching it.

    Tensor cores want many channels. A 3 x 3 convolution of C channels in float32 has 2.25 C operations for every byte
    that it moves, so operations per byte tell its rate: that of 64 channels from there on, down to that of 16 a
    straight line between logarithms, and below it time is that of the bytes.

    The typical rates are those of an H200 beside a fast processor (docs/performance.md).
    """

    profile_format: ClassVar[str] = "gigagrad GPU profile 3"
    calibrate_command: ClassVar[str] = "gigagrad calibrate --device cuda"

    card: str = ""
    """Its name, as PyTorch gives it; empty where nobody knows."""
    flops_per_second: float = 210e12
    """The rate of convolutions of 64 channels, forward and backward, in float32 as PyTorch's flags have it."""
    few_channels_flops_per_second: float = 25e12
    """The rate of convolutions of 16 channels."""
    unfolded_flops_per_second: float = 25e12
    cached_bytes_per_second: float = 3.4e12
    memory_bytes_per_second: float = 3.4e12
    reordered_bytes_per_second: float = 3.4e12
    reordered_memory_bytes_per_second: float = 3.4e12
    ragged_bytes_per_second: float = 3.4e12
    statistics_bytes_per_second: float = 3.4e12
    window_bytes_per_second: float = 3.4e12
    new_bytes_per_second: float = 3.4e12
    seconds_per_operator: float = 40e-6
    """The host's cost of a call of an operator."""
    seconds_per_autograd_call: float = 40e-6
    seconds_per_tile: float = 2.5e-3
    """The host's cost of a tile beside calls of operators on fields: crops, sums, moments and their gradients."""
    seconds_per_pass: float = CALLS_OF_A_PASS * 40e-6
    copy_bytes_per_second: float = 15e9
    """The rate of fields that move to or from the host's memory."""

    @classmethod
    def typical(cls, name: str) -> Self:
        """Make the card of this name with what networks get of the rates on its data sheet. What the host does takes as
        long as beside the H200, whatever the card.
        """
        card = find_card(name) or MIDDLING
        moved = _MEMORY_SHARE * card.memory_bytes_per_second
        many = _PRODUCT_SHARE * card.flops_per_second
        few = min(many, _FEW_CHANNELS * _FEW_CHANNELS_SHARE * card.memory_bytes_per_second)
        made = cls(card=name, flops_per_second=many)
        few_channels = ("few_channels_flops_per_second", "unfolded_flops_per_second")
        return made._with(dict.fromkeys(BYTE_RATES, moved) | dict.fromkeys(few_channels, few))

    @classmethod
    def listed(cls, name: str) -> Self:
        """Make a card that is listed, as `typical` does. Raises `ConfigError` with the list for another one."""
        if find_card(name) is None:
            known = ", ".join(card.name for card in CARDS)
            raise ConfigError(
                f"got the card {name!r}, of which no data sheet is listed; expected one of {known}, or the rates of "
                f"yours: --rates FILE, as '{cls.calibrate_command}' saves it there"
            )
        return cls.typical(name)

    @classmethod
    def detected(cls, name: str, notice: Callable[[str], None] = lambda text: None) -> Self:
        """Return a card that is here, with the saved rates where there are usable ones, else typical ones. `notice` as
        in `Machine.detect`.
        """
        return cls.typical(name)._as_saved(notice, name)

    @classmethod
    def _from_key(cls, path: Path, key: dict[str, Any]) -> Self:
        card = key.get("card")
        if not isinstance(card, str) or not card:
            raise ProfileError(f"the machine profile {path} is damaged: it does not say which card it is for")
        return cls(card=card)

    @property
    def key(self) -> dict[str, str | int]:
        return machine_key(self.card)

    @property
    def basis(self) -> str:
        if self.calibrated:
            return f"measured rates of {self.card}"
        card, measures = find_card(self.card), f"'{self.calibrate_command}' measures yours"
        if card is None:
            known = f"as {self.card} is not listed" if self.card else "as no card is named"
            return f"typical rates of a GPU (data sheet of {MIDDLING.name}, {known}); {measures}"
        return f"typical rates of {card.name} ({'measured on one' if card.measured else 'data sheet'}); {measures}"

    def replaying(self) -> Self:
        # Then kernels follow one another by themselves, and none takes less than its start.
        return dataclasses.replace(
            self,
            seconds_per_operator=_SECONDS_PER_KERNEL,
            seconds_per_autograd_call=_SECONDS_PER_KERNEL,
            seconds_per_tile=_KERNELS_OF_A_TILE * _SECONDS_PER_KERNEL,
            seconds_per_pass=CALLS_OF_A_PASS * _SECONDS_PER_KERNEL,
        )

    def operator_seconds(
        self, moved_bytes: float, flops: float, work: Work = Work.VALUES, *, cached: bool = True, ragged: float = 0.0
    ) -> float:
        seconds = moved_bytes / self.memory_bytes_per_second
        if flops:
            seconds += flops / self._product_rate(flops / max(moved_bytes, 1.0))
        return max(self.seconds_per_operator, seconds)

    def _product_rate(self, flops_per_byte: float) -> float:
        few, many = self.few_channels_flops_per_second, self.flops_per_second
        if flops_per_byte <= _FEW_CHANNELS:
            return few * flops_per_byte / _FEW_CHANNELS
        share = min(1.0, math.log(flops_per_byte / _FEW_CHANNELS) / math.log(_MANY_CHANNELS / _FEW_CHANNELS))
        return few * math.exp(share * math.log(many / few))

    def page_seconds(self, nbytes: float) -> float:
        return 0.0

    def block_seconds(self, nbytes: float) -> float:
        return 0.0


BYTE_RATES: Final = (
    "cached_bytes_per_second",
    "memory_bytes_per_second",
    "reordered_bytes_per_second",
    "reordered_memory_bytes_per_second",
    "ragged_bytes_per_second",
    "statistics_bytes_per_second",
    "window_bytes_per_second",
    "new_bytes_per_second",
)
"""The rates of bytes in and out of operators, which are one on a GPU."""
_FEW_CHANNELS, _MANY_CHANNELS = 36.0, 144.0
"""Operations per byte of a 3 x 3 convolution of 16 and of 64 channels."""
_MEMORY_SHARE: Final = 0.7
"""The share of its memory's bandwidth that operators of values get (H200: 3.0 to 4.3 of 4.8 TB/s)."""
_PRODUCT_SHARE: Final = 0.425
"""The share of its tensor cores' rate that convolutions of 64 channels get, forward and backward (H200: 210 of 495
TFLOP/s at 1024 px)."""
_FEW_CHANNELS_SHARE: Final = 0.145
"""The share of its memory's bandwidth that convolutions of 16 channels get (H200: 25 TFLOP/s, 0.69 TB/s)."""
_SECONDS_PER_KERNEL: Final = 3e-6
"""The least that a kernel takes in a CUDA graph."""
_KERNELS_OF_A_TILE: Final = 50
"""Kernels of a tile beside its operators on fields, about: crops, sums, moments and their gradients."""
_MAY_BE_ZERO = (
    "shared_efficiency",
    "side_by_side_efficiency",
    "codec_bytes_per_second",
    "seconds_per_tile",
    "seconds_per_pass",
)
_LEAST_RATE, _MOST_RATE = 1e-12, 1e18
"""The bounds of rates: what is beyond them was not measured, and a file may hold any number."""
_MOST_THREADS = 4096


def _rates_of(kind: type[Machine]) -> tuple[str, ...]:
    return tuple(field.name for field in dataclasses.fields(kind) if field.type == "float")


def cache_bytes() -> int:
    """Return the last-level cache as the kernel reports it, but no more than 32 MiB, and that where it reports none.

    A guest on a large server is told of a cache of hundreds of MiB that all its neighbours use.
    """
    sizes = []
    for path in _CACHES.glob("index*/size"):
        text = path.read_text().strip()
        sizes.append(int(text[:-1]) * {"K": 2**10, "M": 2**20}.get(text[-1], 1))
    return min(max(sizes, default=_LARGEST_CACHE_BYTES), _LARGEST_CACHE_BYTES)


def machine_key(card: str = "") -> dict[str, str | int]:
    """Return what a profile depends on: the processor, the threads PyTorch uses, PyTorch itself; of a `card` its name,
    the processor that asks it, PyTorch and its CUDA (or ROCm).
    """
    key: dict[str, str | int] = {"processor": _processor(), "torch": str(torch.__version__)}
    if card:
        return key | {"card": card, "cuda": str(torch.version.cuda or torch.version.hip)}
    return key | {"threads": torch.get_num_threads()}


def profile_path(card: str = "") -> Path:
    """Return the path of this machine's profile, or of a card's: in the user's cache folder (`XDG_CACHE_HOME` is
    respected), or among temporary files where the user has no home.
    """
    home = os.path.join(os.path.expanduser("~"), ".cache")
    root = next(filter(os.path.isabs, (os.environ.get("XDG_CACHE_HOME", ""), home)), None) or tempfile.gettempdir()
    digest = hashlib.sha256(json.dumps(machine_key(card), sort_keys=True).encode()).hexdigest()
    return Path(root) / "gigagrad" / f"{'gpu' if card else 'machine'}-{digest[:12]}.json"


def write_profile(path: Path, machine: Machine) -> None:
    """Save the rates of a calibrated machine, atomically. Raises `WriteError`."""
    write_json(path, {"format": machine.profile_format, "machine": machine.key, "rates": machine.rates})


def read_profile(path: Path, card: str = "") -> dict[str, float]:
    """Read the rates in a profile of this machine, or of a card in it. Raises `ProfileError` with the reason if it is
    none.
    """
    content = _read(path, Gpu if card else Machine)
    key = machine_key(card)
    if content.get("machine") != key:
        raise ProfileError(f"the machine profile {path} belongs to {content.get('machine')}, this is {key}")
    return content["rates"]  # type: ignore[no-any-return]  # `_read` has looked


def _read(path: Path, kind: type[Machine]) -> dict[str, Any]:
    """Read a profile of any machine, with usable rates. Raises `ProfileError` with the reason if it is none."""
    try:
        content = read_record(path, kind.profile_format)
    except ValueError as error:
        raise ProfileError(f"the machine profile {error}") from error
    rates, names = content.get("rates"), set(_rates_of(kind))
    if not isinstance(rates, dict) or rates.keys() != names or not all(map(_is_rate, rates, rates.values())):
        raise ProfileError(f"the machine profile {path} is damaged: it lacks a rate, or holds one that is no number")
    return content


def _is_rate(name: str, value: object) -> bool:
    if not isinstance(value, int | float) or isinstance(value, bool):
        return False
    return _LEAST_RATE <= value <= _MOST_RATE or (value == 0 and name in _MAY_BE_ZERO)


def _processor() -> str:
    """Return the processor's name; the kernel's, where there is one, is more telling than Python's."""
    fields = processor_fields()
    words = ("model name", "cpu family", "model", "CPU implementer", "CPU part")
    told = " ".join(fields[word] for word in words if word in fields)
    return told or platform.processor() or platform.machine()


def processor_fields() -> dict[str, str]:
    """Return what Linux says of the first core, which speaks for all; nothing on other systems."""
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8", errors="replace").splitlines()
    except OSError:
        lines = []
    fields = dict[str, str]()
    for line in lines:
        name, _, value = line.partition(":")
        fields.setdefault(name.strip(), value.strip())
    return fields


def peak_flops_per_second(fields: dict[str, str]) -> float | None:
    """Return the most that one core could do in float32, by what `processor_fields` says: clock x lanes x units of
    fused products x 2; None where that does not say enough. The clock is the one that the system tells, which faster
    ones may exceed for a while.
    """
    flags = {*fields.get("flags", "").split(), *fields.get("Features", "").split()}
    hertz = 1e6 * float(fields.get("cpu MHz", 0))
    with suppress(OSError, ValueError):
        hertz = 1e3 * float(_FASTEST.read_text())
    # Zen 4 (family 25) takes two cycles for 512 bits.
    wide = "avx512f" in flags and not (fields.get("vendor_id") == "AuthenticAMD" and fields.get("cpu family") == "25")
    lanes = 16 if wide else 8 if {"avx2", "fma"} <= flags else 4 if "asimd" in flags else 0
    return hertz * lanes * 2 * 2 or None
