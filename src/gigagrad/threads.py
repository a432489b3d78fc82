"""Run threads beside the one that runs a step, and work that Ctrl-C must not end.

Ctrl-C is raised in the main thread between any two instructions of Python. `threading.Condition`, and with it events,
semaphores, futures and executors, is Python, too: an interrupt in the middle of it leaves its lock held, and whoever
needs that waits for ever. So the main thread meets other threads here only through locks and queues whose operations
are one call of C each.

Python collects garbage in the middle of anything, with any lock held, so that whoever ends a run because it is garbage
waits for nobody: another thread may need that lock in order to go on.
"""

from __future__ import annotations

import _thread
import atexit
import gc
import os
import sys
import threading
import weakref
from collections import OrderedDict, deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import CancelledError
from contextlib import contextmanager, suppress
from functools import partial
from queue import Empty, SimpleQueue
from typing import Any, Generic, Self, TypeVar
from weakref import WeakValueDictionary

Result = TypeVar("Result")
Item = TypeVar("Item")

_LOOK_SECONDS = 1.0
"""The pause after which a waiting thread looks for itself: one that was interrupted may not have passed the bell on."""

_here = threading.local()
_collections: OrderedDict[str, object] = OrderedDict()
"""The report of the last collection of garbage, by `start` and `stop`, the later one last."""
# Calls of C alone: an interrupt within Python would be printed and dropped, and the phase with it.
gc.callbacks += [partial(setattr, _here), _collections.__setitem__, _collections.move_to_end]  # type: ignore[list-item]


def _is_collecting() -> bool:
    """Return whether this thread collects garbage."""
    now = [*_collections][-1:] == ["start"]  # in one step: a collection in between would move what is iterated over
    return now and getattr(_here, "start", None) is _collections["start"]


class Task(Generic[Result]):
    """A call that another thread makes."""

    def __init__(self, call: Callable[[], Result]) -> None:
        self._call: Callable[[], Result] | None = call
        self._claim = [True]
        """A token: whoever pops it makes the call."""
        self._cancelled = self._over = False
        self._bell = _thread.allocate_lock()
        self._bell.acquire()
        self._made: list[Result] = []
        self._error: BaseException | None = None

    def run(self) -> None:
        """Make the call, once, unless it was cancelled; what it raises is kept."""
        try:
            self._claim.pop()
        except IndexError:
            return
        call, self._call = self._call, None
        try:
            if not self._cancelled and call is not None:
                self._made.append(call())
        except BaseException as error:
            self._error = error
        finally:
            del call
            self._over = True
            self._bell.release()

    def cancel(self) -> None:
        """Keep the call from being made, unless it has begun."""
        self._cancelled = True

    def begun(self) -> bool:
        return not self._claim

    def done(self) -> bool:
        return self._over

    def wait(self) -> None:
        """Wait until it is over, or until whoever was to run it finds it cancelled."""
        while not self._over:
            if self._bell.acquire(timeout=_LOOK_SECONDS):
                self._bell.release()

    def result(self) -> Result:
        """Return what the call returned, once it is over. Raises what it raised, and CancelledError."""
        self.wait()
        if self._error is not None:
            try:
                raise self._error
            finally:
                del self  # the traceback would hold it, and it the error
        if not self._made:
            raise CancelledError
        return self._made[0]


def wait_for(tasks: Iterable[Task[Any]]) -> None:
    """Wait until each of them is over or will not begin."""
    for task in tasks:
        task.wait()


class SideThreads:
    """A pool of threads that take what they are given in order, PyTorch's operators on each thread alone.

    Otherwise each of them would bring a team of its own, and teams that wait for each other on the same cores take
    several times as long.
    """

    def __init__(self, count: int, name: str) -> None:
        self.count = count
        self._name = name
        self._tasks: SimpleQueue[Task[Any] | None] = SimpleQueue()
        self._threads: list[threading.Thread] = []
        self._guard = threading.Lock()
        self._begun: Task[None] | None = None
        self._closed = False
        # For whoever never shuts them down.
        self._dropped = weakref.finalize(self, _let_go, self._tasks, count)
        self._dropped.atexit = False

    def submit(self, work: Callable[..., Result], *given: Any) -> Task[Result]:
        """Call `work(*given)` in one of the threads. Raises RuntimeError where none can start or all have ended."""
        task = Task(partial(work, *given))
        with self._guard:
            if self._closed:
                raise RuntimeError(f"the threads of {self._name} have ended")
            if self._begun is None:
                _sharing()  # PyTorch settles its count when first asked: here, not where it is set to one
                self._begun = Task(partial(_begin, self._threads, self.count, self._name, self._tasks))
                _thread.start_new_thread(self._begun.run, ())
            self._tasks.put(task)
        self._begun.result()
        return task

    def shutdown(self, *, cancel: bool = False) -> None:
        """End the threads, when all is done or (`cancel`) what is being done."""
        with self._guard:
            self._closed = True
            begun = self._begun
        if begun is not None:
            begun.wait()
        if cancel:
            for task in self._waiting():
                task.cancel()
                task.run()
        # Also where they were told before, as nobody held these any more: that may just have been taken back.
        self._dropped.detach()
        _let_go(self._tasks, self.count)
        for thread in self._threads:
            if thread.ident != threading.get_ident():
                thread.join()
        # What a thread sets is also the default of every thread that PyTorch meets later.
        _share_operators(_sharing())

    def _waiting(self) -> Iterator[Task[Any]]:
        """Yield what nobody has taken yet, taken."""
        with suppress(Empty):
            while True:
                if (task := self._tasks.get_nowait()) is not None:
                    yield task

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.shutdown()


def _begin(threads: list[threading.Thread], count: int, name: str, tasks: SimpleQueue[Task[Any] | None]) -> None:
    """Start the threads, as many as there can be. Raises RuntimeError where there can be none."""
    lent = deque[Task[None]]()
    for index in range(count):
        thread = threading.Thread(target=_serve, args=(tasks, count, lent), name=f"{name}_{index}", daemon=True)
        try:
            thread.start()
        except RuntimeError:
            if not threads:
                raise
            return
        threads.append(thread)


def _serve(tasks: SimpleQueue[Task[Any] | None], count: int, lent: deque[Task[None]]) -> None:
    _here.beside = True
    _here.pool = (tasks, count, lent) if count > 1 else None
    _share_operators(1)
    while (task := tasks.get()) is not None:
        with suppress(IndexError):
            while True:  # first what somebody else has begun
                lent.popleft().run()
        task.run()
        del task  # it holds what it made, until somebody has fetched that


_WAKE: Task[None] = Task(lambda: None)


def side_by_side(work: Callable[[Item], object], items: Sequence[Item]) -> None:
    """Do `work` for every item; one of `SideThreads` does it with the others of them that have nothing begun.

    The work itself waits for none of them. Raises what failed first, when nothing goes on any more.
    """
    pool: tuple[SimpleQueue[Task[Any] | None], int, deque[Task[None]]] | None = getattr(_here, "pool", None)
    if pool is None or len(items) < 2:
        for item in items:
            work(item)
        return
    queue, count, lent = pool
    left, errors = deque(items), list[BaseException]()

    def take_turns() -> None:
        while left and not errors:
            with suppress(IndexError):  # another thread has taken the last one
                item = left.popleft()
                try:
                    work(item)
                except BaseException as error:
                    errors.append(error)

    tasks = [Task(take_turns) for _ in range(min(count, len(items)))]
    lent.extend(tasks)
    for _ in tasks[1:]:
        queue.put(_WAKE)
    with suppress(IndexError):
        while not tasks[-1].begun():  # what others have lent before comes first
            lent.popleft().run()
    wait_for(tasks)
    try:
        for error in errors:
            raise error
    finally:
        errors.clear()  # the traceback would hold it, and it the errors


def _let_go(tasks: SimpleQueue[Task[Any] | None], count: int) -> None:
    for _ in range(count):
        tasks.put(None)


_waiting: dict[str, deque[SimpleQueue[Callable[[], None]]]] = {}
"""Queues of threads that wait for a call, by the name of the threads."""
if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_waiting.clear)  # the threads are its parent's


def call_beside(call: Callable[[], None], name: str) -> None:
    """Make a call in a thread of this name that waits for the next one afterwards: to start one takes longer than most
    of what it is for. Two calls at a time have two threads.
    """
    waiting = _waiting.setdefault(name, deque())
    try:
        calls = waiting.pop()
    except IndexError:
        calls = SimpleQueue()
        threading.Thread(target=_call_and_wait, args=(calls, waiting), name=name, daemon=True).start()
    calls.put(call)


def _call_and_wait(calls: SimpleQueue[Callable[[], None]], waiting: deque[SimpleQueue[Callable[[], None]]]) -> None:
    while True:
        call = calls.get()
        call()
        del call  # it may hold what is to go
        waiting.append(calls)


def _sharing() -> int:
    """Return how many threads share an operator of this one; nobody who reads images alone has to import PyTorch."""
    torch = sys.modules.get("torch")
    return 0 if torch is None else torch.get_num_threads()


def _share_operators(count: int) -> None:
    torch = sys.modules.get("torch")
    if torch is not None and count:
        # A thread that has set its count and never asked for it takes, at its first operator, what any thread set last.
        torch.get_num_threads()
        torch.set_num_threads(count)


@contextmanager
def uncollected() -> Iterator[None]:
    """Collect no garbage meanwhile: little is made, and many objects that stay would be looked through again and
    again.
    """
    collecting = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if collecting:
            gc.enable()


def living(registry: WeakValueDictionary[int, Item]) -> list[Item]:
    """List what is there now. Iterating would fail where another thread adds something meanwhile."""
    return [one for ref in registry.valuerefs() if (one := ref()) is not None]


def may_wait() -> bool:
    """Return whether this thread may wait for others: not one of `SideThreads`, nor while it collects garbage."""
    return not (getattr(_here, "beside", False) or _is_collecting())


_unfinished: set[Task[None]] = set()
"""The tasks that `uninterrupted` was given and that are not over."""
_idle = deque[SimpleQueue[Task[None]]]()
"""Queues of threads that have done such a task and wait for the next one: a new thread may wait for those of
PyTorch's last operator, which keep their cores busy for some milliseconds in case of another.
"""


def uninterrupted(work: Callable[[], object]) -> None:
    """Do `work` to its end, whatever becomes of the caller: in another thread.

    Ctrl-C, and another one while the first is dealt with, ends this waiting, not the work. Who must not wait
    (`may_wait`) goes on at once. Raises what the work raised.
    """
    waits = may_wait()
    if waits and threading.get_ident() != threading.main_thread().ident:
        work()
        return
    count = _sharing()

    def whole() -> None:
        if waits:
            _share_operators(count)  # as in the caller
        work()

    done = Task(whole)
    _unfinished.add(done)
    try:
        queue = _idle.pop()
    except IndexError:
        queue = SimpleQueue()
        try:
            _thread.start_new_thread(_finish_all, (queue,))
        except RuntimeError:  # no more threads: too little memory, or the interpreter's end
            _finish(done)
    queue.put(done)
    if waits:
        done.result()


def _finish_all(queue: SimpleQueue[Task[None]]) -> None:
    while True:
        _finish(queue.get())
        _idle.append(queue)


def _finish(task: Task[None]) -> None:
    task.run()
    _unfinished.discard(task)


def settle() -> None:
    """Come to the end of what `uninterrupted` still does, or was kept from beginning, after an interrupt."""
    for task in tuple(_unfinished):
        task.run()
        task.wait()
        _unfinished.discard(task)


def _alone() -> None:
    """Forget the threads of the process that this one was forked from."""
    _idle.clear()
    _unfinished.clear()


atexit.register(settle)
if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_alone)


@contextmanager
def operator_threads(count: int) -> Iterator[None]:
    """Share operators of this thread by so many in the block.

    By 1 while other threads work: a team that waits for work takes a core from those that have some.
    """
    before, here = _sharing(), threading.get_ident()
    _share_operators(count)
    try:
        yield
    finally:
        if threading.get_ident() == here:  # a generator that is garbage ends in whatever thread collects it
            _share_operators(before)
