"""One conformance suite for all codecs."""

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


class Other(Blosc):
    name = b"othr"


@pytest.mark.parametrize("codec", [Blosc()], ids=lambda codec: type(codec).__name__)
class TestEveryCodec:
    @given(data=st.binary(max_size=5000), repeats=st.integers(1, 20), itemsize=st.sampled_from(ITEMSIZES))
    def test_what_goes_in_comes_out(self, codec, data, repeats, itemsize):
        data = np.frombuffer(data * repeats, np.uint8)
        encoded = codec.encode(data, itemsize)
        assert len(encoded) <= codec.max_encoded_bytes(data.nbytes)
        out = np.full_like(data, 0xAA)
        codec.decode(encoded, out)
        assert np.array_equal(out, data)

    @pytest.mark.parametrize("count", [1, 1_000_003])
    def test_noise_needs_no_more_than_was_said(self, codec, count):
        data = np.random.default_rng(0).integers(0, 256, count, dtype=np.uint8)
        encoded = codec.encode(data, 4)
        assert count <= len(encoded) <= codec.max_encoded_bytes(count)
        out = np.empty_like(data)
        codec.decode(memoryview(bytearray(encoded)), out)
        assert np.array_equal(out, data)

    def test_views_of_memory_are_data_too(self, codec):
        data = smooth()
        assert codec.encode(memoryview(data), 4) == codec.encode(data, 4)

    @given(position=st.floats(0, 1), bit=st.integers(0, 7))
    def test_one_wrong_bit_is_an_error_and_leaves_the_output_alone(self, codec, position, bit):
        data = smooth(count=500)
        encoded = bytearray(codec.encode(data, 4))
        encoded[int(position * (len(encoded) - 1))] ^= 1 << bit
        out = np.full_like(data, 7)
        with pytest.raises(StoreError, match=r"damaged: got .* expected .*scratch"):
            codec.decode(encoded, out)
        assert (out == 7).all()

    @given(kept=st.floats(0, 1, exclude_max=True))
    def test_a_missing_end_is_an_error(self, codec, kept):
        data = smooth(count=500)
        encoded = codec.encode(data, 4)
        with pytest.raises(StoreError, match="damaged"):
            codec.decode(encoded[: int(kept * len(encoded))], np.empty_like(data))

    @given(data=st.binary(max_size=200))
    def test_any_other_bytes_are_an_error(self, codec, data):
        with pytest.raises(StoreError, match="damaged"):
            codec.decode(data, np.empty(100, np.uint8))

    def test_another_length_is_an_error(self, codec):
        data = smooth()
        encoded = codec.encode(data, 4)
        for nbytes in (0, data.nbytes - 4, data.nbytes + 4):
            with pytest.raises(StoreError, match=rf"got {data.nbytes} bytes .* expected {nbytes} bytes"):
                codec.decode(encoded, np.empty(nbytes, np.uint8))

    def test_another_codec_s_bytes_are_an_error(self, codec):
        data = smooth()
        with pytest.raises(StoreError, match=r"encoded by b'.*' *, expected"):
            codec.decode(Other().encode(data, 4), np.empty_like(data))

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

    def test_what_blosc_itself_refuses_is_an_error(self):
        """A checksum that fits bytes that Blosc did not write: nothing but our own fault could make them."""
        forged = bytes(range(200))
        out = np.empty(200, np.uint8)
        with pytest.raises(StoreError, match="what Blosc refuses"):
            Blosc()._decode(memoryview(forged), out)


def test_a_codec_runs_where_it_is_faster_than_the_link():
    assert faster_codec(500e6, 2000e6, 3.0) == Blosc()  # 0.5 + 0.67 ns a byte against 2
    assert faster_codec(3000e6, 2000e6, 3.0) is None  # 0.5 + 0.11 ns a byte against 0.33
    assert faster_codec(500e6, 2000e6, 1.0) is None  # what does not shrink is only delayed
    assert faster_codec(500e6, 0.0, 3.0) is None  # nobody has measured it


@given(link=st.floats(1e6, 1e11), rate=st.floats(1e6, 1e11), ratio=st.floats(0.5, 100))
def test_a_faster_link_never_asks_for_a_codec_that_a_slower_one_did_without(link, rate, ratio):
    if faster_codec(link, rate, ratio) is None:
        assert faster_codec(link * 2, rate, ratio) is None
