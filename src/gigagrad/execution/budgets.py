"""What a run may use in every tier, as the caller named it."""

from __future__ import annotations

import shutil
from dataclasses import dataclass
from pathlib import Path

import psutil

from gigagrad.errors import ConfigError, StoreError
from gigagrad.units import parse_bytes

_FREE_SHARE = 0.95
"""Of what is free now, the share that a run counts on where no budget is named: others use the machine, too."""


@dataclass(frozen=True, slots=True)
class Budgets:
    """Bytes of memory (None: unbounded), of host memory beside a GPU, of files in `scratch` (None: what is free)."""

    memory_bytes: int | None
    host_bytes: int | None
    scratch: Path | None
    scratch_bytes: int | None

    @classmethod
    def parse(
        cls,
        memory: str | int | None,
        host_memory: str | int | None,
        scratch: str | Path | None,
        scratch_bytes: str | int | None,
    ) -> Budgets:
        """Raises ConfigError for what is no number of bytes, and for a budget without its tier."""
        if scratch is None and scratch_bytes is not None:
            raise ConfigError("scratch_bytes bounds the files in a scratch folder; name one with scratch=")
        try:
            amounts = [None if given is None else parse_bytes(given) for given in (memory, host_memory, scratch_bytes)]
        except ValueError as error:
            raise ConfigError(str(error)) from None
        return cls(amounts[0], amounts[1], None if scratch is None else Path(scratch), amounts[2])

    def host_room(self) -> int:
        """Bytes that kept fields may take of the host's memory."""
        free = int(psutil.virtual_memory().available * _FREE_SHARE)
        return free if self.host_bytes is None else self.host_bytes

    def scratch_room(self) -> int:
        """Bytes that files may take now. Raises StoreError if the folder is missing."""
        if self.scratch is None:
            return 0
        try:
            free = int(shutil.disk_usage(self.scratch).free * _FREE_SHARE)
        except OSError as error:
            raise StoreError(f"cannot use scratch folder '{self.scratch}': {error.strerror or error}") from error
        return free if self.scratch_bytes is None else min(free, self.scratch_bytes)
