"""What the process holds, and when freed memory is given back."""

import ctypes
import mmap
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from gigagrad.execution import process
from gigagrad.execution.process import (
    Trimmer,
    peak_resident_bytes,
    resident_bytes,
    return_freed_memory,
    settle_allocator,
    used_bytes,
)

MIB = 2**20


_TAKE_AND_FREE = """
import mmap, torch
from gigagrad.execution.process import return_freed_memory, settle_allocator, used_bytes

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


def test_what_is_given_back_stays_so():
    """Parts of the heap that were once asked to be huge pages would be filled up again by the system."""
    if not Path("/sys/kernel/mm/transparent_hugepage").exists() or used_bytes() is None:
        pytest.skip("the system has no transparent huge pages, or the C library is not glibc")
    settle_allocator()
    blocks = [torch.empty(2**20 - 2**10) for _ in range(8)]  # 4 MiB each, in the heap
    for block in blocks:
        start = -(-block.data_ptr() // 2**21) * 2**21
        ctypes.CDLL(None).madvise(ctypes.c_void_p(start), ctypes.c_size_t(2**21), mmap.MADV_HUGEPAGE)
    assert "hg" in heap_flags()
    del blocks, block
    return_freed_memory()
    assert "hg" not in heap_flags()
    assert "nh" in heap_flags()


def heap_flags() -> set[str]:
    """The flags of all mappings of the heap (proc_pid_smaps(5))."""
    flags, inside = set[str](), False
    for line in Path("/proc/self/smaps").read_text().splitlines():
        name, *values = line.split()
        if not name.endswith(":"):
            inside = line.endswith("[heap]")
        elif name == "VmFlags:" and inside:
            flags.update(values)
    return flags


def test_elsewhere_nobody_tells(monkeypatch):
    monkeypatch.setattr(sys, "platform", "darwin")
    assert used_bytes() is None


def test_the_peak_is_no_less_than_what_is_held():
    assert 0 < resident_bytes() <= peak_resident_bytes()


def trimmer_at(limit, tiles=30, budget=None):
    """Whose limit, beside tiles of so many MiB, is this."""
    trimmer = Trimmer((limit + tiles) * MIB + process.UNNOTICED_BYTES, budget * MIB if budget else None)
    trimmer.begin_pass(tiles * MIB)
    return trimmer


class TestTrimmer:
    @pytest.fixture
    def held(self, monkeypatch):
        """What is resident, in MiB, and what giving memory back leaves of it."""
        held = {"now": 50, "left": 40, "given_back": 0}

        def give_back():
            held["given_back"] += 1
            held["now"] = held["left"]

        monkeypatch.setattr(process, "resident_bytes", lambda: held["now"] * MIB)
        monkeypatch.setattr(process, "return_freed_memory", give_back)
        return held

    def test_gives_nothing_back_within_its_limit(self, held):
        trimmer = trimmer_at(100)
        for _ in range(10):
            trimmer.tile_done()
        trimmer.make_room(50 * MIB)
        assert held["given_back"] == 0

    def test_gives_back_above_it(self, held):
        trimmer = trimmer_at(100)
        for times in (1, 2):
            held["now"] = 101
            trimmer.tile_done()
            assert held["given_back"] == times
        held["now"] = 90
        trimmer.make_room(11 * MIB)
        assert held["given_back"] == 3

    def test_where_it_does_not_help_it_looks_ever_more_rarely_until_the_next_pass(self, held):
        held["now"] = held["left"] = 200
        trimmer = trimmer_at(100)
        for _ in range(1000):
            trimmer.tile_done()
        given_back = held["given_back"]
        assert 15 < given_back < 25
        trimmer.begin_pass(30 * MIB)
        trimmer.tile_done()
        assert held["given_back"] == given_back + 1

    def test_every_pass_has_a_limit_of_its_own(self, held):
        trimmer = trimmer_at(100, tiles=30)
        trimmer.begin_pass(10 * MIB)
        held["now"] = 120
        trimmer.tile_done()
        assert held["given_back"] == 0
        trimmer.begin_pass(11 * MIB)
        trimmer.tile_done()
        assert held["given_back"] == 1

    def test_another_tile_fits_where_there_is_room_for_it_after_giving_back(self, held):
        trimmer = trimmer_at(100, budget=150)
        held["now"] = 130
        assert not trimmer.is_short(10 * MIB, 2)  # room for both: not even looked at what could be given back
        assert held["given_back"] == 0
        held["now"], held["left"] = 131, 140
        assert not trimmer.is_short(10 * MIB, 2)
        assert held["given_back"] == 1
        held["now"], held["left"] = 150, 141
        assert trimmer.is_short(10 * MIB, 2)

    def test_without_a_budget_nothing_is_short(self, held):
        held["now"] = held["left"] = 10**6
        assert not trimmer_at(100).is_short(10 * MIB, 2)
        assert held["given_back"] == 0
