"""What the codec of kept fields promises, and when it runs."""

import sys
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from gigagrad.errors import StoreError
from gigagrad.stores import Blosc, faster_codec

ITEMSIZES = (1, 2, 4, 8)


def smooth(seed: int = 0, count: int = 20_000) -> np.ndarray:
    """The bytes of a float32 field after ReLU."""
    field = np.convolve(np.random.default_rng(seed).normal(size=count), np.ones(50) / 50, "same")
    return np.maximum(field, 0).astype(np.float32).view(np.uint8)


@pytest.mark.parametrize("codec", [Blosc()], ids=lambda codec: type(codec).__name__)
class TestEveryCodec:
    @given(data=st.binary(max_size=5000), repeats=st.integers(1, 20), itemsize=st.sampled_from(ITEMSIZES))
    def test_what_goes_in_comes_out(self, codec, data, repeats, itemsize):
        data = np.frombuffer(data * repeats, np.uint8)
        encoded = codec.encode(data, itemsize)
        out = np.full_like(data, 0xAA)
        codec.decode(encoded, out)
        assert np.array_equal(out, data)

    @given(kept=st.floats(0, 1, exclude_max=True))
    def test_a_missing_end_is_an_error(self, codec, kept):
        data = smooth(count=500)
        encoded = codec.encode(data, 4)
        with pytest.raises(StoreError, match="damaged"):
            codec.decode(encoded[: int(kept * len(encoded))], np.empty_like(data))

    def test_a_brick_that_is_too_small_for_what_was_encoded_is_an_error(self, codec):
        data = smooth()
        with pytest.raises(StoreError, match=rf"damaged.*decode to {data.nbytes - 4} .*scratch"):
            codec.decode(codec.encode(data, 4), np.empty(data.nbytes - 4, np.uint8))

    def test_threads_share_one(self, codec):
        def there_and_back(seed: int) -> bool:
            data = smooth(seed)
            out = np.empty_like(data)
            codec.decode(codec.encode(data, 4), out)
            return np.array_equal(out, data)

        interval = sys.getswitchinterval()
        sys.setswitchinterval(1e-5)
        try:
            with ThreadPoolExecutor(8) as pool:
                assert all(pool.map(there_and_back, range(64)))
        finally:
            sys.setswitchinterval(interval)


class TestBlosc:
    def test_zeros_and_quantised_fields_shrink(self):
        zeros = np.zeros(100_000, np.uint8)
        assert len(Blosc().encode(zeros, 4)) < 1000
        steps = np.round(smooth().view(np.float32) / 0.02).astype(np.int32).view(np.uint8)
        assert len(Blosc().encode(steps, 4)) < len(steps) / 6

    def test_noise_grows_by_a_frame_only(self):
        """Above the largest block too; a store then keeps the bytes as they are."""
        for count in (1, 1_000_003):
            data = np.random.default_rng(0).integers(0, 256, count, dtype=np.uint8)
            encoded = Blosc().encode(data, 4)
            assert count <= len(encoded) <= count + 32
            out = np.empty_like(data)
            Blosc().decode(encoded, out)
            assert np.array_equal(out, data)


def test_a_codec_runs_where_it_is_faster_than_the_link():
    assert faster_codec(500e6, 2000e6, 3.0) == Blosc()  # 0.5 + 0.67 ns a byte against 2
    assert faster_codec(3000e6, 2000e6, 3.0) is None  # 0.5 + 0.11 ns a byte against 0.33
    assert faster_codec(500e6, 2000e6, 1.0) is None  # what does not shrink is only delayed
    assert faster_codec(500e6, 0.0, 3.0) is None  # nobody has measured it


@given(link=st.floats(1e6, 1e11), rate=st.floats(1e6, 1e11), ratio=st.floats(0.5, 100))
def test_a_faster_link_never_asks_for_a_codec_that_a_slower_one_did_without(link, rate, ratio):
    if faster_codec(link, rate, ratio) is None:
        assert faster_codec(link * 2, rate, ratio) is None
