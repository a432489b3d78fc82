"""One conformance suite for all stores: every tier inherits it."""

import math
import time
from abc import ABC, abstractmethod
from concurrent.futures import ThreadPoolExecutor
from queue import Queue

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from gigagrad.boxes import Box, Span, tiles
from gigagrad.devices.buffer_pool import BufferPool
from gigagrad.stores import (
    Blosc,
    DiskStore,
    FieldSpec,
    Half,
    HostStore,
    Quantised,
    RoundedStore,
    Scratch,
    Store,
    Strips,
)

spans = st.tuples(st.integers(0, 8), st.integers(1, 9)).map(lambda span: Span(min(span), max(*span, min(span) + 1)))
some_box = st.tuples(spans, spans).map(lambda box: Box.of(*box))


@pytest.fixture
def slow_writing(monkeypatch):
    """The thread that writes files takes its time."""
    behind = Scratch.behind

    def slowly(self, work):
        def late():
            time.sleep(0.02)
            work()

        return behind(self, late)

    monkeypatch.setattr(Scratch, "behind", slowly)


class StoreConformance(ABC):
    """A backend's test class says how to `make` a store of a shape, dtype and axes."""

    @abstractmethod
    def make(self, shape: tuple[int, ...], dtype: torch.dtype, axes: tuple[int, int]) -> Store:
        """A new store."""

    def test_a_new_store_holds_zeros(self):
        store = self.make((1, 3, 7, 9), torch.float32, (-2, -1))
        store.flush()
        assert torch.equal(store.whole(), torch.zeros(1, 3, 7, 9))

    @pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16, torch.int64, torch.bool])
    def test_tiles_written_make_the_field(self, dtype):
        field = torch.randint(0, 2, (1, 3, 17, 23)).to(dtype)
        store = self.make(tuple(field.shape), dtype, (-2, -1))
        for box in tiles(17, 23, 5, 8):
            store.write(box, field[..., box.y0 : box.y1, box.x0 : box.x1])
        store.flush()
        assert torch.equal(store.whole(), field)
        assert store.whole().dtype == dtype
        assert torch.equal(store.read(Box(3, 4, 11, 20)), field[..., 3:11, 4:20])

    def test_overlapping_crops_add_up(self):
        store = self.make((1, 2, 6, 6), torch.float64, (-2, -1))
        expected = torch.zeros(1, 2, 6, 6, dtype=torch.float64)
        torch.manual_seed(0)
        for box in (Box(0, 0, 4, 4), Box(2, 1, 6, 5), Box(0, 0, 6, 6), Box(5, 5, 6, 6)):
            crop = torch.rand(1, 2, *box.shape, dtype=torch.float64)
            store.add(box, crop)
            expected[..., box.y0 : box.y1, box.x0 : box.x1] += crop
        store.flush()
        assert torch.equal(store.whole(), expected)

    def test_what_is_read_holds_what_was_written_before_it_without_a_flush(self, slow_writing):
        store = self.make((1, 3, 17, 23), torch.float32, (-2, -1))
        field = torch.randint(1, 9, (1, 3, 17, 23)).float()
        for box in tiles(17, 23, 5, 8):
            store.write(box, field[..., box.y0 : box.y1, box.x0 : box.x1])
            assert torch.equal(store.read(box), field[..., box.y0 : box.y1, box.x0 : box.x1])
        assert torch.equal(store.whole(), field)

    def test_what_is_read_holds_what_was_added_before_it_without_a_flush(self, slow_writing):
        store = self.make((1, 3, 17, 23), torch.float32, (-2, -1))
        for count in range(1, 6):
            store.add(Box(2, 3, 11, 20), torch.ones(1, 3, 9, 17))
            assert torch.equal(store.read(Box(2, 3, 11, 20)), torch.full((1, 3, 9, 17), float(count)))

    def test_one_thread_reads_what_another_has_written_while_it_writes_on(self):
        """Boxes of different rows, within the same blocks of a file."""
        store = self.make((1, 3, 64, 40), torch.float32, (-2, -1))
        field = torch.randint(1, 9, (1, 3, 64, 40)).float()
        written: Queue[int] = Queue()
        found = []

        def read():
            for y in iter(written.get, -1):
                found.append(torch.equal(store.read(Box(y, 0, y + 1, 40)), field[..., y : y + 1, :]))

        with ThreadPoolExecutor(1) as reader:
            reading = reader.submit(read)
            for y in range(64):
                store.write(Box(y, 0, y + 1, 40), field[..., y : y + 1, :])
                written.put(y)
            written.put(-1)
            reading.result()
        assert found == [True] * 64

    def test_it_may_be_closed_again(self):
        store = self.make((1, 3, 7, 9), torch.float32, (-2, -1))
        store.write(Box.whole(7, 9), torch.ones(1, 3, 7, 9))
        store.close()
        store.close()

    def test_the_axes_may_stand_anywhere(self):
        field = torch.rand(1, 5, 6, 4)
        store = self.make((1, 5, 6, 4), torch.float32, (-3, -2))
        for box in tiles(5, 6, 2, 4):
            store.write(box, field[:, box.y0 : box.y1, box.x0 : box.x1])
        store.flush()
        assert torch.equal(store.whole(), field)
        assert torch.equal(store.read(Box(1, 2, 3, 6)), field[:, 1:3, 2:6])


@given(
    st.lists(st.tuples(st.sampled_from(["write", "add", "read"]), some_box), max_size=8),
    st.sampled_from([torch.contiguous_format, torch.channels_last]),
)
def test_boxes_in_memory_in_any_order(steps, layout):
    """Zeros are written only where nothing else is first."""
    host = torch.device("cpu")
    store = HostStore((1, 2, 9, 11), torch.float64, (-2, -1), device=host, memory_format=layout)
    expected = torch.zeros(1, 2, 9, 11, dtype=torch.float64)
    for number, (action, box) in enumerate(steps, 1):
        there = expected[..., box.y0 : box.y1, box.x0 : box.x1]
        if action == "read":
            assert torch.equal(store.read(box), there)
            continue
        crop = torch.full((1, 2, *box.shape), float(number), dtype=torch.float64)
        getattr(store, action)(box, crop)
        there.copy_(crop if action == "write" else there + crop)
    assert torch.equal(store.whole(), expected)


class TestHostStore(StoreConformance):
    def make(self, shape, dtype, axes):
        return HostStore(shape, dtype, axes, device=torch.device("cpu"))


class TestHostStoreChannelsLast(StoreConformance):
    def make(self, shape, dtype, axes):
        return HostStore(shape, dtype, axes, device=torch.device("cpu"), memory_format=torch.channels_last)


class TestHostStoreInSpareMemory(StoreConformance):
    @pytest.fixture(autouse=True)
    def any_size(self, monkeypatch):
        monkeypatch.setattr("gigagrad.devices.buffer_pool.MAPPED_BYTES", 0)

    def make(self, shape, dtype, axes):
        self.spare = BufferPool()
        nbytes = math.prod(shape) * dtype.itemsize
        self.spare.give(torch.full((nbytes,), 255, dtype=torch.uint8))  # in floats not a number
        store = HostStore(
            shape, dtype, axes, device=torch.device("cpu"), memory_format=torch.channels_last, spare=self.spare
        )
        assert self.spare.fresh_bytes([nbytes]) == nbytes
        return store

    def test_a_store_that_retires_leaves_its_memory(self):
        store = self.make((1, 3, 7, 9), torch.float32, (-2, -1))
        store.read(Box.whole(7, 9))
        store.retire()
        store.retire()
        assert self.spare.fresh_bytes([3 * 7 * 9 * 4] * 2) == 3 * 7 * 9 * 4

    @pytest.mark.parametrize("end", [HostStore.retire, HostStore.close])
    def test_what_others_may_hold_is_not_left(self, end):
        store = self.make((1, 3, 7, 9), torch.float32, (-2, -1))
        if end is HostStore.retire:
            held = store.whole()
            assert held.isfinite().all()
        end(store)
        assert self.spare.fresh_bytes([3 * 7 * 9 * 4]) == 3 * 7 * 9 * 4


class TestDiskStore(StoreConformance):
    codec: Blosc | None = None

    @pytest.fixture(autouse=True)
    def scratch(self, tmp_path):
        self._scratch = Scratch(tmp_path, 0)
        yield
        self._scratch.close()

    def make(self, shape, dtype, axes):
        return DiskStore(FieldSpec("field", shape, dtype, axes), self._scratch, self.codec)


class TestEncodedDiskStore(TestDiskStore):
    codec = Blosc()


class TestDiskStorePastTheCache(TestDiskStore):
    @pytest.fixture(autouse=True)
    def scratch(self, tmp_path, monkeypatch):
        monkeypatch.setattr("gigagrad.stores.scratch.cacheable_bytes", lambda: -1)
        self._scratch = Scratch(tmp_path, 0)
        yield
        self._scratch.close()


class TestEncodedDiskStorePastTheCache(TestDiskStorePastTheCache):
    codec = Blosc()


class RoundedConformance(StoreConformance):
    """The same suite for values that the rounding holds exactly; sums are refused."""

    @pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
    def test_tiles_written_make_the_field(self, dtype):
        super().test_tiles_written_make_the_field(dtype)

    def test_overlapping_crops_add_up(self):
        store = self.make((1, 2, 6, 6), torch.float32, (-2, -1))
        with pytest.raises(AssertionError, match="never rounded"):
            store.add(Box(0, 0, 6, 6), torch.ones(1, 2, 6, 6))

    def test_what_is_read_holds_what_was_added_before_it_without_a_flush(self):  # type: ignore[override]
        """There is no adding."""

    def test_the_axes_may_stand_anywhere(self):
        field = torch.randint(-9, 9, (1, 5, 6, 4)).float()
        store = self.make((1, 5, 6, 4), torch.float32, (-3, -2))
        for box in tiles(5, 6, 2, 4):
            store.write(box, field[:, box.y0 : box.y1, box.x0 : box.x1])
        assert torch.equal(store.whole(), field)
        assert torch.equal(store.read(Box(1, 2, 3, 6)), field[:, 1:3, 2:6])

    def test_whole_numbers_have_a_store_of_their_own(self):
        with pytest.raises(AssertionError, match="stored as it is"):
            self.make((1, 1, 2, 2), torch.int64, (-2, -1))


class TestHalfStore(RoundedConformance):
    def make(self, shape, dtype, axes):
        inner = HostStore(shape, torch.bfloat16, axes, device=torch.device("cpu"))
        return RoundedStore(inner, Half(torch.bfloat16), dtype)


class TestQuantisedStore(RoundedConformance):
    """Errors below a thousandth of the values' own last digit keep them all exactly."""

    def make(self, shape, dtype, axes):
        rounding = Quantised(1e-20)
        inner = HostStore(shape, rounding.packed_dtype(dtype), axes, device=torch.device("cpu"))
        return RoundedStore(inner, rounding, dtype)

    @pytest.mark.parametrize("halo", [0, 2])
    def test_what_is_read_is_the_rounding_of_what_was_written(self, halo):
        rounding = Quantised(0.05, seed=3)
        store = RoundedStore(
            HostStore((1, 3, 17, 23), torch.int32, (-2, -1), device=torch.device("cpu")), rounding, torch.float32
        )
        field = torch.randn(1, 3, 17, 23).relu()
        for box in tiles(17, 23, 5, 8):
            store.write(box, field[..., box.y0 : box.y1, box.x0 : box.x1])
        expected = rounding.round(field, Box.whole(17, 23), (-2, -1))
        assert torch.equal(store.whole(), expected)
        assert not torch.equal(expected, field)
        for box in tiles(17, 23, 6, 6):
            wide = Box(box.y0 - halo, box.x0 - halo, box.y1 + halo, box.x1 + halo).clamp(17, 23)
            assert torch.equal(store.read(wide), expected[..., wide.y0 : wide.y1, wide.x0 : wide.x1])


class TestStrips(StoreConformance):
    def make(self, shape, dtype, axes):
        return Strips(FieldSpec("gradient", shape, dtype, axes), torch.device("cpu"), whole=False)

    @pytest.mark.parametrize("whole", [False, True])
    def test_what_is_taken_is_what_was_added(self, whole):
        store = Strips(FieldSpec("gradient", (1, 2, 20, 5), torch.float64, (-2, -1)), torch.device("cpu"), whole=whole)
        expected, found = torch.zeros(1, 2, 20, 5, dtype=torch.float64), []
        for y0, y1, done in ((0, 6, 4), (4, 11, 4), (4, 11, 9), (12, 15, 20)):
            crop = torch.rand(1, 2, y1 - y0, 5, dtype=torch.float64)
            store.add(Box(y0, 0, y1, 5), crop)
            expected[..., y0:y1, :] += crop
            if (strip := store.take(done)) is not None:
                found.append(strip)
        assert [(box.y0, box.y1) for box, _ in found] == [(0, 4), (4, 9), (9, 20)]
        assert torch.equal(torch.cat([crop for _, crop in found], -2), expected)
