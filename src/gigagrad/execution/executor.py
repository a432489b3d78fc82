"""Compute tiles in the thread that runs the step, or in several threads with one tile each. Results come in order.

A tile's operators are too small to share among threads well: every one of them would wait for the slowest thread, and
on a machine that does something else besides, it waits long. Whole tiles are independent, so each thread takes one.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Iterator
from queue import SimpleQueue
from typing import TypeVar

from gigagrad.threads import SideThreads, Task, may_wait, operator_threads, wait_for

Item = TypeVar("Item")
Result = TypeVar("Result")


class Executor:
    """Computes what it is given, tile by tile: fewer tiles at a time where memory is short."""

    def __init__(self, workers: int, threads: int) -> None:
        """Compute so many tiles side by side, each in a thread of its own; one at a time in the caller's thread, where
        so many `threads` share PyTorch's operators.
        """
        self._pool = SideThreads(workers, "gigagrad-tile") if workers > 1 else None
        # Not a semaphore, which an interrupt of `hold_one` would leave locked.
        self._places: SimpleQueue[None] = SimpleQueue()
        self._workers, self._threads = workers, threads
        self.at_a_time = 0
        """Number of tiles that may be computed side by side now."""
        self.let_go()

    def in_order(self, items: Iterable[Item], work: Callable[[Item], Result]) -> Iterator[Result]:
        """Yield `work(item)` for every item, in the order of the items."""

        def in_its_place(item: Item) -> Result:
            self._places.get()
            try:
                return work(item)
            finally:
                self._places.put(None)

        with operator_threads(self._threads if self._pool is None else 1):
            if self._pool is None:
                yield from map(work, items)
            else:  # one in the queue, so that nobody waits for whoever delivers the items
                yield from ahead(items, in_its_place, self._pool, self._workers)

    def hold_one(self) -> None:
        """Compute one tile fewer at a time from now on; return when no more than that are being computed."""
        assert self.at_a_time > 1
        self._places.get()
        self.at_a_time -= 1

    def let_go(self) -> None:
        """Compute as many tiles at a time as at first again."""
        while self.at_a_time < self._workers:
            self._places.put(None)
            self.at_a_time += 1

    def close(self) -> None:
        """Stop: no more is computed."""
        if self._pool is not None:
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
