"""Where an output field goes, and that what is held of it is part of the plan."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn

import gigagrad as gg
from gigagrad.boxes import Box, tiles
from gigagrad.errors import BudgetError, ModelError
from gigagrad.execution.sinks import OutputField, Pieces, Pyramid, Several, Sink, WholeTensor, assemble
from gigagrad.images import open_image
from tests.devices.fake import FakeCpu

MIB = 2**20
SIZE = (700, 900)


class Both(nn.Module):
    """Of two images."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Conv2d(1, 3, 3, padding=1), nn.Conv2d(2, 3, 1)

    def forward(self, first: Tensor, second: Tensor) -> Tensor:
        found: Tensor = self.a(first) + self.b(second)
        return found


@pytest.fixture
def pair() -> tuple[Tensor, Tensor]:
    torch.manual_seed(0)
    return torch.rand(1, *SIZE), torch.rand(2, *SIZE)


def test_several_images_are_predicted_into_a_file_of_any_format(pair: tuple[Tensor, Tensor], tmp_path: Path) -> None:
    model = Both()
    engine = gg.compile(model, tile=(300, 200))
    whole = model(*(image[None] for image in pair))[0].detach()
    for name in ("both.tif", "both.ome.tif", "both.ome.zarr"):
        with open_image(engine.forward(pair, out=tmp_path / name)) as found:
            assert found.shape == (3, *SIZE)
            assert torch.allclose(torch.from_numpy(np.asarray(found.read(Box.whole(*SIZE)))), whole, atol=1e-6)


def test_what_a_sink_holds_is_predicted(pair: tuple[Tensor, Tensor], tmp_path: Path) -> None:
    device = FakeCpu()
    device.residue.warm = True
    engine = gg.compile(Both(), tile=(300, 200), device=device)
    for _ in engine.stream(pair):
        pass
    assert engine.last_run is not None
    peaks = [engine.last_run.predicted_peak_bytes]
    for out in (None, tmp_path / "both.tif"):
        engine.forward(pair, out=out)
        peaks.append(engine.last_run.predicted_peak_bytes)
    handed, whole, written = peaks
    assert whole - handed == 3 * SIZE[0] * SIZE[1] * 4
    row = 3 * SIZE[1] * 4
    assert written - handed >= 2 * 300 * row + 512 * row  # two strips, and a band of the file's tiles


def test_a_sink_that_holds_much_makes_smaller_tiles_or_is_refused(pair: tuple[Tensor, Tensor]) -> None:
    class Hoard(Sink):
        kind = "hoard"

        def held_bytes(self, tile_height: int, shape: tuple[int, ...]) -> int:
            return tile_height * MIB

        def take(self, pieces: Pieces, field: OutputField) -> int:
            return len({box.y0 for box, _ in pieces})

    rows = gg.compile(Both(), device=FakeCpu(), memory=700 * MIB).forward(pair, out=Hoard())
    assert rows >= SIZE[0] // 200  # of tiles, of fewer than 200 px
    with pytest.raises(BudgetError):
        gg.compile(Both(), device=FakeCpu(), memory=700 * MIB, tile=(500, 500)).forward(pair, out=Hoard())


@pytest.mark.parametrize("sink", [WholeTensor(torch.float32), Pyramid(Path("x.tif"))])
def test_lower_rows_hold_no_more(sink: Sink) -> None:
    held = [sink.held_bytes(height, (1, 3, *SIZE)) for height in (1, 100, 700, 5000)]
    assert held == sorted(held)
    assert held[-1] == held[-2]


class Noting(Sink):
    """Takes pieces and fails at one of them, if told to."""

    kind = "noting"

    def __init__(self, fails_at: int = -1) -> None:
        self.boxes: list[Box] = []
        self.over = False
        self._fails_at = fails_at

    def held_bytes(self, tile_height: int, shape: tuple[int, ...]) -> int:
        return 3 * tile_height

    def take(self, pieces: Pieces, field: OutputField) -> int:
        try:
            for box, _ in pieces:
                if len(self.boxes) == self._fails_at:
                    raise OSError("full")
                self.boxes.append(box)
        finally:
            self.over = True
        return len(self.boxes)


def test_several_sinks_take_one_sweep(pair: tuple[Tensor, Tensor], tmp_path: Path) -> None:
    engine, noting = gg.compile(Both(), tile=(300, 200)), Noting()
    sinks = (WholeTensor(torch.float32), Pyramid(tmp_path / "both.tif"), noting)
    several = Several(sinks)
    assert several.held_bytes(100, (1, 3, *SIZE)) == sum(sink.held_bytes(100, (1, 3, *SIZE)) for sink in sinks)
    whole, path, count = engine.forward(pair, out=several)
    assert (count, len(set(noting.boxes))) == (15, 15)
    with open_image(path) as found:
        assert np.array_equal(found.read(Box.whole(*SIZE)), whole[0])


@pytest.mark.parametrize("fails_at", [0, 7, 14])
def test_an_error_of_one_of_several_sinks_ends_all(pair: tuple[Tensor, Tensor], tmp_path: Path, fails_at: int) -> None:
    noting = Noting()
    sinks = [noting, Noting(fails_at), Pyramid(tmp_path / "both.tif")]
    with pytest.raises(OSError, match="full"):
        gg.compile(Both(), tile=(300, 200)).forward(pair, out=Several(sinks))
    assert noting.over
    assert len(noting.boxes) == fails_at + 1
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("error", [ValueError("slide"), KeyboardInterrupt()])
def test_a_run_that_ends_early_ends_its_sinks(tmp_path: Path, error: BaseException) -> None:
    def pieces() -> Iterator[tuple[Box, Tensor]]:
        yield Box(0, 0, 5, 9), torch.ones(1, 1, 5, 9)
        raise error

    noting = Noting()
    field = OutputField((1, 1, 10, 9), torch.float32, torch.device("cpu"), None)
    with pytest.raises(type(error)) as caught:
        Several([noting, Pyramid(tmp_path / "x.tif"), Pyramid(tmp_path / "x.zarr")]).take(pieces(), field)
    assert caught.value is error
    assert noting.over
    assert not list(tmp_path.iterdir())


def test_an_error_of_the_sink_ends_the_run(pair: tuple[Tensor, Tensor]) -> None:
    engine = gg.compile(Both(), tile=(300, 200))
    with pytest.raises(OSError, match="full"):
        engine.forward(pair, out=Noting(fails_at=1))
    assert engine.forward(pair).shape == (1, 3, *SIZE)


side = st.integers(1, 40)


@given(side, side, side, side)
def test_strips_are_the_image(height, width, tile_height, tile_width):
    plane = np.arange(height * width, dtype=np.int64).astype(np.uint8).reshape(height, width)
    pieces = ((box, plane[box.y0 : box.y1, box.x0 : box.x1]) for box in tiles(height, width, tile_height, tile_width))
    strips = list(assemble(pieces, height, width))
    assert all(strip.shape[0] <= tile_height for strip in strips)
    assert np.array_equal(np.concatenate(strips), plane)


@pytest.mark.parametrize(
    "boxes",
    [
        [Box(0, 0, 4, 4)],
        [Box(0, 0, 8, 4), Box(0, 4, 8, 10)],
        [Box(0, 0, 4, 8), Box(8, 0, 12, 8)],
        [Box(0, 0, 8, 8), Box(8, 0, 16, 8)],
        [],
    ],
    ids=["too small", "too wide", "gap", "too high", "nothing"],
)
def test_a_model_that_changes_the_size_is_refused(boxes):
    with pytest.raises(ModelError, match="8 x 8 px slide pixel for pixel"):
        list(assemble(((box, np.zeros(box.shape, np.uint8)) for box in boxes), 8, 8))


def test_the_tiles_have_ended_before_the_last_strip_leaves():
    ended = []

    def pieces():
        for box in tiles(8, 8, 4, 4):
            yield box, np.zeros(box.shape, np.uint8)
        ended.append(True)

    strips = assemble(pieces(), 8, 8)
    next(strips)
    assert not ended
    next(strips)
    assert ended
