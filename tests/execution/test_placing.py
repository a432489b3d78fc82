"""Images that a device holds during a run are read once, block by block."""

from __future__ import annotations

from collections import Counter
from math import prod
from pathlib import Path

import numpy as np
import pytest
import tifffile
import torch
import torch.nn.functional as F
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

import gigagrad as gg
from gigagrad.devices import device_for
from gigagrad.execution import sources
from gigagrad.execution.sources import image_source
from gigagrad.images import open_image
from gigagrad.images.tiff import TiffImage
from tests.devices.recording import RecordingCpu


@pytest.fixture
def slide(tmp_path: Path) -> Path:
    pixels = np.random.default_rng(0).integers(0, 256, (150, 203, 3), dtype=np.uint8)
    tifffile.imwrite(tmp_path / "slide.tif", pixels, tile=(32, 48), photometric="rgb", compression="zlib")
    return tmp_path / "slide.tif"


@pytest.fixture
def decoded(monkeypatch: pytest.MonkeyPatch) -> Counter[object]:
    """How often each block was decoded."""
    found, decode = Counter[object](), TiffImage._decode

    def counted(self: TiffImage, key: tuple[object, object]) -> object:
        found[key[0]] += 1
        return decode(self, key)  # type: ignore[arg-type]

    monkeypatch.setattr(TiffImage, "_decode", counted)
    return found


@pytest.mark.parametrize("band_bytes", [1, 5_000, 20_000, 45_000, 10**9])
def test_each_block_of_a_file_is_decoded_once(
    slide: Path, decoded: Counter[object], monkeypatch: pytest.MonkeyPatch, band_bytes: int
) -> None:
    monkeypatch.setattr(sources, "_BAND_BYTES", band_bytes)
    monkeypatch.setattr("gigagrad.images.tiff.CACHE_BYTES", 0)
    with open_image(slide) as image:
        source = image_source(image, lambda name: torch.float32)
        found = sources.placed({"image": source}, device_for("cpu"))["image"]
        assert found.is_placed
        assert torch.equal(found.whole(), torch.from_numpy(tifffile.imread(slide)).permute(2, 0, 1)[None])
    assert len(decoded) == 25
    assert set(decoded.values()) == {1}


@given(
    size=st.tuples(st.integers(1, 90), st.integers(1, 90)),
    block=st.tuples(st.integers(1, 99), st.integers(1, 99)),
    band_bytes=st.integers(1, 9000),
)
def test_bands_cover_an_image_in_whole_blocks(size: tuple[int, int], block: tuple[int, int], band_bytes: int) -> None:
    source = image_source(torch.arange(prod(size), dtype=torch.int32).view(1, *size), lambda name: torch.int32)
    assert source.image is not None
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sources, "_BAND_BYTES", band_bytes)
        patch.setattr(type(source.image), "block_shape", block, raising=False)
        found = sources.placed({"image": source}, device_for("cpu"))["image"]
        boxes = [box for box, _ in sources._bands(source)]
    assert torch.equal(found.whole(), source.whole())
    assert all(box.y0 % block[0] == box.x0 % block[1] == 0 for box in boxes)


def test_a_prediction_reads_what_the_device_holds(
    slide: Path, decoded: Counter[object], monkeypatch: pytest.MonkeyPatch
) -> None:
    """As `forward` and `stream` give it, with the bits of tiles that read crops."""
    monkeypatch.setattr("gigagrad.images.tiff.CACHE_BYTES", 0)
    torch.manual_seed(0)
    model = nn.Sequential(
        gg.models.Normalise(), nn.Conv2d(3, 4, 5, padding=2), nn.ReLU(), nn.Conv2d(4, 1, 3, padding=1)
    ).eval()
    plainly = gg.compile(model, tile=(40, 56), progress=False)
    there = gg.compile(model, tile=(40, 56), device=RecordingCpu(), progress=False)
    expected = plainly.forward(slide)
    decoded.clear()
    assert torch.equal(there.forward(slide), expected)
    assert set(decoded.values()) == {1}
    for box, crop in there.stream(slide):
        assert torch.equal(crop, expected[..., box.y0 : box.y1, box.x0 : box.x1])


def test_the_gradient_of_an_image_reads_what_the_device_holds() -> None:
    torch.manual_seed(0)
    image, target = torch.rand(3, 90, 70), torch.rand(1, 90, 70)
    model = nn.Sequential(nn.Conv2d(3, 4, 5, padding=2), nn.BatchNorm2d(4), nn.ReLU(), nn.Conv2d(4, 1, 3, padding=1))
    expected, found = (
        gg.compile(model, F.mse_loss, tile=(32, 24), device=device, progress=False).image_gradient(image, target)
        for device in ("cpu", RecordingCpu())
    )
    assert torch.equal(found, expected)


def test_a_prediction_is_planned_as_it_runs_where_steps_are_recorded() -> None:
    """Nothing of it is: it comes tile by tile, and its fields may be in any tier."""
    model = nn.Conv2d(3, 1, 3, padding=1)
    image, target = torch.rand(3, 90, 70), torch.rand(1, 90, 70)
    assert not gg.compile(model, device=RecordingCpu()).problem(image).is_recorded
    assert gg.compile(model, F.mse_loss, device=RecordingCpu()).problem(image, target).is_recorded
