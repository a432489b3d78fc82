"""The cache of decoded tiles: its bound, its order, its threads."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from threading import Event, Semaphore

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from gigagrad.boxes import Box, tiles
from gigagrad.images.pixels import ReadOrder, TileCache, grid_parts


def tile(size: int) -> np.ndarray:
    return np.zeros(size, np.uint8)


def held_bytes(cache: TileCache, keys: range) -> int:
    """Of what it gives without decoding."""

    def missing(_: int) -> np.ndarray:
        raise LookupError

    found = 0
    for key in keys:
        with suppress(LookupError):
            found += cache.get(key, missing).nbytes
    return found


@given(limit=st.integers(0, 50), keys=st.lists(st.integers(1, 20), max_size=60))
def test_never_holds_more_than_its_limit(limit: int, keys: list[int]) -> None:
    cache = TileCache(limit)
    for key in keys:
        assert cache.get(key, tile).nbytes == key
        assert cache.held_bytes == held_bytes(cache, range(1, 21)) <= limit


def test_drops_what_was_used_longest_ago() -> None:
    cache = TileCache(30)
    decoded: list[str] = []

    def get(key: str) -> None:
        cache.get(key, lambda key: decoded.append(key) or tile(10))  # type: ignore[func-returns-value]

    for key in "abcadab":
        get(key)
    assert decoded == ["a", "b", "c", "d", "b"]


def test_tiles_that_are_not_wanted_again_leave_early_where_they_are_bounded() -> None:
    cache = TileCache(100, settled_bytes=20)
    for key in range(5):
        cache.get(key, lambda _: tile(10))
    for key in (3, 1, 0):
        cache.settle(key)
    cache.settle(9)  # was never held
    assert cache.held_bytes == held_bytes(cache, range(5)) == 40
    assert held_bytes(cache, range(3, 4)) == 0
    cache.get(1, tile)  # wanted after all
    cache.settle(2)
    assert cache.held_bytes == 40


def test_many_threads_share_it() -> None:
    cache = TileCache(1000)
    with ThreadPoolExecutor(8) as pool:
        sizes = list(pool.map(lambda key: cache.get(key, tile).nbytes, [n % 90 + 1 for n in range(2000)]))
    assert sizes == [n % 90 + 1 for n in range(2000)]
    assert cache.held_bytes == held_bytes(cache, range(1, 91)) <= 1000


def those_who_wait(cache: TileCache, key: int) -> Semaphore:
    """Counts who waits for a tile that is being decoded."""
    come, coming = Semaphore(0), cache._coming[key]
    result = coming.result

    def noted() -> np.ndarray:
        come.release()
        return result()

    coming.result = noted  # type: ignore[method-assign]
    return come


@pytest.mark.parametrize("limit", [30, 5])
def test_a_tile_that_several_threads_want_at_once_is_decoded_once(limit: int) -> None:
    """Also one that is too large to be held."""
    cache, decoded, begun, go_on = TileCache(limit), list[int](), Event(), Event()

    def slow(size: int) -> np.ndarray:
        decoded.append(size)
        begun.set()
        assert go_on.wait(60)
        return tile(size)

    with ThreadPoolExecutor(4) as pool:
        first = pool.submit(cache.get, 10, slow)
        assert begun.wait(60)
        come = those_who_wait(cache, 10)
        others = [pool.submit(cache.get, 10, slow) for _ in range(3)]
        assert all(come.acquire(timeout=60) for _ in others)
        go_on.set()
        found = [one.result() for one in (first, *others)]
    assert decoded == [10]
    assert all(one is found[0] for one in found)
    assert cache.held_bytes == (10 if limit >= 10 else 0)
    assert not cache._coming


def test_tiles_that_another_thread_decodes_come_last() -> None:
    cache, begun, go_on = TileCache(30), Event(), Event()

    def slow(size: int) -> np.ndarray:
        begun.set()
        assert go_on.wait(60)
        return tile(size)

    with ThreadPoolExecutor(1) as pool:
        pool.submit(cache.get, 2, slow)
        assert begun.wait(60)
        turns = list(cache.in_turn([1, 2, 3]))
        go_on.set()
    assert turns == [1, 3, 2]
    assert list(cache.in_turn([1, 2, 3])) == [1, 2, 3]


def test_a_tile_that_could_not_be_decoded_is_tried_again_by_whoever_waits() -> None:
    cache, tried, begun, go_on = TileCache(30), list[int](), Event(), Event()

    def fails_once(size: int) -> np.ndarray:
        tried.append(size)
        if len(tried) > 1:
            return tile(size)
        begun.set()
        assert go_on.wait(60)
        raise ValueError("corrupt")

    with ThreadPoolExecutor(2) as pool:
        first = pool.submit(cache.get, 10, fails_once)
        assert begun.wait(60)
        come = those_who_wait(cache, 10)
        second = pool.submit(cache.get, 10, fails_once)
        assert come.acquire(timeout=60)
        go_on.set()
        with pytest.raises(ValueError, match="corrupt"):
            first.result()
        assert second.result().nbytes == 10
    assert tried == [10, 10]
    assert not cache._coming


def test_nobody_waits_for_what_the_main_thread_decodes() -> None:
    """Ctrl-C may end it at any instruction."""
    cache = TileCache(30)

    def meanwhile(size: int) -> np.ndarray:
        with ThreadPoolExecutor(1) as pool:
            assert pool.submit(cache.get, size, tile).result(60).nbytes == size
        return tile(size)

    cache.get(10, meanwhile)
    assert cache.held_bytes == 10


def test_forgets_everything_when_cleared() -> None:
    cache = TileCache(100)
    cache.get(10, tile)
    cache.clear()
    assert cache.held_bytes == 0


def decoded(height: int, width: int, step: int, halo: int, limit_bytes: int, *, settle: bool = True) -> float:
    """How often a file tile of 32 px is decoded, as crops of `step` px with a halo are read along the shorter side."""
    cache, walk, count, wanted = TileCache(limit_bytes), ReadOrder(height, width), list[None](), set[Box]()

    def decode(_: Box) -> np.ndarray:
        count.append(None)
        return np.zeros((32, 32), np.uint8)

    boxes = list(tiles(height, width, step, step))
    for box in boxes if height >= width else sorted(boxes, key=lambda box: (box.x0, box.y0)):
        crop = Box(box.y0 - halo, box.x0 - halo, box.y1 + halo, box.x1 + halo).clamp(height, width)
        down, right = walk.settled(crop)
        for tile, _, _ in grid_parts(crop, 32, 32):
            cache.get(tile, decode)
            assert cache.held_bytes <= limit_bytes
            if settle and tile.y1 <= down and tile.x1 <= right:
                cache.settle(tile)
            wanted.add(tile)
    return len(count) / len(wanted)


@pytest.mark.parametrize("shape", [(640, 1500), (1500, 640)])
@pytest.mark.parametrize(("step", "halo"), [(128, 0), (128, 1), (100, 0), (100, 9), (170, 3), (60, 30)])
def test_tiles_that_no_later_crop_wants_make_room(shape: tuple[int, int], step: int, halo: int) -> None:
    """The rows of file tiles that two lines of crops share fit beside one crop, and all tiles of a line do not."""
    shared = 2 * -(-2 * halo // 32) + 2
    limit = 32 * 32 * (shared * (640 // 32) + ((step + 2 * halo) // 32 + 2) ** 2)
    assert decoded(*shape, step, halo, limit) == 1


def test_without_that_they_are_decoded_again() -> None:
    limit = 32 * 32 * 60
    assert decoded(1500, 640, 170, 3, limit) == 1
    assert decoded(1500, 640, 170, 3, limit, settle=False) > 1.15


def test_boxes_anywhere_settle_nothing_wanted() -> None:
    """Of crops that are no neighbours nothing is known, and the last ones are held."""
    walk = ReadOrder(1000, 1000)
    for box in (Box(500, 500, 600, 600), Box(0, 0, 100, 100), Box(300, 700, 400, 800)):
        assert walk.settled(box) == (0, 0)
    assert walk.settled(Box(390, 700, 490, 800)) == (480, 790)
    assert walk.settled(Box(390, 700, 490, 800)) == (480, 790)  # once more
    down, right = walk.settled(Box(900, 900, 1000, 1000))
    assert min(down, right) >= 1000
