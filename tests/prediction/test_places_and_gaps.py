"""Where predictions lie on earth and where they hold nothing, read back by GDAL, tifffile, zarr and us."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator
from itertools import count
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import rasterio
import tifffile
import torch
import zarr
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

import gigagrad as gg
from gigagrad.boxes import Box, tiles
from gigagrad.cohorts.records import FORMATS
from gigagrad.events import Notice
from gigagrad.execution.sinks import OutputField, Pyramid
from gigagrad.images import Image, open_image, write_pyramid
from gigagrad.images.georeference import geotiff_tags
from gigagrad.masks.classes import mask_classes
from gigagrad.models import save_model
from gigagrad.prediction.classes import Channels
from gigagrad.prediction.outputs import OUTPUTS, Streaming
from tests.images.test_georeference import NORTH_UP, TRANSFORMS, make

NODATA = {
    "uint8": (None, 0, 255),
    "uint16": (None, 0, 65535),
    "int16": (None, -9999),
    "float32": (None, -1.5, math.nan),
}


class Sums(nn.Module):
    """As many channels as were asked for, of each pixel alone."""

    def __init__(self, channels: int = 1) -> None:
        super().__init__()
        self.factors = torch.linspace(-1, 1, channels)[:, None, None] / 100

    def forward(self, x_NCHW: torch.Tensor) -> torch.Tensor:
        return x_NCHW.double().sum(1, keepdim=True) * self.factors


def whole(path: Path, level: int = 0) -> np.ndarray:
    with open_image(path, level=level) as image:
        return np.asarray(image.read(Box.whole(*image.shape[1:])))


def same_means(pixels: np.ndarray, nodata: float | None) -> np.ndarray:
    """`(C, h, w)` at half the size: of each 2 x 2 pixels the mean of those that hold data."""
    height, width = (side // 2 * 2 for side in pixels.shape[1:])
    quarters = np.stack([pixels[:, y:height:2, x:width:2] for y in (0, 1) for x in (0, 1)]).astype(np.float64)
    there = np.ones(quarters.shape, bool) if nodata is None else ~((quarters == nodata) | np.isnan(quarters))
    total, number = np.where(there, quarters, 0).sum(0), there.sum(0)
    mean = total / np.maximum(number, 1)
    rounded = np.floor(mean + 0.5) if pixels.dtype.kind == "u" else mean
    return np.where(number > 0, rounded, nodata).astype(pixels.dtype)


@pytest.fixture(scope="module")
def fresh(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """Folders, one after the other."""
    root = tmp_path_factory.mktemp("written")
    return (root / str(number) for number in count())


def scene(draw: st.DataObject, folder: Path) -> tuple[Path, np.ndarray]:
    """A GeoTIFF, and where it holds no data."""
    dtype = draw.draw(st.sampled_from(sorted(NODATA)))
    height, width = (draw.draw(st.integers(1, 90)) for _ in range(2))
    rng = np.random.default_rng(draw.draw(st.integers(0, 9)))
    pixels = rng.integers(1, 200, (draw.draw(st.integers(1, 3)), height, width)).astype(dtype)
    nodata = draw.draw(st.sampled_from(NODATA[dtype]))
    gaps = np.zeros((height, width), bool)
    if nodata is not None:
        gaps[: draw.draw(st.integers(0, height)), : draw.draw(st.integers(0, width))] = True
        gaps |= rng.random((height, width)) < draw.draw(st.sampled_from((0, 0.3)))
        pixels[:, gaps] = nodata
    transform = TRANSFORMS[draw.draw(st.sampled_from(sorted(TRANSFORMS)))]
    return make(folder / "scene.tif", pixels, transform=transform, nodata=nodata), gaps


def sink_of(name: str, path: Path, seen: Image, channels: Channels) -> Pyramid:
    if name == "forward":
        return Pyramid.in_place_of(path, seen)
    output = OUTPUTS[name]
    assert output.sink is not None
    sink = output.sink(path, Streaming(seen, channels, channels.classes(None), 0.5))
    assert isinstance(sink, Pyramid)
    return sink


def expected(name: str, logits: torch.Tensor, gaps: np.ndarray, channels: Channels, *, said: bool) -> np.ndarray:
    if name == "forward":
        values, nothing = logits[0].float().numpy(), math.nan
    elif name == "mask":
        values, nothing = channels.mask(logits), 255
    else:
        scaled = (channels.probabilities(logits)[0] * 255).round().numpy()
        values, nothing = (np.minimum(scaled, 254) if said else scaled).astype(np.uint8), 255
    return np.where(gaps, np.array(nothing, values.dtype), values)


@settings(max_examples=25)
@given(
    draw=st.data(), name=st.sampled_from(("forward", "mask", "probabilities")), form=st.sampled_from(sorted(FORMATS))
)
def test_what_is_written_lies_where_the_slide_does_and_holds_what_it_should(
    draw: Any, name: str, form: str, fresh: Iterator[Path]
) -> None:
    folder = next(fresh)
    folder.mkdir()
    source, gaps = scene(draw, folder)
    number = draw.draw(st.integers(1, 5))
    channels = Channels(number, labels=number > 1 and draw.draw(st.booleans()))
    torch.manual_seed(number)
    logits = 4 * torch.randn(1, number, *gaps.shape)
    height, width = gaps.shape
    boxes = list(tiles(height, width, 40, 50))
    path = folder / f"made{FORMATS[form]}"
    with open_image(source) as slide:
        seen, place = slide.filled(), slide.georeference
        sink, said = sink_of(name, path, seen, channels), seen.missing_bytes > 0
        field = OutputField(tuple(logits.shape), torch.float32, torch.device("cpu"), 0.5)
        before = logits.clone()
        sink.take(((box, logits[..., box.y0 : box.y1, box.x0 : box.x1]) for box in boxes), field)
        assert torch.equal(logits, before)
    wanted = expected(name, logits, gaps, channels, said=said)
    nodata = None if not said else math.nan if name == "forward" else 255
    with open_image(path) as image:
        assert (image.shape, image.dtype) == (wanted.shape, wanted.dtype)
        assert (image.nodata is None) == (nodata is None)
        assert nodata is None or image.nodata == nodata or (math.isnan(float(image.nodata or 0)) and math.isnan(nodata))
        assert form == "ome-zarr" or (image.georeference is not None and place is not None)
        np.testing.assert_array_equal(image.read(Box.whole(*gaps.shape)), wanted)
    if form == "ome-zarr":
        inside = "labels/classes/0" if name == "mask" and not channels.labels else "0"
        array = np.asarray(zarr.open_group(path, mode="r")[inside])
        np.testing.assert_array_equal(array.reshape(wanted.shape), wanted)
        return
    with tifffile.TiffFile(path) as tiff:
        pixels = tiff.asarray()
        last = form == "cog" and len(wanted) > 1
        np.testing.assert_array_equal(pixels.transpose(2, 0, 1) if last else pixels.reshape(wanted.shape), wanted)
        assert int(tiff.pages[0].photometric) == 1
        assert set(map(int, tiff.pages[0].extrasamples)) <= {0}
        assert tiff.is_ome == (form == "ome-tiff")
    with rasterio.open(path) as file, rasterio.open(source) as original:
        assert file.crs == original.crs
        assert tuple(file.transform) == pytest.approx(tuple(original.transform), rel=1e-12)
        assert (file.nodata is None) == (nodata is None)
        known = file.count  # of an OME-TIFF, whose channels are pages, GDAL shows the first
        assert known == (1 if form == "ome-tiff" else len(wanted))
        np.testing.assert_array_equal(file.read(), wanted[:known])
        assert "alpha" not in {interpretation.name for interpretation in file.colorinterp}
        missing = file.read_masks() == 0
        assert (missing == gaps).all()


@pytest.mark.filterwarnings("ignore::rasterio.errors.NotGeoreferencedWarning")
@pytest.mark.parametrize("number", [3, 4])
def test_a_cog_of_three_or_four_channels_is_one_of_numbers(number: int, tmp_path: Path) -> None:
    """As large as needs levels: GDAL takes so many channels of bytes for colours, and the last for alpha."""
    logits, channels, path = torch.randn(1, number, 700, 600), Channels(number), tmp_path / "a.cog.tif"
    seen = open_image(np.ones((1, 700, 600), np.uint8))
    field = OutputField((1, number, 700, 600), torch.float32, torch.device("cpu"), 0.5)
    sink_of("probabilities", path, seen, channels).take([(Box.whole(700, 600), logits)], field)
    wanted = expected("probabilities", logits, np.zeros((700, 600), bool), channels, said=False)
    np.testing.assert_array_equal(whole(path), wanted)
    np.testing.assert_array_equal(whole(path, 1), same_means(wanted, None))
    with rasterio.open(path) as file, tifffile.TiffFile(path) as tiff:
        np.testing.assert_array_equal(file.read(), wanted)
        assert file.tags(ns="IMAGE_STRUCTURE")["LAYOUT"] == "COG"
        assert file.overviews(1) == [2]
        assert [int(page.photometric) for page in tiff.pages] == [1, 1]
        assert [list(map(int, page.extrasamples)) for page in tiff.pages] == [[0] * (number - 1)] * 2
    assert [entry.name for entry in tmp_path.iterdir()] == ["a.cog.tif"]


@settings(max_examples=20)
@given(
    draw=st.data(), dtype=st.sampled_from(("uint8", "uint16", "float32")), form=st.sampled_from(("tiff", "ome-zarr"))
)
def test_lower_levels_are_means_of_what_holds_data(draw: Any, dtype: str, form: str, fresh: Iterator[Path]) -> None:
    height, width, nodata = (draw.draw(each) for each in (st.integers(1, 70),) * 2 + (st.sampled_from(NODATA[dtype]),))
    rng = np.random.default_rng(draw.draw(st.integers(0, 9)))
    pixels = rng.integers(1, 200, (draw.draw(st.integers(1, 4)), height, width)).astype(dtype)
    if nodata is not None:
        pixels[rng.random(pixels.shape) < draw.draw(st.sampled_from((0, 0.5, 0.9)))] = nodata
    path, tags, channels = next(fresh), geotiff_tags(None, nodata), mask_classes(len(pixels))
    path = path.with_name(path.name + FORMATS[form])
    rows, shape = [pixels.transpose(1, 2, 0)], (height, width, len(pixels))
    write_pyramid(path, rows, shape=shape, dtype=dtype, nearest=False, tile=16, channels=channels, tags=tags)
    with open_image(path) as image:
        levels = len(image.levels)
        assert (image.nodata is None) == (nodata is None)
    for level in range(levels):
        np.testing.assert_allclose(whole(path, level), pixels, rtol=1e-6)
        pixels = same_means(pixels, nodata)


@pytest.mark.parametrize("form", FORMATS)
def test_a_forward_into_a_file_keeps_the_place(form: str, tmp_path: Path) -> None:
    pixels = np.random.default_rng(0).integers(1, 200, (2, 300, 260)).astype(np.int16)
    pixels[:, :90, :70] = -9999
    path = make(tmp_path / "a.tif", pixels, nodata=-9999)
    engine = gg.compile(Sums(3), tile=(128, 100))
    whole_tensor = engine.forward(path)
    out = engine.forward(path, out=tmp_path / f"b{FORMATS[form]}")
    values = whole(out)
    assert np.isnan(values[:, :90, :70]).all()
    gaps = (pixels == -9999).all(0)
    np.testing.assert_array_equal(values[:, ~gaps], whole_tensor[0].float().numpy()[:, ~gaps])
    if form != "ome-zarr":
        with rasterio.open(out) as file:
            assert (file.crs.to_epsg(), file.transform) == (32633, NORTH_UP)
            assert math.isnan(file.nodata)
    half = gg.compile(nn.Sequential(Sums(1), nn.AvgPool2d(2)))
    with open_image(half.forward(path, out=tmp_path / f"half{FORMATS[form]}")) as image:
        assert image.shape == (1, 150, 130)
        assert image.georeference is None  # nobody knows which of its pixels are where


def test_the_name_of_the_output_decides_what_it_is(tmp_path: Path) -> None:
    """Not that of the slide."""
    for name in ("a.ome.tif", "b.cog.tif", "c.tif"):
        make(tmp_path / name, np.full((1, 40, 50), 9, np.uint8))
    save_model(tmp_path / "best.pt", f"{__name__}:Sums", Sums())
    listed: list[Notice] = []
    for form, suffix in FORMATS.items():
        config = {"run": tmp_path / "best.pt", "slides": (tmp_path,), "out": tmp_path / form, "format": form}
        results = gg.predict({**config, "trust": (f"{__name__}:Sums",)}, listeners=[listed.append])  # type: ignore[list-item]
        assert [result.status for result in results] == ["done"] * 3
        assert {path.name for path in (tmp_path / form / "masks").iterdir()} == {f"{name}{suffix}" for name in "abc"}
    with tifffile.TiffFile(tmp_path / "tiff" / "masks" / "a.tif") as plain:
        assert not plain.is_ome
    with tifffile.TiffFile(tmp_path / "ome-tiff" / "masks" / "c.ome.tif") as ome:
        assert ome.is_ome
    told = [event.text for event in listed if isinstance(event, Notice)]
    assert [text for text in told if "OME-Zarr cannot say where" in text]


def test_what_holds_no_data_is_scored_in_no_format(tmp_path: Path) -> None:
    pixels = np.random.default_rng(0).integers(1, 200, (1, 90, 130)).astype(np.uint8)
    pixels[:, :50, :50] = 0
    make(tmp_path / "a.tif", pixels, nodata=0)
    make(tmp_path / "m.tif", (pixels > 100).astype(np.uint8))
    (tmp_path / "cohort.csv").write_text("slide,mask,split\na.tif,m.tif,test\n")
    save_model(tmp_path / "best.pt", f"{__name__}:Sums?channels=3", Sums(3))
    found = []
    for form in FORMATS:
        outputs = ("mask", "probabilities", "geojson")
        config = {"run": tmp_path / "best.pt", "slides": (tmp_path / "cohort.csv",), "out": tmp_path / form}
        more = {"format": form, "outputs": outputs, "trust": (f"{__name__}:Sums",)}
        (result,) = gg.predict({**config, **more})
        features = json.loads((tmp_path / form / result.files["geojson"]).read_text())["features"]
        measured = [feature["properties"].get("measurements") for feature in features]
        found.append((result.status, result.dice, result.regions, measured))
    assert found[0][0] == "done"
    assert all(each == found[0] for each in found)
