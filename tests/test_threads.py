"""Threads beside a run, and ends that come as garbage is collected."""

import _thread
import gc
import subprocess
import sys
import threading
import time
from functools import partial

import torch

from gigagrad import threads


def test_an_end_that_comes_as_garbage_is_collected_waits_for_nobody():
    """Whoever collects may hold what the end needs; here, what another thread needs in order to end it."""
    lock, ended = threading.Lock(), []

    def end():
        if lock.acquire(timeout=60):
            ended.append(1)
            lock.release()

    class Run:
        def __init__(self):
            self.itself = self

        def __del__(self):
            threads.uninterrupted(end)

    gc.collect()
    Run()
    with lock:
        gc.collect()
        assert ended == []
    threads.settle()
    assert ended == [1]


def test_threads_end_when_collecting_garbage_lets_them_go_before_their_owner_ends_them():
    """First they are told, as nobody holds them any more; then their owner's end takes back what is in the queue."""
    at_work, go_on = threading.Event(), threading.Event()

    class Owner:
        def __init__(self):
            self.itself = self
            self.pool = threads.SideThreads(1, "gigagrad-test")

        def __del__(self):
            threads.uninterrupted(partial(self.pool.shutdown, cancel=True))

    def work():
        at_work.set()
        go_on.wait()

    gc.collect()
    owner = Owner()
    owner.pool.submit(work)
    at_work.wait()
    (served,) = (thread for thread in threading.enumerate() if thread.name == "gigagrad-test_0")
    tasks = owner.pool._tasks
    del owner
    gc.collect()
    time.sleep(0.3)  # their owner's end is begun
    go_on.set()
    served.join(timeout=60)
    ended = not served.is_alive()
    if not ended:
        tasks.put(None)  # or this process would never end
    threads.settle()
    assert ended


def test_any_other_end_is_waited_for():
    ended = []
    threads.uninterrupted(lambda: ended.append(threading.current_thread()))
    assert len(ended) == 1
    assert ended != [threading.main_thread()]


def test_without_a_further_thread_the_caller_does_it(monkeypatch):
    def none(*_):
        raise RuntimeError("can't start new thread")

    ended = []
    for owner, name in ((_thread, "start_new_thread"), (threading.Thread, "start")):
        with monkeypatch.context() as patch:
            patch.setattr(owner, name, none)
            threads.uninterrupted(lambda: ended.append(1))
    assert ended == [1, 1]


def test_side_threads_compute_alone_whatever_others_set_before_their_first_operator():
    before = torch.get_num_threads()
    with threads.SideThreads(1, "gigagrad-test") as side:
        side.submit(lambda: None).result()
        torch.set_num_threads(2)
        try:
            assert side.submit(torch.get_num_threads).result() == 1
        finally:
            torch.set_num_threads(before)


def test_side_threads_leave_pytorchs_count_as_it_would_be():
    """Also where they are the first who ask PyTorch for anything, as where a slide is read before a model is made."""
    asked = "print(torch.get_num_threads())"
    read = "with SideThreads(1, 'read') as threads: assert threads.submit(torch.get_num_threads).result() == 1\n"
    counts = []
    for before in ("", read):
        script = "import torch; from gigagrad.threads import SideThreads\n" + before + asked
        done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
        counts.append(int(done.stdout))
    assert counts[0] == counts[1]


def test_side_threads_with_nothing_to_do_help_one_of_them():
    together = threading.Barrier(3)  # that no fewer than three can pass

    def work():
        threads.side_by_side(lambda _: together.wait(60), range(6))
        return threading.current_thread().name

    with threads.SideThreads(3, "gigagrad-test") as side:
        assert side.submit(work).result().startswith("gigagrad-test")


def test_side_threads_do_each_item_once_whoever_is_busy():
    done: list[int] = []

    def work(first):
        threads.side_by_side(done.append, range(first, first + 50))

    with threads.SideThreads(2, "gigagrad-test") as side:
        for task in [side.submit(work, first) for first in range(0, 1000, 50)]:
            task.result()
    assert sorted(done) == list(range(1000))


def test_other_threads_do_their_items_alone():
    done = []
    threads.side_by_side(lambda item: done.append((item, threading.current_thread())), range(3))
    assert done == [(item, threading.main_thread()) for item in range(3)]


def test_an_error_beside_ends_what_goes_on_beside_it():
    begun, at_work = [], []

    def fail(item):
        begun.append(item)
        at_work.append(item)
        time.sleep(0.01)
        at_work.remove(item)
        if item == 1:
            raise ValueError("item 1")

    def work():
        try:
            threads.side_by_side(fail, range(1000))
        except ValueError as error:
            return str(error), list(at_work)
        return None

    with threads.SideThreads(3, "gigagrad-test") as side:
        assert side.submit(work).result() == ("item 1", [])
        assert len(begun) < 1000
        ended = len(begun)
        assert side.submit(lambda: 1).result() == 1  # nobody is still busy
        assert len(begun) == ended


def test_items_begun_are_finished_before_others_begin():
    """So that what is begun first is done first."""
    order, first, go_on = [], threading.Event(), threading.Event()

    def one(item):
        order.append(item)
        first.set()
        assert go_on.wait(60)

    def work(name):
        threads.side_by_side(one, [f"{name}{index}" for index in range(8)])

    with threads.SideThreads(3, "gigagrad-test") as side:
        begun = side.submit(work, "a")
        assert first.wait(60)
        others = [side.submit(work, name) for name in "bc"]
        go_on.set()
        for task in (begun, *others):
            task.result()
    assert sorted(order[:8]) == [f"a{index}" for index in range(8)]
    assert len(set(order)) == 24


def test_threads_that_are_told_to_end_do_not_wait_for_each_other():
    begun, go_on, done = threading.Event(), threading.Event(), []

    def hold(item):
        begun.set()
        assert go_on.wait(60)
        done.append(item)

    side = threads.SideThreads(2, "gigagrad-test")
    task = side.submit(threads.side_by_side, hold, range(50))
    assert begun.wait(60)
    threading.Timer(0.1, go_on.set).start()
    side.shutdown(cancel=True)
    assert task.done()
    assert sorted(done) == list(range(50))


def test_garbage_is_collected_again_behind_what_went_without():
    with threads.uncollected():
        assert not gc.isenabled()
        with threads.uncollected():
            assert not gc.isenabled()
        assert not gc.isenabled()
    assert gc.isenabled()
    gc.disable()
    try:
        with threads.uncollected():
            pass
        assert not gc.isenabled()
    finally:
        gc.enable()
