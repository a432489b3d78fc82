"""Ranks as processes that begin with everything imported: a server has PyTorch and gigagrad loaded, and forks.

Where it matters how a process begins, tests start one (tests/ranks/started.py).
"""

from __future__ import annotations

import atexit
import multiprocessing
import os
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from tempfile import mkdtemp
from typing import Any

import pytest

from tests.ranks.started import variables_of

_LOADED = ["torch.distributed.device_mesh", "gigagrad.cli", "gigagrad.training", "tests.ranks.worker"]


class Rank:
    """One process: `call(*given)`, with what it prints in files."""

    def __init__(
        self, context: Any, call: Callable[..., Any], given: tuple[Any, ...], variables: dict[str, str]
    ) -> None:
        folder = Path(mkdtemp(prefix="rank-"))
        self._out, self._err = folder / "out", folder / "err"
        self._process = context.Process(target=_begin, args=(call, given, variables, self._out, self._err, os.getcwd()))
        self._process.start()

    def lines(self) -> Iterator[str]:
        """Yields the lines of standard output as they come."""
        place = 0
        while True:
            alive = self._process.is_alive()
            text = self._out.read_text() if self._out.exists() else ""
            while (end := text.find("\n", place)) >= 0:
                yield text[place : end + 1]
                place = end + 1
            if not alive:
                return
            time.sleep(0.02)

    def ended(self, timeout: float = 200.0) -> tuple[int, str, str]:
        """Returns the exit code, and what was printed on standard output and error."""
        self._process.join(timeout)
        assert self._process.exitcode is not None, f"no end within {timeout:g} s"
        return self._process.exitcode, self._out.read_text(), self._err.read_text()

    def send(self, signal: int) -> None:
        os.kill(self._process.pid, signal)

    def kill(self) -> None:
        self._process.kill()
        self._process.join()


def forked(call: Callable[..., Any], given: tuple[Any, ...], count: int) -> list[Rank]:
    """Starts so many ranks of one thread each, which call this function of a module."""
    context = multiprocessing.get_context("forkserver")
    with pytest.MonkeyPatch.context() as patch:  # what is read once, as PyTorch is loaded
        patch.setenv("TORCH_CPP_LOG_LEVEL", "ERROR")
        context.set_forkserver_preload(_LOADED)
        return [Rank(context, call, given, variables) for variables in variables_of(count)]


def command(arguments: list[str]) -> None:
    """Runs `gigagrad` with these arguments, as the interpreter does."""
    from gigagrad.cli import main

    sys.path.insert(0, "")  # the folder that it is started in
    sys.argv = ["gigagrad", *arguments]
    sys.exit(main())


def _begin(
    call: Callable[..., Any], given: tuple[Any, ...], variables: dict[str, str], out: Path, err: Path, folder: str
) -> None:
    import torch

    for path, descriptor in ((out, 1), (err, 2)):
        os.dup2(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC), descriptor)
    os.environ.update(variables, OMP_NUM_THREADS="1")
    torch.set_num_threads(1)
    os.chdir(folder)
    try:
        call(*given)
    finally:
        atexit._run_exitfuncs()  # which processes of multiprocessing leave out
        sys.stdout.flush()
        sys.stderr.flush()
