"""Inputs as a run reads them."""

from __future__ import annotations

import threading
import time
from threading import Barrier
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image as Pillow

import gigagrad as gg
from gigagrad.boxes import Box
from gigagrad.errors import ImageError, TargetError
from gigagrad.execution.sources import image_source, read_ahead, target_source
from gigagrad.graphs import InputSpec
from gigagrad.images import open_image
from gigagrad.images.bag import ArrayBag
from gigagrad.threads import SideThreads


@pytest.mark.parametrize("dtype", [torch.uint8, torch.int64, torch.float32, torch.float64, torch.bool])
@pytest.mark.parametrize("kind", [lambda t: t, lambda t: t.numpy(), lambda t: t[None], open_image])
def test_an_image_has_a_batch_axis_and_its_own_dtype(dtype, kind):
    pixels = (torch.rand(2, 5, 7) * 3).to(dtype)
    source = image_source(kind(pixels))
    assert source.spec == InputSpec((1, 2, 5, 7), dtype, field=True)
    crop = source.read(Box(1, 2, 4, 7))
    assert crop.dtype == dtype
    assert torch.equal(crop, pixels[None, :, 1:4, 2:7])


def test_reading_twice_gives_separate_pixels():
    source = image_source(torch.zeros(1, 4, 4))
    source.read(Box(0, 0, 4, 4)).fill_(7)
    assert not source.read(Box(0, 0, 4, 4)).any()


@pytest.mark.parametrize("dtype", [np.uint8, np.float32, ">u2"])
@pytest.mark.parametrize("part", [np.s_[:], np.s_[:, ::-1], np.s_[:, :, ::2]])
@pytest.mark.parametrize("writeable", [False, True])
def test_the_whole_image_is_what_reading_it_gives(dtype, part, writeable):
    array = np.arange(2 * 6 * 8).reshape(2, 6, 8).astype(dtype)
    array.flags.writeable = writeable
    source = image_source(array[part])
    whole, read = source.whole(), source.read(Box.whole(*source.spec.shape[-2:]))
    assert whole.dtype == read.dtype == source.spec.dtype
    assert torch.equal(whole, read)
    for box in (Box(1, 1, 3, 4), Box(-2, 1, 3, 9), Box(2, 2, 2, 4), Box(7, 0, 9, 2)):  # in part or all outside, too
        assert torch.equal(source.view(box), source.read(box))


def test_one_field_of_records_is_an_image():
    records = np.zeros((2, 6, 8), [("a", np.uint8), ("b", np.float32)])
    records["b"] = np.arange(8)
    assert torch.equal(image_source(records["b"]).whole()[0, 1, 2], torch.arange(8.0))


def test_the_whole_of_an_image_in_memory_is_no_copy():
    for pixels in (torch.zeros(2, 6, 8), np.zeros((2, 6, 8), np.uint8)):
        pixels[1, 2, 3] = 1
        source = image_source(pixels)
        whole, part = source.whole(), source.view(Box(1, 2, 4, 5))
        pixels[1, 2, 3] = 5
        assert whole[0, 1, 2, 3] == part[0, 1, 1, 1] == 5
        assert source.image is not None
        source.image.close()
        with pytest.raises(ImageError, match="closed"):
            source.whole()


IMAGE = image_source(torch.zeros(3, 6, 8))


@pytest.mark.parametrize(
    ("target", "shape", "dtype"),
    [
        (3, (1,), torch.int64),
        (0.5, (1,), torch.float32),
        (True, (1,), torch.bool),
        (torch.tensor(2), (), torch.int64),
        (torch.tensor([1.0, 2.0]), (2,), torch.float32),
        (np.array([1, 2]), (2,), torch.int64),
        (torch.zeros(1, 5), (1, 5), torch.float32),
        (np.zeros((8, 6)), (8, 6), torch.float64),
    ],
)
def test_labels(target, shape, dtype):
    source = target_source(target, IMAGE)
    assert source.spec == InputSpec(shape, dtype, field=False)
    assert source.tensor.shape == shape
    assert source.cache_bytes == 0


@pytest.mark.parametrize(
    "target", [torch.zeros(6, 8), np.zeros((6, 8), np.float32), torch.zeros(1, 6, 8), torch.zeros(1, 1, 6, 8)]
)
def test_masks(target):
    assert target_source(target, IMAGE).spec == InputSpec((1, 1, 6, 8), torch.float32, field=True)


@pytest.mark.parametrize("bag", [ArrayBag(np.arange(24.0).reshape(2, 3, 2, 2)), np.arange(24.0).reshape(2, 3, 2, 2)])
def test_a_batch_is_a_bag(bag):
    source = image_source(bag)
    assert source.spec == InputSpec((2, 3, 2, 2), torch.float64, field=True, bag=True)
    assert source.box == Box.whole(2, 1)
    second = torch.arange(12.0, 24.0, dtype=torch.float64).reshape(1, 1, 3, 2, 2)
    assert torch.equal(source.read(Box(1, 0, 2, 1)), second)
    assert source.whole().shape == (2, 3, 2, 2)


def test_what_is_read_to_be_written_to_is_no_ones_else():
    patches = torch.zeros(2, 1, 2, 2)
    image_source(patches).whole(own=True).add_(1)
    assert not patches.any()


def test_the_target_of_a_bag_is_a_label():
    bag = image_source(np.zeros((2, 3, 4, 4)))
    assert not target_source(torch.zeros(4, 4), bag).spec.field
    assert not target_source(np.zeros((1, 4, 4)), bag).spec.field
    with pytest.raises(TargetError, match="the target of a bag is a label"):
        target_source(open_image(np.zeros((1, 4, 4))), bag)
    with pytest.raises(TargetError, match="no bag of patches"):
        target_source(ArrayBag(np.zeros((2, 1, 4, 4))), IMAGE)


def test_only_what_was_opened_here_is_closed():
    array = np.ones((1, 4, 4))
    mine = open_image(array)
    image_source(mine).close()
    mine.read(Box(0, 0, 1, 1))
    source = image_source(array)
    source.close()
    with pytest.raises(ImageError, match="closed"):
        source.read(Box(0, 0, 1, 1))


@pytest.fixture
def pool():
    with SideThreads(1, "test-read") as made:
        yield made


def test_reading_ahead_keeps_the_order_and_stays_little_ahead(pool):
    read, lead = [], []

    def reader(tile):
        assert threading.current_thread() is not threading.main_thread()
        read.append(tile)
        return {0: torch.tensor(tile)}

    for expected, (tile, crops) in enumerate(read_ahead(range(50), reader, pool)):
        assert tile == expected == crops[0].item()
        lead.append(len(read) - expected)
    assert read == list(range(50))
    assert max(lead) <= 3


def test_an_error_in_the_reader_arrives_at_its_tile(pool):
    def reader(tile):
        if tile == 5:
            raise ImageError("tile 5 is corrupt")
        return {}

    done: list[Any] = []
    with pytest.raises(ImageError, match="tile 5"):
        done.extend(tile for tile, _ in read_ahead(range(50), reader, pool))
    assert done == list(range(5))


def test_leaving_early_stops_the_reader(pool):
    read = []
    ahead = read_ahead(range(1000), lambda tile: read.append(tile) or {}, pool)  # type: ignore[func-returns-value, var-annotated]
    next(ahead)
    ahead.close()  # type: ignore[attr-defined]
    assert len(read) <= 4
    seen = len(read)
    assert [tile for tile, _ in read_ahead(range(2), lambda tile: read.append(tile) or {}, pool)] == [0, 1]  # type: ignore[func-returns-value]
    assert len(read) == seen + 2


def test_several_readers_keep_the_order_and_stay_as_little_ahead():
    """Each is at one, and one waits."""
    at_work, lead, started = Barrier(3), [], []

    def reader(tile):
        started.append(tile)
        if tile < 3:
            at_work.wait(60)  # that no fewer than three can pass
        time.sleep(0.001 * (tile % 3))
        return {0: torch.tensor(tile)}

    with SideThreads(3, "test-read") as several:
        for expected, (tile, crops) in enumerate(read_ahead(range(50), reader, several)):
            assert tile == expected == crops[0].item()
            lead.append(len(started) - expected)
    assert sorted(started) == list(range(50))
    assert max(lead) <= 5


def test_an_error_in_one_of_several_readers_arrives_at_its_tile():
    def reader(tile):
        if tile in (5, 6):
            raise ImageError(f"tile {tile} is corrupt")
        time.sleep(0.001)
        return {}

    done: list[Any] = []
    with SideThreads(3, "test-read") as several, pytest.raises(ImageError, match="tile 5"):
        done.extend(tile for tile, _ in read_ahead(range(50), reader, several))
    assert done == list(range(5))


def test_leaving_early_stops_several_readers():
    read: list[int] = []
    with SideThreads(3, "test-read") as several:
        ahead = read_ahead(range(1000), lambda tile: read.append(tile) or {}, several)  # type: ignore[func-returns-value, var-annotated]
        next(ahead)
        ahead.close()  # type: ignore[attr-defined]
        assert len(read) <= 6
        seen = len(read)
    assert len(read) == seen


def test_nothing_to_read(pool):
    assert list(read_ahead([], lambda tile: {}, pool)) == []


@pytest.mark.parametrize("leaving_early", [False, True])
def test_a_run_leaves_no_threads_behind(leaving_early):
    """The threads are one run's own, however it ends."""

    class Doubled(torch.nn.Module):
        def forward(self, x):
            return x * 2

    image = torch.rand(1, 40, 40)
    engine = gg.compile(Doubled(), tile=(8, 8))
    before, stream = {*threading.enumerate()}, engine.stream(image)
    if leaving_early:
        next(stream)
        stream.close()
    else:
        assert len(list(stream)) == 25
    assert not {*threading.enumerate()} - before


def test_a_target_with_a_palette_is_its_ids(tmp_path):
    plane = np.random.default_rng(0).integers(0, 3, (12, 10), dtype=np.uint8)
    picture = Pillow.fromarray(plane)
    picture.putpalette([200, 0, 0, 0, 200, 0, 0, 0, 200])
    picture.save(tmp_path / "m.png")
    slide = image_source(np.zeros((3, 12, 10), np.uint8))
    source = target_source(tmp_path / "m.png", slide)
    assert source.spec.shape == (1, 1, 12, 10)
    np.testing.assert_array_equal(np.asarray(source.read(Box.whole(12, 10)))[0, 0], plane)
    source.close()
