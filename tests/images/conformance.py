"""What every image reader must do. A reader's test class derives from `ReaderConformance` and supplies `make`."""

from __future__ import annotations

from abc import ABC, abstractmethod
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from gigagrad.boxes import Box
from gigagrad.errors import ImageError
from gigagrad.images import Image, Level, open_image

HEIGHT, WIDTH = 83, 101  # odd, and no multiple of any tile, strip or chunk used here
ALL = Box.whole(HEIGHT, WIDTH)


@st.composite
def boxes(draw: st.DrawFn) -> Box:
    """Boxes inside, across and wholly outside the image, one pixel and empty ones too."""
    y0 = draw(st.integers(-HEIGHT, 2 * HEIGHT))
    x0 = draw(st.integers(-WIDTH, 2 * WIDTH))
    return Box(y0, x0, y0 + draw(st.integers(0, 2 * HEIGHT)), x0 + draw(st.integers(0, 2 * WIDTH)))


class ReaderConformance(ABC):
    """Reads of `open_image(self.make(folder, array_CHW))` against NumPy. Lossless sources only.

    `channels`, `dtype` and `fill` say what array the source is made from and what lies outside it; `name` is what the
    image must call itself.
    """

    channels: int = 3
    dtype: Any = np.uint8
    fill: int | float = 255
    name: str = "image"

    @abstractmethod
    def make(self, folder: Path, array_CHW: np.ndarray) -> Any:
        """Store the array under `folder` (or wrap it) and return what `open_image` takes."""

    def open(self, source: Any, **options: Any) -> Image:
        return open_image(source, **options)

    @pytest.fixture(scope="class")
    @classmethod
    def array(cls) -> np.ndarray:
        rng = np.random.default_rng(7)
        shape = (cls.channels, HEIGHT, WIDTH)
        if np.dtype(cls.dtype).kind == "f":
            return rng.standard_normal(shape).astype(cls.dtype)
        return rng.integers(0, np.iinfo(cls.dtype).max, shape, dtype=cls.dtype, endpoint=True)

    @pytest.fixture(scope="class")
    @classmethod
    def source(cls, tmp_path_factory: pytest.TempPathFactory, array: np.ndarray) -> Any:
        return cls().make(tmp_path_factory.mktemp("conformance"), array)

    @pytest.fixture(scope="class")
    @classmethod
    def image(cls, source: Any) -> Any:
        with cls().open(source) as image:
            yield image

    def expected(self, array: np.ndarray, box: Box) -> np.ndarray:
        """The oracle: fill everywhere, then one assignment."""
        canvas = np.full((self.channels, *box.shape), self.fill, self.dtype)
        part = box.clamp(HEIGHT, WIDTH)
        if not part.empty:
            to = part.shift(-box.y0, -box.x0)
            canvas[:, to.y0 : to.y1, to.x0 : to.x1] = array[:, part.y0 : part.y1, part.x0 : part.x1]
        return canvas

    def test_describes_itself(self, image: Image) -> None:
        assert image.shape == (self.channels, HEIGHT, WIDTH)
        assert str(image.dtype).removeprefix("torch.") == str(np.dtype(self.dtype))
        assert image.fill == self.fill
        assert image.name == self.name
        assert image.levels[0] == Level((HEIGHT, WIDTH), 1.0)

    def test_reads_any_box(self, image: Image, array: np.ndarray) -> None:
        @given(box=boxes())
        def check(box: Box) -> None:
            np.testing.assert_array_equal(np.asarray(image.read(box)), self.expected(array, box))

        check()

    @pytest.mark.parametrize(
        "box",
        [
            ALL,
            Box(-1, -1, HEIGHT + 1, WIDTH + 1),
            Box(0, 0, 1, 1),
            Box(HEIGHT - 1, WIDTH - 1, HEIGHT, WIDTH),
            Box(HEIGHT, 0, HEIGHT + 5, 9),
            Box(-9, -9, 0, 0),
            Box(5, 5, 5, 9),
        ],
    )
    def test_reads_special_boxes(self, image: Image, array: np.ndarray, box: Box) -> None:
        pixels = image.read(box)
        assert pixels.dtype == image.dtype
        np.testing.assert_array_equal(np.asarray(pixels), self.expected(array, box))

    def test_reads_any_squares(self, image: Image, array: np.ndarray) -> None:
        if not isinstance(image.dtype, np.dtype):
            pytest.skip("squares are read of arrays")

        @given(
            st.lists(st.tuples(st.integers(-60, WIDTH + 9), st.integers(-60, HEIGHT + 9)), max_size=5),
            st.integers(1, 60),
        )
        def check(corners: list[tuple[int, int]], side: int) -> None:
            squares = image.read_squares(corners, side)
            assert (squares.shape, squares.dtype) == ((len(corners), self.channels, side, side), image.dtype)
            for square, (x, y) in zip(squares, corners, strict=True):
                np.testing.assert_array_equal(square, self.expected(array, Box(y, x, y + side, x + side)))

        check()

    def test_pixels_belong_to_the_caller(self, image: Image, array: np.ndarray) -> None:
        for box in (ALL, Box(3, 4, 30, 40), Box(-2, -2, 20, 20)):
            image.read(box)[...] = 1
            np.testing.assert_array_equal(np.asarray(image.read(box)), self.expected(array, box))

    def test_many_threads_read_at_once(self, source: Any, array: np.ndarray) -> None:
        rng = np.random.default_rng(3)
        corners = rng.integers(-20, 90, (64, 2)).tolist()
        wanted = [Box(y, x, y + 37, x + 29) for y, x in corners]
        with self.open(source) as image, ThreadPoolExecutor(8) as pool:
            for box, pixels in zip(wanted, pool.map(image.read, wanted), strict=True):
                np.testing.assert_array_equal(np.asarray(pixels), self.expected(array, box))

    def test_a_closed_image_says_so(self, source: Any) -> None:
        with self.open(source) as image:
            image.read(Box(0, 0, 1, 1))
        image.close()
        with pytest.raises(ImageError, match="closed"):
            image.read(Box(0, 0, 1, 1))
        if isinstance(image.dtype, np.dtype):
            with pytest.raises(ImageError, match="closed"):
                image.read_squares([(0, 0)], 1)

    @pytest.mark.parametrize("level", [-1, 9])
    def test_a_missing_level_is_named(self, source: Any, level: int) -> None:
        with pytest.raises(ImageError, match=rf"no level {level}; choose one of: 0 \({HEIGHT} x {WIDTH}\)"):
            self.open(source, level=level)

    def test_the_argument_decides_mpp(self, source: Any) -> None:
        with self.open(source, mpp=0.25) as image:
            assert image.mpp == 0.25
        with pytest.raises(ImageError, match="got mpp 1000, expected"):
            self.open(source, mpp=1000)


class PyramidConformance(ReaderConformance):
    """For formats with levels: `make` must also store the array's every second pixel as level 1."""

    def test_levels_have_their_own_pixels(self, source: Any, array: np.ndarray) -> None:
        half = array[:, ::2, ::2]
        height, width = half.shape[1:]
        with self.open(source, level=1, mpp=0.5) as image:
            assert image.shape == half.shape
            assert [level.shape for level in image.levels] == [(HEIGHT, WIDTH), (height, width)]
            assert image.levels[1].downsample == pytest.approx((HEIGHT / height + WIDTH / width) / 2)
            assert image.mpp == pytest.approx(0.5 * image.levels[1].downsample)
            np.testing.assert_array_equal(np.asarray(image.read(Box.whole(height, width))), half)

    def test_goes_from_level_to_level(self, source: Any) -> None:
        with self.open(source, mpp=0.5) as image, image.at_level(1) as smaller, smaller.at_level(0) as back:
            assert smaller.shape[1:] == image.levels[1].shape
            assert (back.shape, back.mpp) == (image.shape, image.mpp)
