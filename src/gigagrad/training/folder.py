"""The run folder: which file is called what, what is known about the machine that made them, and the checkpoint.

A checkpoint has everything that a step depends on, in one file that is whole or not there. The order of slides, their
transforms and what random operators draw for them are functions of the seed, the epoch and the index, so they need no
state in it.
"""

from __future__ import annotations

import dataclasses
import math
import os
import platform
import shutil
import time
import uuid
from collections.abc import Collection, Iterator, Mapping
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any, get_origin, get_type_hints

import torch
from filelock import FileLock, Timeout
from torch import Tensor

from gigagrad.config.fit import FitConfig
from gigagrad.errors import ConfigError
from gigagrad.files import read_json, read_tensors, write_json, write_tensors, write_text
from gigagrad.models.saved import BEST
from gigagrad.shares import is_alive, minute, this_process

_LOOK_SECONDS = 0.1
_WRITER_SECONDS = 2.0
_PACKAGES = ("gigagrad", "torch", "numpy", "tifffile", "imagecodecs", "openslide-python", "zarr")


class RunFolder:
    """The files of one run. Only these are ever written or removed, whatever else lies in the folder."""

    def __init__(self, path: Path) -> None:
        self.checkpoint = path / "checkpoint.pt"
        self.optimizer = path / "optimizer"
        self.journal = path / "journal"
        self.summary = path / "summary.json"
        self.best = path / BEST
        self.model = path / "model"
        self.metrics = path / "metrics.jsonl"
        self.curves = path / "tensorboard"
        self.tracking = path / "tracking.txt"
        self.labels = path / "labels"
        self.features = path / "features"
        self.config = path / "config.yaml"
        self.environment = path / "environment.json"
        self.plan_data = path / "plan.json"
        self.plan_text = path / "plan.txt"
        self._all: tuple[Path, ...] = tuple(vars(self).values())
        self.path = path
        self._lock = path / ".gigagrad.lock"
        """Held by whoever writes the run, whose name is in the other file."""
        self._writer = path / ".writer.json"

    @contextmanager
    def written(self, launches: Collection[str] = (), patience: float = 0.0) -> Iterator[None]:
        """Keep everybody else from writing the run in the block: the system keeps the lock for as long as this process
        lives.

        One of `launches`, started again, waits for so many seconds until the process that it replaces has ended.
        Raises `ConfigError` where another process writes the run. Where nothing can be written, or nothing be locked
        (some shared disks), there is no lock.
        """
        made = [folder for folder in (self.path, *self.path.parents) if not folder.exists()]
        with ExitStack() as stack:
            with suppress(OSError, NotImplementedError):
                self.path.mkdir(parents=True, exist_ok=True)
                lock = FileLock(self._lock, thread_local=False)
                self._acquire(lock, {*launches}, patience)
                stack.callback(self._release, lock, made)
                write_json(self._writer, {**this_process(), "launches": sorted(launches)})
            yield

    def _acquire(self, lock: FileLock, launches: set[str], patience: float) -> None:
        replaced_end = time.monotonic() + patience
        unknown_end = time.monotonic() + _WRITER_SECONDS
        while not lock.is_locked:
            try:
                lock.acquire(blocking=False)
            except Timeout:
                writer, end = self._known_writer(), 0.0
                if not writer:  # about to write its name, or at its end
                    end = unknown_end
                elif not launches.isdisjoint(writer["launches"]):
                    end, unknown_end = replaced_end, time.monotonic() + _WRITER_SECONDS
                if time.monotonic() > end:
                    raise ConfigError(
                        f"{writer.get('said', 'another process')} is writing the run in {self.path}; let it finish or "
                        "stop it, then give the command again, or choose another --out"
                    ) from None
                time.sleep(_LOOK_SECONDS)

    def _known_writer(self) -> dict[str, Any]:
        """Read what is written down of whoever has the lock (`said`: in words), or return nothing."""
        with suppress(ValueError, TypeError, KeyError):  # missing, or of another version
            writer: dict[str, Any] = read_json(self._writer)
            host, pid, started = writer["host"], writer["pid"], writer["started"]
            if host != platform.node() or is_alive(pid, started):
                said = f"process {pid} on {host}, started {minute(started)},"
                return {"said": said, "launches": writer.get("launches", ())}
        return {}

    def _release(self, lock: FileLock, made: Collection[Path]) -> None:
        """Leave nothing of the lock, nor of folders in which no run was begun."""
        with suppress(OSError):
            self._writer.unlink(missing_ok=True)
            self._lock.unlink(missing_ok=True)  # first, so that nobody ever holds a lock of this name unseen
        lock.release()
        with suppress(OSError):  # up to the first that holds something
            for folder in made:
                folder.rmdir()

    def tracking_key(self) -> str:
        """Return the key by which a program that tracks the run finds it again. Raises `WriteError`."""
        key = self.tracking.read_text(encoding="ascii", errors="replace") if self.tracking.exists() else ""
        if not key.isalnum():
            key = uuid.uuid4().hex
            write_text(self.tracking, key)
        return key

    def optimizer_after(self, step: int) -> Path:
        """Return the folder of the optimizer's state, where ranks share it."""
        return self.optimizer / f"step-{step}"

    def clear(self) -> None:
        """Remove the files of an earlier run; the checkpoint first, so that half a run is never continued."""
        for path in self._all:
            if path.is_dir() and not path.is_symlink():
                shutil.rmtree(path)
            else:
                path.unlink(missing_ok=True)

    def check_own(self) -> None:
        """Raise `ConfigError` where a file of ours is a link: whoever made the folder could have us write anywhere."""
        for path in self._all:
            if path.is_symlink():
                raise ConfigError(f"{path} is a link; a run is continued from files of its own, so copy them here")

    def other_versions(self) -> list[str]:
        """List the packages whose versions are others than those that the run was last written with."""
        try:
            before: dict[str, Any] = read_json(self.environment)["packages"]
            now = environment()["packages"]
            return [f"{name} {before[name]} then, {now[name]} now" for name in now if before[name] != now[name]]
        except (ValueError, KeyError, TypeError):  # missing, or of another version
            return []

    def leftover(self) -> Path | None:
        """Return a file in the place of one of ours, None if there is none."""
        return next((path for path in self._all if path.exists()), None)


def environment() -> dict[str, Any]:
    """Return versions and the machine, as plain values: what somebody needs to run the same thing again."""
    import psutil

    return {
        "python": platform.python_version(),
        "packages": {name: _version(name) for name in _PACKAGES},
        "platform": platform.platform(),
        "processor": platform.processor() or platform.machine(),
        "cpus": os.cpu_count(),
        "threads": torch.get_num_threads(),
        "memory_bytes": psutil.virtual_memory().total,
        "cuda": torch.cuda.get_device_name() if torch.cuda.is_available() else None,
    }


def _version(package: str) -> str | None:
    try:
        return version(package)
    except PackageNotFoundError:
        return None


_KIND = "gigagrad checkpoint"


@dataclass(frozen=True, slots=True)
class Progress:
    """The progress of a run: `epoch` whole epochs (validated), then `index` slides of the next; `step` steps in all."""

    epoch: int = 0
    index: int = 0
    step: int = 0
    best_loss: float = math.inf
    best_epoch: int = 0


@dataclass(frozen=True, slots=True)
class Checkpoint:
    """A run at the end of a step.

    `config` as `FitConfig.to_dict`; `cohort` is its fingerprint; `engine` the choices the engine made by measurement;
    `tile` the `(height, width)` the plan chose; `metrics_bytes` how much of the metrics file belongs to it; `average`
    is that of the weights, empty where none is kept; `further` what no state dict has
    (`state.FurtherState`). All ranks hold the same, the first writes it, any number go on;
    of an optimizer's state that ranks share, `optimizer` says only how many tensors lie in a folder of its own.
    `launches`: what has started those that wrote it, and starts them again. `contents`: digests of the slides, masks
    and annotations, by path, and of the labels that the run made, by name.
    """

    config: dict[str, Any]
    cohort: str
    progress: Progress
    model: dict[str, Tensor]
    optimizer: dict[str, Any]
    engine: dict[str, Any]
    tile: tuple[int, int]
    metrics_bytes: int
    average: dict[str, Tensor]
    further: dict[str, Any]
    launches: tuple[str, ...]
    contents: dict[str, str]

    def save(self, path: Path) -> None:
        """Replace `path` atomically. Raises `WriteError`."""
        fields = {field.name: getattr(self, field.name) for field in dataclasses.fields(self)}
        fields |= {"progress": dataclasses.asdict(self.progress)}
        fields |= {"tile": list(self.tile), "launches": list(self.launches)}
        write_tensors(path, {"format": _KIND, "version": 1, **fields})

    @classmethod
    def load(cls, path: Path) -> Checkpoint:
        """Read a file of `save`. Raises `ConfigError` when it is damaged, with the remedy."""
        try:
            payload = read_tensors(path, _KIND)
            # Of those that were written before there were any.
            payload = {"average": {}, "further": {}, "launches": [], "contents": {}} | payload
            fields = {field.name: payload[field.name] for field in dataclasses.fields(cls)}
            fields |= {"progress": Progress(**payload["progress"])}
            fields |= {"tile": tuple(payload["tile"]), "launches": tuple(payload["launches"])}
            _check_kinds(fields)
        except (ValueError, KeyError, TypeError) as error:
            reason = error if isinstance(error, ValueError) else f"{path} was written by another version"
            raise ConfigError(f"cannot continue the run: {reason}; start anew with --overwrite") from error
        return cls(**fields)

    def check_same_run(self, config: FitConfig, cohort: str) -> None:
        """Raise `ConfigError` naming the settings that differ from those the run began with."""
        new = config.to_dict()
        # A setting that did not exist when the run began had the value that is now the default.
        defaults = FitConfig(slides="", out="").to_dict()
        old = {**{name: new[name] for name in new if new[name] == defaults[name]}, **self.config}
        # How long a run is decides its rates where these follow a schedule.
        free = {*config.MAY_CHANGE} - (set() if config.schedule == "constant" else {"epochs"})
        changed = [key for key in {**old, **new} if key not in free and old.get(key) != new.get(key)]
        differing = [f"{key}: {old.get(key)!r} then, {new.get(key)!r} now" for key in changed]
        if differing:
            raise ConfigError(
                f"{config.out} holds a run with other settings ({'; '.join(differing)}); "
                "use those, choose another --out, or start anew with --overwrite"
            )
        if cohort != self.cohort:
            raise ConfigError(
                f"the rows of {config.slides} changed since the run in {config.out} began; "
                "restore them, choose another --out, or start anew with --overwrite"
            )

    def check_same_contents(self, config: FitConfig, contents: Mapping[str, str]) -> None:
        """Raise `ConfigError` naming the files that are no longer what they were; those of older versions' runs, which
        did not look, may be anything.
        """
        changed = [path for path, digest in contents.items() if self.contents.get(path, digest) != digest]
        if changed:
            more = f" and {len(changed) - 1} more files" if len(changed) > 1 else ""
            raise ConfigError(
                f"{changed[0]}{more} changed since the run in {config.out} began; restore what was there, choose "
                "another --out, or start anew with --overwrite"
            )


def _check_kinds(fields: Mapping[str, Any]) -> None:
    """Raise `TypeError` where something else lies in the place of what a run needs to go on."""
    progress: Progress = fields["progress"]
    counts = (progress.epoch, progress.index, progress.step, progress.best_epoch, fields["metrics_bytes"])
    kinds = [isinstance(fields[name], get_origin(kind) or kind) for name, kind in get_type_hints(Checkpoint).items()]
    if not all([*kinds, *(isinstance(name, str) for name in fields["launches"])]):
        raise TypeError("a field of another type")
    if not all(type(count) is int and count >= 0 for count in counts) or type(progress.best_loss) is not float:
        raise TypeError("no progress")
