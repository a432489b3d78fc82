"""Predictions of a part of an image: the bits of the whole prediction there, and nothing computed elsewhere."""

import numpy as np
import pytest
import torch
from torch import nn

import gigagrad as gg
from gigagrad.boxes import Box
from gigagrad.devices.cpu import Cpu
from gigagrad.errors import ConfigError
from gigagrad.events import Event, TileBegun, TileDone
from gigagrad.execution.needed import Within
from gigagrad.images import Image, open_image

SIDE = 192


class Counted(Image):
    """Pixels that count how many of them are read."""

    def __init__(self, pixels):
        super().__init__(shape=pixels.shape, dtype=pixels.dtype, name="counted")
        self._pixels, self.read_px = pixels, 0

    def _read_inside(self, box):
        self.read_px += box.area
        return self._pixels[:, box.y0 : box.y1, box.x0 : box.x1].copy()


def pixels(height=SIDE, width=SIDE + 37):
    return np.random.default_rng(0).integers(0, 256, (3, height, width), dtype=np.uint8)


def corner(rows=12, columns=12):
    """A mask whose lower right corner is wanted."""
    cells = np.zeros((rows, columns), np.uint8)
    cells[-3:, -2:] = 255
    return cells


def wanted_at(cells, height, width):
    rows, columns = (np.arange(size) * count // size for size, count in zip((height, width), cells.shape, strict=True))
    return cells[rows][:, columns] > 0


def local():
    torch.manual_seed(0)
    return nn.Sequential(nn.Conv2d(3, 4, 5, padding=2), nn.ReLU(), nn.Conv2d(4, 2, 3, padding=1))


class Normed(nn.Module):
    """A norm over the whole image between local layers."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.before, self.norm = nn.Conv2d(3, 4, 3, padding=1), nn.InstanceNorm2d(4)
        self.after = nn.Conv2d(4, 1, 3, padding=1)

    def forward(self, x):
        return self.after(self.norm(self.before(x)))


class Reversing(nn.Module):
    """Mixes all rows by an operator that tiles do not have."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.before, self.after = nn.Conv2d(3, 1, 3, padding=1), nn.Conv2d(1, 1, 3, padding=1)

    def forward(self, x):
        return self.after(self.before(x).cumsum(2))


class Scaled(nn.Module):
    def forward(self, x):
        return x.float() / 255


def bytes_first(model):
    return nn.Sequential(Scaled(), model).eval()


def far():
    """A network that reads far, so that plans keep fields: at half the size, too."""
    torch.manual_seed(0)
    wide = [layer for _ in range(4) for layer in (nn.Conv2d(16, 16, 7, padding=3), nn.ReLU())]
    half = [nn.Conv2d(16, 16, 2, stride=2), *wide, nn.ConvTranspose2d(16, 16, 2, stride=2)]
    return nn.Sequential(nn.Conv2d(3, 16, 7, padding=3), *wide, *half, nn.Conv2d(16, 1, 3, padding=1))


@pytest.mark.parametrize("make", [local, Normed, Reversing])
@pytest.mark.parametrize("tile", [(16, 24), (50, 50), (500, 500)])
def test_what_is_wanted_has_the_bits_of_the_whole(make, tile):
    image, model = pixels(), bytes_first(make())
    whole = gg.compile(model, tile=tile).forward(image)
    part = gg.compile(model, tile=tile).forward(image, within=corner())
    there = torch.from_numpy(wanted_at(corner(), *image.shape[1:]))
    assert torch.equal(part[..., there], whole[..., there])
    assert part[..., ~there].isnan().all()


def test_a_deep_network_computes_of_its_kept_fields_what_is_read():
    image = Counted(pixels(512, 512))
    engine = gg.compile(bytes_first(far()), memory="2 GiB", tile=(32, 32))
    assert len(engine.plan(image).kept) > 2
    whole = engine.forward(image)
    image.read_px = 0
    part = engine.forward(image, within=corner(16, 16))
    there = torch.from_numpy(wanted_at(corner(16, 16), 512, 512))
    assert torch.equal(part[..., there], whole[..., there])
    assert image.read_px < 0.6 * 512**2


def test_only_tiles_that_are_read_are_read():
    image = Counted(pixels(160, 160))
    engine = gg.compile(bytes_first(local()), tile=(16, 16))
    cells = np.zeros((10, 10), bool)
    cells[4, 7] = True
    engine.plan(image)
    image.read_px = 0
    engine.forward(image, within=cells)
    assert image.read_px == 22 * 22


@pytest.mark.parametrize(("make", "before"), [(local, 0), (Normed, 20)])
def test_progress_counts_what_is_computed_alone(make, before):
    """A norm over the image takes all 20 tiles before it."""
    heard: list[Event] = []
    engine = gg.compile(bytes_first(make()), tile=(50, 50))
    engine.events.subscribe(heard.append)
    engine.forward(pixels(), within=corner())
    count = before + 4
    done = [event for event in heard if isinstance(event, TileDone)]
    assert [(event.done, event.total) for event in done] == [(number, count) for number in range(1, count + 1)]
    assert done[-1].seconds_left == 0
    assert sum(isinstance(event, TileBegun) for event in heard) == count


def one_cell(image):
    """An engine that plans one tile for an image of 160 x 160 px, and a mask of one cell of 16 x 16."""
    engine, cells = gg.compile(bytes_first(local()), memory="2 GiB"), np.zeros((10, 10), bool)
    assert engine.plan(image).tile == (160, 160)
    cells[4, 7] = True
    return engine, cells


def test_of_a_tile_only_the_part_that_is_wanted_is_computed():
    image = Counted(pixels(160, 160))
    engine, cells = one_cell(image)
    whole = engine.forward(image)
    image.read_px = 0
    part = engine.forward(image, within=cells)
    assert image.read_px == (20 + 6) * (20 + 6)  # rows 60 to 80 and columns 110 to 130, by sixteenths, and a halo of 3
    there = torch.from_numpy(wanted_at(cells, 160, 160))
    torch.testing.assert_close(part[..., there], whole[..., there], atol=1e-6, rtol=0)
    assert part[..., ~there].isnan().all()


def test_parts_are_coarser_where_what_they_are_compiled_to_does_not_fit(monkeypatch):
    image = Counted(pixels(160, 160))
    engine, cells = one_cell(image)
    engine.forward(image)
    image.read_px, asked = 0, []

    def compiled_bytes(self, count, dtypes):
        asked.append(count)
        return 0 if len(asked) > 2 else 2**40

    monkeypatch.setattr(Cpu, "compiled_bytes", compiled_bytes)
    engine.forward(image, within=cells)
    assert asked == [2, 2, 2]
    assert image.read_px == (40 + 6) * (80 + 3)  # by quarters: rows 40 to 80 and columns 80 to 160


@pytest.mark.parametrize("make", [Normed, Reversing, far])
def test_parts_are_exact_where_sums_and_kept_fields_come_before(make):
    image, model = pixels(200, 264) / 255, make().eval().double()
    whole = gg.compile(model, memory="2 GiB").forward(image)
    part = gg.compile(model, memory="2 GiB").forward(image, within=corner())
    there = torch.from_numpy(wanted_at(corner(), *image.shape[1:]))
    torch.testing.assert_close(part[..., there], whole[..., there], atol=1e-12, rtol=0)
    assert part[..., ~there].isnan().all()


def test_a_part_is_the_smallest_box_of_what_is_wanted():
    draw = np.random.default_rng(0)
    for _ in range(200):
        shape, size = draw.integers(1, 40, 2), draw.integers(1, 60, 2)
        cells = draw.random(shape) > 0.8
        wanted = wanted_at(cells, *size)
        y, x = (np.sort(draw.choice(side + 1, 2, replace=False)) for side in size)
        box, within = Box(int(y[0]), int(x[0]), int(y[1]), int(x[1])), Within(cells, (1, 1, *size))
        found = within.hull(box)
        ys, xs = np.nonzero(wanted[y[0] : y[1], x[0] : x[1]])
        if found is None:
            assert not ys.size
        elif (shape <= size).all():  # of finer cells some are nearest to no pixel
            assert found == Box(ys.min(), xs.min(), ys.max() + 1, xs.max() + 1).shift(box.y0, box.x0)
        else:
            assert found.within(box)
            assert wanted[found.y0 : found.y1, found.x0 : found.x1].sum() == ys.size


def test_nothing_wanted_and_all_of_it():
    image, engine = pixels(), gg.compile(bytes_first(local()), tile=(50, 50))
    assert engine.forward(image, within=np.zeros((3, 3))).isnan().all()
    assert torch.equal(engine.forward(image, within=np.ones((3, 3))), engine.forward(image))


def test_integers_are_0_where_nothing_is_computed():
    class Bright(nn.Module):
        def forward(self, x):
            return (x > 0).to(torch.uint8)

    part = gg.compile(Bright(), tile=(16, 16)).forward(pixels() | 1, within=corner())
    there = torch.from_numpy(wanted_at(corner(), SIDE, SIDE + 37))
    assert part.dtype == torch.uint8
    assert part[..., there].all()
    assert not part[..., ~there].any()


def test_a_file_says_where_nothing_was_computed(tmp_path):
    image, engine = pixels(), gg.compile(bytes_first(local()), tile=(64, 64))
    engine.forward(image, out=tmp_path / "part.tif", within=corner())
    there = wanted_at(corner(), *image.shape[1:])
    with open_image(tmp_path / "part.tif") as found:
        values = np.asarray(found.read(Box.whole(*found.shape[1:])))
    assert np.isnan(values[:, ~there]).all()
    assert not np.isnan(values[:, there]).any()


@pytest.mark.parametrize("cells", [np.ones(3), np.ones((1, 3, 3)), np.ones((0, 3))])
def test_masks_of_other_shapes_are_refused(cells):
    with pytest.raises(ConfigError, match="two axes"):
        gg.compile(bytes_first(local())).forward(pixels(), within=cells)


def test_what_gives_no_image_has_no_part():
    class Mean(nn.Module):
        def forward(self, x):
            return x.float().mean((2, 3))

    with pytest.raises(ConfigError, match="within= needs a model whose output is an image"):
        gg.compile(Mean()).forward(pixels(), within=corner())
    with pytest.raises(ConfigError, match="without the target"):
        gg.compile(local(), nn.MSELoss()).forward(pixels(), pixels()[:2], within=corner())
