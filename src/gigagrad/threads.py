"""Threads that work beside the one that runs a step."""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager

import torch


class SideThreads(ThreadPoolExecutor):
    """Threads in which PyTorch's operators run on that thread alone.

    Otherwise each of them would bring a team of its own, and teams that wait for each other on the same cores take
    several times as long.
    """

    def __init__(self, count: int, name: str) -> None:
        super().__init__(count, name, initializer=torch.set_num_threads, initargs=(1,))
        self.count = count

    def shutdown(self, wait: bool = True, *, cancel_futures: bool = False) -> None:
        super().shutdown(wait, cancel_futures=cancel_futures)
        # What a thread sets is also the default of every thread that PyTorch meets later.
        torch.set_num_threads(torch.get_num_threads())


@contextmanager
def operator_threads(count: int) -> Iterator[None]:
    """In this thread, operators are shared by so many.

    By 1 while other threads work: a team that waits for work takes a core from those that have some.
    """
    before = torch.get_num_threads()
    torch.set_num_threads(count)
    try:
        yield
    finally:
        torch.set_num_threads(before)
