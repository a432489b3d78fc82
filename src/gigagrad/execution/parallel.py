"""Tiles side by side: several threads compute one tile each, and the results come back in order.

A tile's operators are too small to share among threads well: every one of them would wait for the slowest thread, and
on a machine that does something else besides, it waits long. Whole tiles are independent, so each thread takes one.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Iterator
from queue import SimpleQueue
from typing import TypeVar

from gigagrad.threads import SideThreads, Task, beside_a_run, operator_threads, wait_for

Item = TypeVar("Item")
Result = TypeVar("Result")


class TileThreads(SideThreads):
    """Threads that compute one tile each; fewer of them at a time where memory is short."""

    def __init__(self, count: int) -> None:
        super().__init__(count, "gigagrad-tile")
        # Not a semaphore, which an interrupt of `hold_one` would leave locked.
        self._places: SimpleQueue[None] = SimpleQueue()
        self._held = count
        self.let_go()

    @property
    def at_a_time(self) -> int:
        """How many tiles may be computed beside each other now."""
        return self.count - self._held

    def hold_one(self) -> None:
        """From now on one tile fewer at a time; returns when no more than that are at work."""
        assert self.at_a_time > 1
        self._places.get()
        self._held += 1

    def let_go(self) -> None:
        """As many at a time as there are threads again."""
        while self._held:
            self._places.put(None)
            self._held -= 1

    def in_its_place(self, work: Callable[[Item], Result]) -> Callable[[Item], Result]:
        """The same work, begun only when a place is free."""

        def placed(item: Item) -> Result:
            self._places.get()
            try:
                return work(item)
            finally:
                self._places.put(None)

        return placed


def in_order(items: Iterable[Item], work: Callable[[Item], Result], pool: TileThreads | None) -> Iterator[Result]:
    """`work(item)` for every item, in the order of the items; as many at a time as the pool has threads.

    Without a pool everything runs in the caller's thread, and PyTorch's operators share their own threads.
    """
    if pool is None:
        yield from map(work, items)
        return
    with operator_threads(1):
        # One in the queue, so that nobody waits for whoever delivers the items.
        yield from ahead(items, pool.in_its_place(work), pool, pool.count)


def ahead(items: Iterable[Item], work: Callable[[Item], Result], pool: SideThreads, most: int) -> Iterator[Result]:
    """`work(item)` for every item, in the order of the items: up to `most` of them beyond the one that is waited for.

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
        if not beside_a_run():
            wait_for(waiting)
