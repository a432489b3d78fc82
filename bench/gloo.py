"""What the processes of a benchmark need to find each other on this machine."""

from __future__ import annotations

import socket
from collections.abc import Iterator


def variables_of(count: int) -> Iterator[dict[str, str]]:
    """Environment variables for each of so many ranks; none for one process by itself."""
    if count == 1:
        yield {}
        return
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    for rank in range(count):
        where = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
        yield where | {"WORLD_SIZE": str(count), "RANK": str(rank)}
