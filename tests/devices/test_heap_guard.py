"""When freed memory is given back, and where large blocks come from."""

import ctypes
import mmap
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest
import torch

from gigagrad import threads
from gigagrad.allowances import UNNOTICED_BYTES
from gigagrad.devices import device_for, heap
from gigagrad.devices.cpu import HeapGuard
from gigagrad.devices.heap import return_freed_memory, settle_allocator, used_bytes
from tests.devices.fake import FakeCpu

MIB = 2**20


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


def watch_at(device, limit, tiles=30, budget=None):
    """Whose limit, beside tiles of so many MiB, is this."""
    peak = (limit + tiles) * MIB + UNNOTICED_BYTES
    watch = HeapGuard(device, peak, budget * MIB if budget else None)
    watch.begin_pass(tiles * MIB, 0)
    return watch


class Held:
    """What a fake processor holds, in MiB."""

    def __init__(self):
        self.device = FakeCpu(50 * MIB, 40 * MIB)
        self.told = {}

    def __getitem__(self, name):
        if name == "given_back":
            return self.device.trimmed
        return self.device.held // MIB if name == "now" else self.told[name]

    def __setitem__(self, name, value):
        if name in ("now", "left"):
            setattr(self.device, {"now": "held", "left": "left"}[name], value * MIB)
        else:
            self.told[name] = value

    def __contains__(self, name):
        return name in self.told


@pytest.fixture
def held():
    """What is held, in MiB, and what giving memory back leaves of it."""
    return Held()


class TestHeapGuard:
    def test_gives_nothing_back_within_its_limit(self, held):
        watch = watch_at(held.device, 100)
        for _ in range(10):
            watch.tile_done()
        watch.reserve(50 * MIB)
        assert held["given_back"] == 0

    def test_gives_back_above_it(self, held):
        watch = watch_at(held.device, 100)
        for times in (1, 2):
            held["now"] = 101
            watch.tile_done()
            assert held["given_back"] == times
        held["now"] = 90
        watch.reserve(11 * MIB)
        assert held["given_back"] == 3

    def test_where_it_does_not_help_it_looks_ever_more_rarely_until_the_next_pass(self, held):
        held["now"] = held["left"] = 200
        watch = watch_at(held.device, 100)
        for _ in range(1000):
            watch.tile_done()
        given_back = held["given_back"]
        assert 15 < given_back < 25
        watch.begin_pass(30 * MIB, 0)
        watch.tile_done()
        assert held["given_back"] == given_back + 1

    def test_every_pass_has_a_limit_of_its_own(self, held):
        watch = watch_at(held.device, 100, tiles=30)
        watch.begin_pass(4 * MIB, 6 * MIB)
        held["now"] = 120
        watch.tile_done()
        assert held["given_back"] == 0
        watch.begin_pass(5 * MIB, 6 * MIB)
        watch.tile_done()
        assert held["given_back"] == 1

    def test_another_tile_fits_where_there_is_room_for_it_after_giving_back(self, held):
        watch = watch_at(held.device, 100, budget=150)
        held["now"] = 130
        assert not watch.is_short(10 * MIB, 2)  # room for both: not even looked at what could be given back
        assert held["given_back"] == 0
        held["now"], held["left"] = 131, 140
        assert not watch.is_short(10 * MIB, 2)
        assert held["given_back"] == 1
        held["now"], held["left"] = 150, 141
        assert watch.is_short(10 * MIB, 2)

    def test_without_a_budget_nothing_is_short(self, held):
        held["now"] = held["left"] = 10**6
        assert not watch_at(held.device, 100).is_short(10 * MIB, 2)
        assert held["given_back"] == 0


@pytest.mark.usefixtures("no_other_runs")
class TestLargeBlocks:
    """Under a roof of 100 MiB: a plan of 129, less 5 beside tiles, 16 unnoticed and 8 for the largest block."""

    @pytest.fixture
    def held(self, held, monkeypatch):
        """And what the C library was told last: whether blocks may be mapped, and what it keeps."""

        def set_options(options):
            held["mapped"], held["kept"] = options[heap._M_MMAP_MAX], options[heap._M_TRIM_THRESHOLD]

        monkeypatch.setattr(heap, "_set_options", set_options)
        return held

    @pytest.fixture
    def watch(self, held):
        watch = HeapGuard(held.device, 113 * MIB + UNNOTICED_BYTES, 200 * MIB)
        watch.begin_pass(38 * MIB, 5 * MIB, 8 * MIB)
        with watch.computing_tiles():
            yield watch
        watch.close()

    def test_small_ones_stay_from_tile_to_tile_up_to_the_roof_too(self, held):
        watch = HeapGuard(held.device, 100 * MIB + UNNOTICED_BYTES, None)
        watch.begin_pass(30 * MIB, 0, 6 * MIB)
        with watch.computing_tiles():
            assert (held["mapped"], held["kept"]) == (65536, -1)
            held["now"] = 94
            watch.tile_done()
            assert held["given_back"] == 0
            held["now"] = 95
            watch.tile_done()
            assert held["given_back"] == 1
        watch.close()
        assert held["kept"] == 64 * MIB

    def test_where_nothing_is_announced_nothing_changes(self, held):
        watch = HeapGuard(held.device, 100 * MIB, None)
        watch.begin_pass(30 * MIB, 0)
        with watch.computing_tiles():
            assert "mapped" not in held
        watch.close()
        assert "mapped" not in held
        assert held["given_back"] == 0

    def test_come_from_the_heap_while_tiles_are_at_work(self, held):
        watch = HeapGuard(held.device, 200 * MIB, None)
        watch.begin_pass(30 * MIB, 0, 8 * MIB)
        assert (held["mapped"], held["kept"]) == (65536, -1)
        with watch.computing_tiles():
            assert (held["mapped"], held["kept"]) == (0, -1)
        assert (held["mapped"], held["kept"]) == (65536, -1)
        watch.close()
        assert (held["mapped"], held["kept"]) == (65536, 64 * MIB)
        assert held["given_back"] == 0

    def test_after_the_run_no_more_stays_than_the_next_tile_may_find(self, held, watch):
        held["now"] = 70
        watch.close()
        assert held["given_back"] == 0
        held["now"] = 71
        watch.close()
        assert held["given_back"] == 1

    def test_below_the_roof_freed_blocks_stay(self, held, watch):
        held["now"] = 92
        watch.reserve(8 * MIB, for_tile=True)
        watch.tile_done()
        watch.reserve(8 * MIB)
        assert held["given_back"] == 0
        assert not held["mapped"]
        held["now"] = 101
        watch.tile_done()
        assert held["given_back"] == 1
        assert not held["mapped"]

    def test_above_it_they_are_given_back_and_the_rest_of_the_tile_is_mapped(self, held, watch):
        held["now"] = 93
        watch.reserve(8 * MIB, for_tile=True)
        assert held["given_back"] == 1
        assert (held["mapped"], held["kept"]) == (65536, 64 * MIB)
        held["now"] = 71  # above what may be held where the next tile's blocks are mapped
        watch.reserve(0)
        assert held["given_back"] == 2
        watch.tile_done()
        assert (held["mapped"], held["kept"]) == (0, -1)

    def test_the_pause_grows_until_the_next_pass(self, held, watch):
        for tiles in (1, 2, 4):
            held["now"] = 93
            watch.reserve(8 * MIB, for_tile=True)
            for _ in range(tiles):
                assert held["mapped"]
                watch.tile_done()
            assert not held["mapped"]
        watch.begin_pass(38 * MIB, 5 * MIB, 8 * MIB)
        held["now"] = 93
        watch.reserve(8 * MIB, for_tile=True)
        watch.tile_done()
        assert not held["mapped"]

    def test_it_looks_before_every_block_whatever_the_last_look_gave(self, held, watch):
        held["now"] = held["left"] = 99
        for times in range(1, 10):
            watch.reserve(8 * MIB, for_tile=True)
            assert held["given_back"] == times

    def test_before_smaller_ones_it_looks_once_they_might_exceed_the_roof(self, held):
        watch = HeapGuard(held.device, 100 * MIB + UNNOTICED_BYTES, None)
        watch.begin_pass(30 * MIB, 0, 4 * MIB)
        held["now"] = held["left"] = 60
        watch.reserve(4 * MIB, for_tile=True)  # room for 32 MiB more, below the roof of 96
        held["now"] = held["left"] = 99
        for given_back in (0, 0, 0, 0, 0, 0, 0, 1, 1, 2, 2, 3):  # where it does not help not before each of them
            watch.reserve(4 * MIB, for_tile=True)
            assert held["given_back"] == given_back

    def test_what_the_next_tile_is_computed_in_does_not_make_it_short(self, held, watch):
        held["now"] = 99
        assert not watch.is_short(120 * MIB, 1)
        assert held["given_back"] == 0
        held["now"] = held["left"] = 101  # above the roof: something else has grown
        assert watch.is_short(120 * MIB, 1)


_TAKE_LARGE_BLOCKS = """
import torch
from gigagrad.devices.cpu import Cpu, HeapGuard
from gigagrad.devices.heap import resident_bytes, settle_allocator

torch.set_num_threads(1)
settle_allocator()
taken, below = torch.ones(2**20), resident_bytes()
watch = HeapGuard(Cpu('cpu'), below + 200 * 2**20, None)
watch.begin_pass(180 * 2**20, 0, 24 * 2**20)

def step(mebibytes):
    watch.reserve(mebibytes * 2**20, for_tile=True)
    block = torch.ones(mebibytes * 2**18)
    last.append(torch.ones(64))  # above it, so that the heap cannot shrink

last = []
for mebibytes in (24, 20):  # the second has a place where the first was, wherever the small one came to lie
    with watch.computing_tiles():
        step(mebibytes)
    print(resident_bytes() - below)
watch.close()
print(resident_bytes() - below)
"""


class TestWholeNetworks:
    """Under a roof of 100 MiB: a plan of 124, less 16 unnoticed and 8 that are filled between two looks."""

    @pytest.fixture
    def watch(self, held):
        watch = HeapGuard(held.device, 108 * MIB + UNNOTICED_BYTES, 200 * MIB)
        yield watch
        watch.close()

    def test_what_was_freed_is_given_back_as_it_comes_to_the_roof(self, held, watch):
        watch.begin_pass(90 * MIB, 0, 8 * MIB)
        with watch.computing_whole():
            held["now"] = 100
            time.sleep(0.05)
            assert held["given_back"] == 0
            held["now"] = 101
            wait_until(lambda: held["given_back"] == 1)
            assert held["now"] == 40
        assert_nobody_looks(held)

    def test_nobody_looks_where_blocks_are_mapped(self, held, watch):
        watch.begin_pass(90 * MIB, 0, 0)
        with watch.computing_whole():
            assert_nobody_looks(held)

    def test_an_error_ends_the_looking(self, held, watch):
        watch.begin_pass(90 * MIB, 0, 8 * MIB)
        with pytest.raises(ValueError, match="no"), watch.computing_whole():
            raise ValueError("no")
        assert_nobody_looks(held)

    def test_one_thread_looks_in_one_step_after_the_other(self, held, watch):
        watch.begin_pass(90 * MIB, 0, 8 * MIB)
        for step in range(1, 4):
            wait_until(lambda: not looking() or threads._waiting["gigagrad-memory"])
            before = looking()
            with watch.computing_whole():
                assert len(looking() - before) == (not before)
                held["now"] = 101
                wait_until(lambda step=step: held["given_back"] == step)

    def test_of_two_at_a_time_each_is_looked_at(self, held, watch):
        lower = HeapGuard(held.device, 68 * MIB + UNNOTICED_BYTES, 200 * MIB)
        watch.begin_pass(90 * MIB, 0, 8 * MIB)
        lower.begin_pass(50 * MIB, 0, 8 * MIB)
        with watch.computing_whole():
            with lower.computing_whole():
                held["now"] = 61
                wait_until(lambda: held["given_back"] == 1)
            held["now"] = 101
            wait_until(lambda: held["given_back"] == 2)
        lower.close()


def looking():
    return {thread for thread in threading.enumerate() if thread.name == "gigagrad-memory"}


def assert_nobody_looks(held):
    before, held["now"] = held["given_back"], 101
    time.sleep(0.05)
    assert held["given_back"] == before


def wait_until(holds):
    for _ in range(6000):
        if holds():
            return
        time.sleep(0.01)
    raise AssertionError("it never did")


def test_the_heap_keeps_freed_large_blocks_until_the_run_is_over():
    done = subprocess.run([sys.executable, "-c", _TAKE_LARGE_BLOCKS], capture_output=True, text=True, check=True)
    if used_bytes() is None:
        pytest.skip("the C library is not glibc")
    first, second, end = map(int, done.stdout.split())
    assert 20 * MIB < first < 34 * MIB
    assert abs(second - first) < 2 * MIB
    assert end < 8 * MIB


@pytest.mark.usefixtures("no_other_runs")
def test_of_two_runs_the_one_that_wants_blocks_mapped_is_heeded(monkeypatch):
    """The setting is the whole process's: what one run chooses must not undo what another relies on."""
    told = []
    monkeypatch.setattr(heap, "_set_options", lambda options: told.append(options[heap._M_MMAP_MAX]))
    one, other = heap.LargeBlocks(), heap.LargeBlocks()
    one.choose(in_heap=True, holding=True)
    assert told[-1] == 0
    other.choose(in_heap=False, holding=False)
    assert told[-1] == 65536
    one.choose(in_heap=True, holding=True)
    assert told[-1] == 65536
    other.close()
    assert told[-1] == 0
    one.close()
    assert told[-1] == 65536


def test_what_a_run_keeps_stays_until_another_has_no_use_for_it(monkeypatch, no_other_runs):
    options: list[dict[int, int]] = []
    monkeypatch.setattr(heap, "_set_options", options.append)
    device = FakeCpu(350 * MIB, 100 * MIB)
    watch = HeapGuard(device, 400 * MIB, None)
    watch.begin_pass(200 * MIB, 0)
    watch.close(keeps=True)
    assert heap.LargeBlocks.are_kept()
    assert heap._NEVER in options[-1].values()
    assert not device.trimmed
    heap.LargeBlocks.let_go()
    assert not heap.LargeBlocks.are_kept()
    assert heap._NEVER not in options[-1].values()


def test_a_run_that_keeps_nothing_gives_back_what_it_held(no_other_runs):
    device = FakeCpu(350 * MIB, 100 * MIB)
    watch = HeapGuard(device, 400 * MIB, None)
    watch.begin_pass(200 * MIB, 0)
    watch.close()
    assert device.trimmed
    assert not heap.LargeBlocks.are_kept()


class Freed(FakeCpu):
    """Gives back as much as it is asked to, of what is not used."""

    def used_bytes(self, enough: int = 0) -> int | None:
        return self.left

    def give_back(self, nbytes: int) -> None:
        assert self.left is not None
        self.held = max(self.held - nbytes, self.left)


@pytest.mark.parametrize(
    ("budget", "kept"),
    [
        (None, 350),
        (600, 350),  # 250 of it freed, 250 left
        (500, 268),  # 200 may be kept, less what is given back at once
        (100, 100),
    ],
)
def test_as_much_room_is_left_as_is_kept(monkeypatch, no_other_runs, budget, kept):
    monkeypatch.setattr(heap, "_set_options", lambda options: None)
    device = Freed(350 * MIB, 100 * MIB)
    watch = HeapGuard(device, 400 * MIB, budget and budget * MIB)
    watch.begin_pass(200 * MIB, 0, 4 * MIB)
    watch.close(keeps=True)
    assert device.held == kept * MIB
    assert not device.trimmed


def test_a_whole_network_gives_back_as_little_as_it_takes(monkeypatch, no_other_runs):
    monkeypatch.setattr(heap, "_set_options", lambda options: None)
    device = Freed(90 * MIB, 40 * MIB)
    watch = HeapGuard(device, 108 * MIB + UNNOTICED_BYTES, None)
    watch.begin_pass(90 * MIB, 0, 8 * MIB)
    with watch.computing_whole():
        device.held = 101 * MIB
        wait_until(lambda: device.held < 101 * MIB)
    assert device.held == 68 * MIB
    assert not device.trimmed


_GIVE_BACK_SOME = """
import torch
from gigagrad.devices.heap import resident_bytes, return_largest_freed, settle_allocator, used_bytes

torch.set_num_threads(1)
settle_allocator()
blocks, between = [], []
for mebibytes in (6, 6, 6, 3, 3, 3):
    blocks.append(torch.ones(mebibytes * 2**18 - 2**10))
    between.append(torch.ones(2**15))  # so that freed ones do not become one
blocks.clear()
held, used = resident_bytes(), used_bytes()
return_largest_freed(10 * 2**20)
if used is not None:
    print(held - resident_bytes(), used_bytes() - used)
    again = [torch.ones(3 * 2**17) for _ in range(3)]
    print(held - resident_bytes())
assert all(bool((one == 1).all()) for one in between)
"""


def test_the_largest_freed_blocks_are_given_back_and_smaller_ones_serve_again():
    done = subprocess.run([sys.executable, "-c", _GIVE_BACK_SOME], capture_output=True, text=True, check=True)
    if not done.stdout:
        pytest.skip("the C library is not glibc")
    (given, used), (after,) = (map(int, line.split()) for line in done.stdout.splitlines())
    assert 10 * MIB <= given < 17 * MIB
    assert abs(used) < 2 * MIB
    assert given - after < 2 * MIB


def test_a_processor_gives_back_what_an_earlier_run_kept(no_other_runs):
    device = device_for("cpu")
    blocks = heap.LargeBlocks()
    blocks.choose(in_heap=True, holding=True)
    blocks.close(keeps=True)
    device.let_go()
    assert not heap.LargeBlocks.are_kept()
