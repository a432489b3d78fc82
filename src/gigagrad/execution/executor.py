"""Compute tiles in the thread that runs the step, or in several threads with one tile each. Results come in order.

A tile's operators are too small to share among threads well: every one of them would wait for the slowest thread, and
on a machine that does something else besides, it waits long. Whole tiles are independent, so each thread takes one.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from queue import SimpleQueue
from typing import TypeVar

from gigagrad.threads import SideThreads, Task, may_wait, operator_threads, wait_for

Item = TypeVar("Item")
Result = TypeVar("Result")


class Executor(ABC):
    """Computes what it is given, tile by tile."""

    at_a_time: int = 1
    """Number of tiles that may be computed side by side now."""

    @abstractmethod
    def in_order(self, items: Iterable[Item], work: Callable[[Item], Result]) -> Iterator[Result]:
        """Yield `work(item)` for every item, in the order of the items."""

    def hold_one(self) -> None:
        """Compute one tile fewer at a time from now on; return when no more than that are being computed."""

    def let_go(self) -> None:
        """Compute as many tiles at a time as at first again."""

    def close(self) -> None:
        """Stop: no more is computed."""


class Serial(Executor):
    """One tile at a time in the caller's thread; PyTorch's operators share so many of their own."""

    def __init__(self, threads: int) -> None:
        self._threads = threads

    def in_order(self, items: Iterable[Item], work: Callable[[Item], Result]) -> Iterator[Result]:
        with operator_threads(self._threads):
            yield from map(work, items)


class Threads(Executor):
    """So many threads that compute one tile each; fewer of them at a time where memory is short."""

    def __init__(self, count: int) -> None:
        self._pool = SideThreads(count, "gigagrad-tile")
        # Not a semaphore, which an interrupt of `hold_one` would leave locked.
        self._places: SimpleQueue[None] = SimpleQueue()
        self._count, self.at_a_time = count, 0
        self.let_go()

    def in_order(self, items: Iterable[Item], work: Callable[[Item], Result]) -> Iterator[Result]:
        def in_its_place(item: Item) -> Result:
            self._places.get()
            try:
                return work(item)
            finally:
                self._places.put(None)

        with operator_threads(1):
            # One in the queue, so that nobody waits for whoever delivers the items.
            yield from ahead(items, in_its_place, self._pool, self._count)

    def hold_one(self) -> None:
        assert self.at_a_time > 1
        self._places.get()
        self.at_a_time -= 1

    def let_go(self) -> None:
        while self.at_a_time < self._count:
            self._places.put(None)
            self.at_a_time += 1

    def close(self) -> None:
        self._pool.shutdown(cancel=True)


def ahead(items: Iterable[Item], work: Callable[[Item], Result], pool: SideThreads, most: int) -> Iterator[Result]:
    """Yield `work(item)` for every item, in the order of the items: up to `most` of them beyond the one that is waited
    for.

    Leaving early, by an error too, cancels what has not begun and waits for what has; but for a thread of the pool that
    collects an iterator which nobody holds any more.
    """
    waiting: deque[Task[Result]] = deque()
    try:
        for item in items:
            waiting.append(pool.submit(work, item))
            del item
            if len(waiting) > most:
                yield waiting.popleft().result()
        while waiting:
            yield waiting.popleft().result()
    finally:
        for task in waiting:
            task.cancel()
        if may_wait():
            wait_for(waiting)
