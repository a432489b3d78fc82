"""Threads that work beside the one that runs a step."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import CancelledError, Future, ThreadPoolExecutor
from contextlib import contextmanager, suppress
from typing import Any

import torch

_here = threading.local()


class SideThreads(ThreadPoolExecutor):
    """Threads in which PyTorch's operators run on that thread alone.

    Otherwise each of them would bring a team of its own, and teams that wait for each other on the same cores take
    several times as long.
    """

    def __init__(self, count: int, name: str) -> None:
        super().__init__(count, name, initializer=_begin)
        self.count = count

    def shutdown(self, wait: bool = True, *, cancel_futures: bool = False) -> None:
        super().shutdown(wait, cancel_futures=cancel_futures)
        # What a thread sets is also the default of every thread that PyTorch meets later.
        torch.set_num_threads(torch.get_num_threads())


def wait_for(futures: Iterable[Future[Any]]) -> None:
    """Until each of them is done, has failed or will not begin. For those that the end of their pool cancelled,
    `concurrent.futures.wait` would wait for ever.
    """
    for future in futures:
        with suppress(CancelledError):
            future.exception()


def _begin() -> None:
    _here.beside = True
    torch.set_num_threads(1)


def beside_a_run() -> bool:
    """Whether this thread is one of `SideThreads`. It must not wait for their end."""
    return getattr(_here, "beside", False)


def uninterrupted(work: Callable[[], object]) -> None:
    """Do `work` to its end, whatever becomes of the caller: in a thread of its own.

    Ctrl-C is raised in the main thread alone, there between any two instructions, and again while the first one is
    dealt with. It ends this waiting, not the work. Garbage is collected in any thread: a `SideThreads` one, whose end
    the work may wait for, goes on at once. Raises what the work raised.
    """
    beside = beside_a_run()
    if not beside and threading.current_thread() is not threading.main_thread():
        work()
        return
    raised: list[BaseException] = []
    count = torch.get_num_threads()

    def whole() -> None:
        try:
            if not beside:
                torch.set_num_threads(count)  # as in the caller
            work()
        except BaseException as error:
            raised.append(error)

    thread = threading.Thread(target=whole, name="gigagrad-close")
    try:
        thread.start()
    except RuntimeError:  # no more threads: too little memory, or the interpreter's end
        work()
        return
    if not beside:
        thread.join()
        if raised:
            raise raised.pop()


@contextmanager
def operator_threads(count: int) -> Iterator[None]:
    """In this thread, operators are shared by so many.

    By 1 while other threads work: a team that waits for work takes a core from those that have some.
    """
    before, here = torch.get_num_threads(), threading.get_ident()
    torch.set_num_threads(count)
    try:
        yield
    finally:
        if threading.get_ident() == here:  # a generator that is garbage ends in whatever thread collects it
            torch.set_num_threads(before)
