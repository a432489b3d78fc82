"""Shares of a cohort: processes, on one machine or on many, that go through it side by side and into one folder.

They say nothing to each other. Which slides are whose follows from the list of slides and the share alone; what is done
is seen by the files that are there; and a claim tells whoever gives the same command again on the same machine that the
first still runs. A claim that is left behind holds nobody up.
"""

from __future__ import annotations

import os
import platform
import re
import time
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self, TypeVar

from gigagrad.errors import ConfigError, WriteError
from gigagrad.files import HOST, read_json, write_json

_T = TypeVar("_T")


@dataclass(frozen=True, slots=True)
class Share:
    """The share `number` of `count`, counted from 1; written `2/4`. Raises `ConfigError` for one that there is not."""

    number: int
    count: int

    def __post_init__(self) -> None:
        if not 1 <= self.number <= self.count:
            raise ConfigError(f"there is no share {self}; write I/N with I from 1 to N, as 2/4")

    @classmethod
    def parse(cls, text: str) -> Self:
        """Read a share. Raises `ConfigError` for what is none."""
        found = re.fullmatch(r"([0-9]{1,9})/([0-9]{1,9})", text)
        if found is None:
            raise ConfigError(f"a share is written I/N with I from 1 to N, as 2/4; got {text!r}")
        return cls(int(found[1]), int(found[2]))

    def __str__(self) -> str:
        return f"{self.number}/{self.count}"

    def named(self, job: str) -> str:
        """Name a job of this share."""
        return job if self.count == 1 else f"{job} (share {self.number} of {self.count})"

    def deal(self, items: Sequence[_T], sizes: Sequence[int]) -> tuple[_T, ...]:
        """Return the items of this share, in their order. All are dealt out like cards, the largest first, to and fro.

        So shares are alike in number, whatever the sizes say, and nearly in size.
        """
        order = sorted(range(len(items)), key=lambda at: -sizes[at])
        both_ways = 2 * self.count
        turns = (self.number - 1, both_ways - self.number)
        return tuple(items[at] for at in sorted(at for turn, at in enumerate(order) if turn % both_ways in turns))


def share_from(environment: Mapping[str, str]) -> tuple[str, str]:
    """Return the share that Slurm's array or torchrun means, and the variables that say so; the whole and "" where none
    do.

    In an array of torchruns each task's share is shared again. Raises `ConfigError` for an array with gaps.
    """
    number, count, said = 0, 1, []
    if "SLURM_ARRAY_TASK_ID" in environment:
        at, first, last, tasks, step = (
            _number(environment, f"SLURM_ARRAY_TASK_{name}", default)
            for name, default in (("ID", None), ("MIN", None), ("MAX", None), ("COUNT", None), ("STEP", "1"))
        )
        if (last - first) // step + 1 != tasks:
            raise ConfigError(
                f"the {tasks} tasks of the Slurm array from {first} to {last} have gaps; say --share I/N for each"
            )
        number, count = (at - first) // step, tasks
        said.append("SLURM_ARRAY_TASK_ID")
    if "RANK" in environment and "WORLD_SIZE" in environment:
        rank, ranks = (_number(environment, name) for name in ("RANK", "WORLD_SIZE"))
        number, count = number * ranks + rank, count * ranks
        said.append("RANK")
    return str(Share(number + 1, count)), " and ".join(said)


def _number(environment: Mapping[str, str], name: str, default: str | None = None) -> int:
    text = environment.get(name, default)
    if text is None or not text.isdecimal():
        raise ConfigError(f"the variable {name} is {text!r}, expected a whole number; say --share I/N")
    return int(text)


@contextmanager
def claimed(out: Path, share: Share, names: Collection[str]) -> Iterator[None]:
    """Let others know, in the block, that this process makes what belongs to slides of these names in the folder `out`,
    which is made if it is missing.

    A claim is a hidden file that names the machine, the process and since when. Those of processes that have ended, and
    of other machines where they are of the same slides, are taken away: the two would write the same. Raises
    `ConfigError` where a process of this machine is at work on one of the slides, and `WriteError`.
    """
    own, names = out / f".claim-{HOST}-{os.getpid()}.json", sorted(names)
    claim = {"share": str(share), **this_process(), "slides": names}
    try:
        out.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise WriteError(f"cannot make the folder {out}: {error.strerror}; choose another --out") from error
    write_json(own, claim)  # before looking: of two that begin together, none may overlook the other
    try:
        for path in out.glob(".claim-*.json"):
            if path != own:
                _settle(path, out, names)
        yield
    finally:
        own.unlink(missing_ok=True)


def _settle(path: Path, out: Path, names: Sequence[str]) -> None:
    """Take a claim away that counts no more. Raises `ConfigError` for one that does."""
    try:
        claim: dict[str, Any] = read_json(path)
        both = sorted(set(claim["slides"]).intersection(names))
        here, share, pid, started = claim["host"] == platform.node(), claim["share"], claim["pid"], claim["started"]
        lives = here and is_alive(pid, started)
    except (ValueError, TypeError, KeyError):  # of another version, or gone meanwhile
        path.unlink(missing_ok=True)
        return
    if lives and both:
        raise ConfigError(
            f"process {pid}, started {minute(started)}, is at work on {both[0]} in {out} (share {share}); "
            "let it finish or stop it, then give the command again"
        )
    if both or (here and not lives):
        path.unlink(missing_ok=True)


def this_process() -> dict[str, Any]:
    """Return what others know this process by: the machine, its number, when it started."""
    import psutil

    pid = os.getpid()
    return {"host": platform.node(), "pid": pid, "started": psutil.Process(pid).create_time()}


def minute(seconds: float) -> str:
    """Write a time as people write it."""
    return time.strftime("%Y-%m-%d %H:%M", time.localtime(seconds))


def is_alive(pid: int, started: float) -> bool:
    """Return whether this process of this machine runs; another of the same number began at another time."""
    import psutil

    try:
        process = psutil.Process(pid)
        return abs(process.create_time() - started) < 1 and process.status() != psutil.STATUS_ZOMBIE
    except psutil.Error:
        return False
