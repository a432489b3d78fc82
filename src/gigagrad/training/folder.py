"""The run folder: which file is called what, and what is known about the machine that made them."""

from __future__ import annotations

import os
import platform
import shutil
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import torch

from gigagrad.errors import ConfigError
from gigagrad.models.saved import BEST

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
        self.config = path / "config.yaml"
        self.environment = path / "environment.json"
        self.plan_data = path / "plan.json"
        self.plan_text = path / "plan.txt"
        self._all: tuple[Path, ...] = tuple(vars(self).values())
        self.path = path

    def optimizer_after(self, step: int) -> Path:
        """The folder of the optimizer's state, where ranks share it."""
        return self.optimizer / f"step-{step}"

    def clear(self) -> None:
        """Remove the files of an earlier run; the checkpoint first, so that half a run is never continued."""
        for path in self._all:
            if path.is_dir() and not path.is_symlink():
                shutil.rmtree(path)
            else:
                path.unlink(missing_ok=True)

    def check_own(self) -> None:
        """Raises `ConfigError` where a file of ours is a link: whoever made the folder could have us write anywhere."""
        for path in self._all:
            if path.is_symlink():
                raise ConfigError(f"{path} is a link; a run is continued from files of its own, so copy them here")

    def leftover(self) -> Path | None:
        """A file in the place of one of ours, None if there is none."""
        return next((path for path in self._all if path.exists()), None)


def environment() -> dict[str, Any]:
    """Versions and the machine, as plain values: what somebody needs to run the same thing again."""
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
