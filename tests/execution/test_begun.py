"""Whoever listens is told of each tile as it begins: which part of the image it is, and what it is computed from."""

import numpy as np
import pytest
import torch

from gigagrad.boxes import Box
from gigagrad.events import Event, TileBegun, TileDone
from gigagrad.execution import compile as compile_engine
from gigagrad.plans import Plan


class Strided(torch.nn.Module):
    """A network whose loss is of a field with a third of the image's sides, after a norm over the whole image."""

    def __init__(self):
        super().__init__()
        self.first, self.second = torch.nn.Conv2d(3, 4, 5, padding=2), torch.nn.Conv2d(4, 2, 3, stride=3)
        self.norm = torch.nn.InstanceNorm2d(4)

    def forward(self, x):
        return self.second(self.norm(self.first(x)))


@pytest.fixture
def begun():
    torch.manual_seed(0)
    engine = compile_engine(Strided(), lambda y, t: (y**2).mean(), tile=(64, 51))
    events: list[Event] = []
    engine.events.subscribe(events.append)
    image = np.random.default_rng(0).random((3, 600, 510), np.float32)
    engine.backward(image, torch.zeros(1))
    return engine.plan(image, torch.zeros(1)), events


def test_tiles_of_a_pass_are_all_of_the_image_once(begun):
    plan, events = begun
    tiles = [event for event in events if isinstance(event, TileBegun)]
    assert len(tiles) == plan.tile_count == sum(isinstance(event, TileDone) for event in events)
    assert len({event.segment for event in tiles}) == len(plan.segments) == tiles[0].segments > 1
    for index, segment in enumerate(plan.segments):
        phases = {event.phase for event in tiles if event.segment == index}
        for phase in phases:
            places = [event.place() for event in tiles if (event.segment, event.phase) == (index, phase)]
            assert len(places) == segment.tile_count
            covered = np.zeros((600, 510), np.uint8)
            for place in places:
                box = place.box
                covered[box.y0 : box.y1, box.x0 : box.x1] += 1
                assert box.within(place.crop)
                assert place.crop.within(Box.whole(600, 510))
                if not index:  # the moments of a convolution of 5 x 5 px
                    near, far = (Box(box.y0 - n, box.x0 - n, box.y1 + n, box.x1 + n).clamp(600, 510) for n in (2, 4))
                    assert near.within(place.crop)
                    assert place.crop.within(far)
                assert box.height <= place.tile[0] + 3
            assert covered.min() == 1
            assert (covered > 1).mean() < 0.05  # where a border falls between two pixels


def test_a_tile_begins_before_it_is_done(begun):
    running = 0
    for event in begun[1]:
        running += isinstance(event, TileBegun) - isinstance(event, TileDone)
        assert running >= 0
    assert running == 0


def test_the_plan_says_of_which_fields_its_tiles_and_crops_are(begun):
    plan, events = begun
    for event in events:
        if isinstance(event, TileBegun):
            segment, place = plan.segments[event.segment], event.place()
            sides = (side * of / own for side, of, own in zip(segment.tile, (600, 510), segment.shape, strict=True))
            assert place.tile == pytest.approx(tuple(sides))
    assert plan.segments[-1].read_shape == (600, 510)
    assert Plan.from_dict(plan.to_dict()) == plan


class Mean(torch.nn.Module):
    """The mean of a bag's patches, as a network sees each."""

    def __init__(self):
        super().__init__()
        self.network = torch.nn.Conv2d(3, 2, 3)

    def forward(self, patches):
        return self.network(patches).mean((2, 3)).mean(0, keepdim=True)


def test_of_a_bag_it_is_patches():
    engine = compile_engine(Mean(), memory="2GiB")
    engine.in_tiles = True
    found = []
    engine.events.subscribe(lambda event: found.append(event) if isinstance(event, TileBegun) else None)
    engine.forward(np.zeros((6, 3, 64, 64), np.float32))
    boxes = [event.place().box for event in found if event.segment == 0]
    assert boxes[0].y0 == 0
    assert boxes[-1].y1 == 6
    assert {box.x for box in boxes} == {(0, 1)}


def test_an_image_computed_at_once_is_one_tile():
    engine = compile_engine(Strided(), lambda y, t: (y**2).mean(), memory="2GiB")
    found = []
    engine.events.subscribe(lambda event: found.append(event) if isinstance(event, TileBegun) else None)
    engine.backward(np.zeros((3, 60, 51), np.float32), torch.zeros(1))
    assert [event.place().box for event in found] == [Box.whole(60, 51)]
