"""Masks of tissue only: on tissue the same bytes, elsewhere background, and the files say so."""

import json
from pathlib import Path

import numpy as np
import pytest
import tifffile
import torch
from torch import nn

from gigagrad.boxes import Box
from gigagrad.cohorts.records import read_records
from gigagrad.config.predict import PredictConfig
from gigagrad.errors import ConfigError
from gigagrad.events import Event, Notice
from gigagrad.images import open_image
from gigagrad.images.write import write_pyramid
from gigagrad.models import resolve, save_model
from gigagrad.prediction.predict import predict


class Everywhere(nn.Module):
    """Says foreground of every pixel."""

    def forward(self, x):
        return x[:, :1].float() * 0 + 2


@pytest.fixture
def run(tmp_path):
    save_model(tmp_path / "model.pt", f"{__name__}:Everywhere", Everywhere())
    return tmp_path / "model.pt"


def predicted(run, slide, out, **settings):
    trust = (f"{__name__}:Everywhere",) if run.name == "model.pt" else ()
    (result,) = predict(PredictConfig(run=run, slides=(slide,), out=out, trust=trust, **settings))
    return result


def whole(path):
    with open_image(path) as image:
        return np.asarray(image.read(Box.whole(*image.shape[1:])))


def test_glass_is_background(run, jpeg_slide, tmp_path):
    result = predicted(run, jpeg_slide, tmp_path / "out", only_tissue="auto", outputs=("mask", "probabilities"))
    mask, chances = (whole(tmp_path / "out" / result.files[name]) for name in ("mask", "probabilities"))
    assert mask[0, 40:560, 40:760].all()
    assert not mask[0, 625:].any()
    assert not mask[0, :, 825:].any()
    assert np.array_equal(chances, mask * np.uint8(225))
    assert result.regions == 1


def test_files_and_records_say_so(run, jpeg_slide, tmp_path):
    settings = {"outputs": ("mask", "probabilities")}
    only = predicted(run, jpeg_slide, tmp_path / "only", only_tissue="auto", **settings)
    full = predicted(run, jpeg_slide, tmp_path / "full", **settings)
    for name in settings["outputs"]:
        for folder, result, said in (("only", only, True), ("full", full, False)):
            with tifffile.TiffFile(tmp_path / folder / result.files[name]) as file:
                assert ("computed on tissue only" in str(file.pages[0].tags["ImageDescription"].value)) == said
    assert (
        json.loads((tmp_path / "only/predictions.json").read_text())["slides"][0]["made_with"]["only_tissue"] == "auto"
    )
    assert read_records(tmp_path / "full")["small"].made_with.only_tissue == ""
    with pytest.raises(ConfigError, match="another model"):
        predicted(run, jpeg_slide, tmp_path / "only")


def test_records_of_earlier_versions_are_of_whole_slides(run, jpeg_slide, tmp_path):
    result = predicted(run, jpeg_slide, tmp_path / "out")
    for path in (tmp_path / "out/records/small.json", tmp_path / "out/predictions.json"):
        content = json.loads(path.read_text())
        del (content["slides"][0] if "slides" in content else content)["made_with"]["only_tissue"]
        path.write_text(json.dumps(content))
    assert predicted(run, jpeg_slide, tmp_path / "out") == result


def test_a_real_network_says_the_same_on_tissue(jpeg_slide, tmp_path):
    save_model(tmp_path / "unet.pt", "paper-unet", resolve("paper-unet").eval())
    masks = tmp_path / "tissue"
    masks.mkdir()
    tissue = np.zeros((350, 450), np.uint8)
    tissue[100:180, 200:330] = 1
    write_pyramid(masks / "small.tif", [tissue], shape=(350, 450, 1), dtype=np.uint8, nearest=True)
    settings = {"outputs": ("mask", "probabilities")}
    full = predicted(tmp_path / "unet.pt", jpeg_slide, tmp_path / "full", **settings)
    only = predicted(tmp_path / "unet.pt", jpeg_slide, tmp_path / "only", only_tissue=masks, **settings)
    inside = (slice(None), slice(216, 352), slice(416, 640))
    for name in settings["outputs"]:
        expected, found = (
            whole(tmp_path / folder / result.files[name]) for folder, result in (("full", full), ("only", only))
        )
        assert np.array_equal(found[inside], expected[inside])
        assert not found[:, :184].any()
        assert not found[:, :, 680:].any()


def test_tissue_up_to_the_far_corner_of_an_odd_slide(run, tmp_path):
    """Cells of 16 px reach 15 px beyond 305 px: spread over it they lay up to 15 px too far up and left."""
    folder = tmp_path / "tissue"
    folder.mkdir()
    tissue = np.zeros((305, 401), np.uint8)
    tissue[240:288, 320:384] = 1
    slide = np.zeros((305, 401, 3), np.uint8)
    tifffile.imwrite(tmp_path / "odd.tif", slide, tile=(64, 64), photometric="rgb")
    write_pyramid(folder / "odd.tif", [tissue], shape=(305, 401, 1), dtype=np.uint8, nearest=True)
    result = predicted(run, tmp_path / "odd.tif", tmp_path / "out", only_tissue=folder)
    mask = whole(tmp_path / "out" / result.files["mask"])[0]
    assert mask[tissue > 0].all()
    assert not mask[:220].any()
    moved = np.zeros_like(tissue)
    moved[:48, :64] = 1
    write_pyramid(folder / "odd.tif", [moved], shape=(305, 401, 1), dtype=np.uint8, nearest=True, overwrite=True)
    predicted(run, tmp_path / "odd.tif", tmp_path / "out", only_tissue=folder)
    mask = whole(tmp_path / "out" / result.files["mask"])[0]
    assert mask[moved > 0].all()
    assert not mask[tissue > 0].any()


class Broken(nn.Module):
    """Says NaN of every bright pixel."""

    def forward(self, x):
        bright = x[:, :1].float()
        return torch.where(bright > 200, torch.nan, bright)


def test_what_is_no_number_is_told(jpeg_slide, tmp_path):
    """Whoever looks at the mask alone takes a network that computes NaN for one that finds nothing."""
    save_model(tmp_path / "broken.pt", f"{__name__}:Broken", Broken())
    settings = PredictConfig(
        run=tmp_path / "broken.pt", slides=(jpeg_slide,), out=tmp_path / "out", trust=(f"{__name__}:Broken",)
    )
    events = list[Event]()
    predict(settings, [events.append])
    with open_image(jpeg_slide) as slide:
        count = int((np.asarray(slide.read(Box.whole(*slide.shape[1:])))[0] > 200).sum())
    told = [event.text for event in events if isinstance(event, Notice) and event.warning]
    assert [text.startswith(f"the model gave NaN for {count} pixels of small, which became") for text in told] == [True]


def test_a_folder_has_one_mask_of_each_slide(run, jpeg_slide, tmp_path):
    (tmp_path / "tissue").mkdir()
    result = predicted(run, jpeg_slide, tmp_path / "out", only_tissue=tmp_path / "tissue")
    assert result.failed
    assert "has 0 masks of tissue called small.SUFFIX" in result.error


def test_scores_have_no_part(jpeg_slide, tmp_path):
    save_model(tmp_path / "scores.pt", "timm:resnet10t?num_classes=2", resolve("timm:resnet10t?num_classes=2").eval())
    result = predicted(tmp_path / "scores.pt", jpeg_slide, tmp_path / "out", only_tissue="auto")
    assert result.failed
    assert "only_tissue is of models that give masks" in result.error
    name = "mil:encoder=timm:resnet10t&head=mean"
    save_model(tmp_path / "bag.pt", name, resolve(name).eval())
    with pytest.raises(ConfigError, match="only_tissue is of models that give masks"):
        predicted(tmp_path / "bag.pt", jpeg_slide, tmp_path / "bags", only_tissue="auto", patch_size=64)


def test_auto_is_no_path():
    config = PredictConfig(run="r", slides=("s",), out="o", only_tissue="auto")
    assert config.relative_to(Path("/x")).only_tissue == "auto"
    assert PredictConfig(run="r", slides=("s",), out="o", only_tissue="t").relative_to(Path("/x")).only_tissue == "/x/t"
