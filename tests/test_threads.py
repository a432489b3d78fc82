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
        if lock.acquire(timeout=10):
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
    served.join(timeout=10)
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
