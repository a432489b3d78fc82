"""Processes of this machine that find each other, as torchrun starts them."""

from __future__ import annotations

import os
import socket
import subprocess
from collections.abc import Iterator, Sequence
from typing import Any


def variables_of(count: int) -> Iterator[dict[str, str]]:
    """Environment variables for each of so many ranks."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    for rank in range(count):
        where = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
        yield where | {"WORLD_SIZE": str(count), "RANK": str(rank)}


def started(command: Sequence[str], count: int, **options: Any) -> list[subprocess.Popen[str]]:
    """So many ranks of one thread each; what they print is there to be read. `options` are `Popen`'s."""
    options = {"stdout": subprocess.PIPE, "text": True} | options
    own = [os.environ | variables | {"OMP_NUM_THREADS": "1"} for variables in variables_of(count)]
    return [subprocess.Popen(command, env=environment, **options) for environment in own]
