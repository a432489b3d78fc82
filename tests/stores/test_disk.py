"""Files that are damaged, folders that are full, missing or left behind, and boxes that cut bricks anywhere."""

import gc
import os
import subprocess
import sys
import threading

import numpy as np
import pytest
import torch
from filelock import FileLock, Timeout
from hypothesis import given, settings
from hypothesis import strategies as st

from gigagrad.allowances import ROWS_AT_ONCE
from gigagrad.boxes import Box
from gigagrad.devices import Machine
from gigagrad.errors import StoreError
from gigagrad.files import HOST
from gigagrad.stores import Blosc, DiskStore, DiskTier, FieldSpec, PlannedDiskTier, Scratch
from gigagrad.stores.disk import Bricks


def past_the_cache(monkeypatch):
    """As if the system could keep nothing of files in memory."""
    monkeypatch.setattr("gigagrad.stores.scratch.cacheable_bytes", lambda: -1)


@pytest.fixture(params=["through the cache", "past it"])
def scratch(request, tmp_path, monkeypatch):
    if request.param == "past it":
        past_the_cache(monkeypatch)
    scratch = Scratch(tmp_path, 0)
    yield scratch
    scratch.close()


def store(scratch, shape=(1, 3, 150, 170), dtype=torch.float32, name="field", codec=None):
    return DiskStore(FieldSpec(name, shape, dtype, (-2, -1)), scratch, codec)


@st.composite
def boxes(draw, height=150, width=170):
    y = sorted(draw(st.lists(st.integers(0, height), min_size=2, max_size=2, unique=True)))
    x = sorted(draw(st.lists(st.integers(0, width), min_size=2, max_size=2, unique=True)))
    return Box(y[0], x[0], y[1], x[1])


@settings(deadline=None, max_examples=25)
@given(
    st.lists(st.tuples(boxes(), st.booleans()), max_size=6),
    boxes(),
    st.sampled_from([3, 70]),
    st.sampled_from([None, Blosc()]),
    st.booleans(),
)
def test_any_boxes_written_and_added_give_what_a_tensor_would(tmp_path_factory, updates, read, channels, codec, past):
    shape = (1, channels, 150, 170)
    expected = torch.zeros(shape, dtype=torch.float64)
    with pytest.MonkeyPatch.context() as monkeypatch:
        if past:
            past_the_cache(monkeypatch)
        scratch = Scratch(tmp_path_factory.mktemp("scratch"), 0)
    try:
        field = store(scratch, shape, torch.float64, codec=codec)
        for number, (box, adds) in enumerate(updates):
            crop = torch.full((1, channels, *box.shape), number + 0.5, dtype=torch.float64)
            view = expected[..., box.y0 : box.y1, box.x0 : box.x1]
            if adds:
                field.add(box, crop)
                view.add_(crop)
            else:
                field.write(box, crop)
                view.copy_(crop)
        field.flush()
        assert torch.equal(field.read(read), expected[..., read.y0 : read.y1, read.x0 : read.x1])
        field.close()
    finally:
        scratch.close()


@pytest.mark.parametrize("box", [Box(0, 5, 150, 170), Box(0, 0, 150, 77), Box(3, 0, 150, 170), Box(40, 40, 50, 50)])
def test_bricks_that_are_written_in_part_keep_the_rest(scratch, monkeypatch, box):
    kept = store(scratch)
    kept.write(Box.whole(150, 170), torch.ones(1, 3, 150, 170))
    kept.flush()
    # What memory held before must not matter.
    monkeypatch.setattr(np, "empty", lambda shape, dtype: np.full(shape, 0xAA, dtype))
    kept.write(box, torch.full((1, 3, *box.shape), 2.0))
    kept.flush()
    expected = torch.ones(1, 3, 150, 170)
    expected[..., box.y0 : box.y1, box.x0 : box.x1] = 2.0
    assert torch.equal(kept.whole(), expected)


def test_what_is_stored_may_live_in_any_layout(scratch):
    field = torch.randn(1, 3, 150, 170).contiguous(memory_format=torch.channels_last)
    kept = store(scratch)
    kept.write(Box.whole(150, 170), field)
    kept.flush()
    assert torch.equal(kept.whole(), field)


@pytest.fixture
def encoded(scratch):
    """A field of one brick as Blosc made it, the file it is in, and where its bytes end there."""
    kept = store(scratch, shape=(1, 3, 64, 64), codec=Blosc())
    kept.write(Box.whole(64, 64), torch.randn(1, 3, 64, 64).round(decimals=1))
    kept.flush()
    path = scratch.folder / "field"
    end = len(path.read_bytes().rstrip(b"\0"))
    assert 1000 < end < 64 * 64 * 3 * 4
    return kept, path, end


@pytest.fixture
def parsed(monkeypatch):
    """The bricks that reach Blosc's own parser."""
    seen, decode = [], Blosc.decode

    def noting(self, data, out):
        seen.append(bytes(data))
        decode(self, data, out)

    monkeypatch.setattr(Blosc, "decode", noting)
    return seen


@pytest.mark.parametrize("share", [0.0, 0.001, 0.01, 0.3, 0.9, 1.0])
def test_a_wrong_bit_of_an_encoded_brick_is_noticed_before_blosc_parses_it(encoded, parsed, share):
    kept, path, end = encoded
    content = bytearray(path.read_bytes())
    content[int(share * (end - 1))] ^= 16
    path.write_bytes(content)
    with pytest.raises(StoreError, match="does not hold what was written"):
        kept.whole()
    assert not parsed


def test_an_older_encoded_brick_is_noticed_before_blosc_parses_it(encoded, parsed):
    """Its own frame is whole, so nothing in it could tell."""
    kept, path, _ = encoded
    older = path.read_bytes()
    kept.write(Box.whole(64, 64), torch.randn(1, 3, 64, 64).round(decimals=1))
    kept.flush()
    newer = path.read_bytes()
    path.write_bytes(older)
    with pytest.raises(StoreError, match="does not hold what was written"):
        kept.whole()
    assert not parsed
    path.write_bytes(newer)
    kept.whole()
    assert len(parsed) == 1


@pytest.mark.parametrize("position", [0, 40_000, -1])
def test_a_damaged_file_is_noticed(scratch, position):
    kept = store(scratch, shape=(1, 3, 128, 128))
    kept.write(Box.whole(128, 128), torch.randn(1, 3, 128, 128))
    kept.flush()
    path = scratch.folder / "field"
    content = bytearray(path.read_bytes())
    content[position] ^= 1
    path.write_bytes(content)
    with pytest.raises(StoreError, match="does not hold what was written"):
        kept.whole()


def test_a_file_that_was_cut_short_is_noticed(scratch):
    kept = store(scratch)
    kept.write(Box.whole(150, 170), torch.randn(1, 3, 150, 170))
    kept.flush()
    os.truncate(scratch.folder / "field", 1000)
    with pytest.raises(StoreError, match="ended early"):
        kept.whole()


@pytest.mark.parametrize("most", [1, 1000, 4096, 5000])
def test_a_short_read_is_no_damage(scratch, monkeypatch, most):
    """A system may give fewer bytes than were asked for, whole pages or not; the rest is there."""
    kept = store(scratch, (1, 3, 64, 70) if most == 1 else (1, 3, 150, 170))
    crop = torch.randn(kept.shape)
    kept.write(Box.whole(*crop.shape[-2:]), crop)
    kept.flush()
    read, calls = os.preadv, []

    def short(descriptor, buffers, offset):
        calls.append(offset)
        count = read(descriptor, buffers, offset)
        if len(calls) % 3 and count > most:
            buffers[0][most:] = bytes([0xAA]) * (len(buffers[0]) - most)
            return most
        return count

    monkeypatch.setattr(os, "preadv", short)
    assert torch.equal(kept.whole(), crop)
    assert len(calls) > 2


@pytest.mark.skipif(not hasattr(os, "O_DIRECT"), reason="this system has no way past its page cache")
def test_only_what_memory_cannot_cache_goes_past_the_cache(tmp_path, monkeypatch):
    """Whole pages of it. What a codec made of them goes through."""
    import fcntl

    try:
        os.close(os.open(tmp_path / "probe", os.O_RDWR | os.O_CREAT | os.O_DIRECT))
    except OSError:
        pytest.skip("this file system does not let files past its cache")
    written = []
    original = os.pwrite

    def noting(descriptor, data, offset):
        written.append((fcntl.fcntl(descriptor, fcntl.F_GETFL) & os.O_DIRECT != 0, data.nbytes))
        return original(descriptor, data, offset)

    monkeypatch.setattr(os, "pwrite", noting)
    for cacheable, codec in ((4096, None), (4095, None), (4095, Blosc())):
        monkeypatch.setattr("gigagrad.stores.scratch.cacheable_bytes", lambda cacheable=cacheable: cacheable)
        scratch = Scratch(tmp_path, 4096)
        kept = store(scratch, codec=codec)
        crop = torch.randint(0, 9, (1, 3, 150, 170)).float()
        kept.write(Box.whole(150, 170), crop)
        kept.flush()
        assert torch.equal(kept.whole(), crop)
        scratch.close()
    plain, direct, encoded = written[:3], written[3:6], written[6:]
    assert {past for past, _ in plain} == {False}
    assert {past for past, _ in direct} == {True}
    assert sum(n for _, n in plain) == sum(n for _, n in direct) == 9 * 64 * 64 * 12
    assert {past for past, n in encoded if n % 4096} == {False}


@pytest.mark.usefixtures("no_direct_access")
def test_where_the_file_system_has_no_way_past_its_cache_files_go_through_it(tmp_path, monkeypatch):
    past_the_cache(monkeypatch)
    scratch = Scratch(tmp_path, 0)
    kept = store(scratch)
    crop = torch.randn(1, 3, 150, 170)
    kept.write(Box.whole(150, 170), crop)
    kept.flush()
    assert torch.equal(kept.whole(), crop)
    scratch.close()


def test_a_failure_behind_is_raised_by_the_next_call(scratch, monkeypatch):
    kept = store(scratch)

    def refuse(*args):
        raise OSError(5, "Input/output error")

    monkeypatch.setattr(os, "pwrite", refuse)
    kept.write(Box.whole(150, 170), torch.ones(1, 3, 150, 170))
    with pytest.raises(StoreError, match="cannot write"):
        kept.flush()


def test_nothing_is_read_after_a_failure_behind(scratch, monkeypatch):
    """Not even what was written well after it, nor old values where the failed write would have been."""
    kept = store(scratch)
    written = os.pwrite

    def once(*given):
        monkeypatch.setattr(os, "pwrite", written)
        go_on.wait(60)
        raise OSError(5, "Input/output error")

    go_on = threading.Event()
    monkeypatch.setattr(os, "pwrite", once)
    kept.write(Box(0, 0, 64, 64), torch.ones(1, 3, 64, 64))
    kept.write(Box(64, 64, 128, 128), torch.ones(1, 3, 64, 64))
    go_on.set()
    other = store(scratch, name="other")
    other.write(Box(0, 0, 64, 64), torch.ones(1, 3, 64, 64))
    other.flush()
    with pytest.raises(StoreError, match="cannot write"):
        kept.write(Box(0, 0, 64, 64), torch.ones(1, 3, 64, 64))
    for box in (Box(0, 0, 64, 64), Box(64, 64, 128, 128)):
        with pytest.raises(StoreError, match="cannot write"):
            kept.read(box)
    assert torch.equal(other.read(Box(0, 0, 64, 64)), torch.ones(1, 3, 64, 64))


def test_a_folder_that_is_missing_or_too_small_is_refused(tmp_path):
    with pytest.raises(StoreError, match="does not exist"):
        Scratch(tmp_path / "nowhere", 0)
    with pytest.raises(StoreError, match=r"free, the plan needs .* make room"):
        Scratch(tmp_path, 2**60)
    assert not list(tmp_path.iterdir())


def test_a_folder_that_cannot_be_written_to_is_refused(tmp_path, monkeypatch):
    def refuse(*args, **kwargs):
        raise OSError(30, "Read-only file system")

    monkeypatch.setattr("pathlib.Path.mkdir", refuse)
    with pytest.raises(StoreError, match="Read-only file system"):
        Scratch(tmp_path, 0)


def test_a_full_disk_is_named(scratch, monkeypatch):
    def refuse(*args):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "posix_fallocate", refuse)
    with pytest.raises(StoreError, match="no space left"):
        store(scratch)


def open_below(folder):
    """Files below it that this process holds, also those that have no name any more."""
    links = (f"/proc/self/fd/{number}" for number in os.listdir("/proc/self/fd"))
    return [target for link in links if os.path.lexists(link) and str(folder) in (target := os.readlink(link))]


def beside():
    return {thread for thread in threading.enumerate() if thread.name.startswith("gigagrad")}


@pytest.mark.skipif(not os.path.isdir("/proc/self/fd"), reason="this system does not tell which files are open")
def test_nothing_remains_after_a_run(tmp_path, monkeypatch):
    """Files, descriptors or threads, be the stores closed or not, be what was to be written written or not."""
    threads = beside()
    for cacheable in (-1, 2**60):
        monkeypatch.setattr("gigagrad.stores.scratch.cacheable_bytes", lambda cacheable=cacheable: cacheable)
        scratch = Scratch(tmp_path, 0)
        stores = [store(scratch, name=str(i)) for i in range(3)]
        for each in stores:
            each.write(Box.whole(150, 170), torch.ones(1, 3, 150, 170))
        stores[0].close()
        assert open_below(tmp_path)
        scratch.close()
        assert not list(tmp_path.iterdir())
        assert not open_below(tmp_path)
        assert beside() == threads
        scratch.close()
        stores[1].close()


def test_what_waits_to_be_written_is_not_waited_for(scratch, monkeypatch):
    """Neither the crops behind nor other rows of the one that is at hand, nor when the store is closed after that."""
    written, begun, go_on = os.pwrite, threading.Event(), threading.Event()

    def slowly(*given):
        begun.set()
        assert go_on.wait(60)
        return written(*given)

    monkeypatch.setattr(os, "pwrite", slowly)
    kept = store(scratch, (1, 3, 1500, 170))
    kept.write(Box.whole(1500, 170), torch.ones(1, 3, 1500, 170))
    kept.write(Box.whole(1500, 170), torch.ones(1, 3, 1500, 170))
    assert begun.wait(60)
    threading.Timer(0.1, go_on.set).start()
    scratch.close()
    kept.close()


@pytest.mark.slow
@pytest.mark.skipif(not os.path.isdir("/proc/self/fd"), reason="this system does not tell which files are open")
def test_nothing_remains_of_a_scratch_that_nobody_closed(tmp_path):
    scratch = Scratch(tmp_path, 0)
    kept = store(scratch)
    kept.write(Box.whole(150, 170), torch.ones(1, 3, 150, 170))
    kept.flush()
    del scratch, kept
    gc.collect()
    assert not list(tmp_path.iterdir())
    assert not open_below(tmp_path)
    program = (
        "import sys, pathlib; from gigagrad.stores import Scratch; "
        "s = Scratch(pathlib.Path(sys.argv[1]), 0); s.create('field', 10000)"
    )
    subprocess.run([sys.executable, "-c", program, str(tmp_path)], check=True)
    assert not list(tmp_path.iterdir())


@pytest.mark.skipif(not os.path.isdir("/proc/self/fd"), reason="this system does not tell which files are open")
@pytest.mark.parametrize("error", [OSError(28, "No space left on device"), MemoryError(), KeyboardInterrupt()])
def test_an_error_in_opening_the_third_store_leaves_nothing(tmp_path, monkeypatch, error):
    scratch = Scratch(tmp_path, 0)
    store(scratch, name="first"), store(scratch, name="second")

    def fail(*args):
        raise error

    monkeypatch.setattr(os, "posix_fallocate", fail)
    with pytest.raises(StoreError if isinstance(error, OSError) else type(error)) as kept:  # and its frames
        store(scratch, name="third")
    assert sorted(path.name for path in scratch.folder.iterdir()) == ["first", "second"]
    scratch.close()
    assert not list(tmp_path.iterdir())
    assert not open_below(tmp_path)
    del kept


def test_locks_without_a_folder_are_removed_unless_somebody_holds_them(tmp_path):
    left, held = (tmp_path / f"gigagrad-{HOST}-123-{number}.lock" for number in ("0123abcd", "4567abcd"))
    left.touch()
    with FileLock(held):
        Scratch(tmp_path, 0).close()
        assert list(tmp_path.iterdir()) == [held]


def test_a_run_whose_lock_is_taken_for_an_abandoned_one_takes_another_name(tmp_path, monkeypatch):
    """Whoever cleans up may hold it for a moment before the run does, or have removed it."""
    acquire, tried = FileLock.acquire, []

    def late(self, *given, **how):
        tried.append(self.lock_file)
        if len(tried) == 1:
            raise Timeout(self.lock_file)
        taken = acquire(self, *given, **how)
        if len(tried) == 2:
            os.unlink(self.lock_file)
        return taken

    monkeypatch.setattr(FileLock, "acquire", late)
    scratch = Scratch(tmp_path, 0)
    monkeypatch.undo()
    assert len(set(tried)) == 3
    assert str(scratch.folder) + ".lock" == tried[-1]
    Scratch(tmp_path, 0).close()
    assert scratch.folder.is_dir()
    scratch.close()


def test_folders_that_are_only_called_like_ours_stay(tmp_path):
    """Also where the machine is not named, as earlier versions did: it may be any."""
    for name in ("gigagrad-results", "gigagrad-1-2", f"gigagrad-{HOST}-12-0123abcd.old", "gigagrad-12-0123abcd"):
        (tmp_path / name).mkdir()
    Scratch(tmp_path, 0).close()
    assert len(list(tmp_path.iterdir())) == 4


def test_what_another_machine_keeps_is_not_taken_for_abandoned(tmp_path):
    """Where its lock does not reach us, as on some shared disks, it looks so."""
    left, theirs = (tmp_path / f"gigagrad-{host}-123-0123abcd" for host in (HOST, "0123abcd"))
    for folder in (left, theirs):
        folder.mkdir()
        (folder / "field").write_bytes(b"half")
        folder.with_name(f"{folder.name}.lock").touch()
    scratch = Scratch(tmp_path, 0)
    assert scratch.folder.name.startswith(f"gigagrad-{HOST}-")
    scratch.close()
    assert sorted(path.name for path in tmp_path.iterdir()) == [theirs.name, f"{theirs.name}.lock"]
    assert (theirs / "field").read_bytes() == b"half"


@pytest.mark.slow
def test_what_a_killed_process_left_is_removed_by_the_next_run_and_nothing_else(tmp_path):
    program = (
        "import os, sys, pathlib; from gigagrad.stores import Scratch; "
        "s = Scratch(pathlib.Path(sys.argv[1]), 0); s.create('field', 10000); print(s.folder.name, flush=True); "
        "os.kill(os.getpid(), 9)"
    )
    done = subprocess.run([sys.executable, "-c", program, str(tmp_path)], capture_output=True, text=True)
    left = tmp_path / done.stdout.strip()
    assert (left / "field").stat().st_size == 10000
    (tmp_path / "mine").mkdir()
    alive = Scratch(tmp_path, 0)
    assert not left.exists()
    other = Scratch(tmp_path, 0)
    assert alive.folder.is_dir()
    alive.close()
    other.close()
    assert [path.name for path in tmp_path.iterdir()] == ["mine"]


@given(st.integers(1, 5000), st.integers(1, 5000), st.integers(1, 5000))
def test_bricks_cover_the_field(height, width, bytes_per_pixel):
    bricks = Bricks(height, width, bytes_per_pixel)
    rows, columns = bricks.shape
    assert (rows - 1) * bricks.side < height <= rows * bricks.side
    assert (columns - 1) * bricks.side < width <= columns * bricks.side
    assert bricks.brick_bytes <= bricks.slot_bytes < bricks.brick_bytes + 4096


@given(st.integers(1, 300), st.integers(1, 300), st.integers(1, 5000), st.data())
def test_no_box_touches_more_of_a_row_than_is_counted(height, width, bytes_per_pixel, data):
    bricks = Bricks(height, width, bytes_per_pixel)
    span = data.draw(st.integers(1, width))
    touched = [
        (-(-(start + span) // bricks.side) - start // bricks.side) * bricks.slot_bytes
        for start in range(width - span + 1)
    ]
    assert max(touched) <= bricks.row_bytes(span)
    if len(touched) >= bricks.side:
        assert max(touched) == bricks.row_bytes(span)


def test_rows_past_the_cache_wait_for_the_disk_together(tmp_path, monkeypatch):
    """As many as plans count: with fewer at once, each of these would wait for the others in vain."""
    past_the_cache(monkeypatch)
    scratch = Scratch(tmp_path, 0)
    together = threading.Barrier(ROWS_AT_ONCE)
    scratch.each(lambda row: together.wait(60), range(3 * ROWS_AT_ONCE))  # type: ignore[arg-type]
    scratch.close()
    assert not together.broken


def test_a_disk_that_is_not_here_is_planned_for_like_one_that_is_and_never_opened(tmp_path):
    planned, real = PlannedDiskTier(1 << 50), DiskTier(tmp_path)
    assert planned.room_bytes() == 1 << 50 > real.room_bytes()
    assert planned.field_bytes((300, 200), 4) == real.field_bytes((300, 200), 4)
    assert planned.name == real.name
    with pytest.raises(StoreError, match="scratch="):
        planned.open(1, Machine())
