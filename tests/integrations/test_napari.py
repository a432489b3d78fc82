"""What napari's plugin opens is what the image holds, part by part, and what it writes opens again."""

import tomllib
from importlib.metadata import EntryPoint
from pathlib import Path
from pkgutil import resolve_name

import numpy as np
import pytest
import tifffile
import yaml

import gigagrad as gg
from gigagrad.boxes import Box
from gigagrad.cohorts.rows import SLIDE_SUFFIXES
from gigagrad.errors import WriteError
from gigagrad.images import write_pyramid
from gigagrad.integrations.napari import get_reader, read_layers, write_mask
from gigagrad.masks.classes import mask_classes
from tests.pages import ROOT, play

MANIFEST = ROOT / "src" / "gigagrad" / "integrations" / "napari.yaml"


@pytest.fixture
def slide(tmp_path):
    """A slide without a pyramid, of 0.5 um per pixel."""
    rgb = np.random.default_rng(0).integers(0, 256, (700, 1100, 3), np.uint8)
    described = {"photometric": "rgb", "resolution": (20000, 20000), "resolutionunit": "CENTIMETER", "metadata": None}
    tifffile.imwrite(tmp_path / "slide.tif", rgb, tile=(256, 256), **described)
    return tmp_path / "slide.tif"


def test_the_manifest_names_what_is_there():
    found = yaml.safe_load(MANIFEST.read_text())["contributions"]
    commands = {command["id"]: resolve_name(command["python_name"]) for command in found["commands"]}
    (reader,), (writer,) = found["readers"], found["writers"]
    assert commands == {reader["command"]: get_reader, writer["command"]: write_mask}
    assert set(reader["filename_patterns"]) == {f"*{suffix}" for suffix in SLIDE_SUFFIXES}


def test_the_package_announces_the_manifest_and_holds_it():
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
    (value,) = project["project"]["entry-points"]["napari.manifest"].values()
    entry = EntryPoint("gigagrad", value, "napari.manifest")
    assert (entry.module, entry.attr) == ("gigagrad.integrations", "napari.yaml")
    assert any(MANIFEST.match(pattern) for pattern in project["tool"]["setuptools"]["package-data"]["gigagrad"])
    assert yaml.safe_load(MANIFEST.read_text())["name"] == project["project"]["name"]


def test_what_cannot_be_read_is_left_to_others(slide, tmp_path):
    assert get_reader(str(slide)) is read_layers
    assert get_reader([str(slide)]) is None
    (tmp_path / "text.tif").write_text("no image")
    assert get_reader(str(tmp_path / "text.tif")) is None


@pytest.mark.parametrize(
    "index",
    [
        (slice(10, 500), slice(600, 1100)),
        (slice(None, None, 7), slice(3, 4)),
        (slice(20, 30), slice(None), 1),
        (5, slice(7, 9)),
        (slice(40, 20), slice(None)),
        (slice(30, 10, -3), 8),
        9,
        ...,
    ],
    ids=str,
)
def test_parts_of_a_level_are_those_of_an_array(slide, index):
    ((levels, settings, kind),) = read_layers(str(slide))
    pixels = tifffile.imread(slide)
    index = slice(None) if index is ... else index
    np.testing.assert_array_equal(levels[0][index], pixels[index])
    assert kind == "image"
    assert settings == {"name": "slide", "multiscale": True, "scale": (0.5, 0.5), "rgb": True}
    assert [level.shape for level in levels] == [(700, 1100, 3), (350, 550, 3), (175, 275, 3)]
    assert levels[0].size == pixels.size
    half = pixels[:20, :20].reshape(10, 2, 10, 2, 3).mean(axis=(1, 3))
    assert np.abs(levels[1][:10, :10] - half).max() <= 1


def test_probabilities_have_a_layer_for_each_class(tmp_path):
    (tmp_path / "probabilities").mkdir()
    path = tmp_path / "probabilities" / "slide.tif"
    values = np.random.default_rng(1).integers(0, 256, (80, 96, 3), np.uint8)
    write_pyramid(path, [values], shape=values.shape, dtype=np.uint8, nearest=False, tile=16)
    layers = read_layers(str(path))
    assert [settings["name"] for _, settings, _ in layers] == ["slide 1", "slide 2", "slide 3"]
    for number, (levels, settings, kind) in enumerate(layers):
        assert (kind, settings["contrast_limits"]) == ("image", (0, 255))
        np.testing.assert_array_equal(np.asarray(levels[0]), values[..., number])


@pytest.mark.parametrize("name", ["slide.tif", "slide.zarr"])
def test_labels_are_written_and_open_as_labels(tmp_path, name):
    (tmp_path / "masks").mkdir()
    path = str(tmp_path / "masks" / name)
    labels = np.zeros((1100, 700), int)
    labels[500:700, 90:400] = 3
    assert write_mask(path, labels, {"scale": (0.5, 0.5)}) == [path]
    ((levels, settings, kind),) = read_layers(path)
    assert (kind, settings["scale"]) == ("labels", (0.5, 0.5))
    np.testing.assert_array_equal(np.asarray(levels[0]), labels)
    assert set(np.unique(levels[1])) == {0, 3}
    # A layer of several levels, over the file that is there.
    assert write_mask(path, [labels + 1, labels[::2, ::2]], {"scale": (1.0, 1.0)}) == [path]
    with gg.open_image(path) as image:
        assert (image.mpp, str(image.dtype)) == (None, "uint8")
        assert image.read(Box(500, 90, 501, 91)).item() == 4


def test_a_mask_of_labels_has_a_layer_for_each(tmp_path):
    labels = np.random.default_rng(2).integers(0, 2, (90, 110, 3), np.uint8)
    (tmp_path / "masks").mkdir()
    kinds = mask_classes(3, ("whole", "core", "rim"))
    path = tmp_path / "masks" / "slide.ome.tif"
    write_pyramid(path, [labels], shape=(90, 110, 3), dtype=np.uint8, nearest=True, channels=kinds)
    layers = read_layers(str(path))
    assert [(settings["name"].split()[-1], kind) for _, settings, kind in layers] == [
        (name, "labels") for name in ("whole", "core", "rim")
    ]
    for number, (levels, _, _) in enumerate(layers):
        np.testing.assert_array_equal(levels[0][:, :], labels[..., number])


def test_labels_below_0_are_refused(tmp_path):
    with pytest.raises(WriteError, match="got -1"):
        write_mask(str(tmp_path / "mask.tif"), np.full((4, 4), -1), {})
    assert not list(tmp_path.iterdir())


def test_the_page_reads_a_slide(slide, monkeypatch):
    monkeypatch.chdir(slide.parent)
    assert play("how-to/napari.md")["corner"].shape == (64, 64, 3)
    assert Path("slide.tif").is_file()
