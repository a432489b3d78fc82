"""What the process holds."""

import subprocess
import sys
import threading

import pytest

from gigagrad.devices import heap
from gigagrad.devices.buffer_pool import BufferPool
from gigagrad.devices.heap import LargeBlocks, peak_resident_bytes, resident_bytes, used_bytes

MIB = 2**20


_TAKE_AND_FREE = """
import mmap, torch
from gigagrad.devices.heap import return_freed_memory, settle_allocator, used_bytes

torch.set_num_threads(1)  # on many cores the stacks of a team would count
settle_allocator()
return_freed_memory()
before = used_bytes()
if before is not None:
    small = [torch.zeros(2**18 - 64) for _ in range(40)]  # 40 MiB in the heap
    last = torch.zeros(64)  # above them, so that the heap cannot shrink
    large = torch.empty(25 * 2**18)  # mapped, never touched
    elsewhere = mmap.mmap(-1, 20 * 2**20)
    elsewhere.write(bytes(20 * 2**20))
    print(used_bytes() - before)
    del small, large
    elsewhere.close()
    print(used_bytes() - before)
"""


def test_what_is_used_is_counted_and_what_is_freed_is_not():
    """In a process of its own: blocks that others took and never touched count as soon as they are touched."""
    done = subprocess.run([sys.executable, "-c", _TAKE_AND_FREE], capture_output=True, text=True, check=True)
    if not done.stdout:
        pytest.skip("the C library does not tell")
    taken, left = map(int, done.stdout.split())
    assert 56 * MIB < taken < 68 * MIB
    assert abs(left) < 6 * MIB


def test_elsewhere_nobody_tells(monkeypatch):
    monkeypatch.setattr(sys, "platform", "darwin")
    assert used_bytes() is None


def test_the_peak_is_no_less_than_what_is_held():
    assert 0 < resident_bytes() <= peak_resident_bytes()


@pytest.mark.usefixtures("no_other_runs")
def test_a_run_that_ends_in_the_middle_of_anothers_choice_is_heeded(monkeypatch):
    """As where garbage is collected there, or by another thread: nobody waits, and what is wanted last is set."""
    mapped, in_heap, was_set = LargeBlocks(), LargeBlocks(), []

    def set_and_interrupt(options):
        was_set.append(options)
        if len(was_set) == 2:
            mapped.close()

    monkeypatch.setattr(heap, "_set_options", set_and_interrupt)
    in_heap.choose(in_heap=True, holding=True)
    mapped.choose(in_heap=False, holding=False)
    assert len(was_set) == 3
    assert was_set[2] == was_set[0] != was_set[1]
    in_heap.close()
    assert was_set[3] == was_set[1]


@pytest.mark.usefixtures("no_other_runs")
@pytest.mark.parametrize(
    "begin",
    [
        lambda: LargeBlocks().choose(in_heap=False, holding=False),
        lambda: BufferPool.held_bytes() or BufferPool(),
    ],
)
def test_runs_begin_and_end_in_several_threads(begin, monkeypatch):
    """More often than not this met a registry that changed while it was looked through."""
    monkeypatch.setattr(heap, "_set_options", lambda options: None)
    errors = list[BaseException]()

    def work():
        try:
            kept = [begin() for _ in range(1000)]
            del kept
        except RuntimeError as error:
            errors.append(error)

    before = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    try:
        started = [threading.Thread(target=work) for _ in range(4)]
        for thread in started:
            thread.start()
        for thread in started:
            thread.join()
    finally:
        sys.setswitchinterval(before)
    assert not errors
