"""Read the machines that may be rented for a cohort: a YAML list of their prices, memory and rates; and what is planned
for where a machine is not this one.
"""

from __future__ import annotations

import dataclasses
import math
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, ClassVar

from gigagrad.config import Settings, read_yaml
from gigagrad.errors import ConfigError

if TYPE_CHECKING:
    from gigagrad.devices import Device, Machine


@dataclass(frozen=True, kw_only=True)
class MachineKind(Settings):
    """A kind of machine that may be rented.

    Attributes:
        name: what it is called in tables.
        price: of an hour, in any currency, one for all.
        memory: peak memory of the process, or of the GPU, as "120 GiB".
        device: "cpu" or "cuda".
        cores: of a processor, that compute tiles; none given: those of `rates`.
        rates: file that `gigagrad calibrate` saved there; a processor without one is taken to have this one's rates.
        card: instead of `rates`, the name of a GPU whose data sheet is known.
        most: number of machines that there are.
    """

    name: str
    price: float
    memory: str
    device: str = "cpu"
    cores: int | None = None
    rates: str | Path | None = None
    card: str | None = None
    most: int = 1

    PATHS: ClassVar = ("rates",)
    LIMITS: ClassVar = {"price": (0, math.inf), "cores": (1, 4096), "most": (0, 10_000)}
    CHOICES: ClassVar = {"device": ("cpu", "cuda")}

    def __post_init__(self) -> None:
        super().__post_init__()
        if not math.isfinite(self.price):
            raise ConfigError(f"price must be a number, got {self.price}")
        if self.rates is None and (self.card if self.device == "cuda" else self.cores) is None:
            raise ConfigError(f"give its rates or its {'card' if self.device == 'cuda' else 'cores'}")


def read_kinds(path: Path) -> tuple[MachineKind, ...]:
    """Read a YAML list of machines; relative paths in it are taken from its folder.

    Raises:
        ConfigError: the file cannot be read, holds no such list, or two of its machines have one name.
    """
    try:
        content = read_yaml(path)
    except ValueError as error:
        raise ConfigError(f"cannot read the machines {path}: {error}") from error
    if not isinstance(content, list) or not content or not all(isinstance(each, dict) for each in content):
        raise ConfigError(f"{path} is no list of machines; write '- name: NAME', and below it price and memory")
    kinds = tuple(_read_kind(each, f"{path}, machine {number}") for number, each in enumerate(content, 1))
    names = [each.name for each in kinds]
    if twice := sorted({name for name in names if names.count(name) > 1}):
        raise ConfigError(f"{path} has several machines {twice[0]!r}; give each its own name")
    return tuple(each.relative_to(path.parent) for each in kinds)


def _read_kind(content: dict[str, object], where: str) -> MachineKind:
    needed = [f.name for f in dataclasses.fields(MachineKind) if f.default is dataclasses.MISSING]
    if missing := [name for name in needed if name not in content]:
        raise ConfigError(f"{where}: {missing[0]} is missing; give its {', '.join(needed)}")
    try:
        return MachineKind.from_dict(content)
    except ConfigError as error:
        raise ConfigError(f"{where}: {error}") from error


def planned_for(
    device: str, card: str | None, rates: Path | None, threads: int | None, memory: str | None
) -> tuple[str | Device, Machine | None]:
    """Return the device that is planned for, and its machine where that is not this one.

    Raises:
        ConfigError: settings of processors with a GPU and the other way round, and a GPU that need not be here and of
            which nobody says how much memory it has.
    """
    if device == "cuda":
        return _planned_gpu(card, rates, threads, memory)
    if card is not None:
        raise ConfigError(f"--card names a GPU, got {card!r} with --device {device}; add --device cuda")
    if rates is None and threads is None:
        return device, None
    from gigagrad.devices import Machine, device_for

    machine = device_for(device).machine() if rates is None else Machine.from_profile(rates)
    return device, machine if threads is None else dataclasses.replace(machine, threads=threads)


def _planned_gpu(
    card: str | None, rates: Path | None, threads: int | None, memory: str | None
) -> tuple[str | Device, Machine | None]:
    import torch

    from gigagrad.devices.cuda import PlannedCuda
    from gigagrad.devices.machine import Gpu

    if threads is not None:
        raise ConfigError("--threads are of processors, got --device cuda; leave them out")
    if rates is not None and card is not None:
        raise ConfigError(f"got --rates {rates} and --card {card}, expected one of both; leave one out")
    if rates is None and card is None and torch.cuda.is_available():
        return "cuda", None
    if memory is None:
        why = "a card of --rates or --card is not asked" if torch.cuda.is_available() else "there is no GPU here to ask"
        raise ConfigError(f"{why}; give what yours may use of its memory, e.g. --memory 40GiB")
    if rates is not None:
        machine = Gpu.from_profile(rates)
    elif card is not None:
        machine = Gpu.listed(card)
    else:
        machine = Gpu.typical("")
    return PlannedCuda(machine), machine
