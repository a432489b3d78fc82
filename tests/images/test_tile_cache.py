"""The cache of decoded tiles: its bound, its order, its threads."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from gigagrad.images.tile_cache import TileCache


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


def test_many_threads_share_it() -> None:
    cache = TileCache(1000)
    with ThreadPoolExecutor(8) as pool:
        sizes = list(pool.map(lambda key: cache.get(key, tile).nbytes, [n % 90 + 1 for n in range(2000)]))
    assert sizes == [n % 90 + 1 for n in range(2000)]
    assert cache.held_bytes == held_bytes(cache, range(1, 91)) <= 1000


def test_a_tile_that_two_readers_decode_at_once_counts_once() -> None:
    cache = TileCache(30)
    # The second reader comes while the first is still decoding.
    cache.get(10, lambda key: cache.get(key, tile))
    assert cache.held_bytes == 10


def test_forgets_everything_when_cleared() -> None:
    cache = TileCache(100)
    cache.get(10, tile)
    cache.clear()
    assert cache.held_bytes == 0
