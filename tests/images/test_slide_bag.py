"""Geometry of patches: which level they are read from, their order, what of them is tissue, and their pixels."""

from __future__ import annotations

from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from itertools import pairwise

import numpy as np
import openslide
import PIL.Image as Pillow
import pytest
import tifffile
import zarr
from hypothesis import given
from hypothesis import strategies as st

from gigagrad.boxes import Box
from gigagrad.errors import ConfigError, ImageError
from gigagrad.images import open_image
from gigagrad.images.image import Image
from gigagrad.images.pixels import Level
from gigagrad.images.slide_bag import (
    CaseBag,
    Sampling,
    SlideBag,
    coarse_level,
    file_order,
    grid,
    last_of_blocks,
    mask_cells,
    resampled,
    shares,
    tissue_cells,
)
from gigagrad.images.tiff import TiffImage
from gigagrad.threads import SideThreads


class Blank(Image):
    """An image without pixels, in blocks."""

    def __init__(self, shape, levels=(1.0,), block=None):
        sizes = [Level((round(shape[1] / each), round(shape[2] / each)), each) for each in levels]
        super().__init__(shape=shape, dtype=np.dtype(np.uint8), name="blank", levels=tuple(sizes))
        self._block = block

    @property
    def block_shape(self):
        return self._block

    def _read_inside(self, box):
        raise AssertionError("there is nothing to read")


@pytest.fixture
def decoded(monkeypatch):
    """How often each tile of each level was decoded."""
    counts = Counter[object]()
    decode = TiffImage._decode

    def counting(self, key):
        counts[self.name, self.shape, key[0]] += 1
        return decode(self, key)

    monkeypatch.setattr(TiffImage, "_decode", counting)
    return counts


@pytest.fixture(scope="module")
def wide_slide(tmp_path_factory):
    """A JPEG TIFF of 640 x 5000 px in tiles of 64, so wide that two rows of its tiles are more than a small cache."""
    y, x = np.mgrid[0:640, 0:5000]
    rgb_HWC = np.stack([(x * 7 + y) % 251, (x + y * 3) % 241, (x ^ y) % 239], axis=-1).astype(np.uint8)
    path = tmp_path_factory.mktemp("wide") / "wide.tif"
    tifffile.imwrite(path, rgb_HWC, photometric="rgb", tile=(64, 64), compression="jpeg", resolution=(20000, 20000),
                     resolutionunit="CENTIMETER", metadata=None)  # fmt: skip
    return path


def test_levels_are_as_fine_as_asked_for():
    slide = Blank((3, 16000, 16000), levels=(1.0, 4.0, 16.0))
    assert Sampling.choose(slide, 224, 224) == Sampling(224, 224, 0, 1.0, 224)
    assert Sampling.choose(slide, 224, 448) == Sampling(224, 448, 0, 1.0, 448)
    assert Sampling.choose(slide, 224, 896) == Sampling(224, 896, 1, 4.0, 224)
    assert Sampling.choose(slide, 224, 1792) == Sampling(224, 1792, 1, 4.0, 448)
    assert Sampling.choose(slide, 224, 3 * 224 + 40).region == 712
    assert Sampling.choose(slide, 224, 100000).level == 2


@pytest.mark.parametrize("factor", [0.96, 0.99, 1.01, 1.04])
@pytest.mark.parametrize(("side", "level", "region"), [(224, 0, 224), (448, 0, 448), (896, 1, 224), (1792, 1, 448)])
def test_scanners_of_one_magnification_are_read_alike(factor, side, level, region):
    slide = Blank((3, 16000, 16000), levels=(1.0, 4.0, 16.0))
    chosen = Sampling.choose(slide, 224, side * factor)
    assert (chosen.level, chosen.region, chosen.side) == (level, region, side)
    assert chosen.resolution == side / 224


def test_a_magnification_that_was_not_scanned_is_refused():
    slide = Blank((3, 16000, 16000))
    assert Sampling.choose(slide, 224, 170).region == 170
    with pytest.raises(ImageError, match=r"blank has 112 px of level 0 where patches of 224 px are asked for, 2 times"):
        Sampling.choose(slide, 224, 112)


@given(
    size=st.integers(1, 600),
    side=st.floats(1, 20000),
    levels=st.lists(st.floats(1.2, 5), max_size=4),
)
def test_the_level_is_the_coarsest_that_will_do(size, side, levels):
    downsamples = [float(each) for each in np.cumprod([1.0, *levels])]
    slide = Blank((3, 40000, 40000), levels=downsamples)
    if 1.5 * side < size:
        return
    chosen = Sampling.choose(slide, size, side)
    assert chosen.downsample == downsamples[chosen.level]
    assert chosen.downsample <= max(1, side / size * 1.05)
    assert all(each > side / size * 1.05 for each in downsamples[chosen.level + 1 :])
    # The region shows what was asked for, but for a twentieth or half a pixel of the level.
    assert abs(chosen.region * chosen.downsample - side) <= max(0.0501 * side, 0.51 * chosen.downsample)
    assert chosen.region >= 1 or side < size


@given(height=st.integers(1, 900), width=st.integers(1, 900), side=st.integers(16, 300), step=st.integers(1, 300))
def test_a_grid_covers_the_slide(height, width, side, step):
    slide = Blank((3, height, width))
    for apart in (None, step):
        corners = grid(slide, Sampling.choose(slide, side, side), apart)
        x, y = (sorted({*axis.tolist()}) for axis in corners.T)
        assert len(corners) == len(x) * len(y) == len({*map(tuple, corners.tolist())})
        for places, length in ((x, width), (y, height)):
            assert places == list(range(0, length, apart or side))


def test_grids_without_end_are_refused():
    slide = Blank((3, 10**6, 10**6))
    with pytest.raises(ImageError, match="1000000000000 patches 1 px apart"):
        grid(slide, Sampling.choose(slide, 64, 64), 1)
    with pytest.raises(ConfigError, match="got step 0"):
        grid(slide, Sampling.choose(slide, 64, 64), 0)


@given(st.data())
def test_an_order_has_every_square_once(data):
    blocks = data.draw(st.one_of(st.none(), st.tuples(st.integers(16, 4096), st.integers(16, 4096))))
    corner = st.tuples(st.integers(-300, 3000), st.integers(-300, 3000))
    corners = np.array(data.draw(st.lists(corner, min_size=1, max_size=40)))
    order = file_order(corners, data.draw(st.integers(1, 700)), Blank((3, 3000, 3000), block=blocks))
    assert sorted(order.tolist()) == list(range(len(corners)))


@given(
    corners=st.lists(st.tuples(st.integers(-70, 99), st.integers(-70, 79)), min_size=1, max_size=9),
    region=st.integers(1, 70),
    block=st.tuples(st.integers(7, 40), st.integers(7, 40)),
)
def test_the_last_square_that_wants_a_block_is_known(corners, region, block):
    last_of = last_of_blocks(np.array(corners), region, Blank((3, 80, 100), block=block))
    for row, column in np.ndindex(-(-80 // block[0]), -(-100 // block[1])):
        part = Box.whole(*block).shift(row * block[0], column * block[1]).clamp(80, 100)
        wanting = [
            index for index, (x, y) in enumerate(corners) if not part.intersect(Box(y, x, y + region, x + region)).empty
        ]
        assert last_of[row, column] >= max(wanting, default=-1)
        if all(0 <= x <= 100 - region and 0 <= y <= 80 - region for x, y in corners):
            assert last_of[row, column] == max(wanting, default=-1)


def test_an_order_without_blocks_is_that_of_rows():
    corners = np.array([[9, 5], [3, 5], [7, 0]])
    assert file_order(corners, 4, Blank((3, 20, 20))).tolist() == [2, 1, 0]


@given(
    cells=st.tuples(st.integers(1, 7), st.integers(1, 7)),
    cell=st.integers(1, 9),
    corner=st.tuples(st.integers(-12, 60), st.integers(-12, 60)),
    side=st.integers(1, 40),
    seed=st.integers(0, 9),
)
def test_shares_are_areas(cells, cell, corner, side, seed):
    plane = np.random.default_rng(seed).random(cells).round(1)
    full = np.pad(plane.repeat(cell, 0).repeat(cell, 1), 100)
    x, y = corner
    exact = full[100 + y : 100 + y + side, 100 + x : 100 + x + side].mean()
    assert shares(plane, (cell, cell), np.array([corner]), side)[0] == pytest.approx(exact, abs=1e-9)


@given(shape=st.tuples(st.integers(1, 90), st.integers(1, 90)), cell=st.integers(1, 20), seed=st.integers(0, 9))
def test_cells_of_a_mask_are_means(shape, cell, seed):
    mask = np.random.default_rng(seed).choice(np.array([0, 1, 255], np.uint8), shape)
    cells = mask_cells(open_image(mask), cell)
    for y, x in np.ndindex(cells.shape):
        block = mask[y * cell : (y + 1) * cell, x * cell : (x + 1) * cell]
        assert cells[y, x] == pytest.approx((block == 1).mean())


@pytest.mark.parametrize(("levels", "side", "level", "cell"), [
    ((1.0,), 224, 0, 16),
    ((1.0,), 64, 0, 8),
    ((1.0,), 4, 0, 1),
    ((1.0, 4.0, 16.0, 32.0), 448, 2, 1),
    ((1.0, 4.0001, 16.003), 224, 2, 1),
    ((1.0, 2.0, 4.0, 64.0), 224, 2, 4),
])  # fmt: skip
def test_tissue_is_looked_for_in_a_coarse_level(levels, side, level, cell):
    assert coarse_level(Blank((3, 20000, 20000), levels=levels), side) == (level, cell)


def test_tissue_is_that_of_our_recipe(jpeg_slide):
    with open_image(jpeg_slide) as slide:
        cells = tissue_cells(slide, 10)
    assert cells.shape == (70, 90)
    assert cells[:58, :78].all()
    assert not cells[62:].any()


def opened(path, corners, size, side, **options):
    slide = open_image(path)
    sampling = Sampling.choose(slide, size, side)
    image = slide if not sampling.level else slide.at_level(sampling.level)
    return SlideBag(image, np.asarray(corners), sampling, name=slide.name, mpp=slide.mpp, **options)


@pytest.mark.parametrize(("size", "side", "step"), [(64, 64, 64), (48, 48, 40), (100, 100, 100), (32, 64, 64),
                                                    (50, 75, 75)])  # fmt: skip
@pytest.mark.parametrize("chunk", [1, 7])
def test_each_tile_is_decoded_once(size, side, step, chunk, wide_slide, decoded, monkeypatch):
    # So small that a row of all tiles does not fit.
    for module in ("tiff", "slide_bag"):
        monkeypatch.setattr(f"gigagrad.images.{module}.CACHE_BYTES", 60 * 64 * 64 * 3)
    x, y = np.meshgrid(np.arange(0, 5000, step), np.arange(0, 640, step))
    with opened(wide_slide, np.stack((x.ravel(), y.ravel()), 1), size, side) as bag:
        for start in range(0, len(bag), chunk):
            bag.read(start, min(start + chunk, len(bag)))
    assert len(decoded) == 10 * 79
    again = sum(count - 1 for count in decoded.values())
    # Where squares do not end with tiles at any place that would do, a column of tiles is met by two strips.
    assert again == 0


@pytest.mark.parametrize("chunks", [(3, 64, 64), (1, 100, 64)])
def test_each_chunk_of_a_zarr_is_read_once(chunks, monkeypatch):
    pixels = np.random.default_rng(0).integers(0, 255, (3, 300, 500), np.uint8)
    slide = open_image(zarr.array(pixels, chunks=chunks))
    boxes = []
    read = type(slide)._read_inside

    def noted(self, box):
        boxes.append(box)
        return read(self, box)

    monkeypatch.setattr(type(slide), "_read_inside", noted)
    sampling = Sampling.choose(slide, 48, 48)
    with SlideBag(slide, grid(slide, sampling), sampling, name="zarr") as bag:
        assert bag.cache_bytes == 32 * 2**20
        for index, (x, y) in enumerate(bag.coords):
            whole = np.full((3, 48, 48), 255, np.uint8)
            part = pixels[:, y : y + 48, x : x + 48]
            whole[:, : part.shape[1], : part.shape[2]] = part
            assert np.array_equal(bag.read(index, index + 1)[0], whole)
    assert len(boxes) == len(set(boxes)) == -(-300 // chunks[1]) * 8


def test_chunks_that_no_cache_holds_are_not_kept():
    slide = open_image(zarr.array(np.zeros((3, 2048, 2048), np.uint8), chunks=(3, 2048, 2048)))
    bag = SlideBag(slide, np.zeros((1, 2), int), Sampling(48, 48, 0, 1.0, 48), name="zarr")
    assert bag.cache_bytes == 0
    assert not bag.read(0, 1).any()


def test_threads_read_what_one_reads(wide_slide, decoded):
    corners = np.random.default_rng(0).integers(-60, 4900, (60, 2)) % (5000, 640)
    with opened(wide_slide, corners, 64, 128) as bag, ThreadPoolExecutor(4) as pool, SideThreads(2, "test") as ours:
        whole = bag.read(0, 60)
        for submit in (pool.submit, ours.submit):
            parts = [submit(bag.read, start, start + 4) for start in range(0, 60, 4)]
            assert np.array_equal(np.concatenate([part.result() for part in parts]), whole)
    assert max(decoded.values()) == 1


@given(data=st.data())
def test_any_chunks_are_parts_of_the_whole(data, jpeg_slide):
    corner = st.tuples(st.integers(-40, 890), st.integers(-40, 690))
    corners = data.draw(st.lists(corner, min_size=1, max_size=12))
    size, side = data.draw(st.sampled_from([(32, 32), (32, 64), (20, 47)]))
    with opened(jpeg_slide, corners, size, side) as bag:
        cuts = data.draw(st.lists(st.integers(0, len(bag)), max_size=4))
        places = sorted({0, len(bag), *cuts})
        whole = bag.read(0, len(bag))
        for start, stop in data.draw(st.permutations(list(pairwise(places)))):
            assert np.array_equal(bag.read(start, stop), whole[start:stop])


def test_patches_are_in_the_order_of_the_file(wide_slide):
    corners = np.array([[640, 576], [64, 0], [0, 576], [0, 0]])
    with opened(wide_slide, corners, 64, 64, tissue_share=np.array([0.1, 0.2, 0.3, 0.4])) as bag:
        assert bag.coords.tolist() == [[0, 0], [64, 0], [0, 576], [640, 576]]
        assert bag.rows.tolist() == [3, 1, 2, 0]
        assert np.array_equal(corners[bag.rows], bag.coords)
        assert bag.tissue_share.tolist() == [0.4, 0.2, 0.3, 0.1]
        for array in (bag.coords, bag.rows, bag.tissue_share, bag.over_edge):
            assert not array.flags.writeable


def test_beyond_the_edge_is_white(jpeg_slide):
    corners = np.array([[-10, -20], [850, 690], [0, 0]])
    with opened(jpeg_slide, corners, 64, 64) as bag:
        assert bag.over_edge.tolist() == [True, False, True]
        first, _, last = bag.read(0, 3)
        assert (first[:, :20] == 255).all()
        assert (first[:, :, :10] == 255).all()
        assert (last[:, 10:] == 255).all()


@pytest.mark.parametrize(("size", "side"), [(64, 128), (64, 180), (64, 96), (100, 80)])
def test_patches_are_resampled_as_pillow_does(size, side, jpeg_slide):
    corners = np.array([[0, 0], [200, 133], [840, 600], [-30, 5]])
    with opened(jpeg_slide, corners, size, side) as bag, open_image(jpeg_slide) as slide:
        level = bag._sampling
        with slide.at_level(level.level) as image:
            for index, (x, y) in enumerate(np.rint(bag.coords / level.downsample).astype(int).tolist()):
                region = np.asarray(image.read(Box(y, x, y + level.region, x + level.region))).transpose(1, 2, 0)
                wanted = Pillow.fromarray(np.ascontiguousarray(region)).resize((size, size), Pillow.Resampling.BICUBIC)
                difference = np.abs(np.asarray(wanted).astype(int) - bag.read(index, index + 1)[0].transpose(1, 2, 0))
                assert difference.max() <= 1
                assert (difference > 0).mean() < 0.01


@pytest.mark.parametrize("dtype", [np.uint16, np.int32, np.float32, bool])
def test_other_numbers_are_resampled_exactly(dtype):
    ramp = np.tile(np.arange(40), (1, 1, 40, 1))
    pixels = ramp > 19 if dtype is bool else (ramp * 1000).astype(dtype)
    half = resampled(pixels, 20)
    assert (half.dtype, half.shape) == (dtype, (1, 1, 20, 20))
    if dtype is not bool:
        assert half[..., 2:18] == pytest.approx(ramp[:, :, :20, 4:36:2] * 1000 + 500)
    assert resampled(np.full((2, 1, 9, 9), pixels.max()), 5).max() == pixels.max()


@pytest.mark.parametrize("level", [0, 1])
def test_pixels_are_openslides(level, jpeg_slide):
    side = 64 * 2**level
    with (
        opened(jpeg_slide, np.array([[128, 256], [512, 384]]), 64, side) as bag,
        openslide.OpenSlide(jpeg_slide) as other,
    ):
        assert bag._sampling.level == level
        for index, corner in enumerate(bag.coords.tolist()):
            region = np.asarray(other.read_region(tuple(corner), level, (64, 64)).convert("RGB"))
            assert np.array_equal(bag.read(index, index + 1)[0].transpose(1, 2, 0), region)


def test_slides_of_a_case_must_be_of_one_kind(jpeg_slide):
    grey = SlideBag(
        open_image(np.zeros((64, 64), np.uint8)), np.zeros((1, 2), int), Sampling(64, 64, 0, 1.0, 64), name="g"
    )
    with opened(jpeg_slide, [[0, 0]], 64, 64) as colour, pytest.raises(ImageError, match="other sizes or kinds"):
        CaseBag([colour, grey])


def test_slides_of_a_case_share_a_cache(wide_slide, decoded, monkeypatch):
    """They are read one after the other."""
    monkeypatch.setattr("gigagrad.images.slide_bag.CACHE_BYTES", 60 * 64 * 64 * 3)
    corners = np.stack(np.meshgrid(np.arange(0, 1024, 64), np.arange(0, 512, 64)), -1).reshape(-1, 2)
    with CaseBag([opened(wide_slide, corners, 64, 64) for _ in range(3)]) as case:
        assert case.cache_bytes == 60 * 64 * 64 * 3
        for start in range(0, len(case), 7):
            case.read(start, min(start + 7, len(case)))
            assert {id(bag.block_cache) for bag in case.bags} == {id(case.bags[0].block_cache)}
            assert case.bags[0].block_cache.held_bytes <= case.cache_bytes
        assert sum(decoded.values()) == 3 * 16 * 8
        each = np.concatenate([bag.read(0, len(bag)) for bag in case.bags])
        assert np.array_equal(case.read(0, len(case)), each)


def test_tensors_are_refused():
    import torch

    with pytest.raises(ImageError, match="give its slide as a NumPy array"):
        SlideBag(open_image(torch.zeros(3, 64, 64)), np.zeros((1, 2), int), Sampling(64, 64, 0, 1.0, 64), name="t")


@pytest.mark.slides
@pytest.mark.parametrize("side", [224, 448])
@pytest.mark.parametrize("name", ["CMU-1-Small-Region", "TCGA-CR-7395-01A-01-TS1"])
def test_tiles_of_real_slides_are_decoded_once(name, side, real_slides, decoded):
    path = real_slides / "slides" / f"{name}.svs"
    with open_image(path) as slide:
        corners = grid(slide, Sampling.choose(slide, side, side))
    with opened(path, corners, 224, side) as bag, openslide.OpenSlide(path) as other:
        used = bag._sampling
        for start in range(0, len(bag), 5):
            patch = bag.read(start, min(start + 5, len(bag)))[0].transpose(1, 2, 0).astype(int)
            if used.level or bag.over_edge[start]:
                continue
            # As TRIDENT reads it.
            region = other.read_region(tuple(bag.coords[start].tolist()), 0, (used.region, used.region)).convert("RGB")
            wanted = region.resize((224, 224), Pillow.Resampling.BICUBIC)
            assert np.abs(np.asarray(wanted) - patch).max() <= 2
    assert set(decoded.values()) == {1}
