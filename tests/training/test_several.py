"""Several images of each place, and several labels of each pixel."""

from __future__ import annotations

import json
import shutil
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import tifffile
import torch

from gigagrad.errors import ConfigError, TargetError
from gigagrad.prediction import PredictConfig, predict
from gigagrad.prediction.cohort_scores import evaluate_masks, evaluate_model
from gigagrad.training import FitConfig, fit
from gigagrad.training.folder import Checkpoint, RunFolder


@pytest.fixture
def networks(tmp_path, monkeypatch):
    """A module of the user's own: networks of six channels in, and of two labels out."""
    (tmp_path / "networks_of_test_several.py").write_text(
        "import torch\n"
        "class Labels(torch.nn.Module):\n"
        "    def __init__(self, channels=3, labels=2):\n"
        "        super().__init__()\n"
        "        self.convolution = torch.nn.Conv2d(channels, labels, 3, padding=1)\n"
        "    def forward(self, image):\n"
        "        return self.convolution(image / 255)\n"
        "class Six(Labels):\n"
        "    def __init__(self):\n"
        "        super().__init__(6, 1)\n"
        "class Stains(Six):\n"
        "    def forward(self, image):\n"
        "        return self.convolution((image - 150.0) / 60)\n"
    )
    monkeypatch.chdir(tmp_path)
    return "networks_of_test_several"


def table(cohort_csv, path, header, line):
    """A cohort of what `line` makes of (slide, mask, split) of the small one."""
    rows = [text.split(",") for text in cohort_csv.read_text().splitlines()[1:]]
    made = [line(cohort_csv.parent / slide, cohort_csv.parent / mask, split) for slide, mask, split in rows]
    path.write_text("\n".join([header, *(",".join(map(str, cells)) for cells in made)]) + "\n")
    return str(path)


def trained(config):
    fit(config)
    return Checkpoint.load(RunFolder(Path(config.out)).checkpoint).model


@pytest.fixture
def config(tmp_path, networks):
    return FitConfig(
        slides="",
        out=str(tmp_path / "run"),
        model=f"{networks}:Labels",
        epochs=1,
        loss="bce_dice",
        checkpoint_seconds=0,
    )


def other_label(mask, folder):
    """A mask that overlaps with the other one: its left half, as 255."""
    plane = 255 * tifffile.imread(mask)
    plane[:, plane.shape[1] // 2 :] = 0
    tifffile.imwrite(folder / mask.name, plane, tile=(64, 64))
    return folder / mask.name


def test_labels_in_columns_and_in_channels_train_alike(config, cohort_csv, tmp_path):
    columns = table(
        cohort_csv,
        tmp_path / "columns.csv",
        "slide,mask:blob,mask:left,split",
        lambda slide, mask, split: (slide, mask, other_label(mask, tmp_path), split),
    )

    def stacked(slide, mask, split):
        made = tmp_path / f"both-{mask.name}"
        planes = np.stack([tifffile.imread(mask), tifffile.imread(tmp_path / mask.name)])
        tifffile.imwrite(made, planes, tile=(64, 64), photometric="minisblack", planarconfig="separate")
        return slide, made, split

    channels = table(cohort_csv, tmp_path / "channels.csv", "slide,mask,split", stacked)
    one = trained(replace(config, slides=columns))
    other = trained(replace(config, slides=channels, out=str(tmp_path / "other")))
    assert all(torch.equal(one[key], other[key]) for key in one)


def test_a_step_of_several_labels_is_that_of_plain_pytorch(config, cohort_csv, tmp_path):
    """255 in a mask of class ids is ignored in every channel."""

    def of_ids(slide, mask, split):
        ids = tifffile.imread(mask)
        ids[:, :40] *= 2
        ids[:20] = 255
        tifffile.imwrite(tmp_path / mask.name, ids, tile=(64, 64))
        return slide, tmp_path / mask.name, split

    slides = table(cohort_csv, tmp_path / "ids.csv", "slide,mask,split", of_ids)
    settings = replace(
        config, slides=slides, loss="dice", optimizer="sgd", learning_rate=1.0, accumulate=3, augment=False
    )
    after = trained(settings)

    torch.manual_seed(settings.seed)
    network = torch.nn.Conv2d(3, 2, 3, padding=1)
    losses = []
    for index in range(3):
        slide = torch.from_numpy(tifffile.imread(cohort_csv.parent / f"slide{index}.tif")).permute(2, 0, 1)
        ids = torch.from_numpy(tifffile.imread(tmp_path / f"slide{index}.mask.tif"))
        chance = torch.sigmoid(network(slide[None].float() / 255))[0][:, ids != 255]
        true = torch.stack([ids == 1, ids == 2])[:, ids != 255].float()
        hits, total = (chance * true).sum(1), chance.sum(1) + true.sum(1)
        losses.append((1 - (hits + 1) / (total / 2 + 1)).mean())
    torch.stack(losses).mean().backward()
    for name, parameter in network.named_parameters():
        assert parameter.grad is not None
        expected = parameter - parameter.grad
        torch.testing.assert_close(after[f"convolution.{name}"], expected, rtol=1e-5, atol=1e-7)


def test_channels_of_several_images(config, networks, cohort_csv, tmp_path):
    """A slide beside itself: the weights of both halves get the same gradients."""
    slides = table(
        cohort_csv,
        tmp_path / "stains.csv",
        "slide,slide:ihc,mask,split",
        lambda slide, mask, split: (slide, slide, mask, split),
    )
    settings = replace(config, slides=slides, model=f"{networks}:Six", loss="bce", optimizer="sgd", learning_rate=0.5)
    after = trained(settings)["convolution.weight"]
    torch.manual_seed(settings.seed)
    before = torch.nn.Conv2d(6, 1, 3, padding=1).weight.detach()
    first, second = (after - before).split(3, dim=1)
    torch.testing.assert_close(first, second, rtol=1e-3, atol=1e-7)
    assert float(first.abs().max()) > 1e-3


def stained(folder, name, seed, side=64):
    """Write nuclei of which half are dark in either stain, the second one at half the resolution, and those in both."""
    draw = np.random.default_rng(seed)
    cells = np.kron(draw.integers(0, 2, (2, side // 8, side // 8)), np.ones((8, 8), int))
    stains = {"he": cells[0], "ihc": cells[1, ::2, ::2]}
    for stain, dark in stains.items():
        pixels = (210 - 120 * dark[..., None] + draw.normal(0, 15, (*dark.shape, 3))).clip(0, 255).astype(np.uint8)
        tifffile.imwrite(folder / f"{name}-{stain}.tif", pixels, tile=(32, 32), photometric="rgb")
    tifffile.imwrite(folder / f"{name}-mask.tif", cells.all(axis=0).astype(np.uint8), tile=(32, 32))


def test_two_stains_show_what_neither_does_alone(config, networks, tmp_path):
    """Trained, predicted and evaluated of a cohort, the second stain at half the resolution."""
    splits = ["train", "train", "val", "test"]
    for number in range(len(splits)):
        stained(tmp_path, number, number)
    settings = replace(config, model=f"{networks}:Stains", loss="bce_dice", epochs=14, learning_rate=0.1)
    dice, trust = {}, (settings.model,)
    for stains in (("he", "ihc"), ("he", "he"), ("ihc", "ihc")):
        rows = [
            f"{number}-{stains[0]}.tif,{number}-{stains[1]}.tif,{number}-mask.tif,{split}"
            for number, split in enumerate(splits)
        ]
        slides, out = tmp_path / f"{'-'.join(stains)}.csv", str(tmp_path / "-".join(stains))
        slides.write_text("\n".join(["slide,slide:ihc,mask,split", *rows]))
        dice[stains] = np.mean(list(fit(replace(settings, slides=str(slides), out=out)).scores.values()))
        if stains == ("he", "ihc"):
            made = predict(PredictConfig(run=out, slides=(slides,), out=tmp_path / "out", split="test", trust=trust))
            assert [slide.dice for slide in made] == pytest.approx([dice[stains]])
            of_model = evaluate_model(out, slides, split="test", trust=trust)
            assert of_model.dice[0] == pytest.approx(dice[stains])
    assert dice["he", "ihc"] > 0.8
    assert max(dice["he", "he"], dice["ihc", "ihc"]) < 0.7


@pytest.mark.parametrize(
    ("model", "loss", "header", "error", "words"),
    [
        ("Labels?labels=3", "bce", "slide,mask:a,mask:b,split", TargetError, "has 2 channels, and the model 3 output"),
        ("Labels", "ce", "slide,mask:a,mask:b,split", ConfigError, "there are 3 classes"),
        ("Labels", "bce", "slide,mask:a,mask:b,mask:c,split", ConfigError, "there are 3 classes"),
        (
            "Labels",
            "bce",
            "slide,split",
            TargetError,
            "line 2: the mask is empty, and the tissue recipe makes one label",
        ),
    ],
)
def test_what_does_not_fit_is_said_before_anything_is_written(
    config, networks, cohort_csv, tmp_path, model, loss, header, error, words
):
    masks = header.count("mask")
    slides = table(
        cohort_csv, tmp_path / "wrong.csv", header, lambda slide, mask, split: (slide, *[mask] * masks, split)
    )
    with pytest.raises(error, match=words):
        fit(replace(config, slides=slides, model=f"{networks}:{model}", loss=loss))
    assert not Path(config.out).exists()


def test_a_dataset_of_nnunet_with_regions(config, cohort_csv, tmp_path):
    """Regions train as channels of their own do, and a label map has the dataset's ids."""
    folder = tmp_path / "nnunet"
    for name in ("imagesTr", "labelsTr", "imagesTs", "labelsTs"):
        (folder / name).mkdir(parents=True)
    planes = {}
    for line in cohort_csv.read_text().splitlines()[1:]:
        slide, mask, split = line.split(",")
        ids = tifffile.imread(cohort_csv.parent / mask)
        ids[:, :40] *= 2
        part, case = "Ts" if split == "test" else "Tr", Path(slide).stem
        shutil.copy(cohort_csv.parent / slide, folder / f"images{part}" / f"{case}_0000.tif")
        tifffile.imwrite(folder / f"labels{part}" / f"{case}.tif", ids, tile=(64, 64))
        planes[case] = ids
    labels = {"background": 0, "whole": [1, 2], "core": 2}
    settings = {"labels": labels, "regions_class_order": [1, 2], "file_ending": ".tif", "channel_names": {"0": "R"}}
    (folder / "dataset.json").write_text(json.dumps(settings))
    config = replace(config, slides=str(folder), epochs=4, learning_rate=0.1)
    result = fit(config)
    trust, out = (config.model,), tmp_path / "out"
    wanted = PredictConfig(run=config.out, slides=(folder,), out=out, split="test", trust=trust, outputs=("labelmap",))
    made = predict(wanted)
    assert [slide.dice for slide in made] == pytest.approx(list(result.scores.values()))
    assert evaluate_masks(out, folder, split="test").classes == ("whole", "core")
    name = made[0].name
    mask, ids = (tifffile.imread(out / kind / f"{name}.tif") for kind in ("masks", "labelmaps"))
    assert mask.any()
    np.testing.assert_array_equal(ids, np.where(mask[1] == 1, 2, mask[0]))
    truth = np.array([planes[name] > 0, planes[name] == 2])
    dice = [2 * (a & b).sum() / (a.sum() + b.sum()) for a, b in zip(mask, truth, strict=True)]
    assert made[0].dice == pytest.approx(np.mean(dice))
    for wrong in ({"loss": "ce"}, {"model": f"{config.model}?labels=3"}):
        with pytest.raises(ConfigError, match=r"regions that may overlap .*whole = 1\+2.* model of 2 output channels"):
            fit(replace(config, out=str(tmp_path / "wrong"), **wrong))
    with pytest.raises(ConfigError, match="a label map is of classes that are regions"):
        predict(replace(wanted, classes=("a", "b")))


def test_labels_are_predicted_and_scored_alike(config, networks, cohort_csv, tmp_path):
    columns = table(
        cohort_csv,
        tmp_path / "columns.csv",
        "slide,mask:blob,mask:left,split",
        lambda slide, mask, split: (slide, mask, other_label(mask, tmp_path), split),
    )
    settings = replace(config, slides=columns, epochs=4, learning_rate=0.1)
    result = fit(settings)
    trust = (settings.model,)
    made = predict(
        PredictConfig(
            run=settings.out,
            slides=(columns,),
            out=tmp_path / "out",
            split="test",
            trust=trust,
            outputs=("mask", "geojson", "overlay", "probabilities"),
        )
    )
    assert [slide.dice for slide in made] == pytest.approx(list(result.scores.values()))
    of_model = evaluate_model(settings.out, columns, split="test", trust=trust)
    of_masks = evaluate_masks(tmp_path / "out", columns, split="test")
    assert of_model == of_masks
    assert of_model.dice[0] == pytest.approx(result.mean)
    assert of_model.classes == ("blob", "left")
    name = made[0].name
    mask = tifffile.imread(tmp_path / "out" / "masks" / f"{name}.tif")
    chances = tifffile.imread(tmp_path / "out" / "probabilities" / f"{name}.tif")
    np.testing.assert_array_equal(mask[:, chances[0] != 128], (chances > 127)[:, chances[0] != 128])
    truth = [
        tifffile.imread(cohort_csv.parent / f"{name}.mask.tif"),
        tifffile.imread(tmp_path / f"{name}.mask.tif") > 0,
    ]
    dice = [2 * (a & b).sum() / (a.sum() + b.sum()) for a, b in zip(mask, np.array(truth), strict=True)]
    assert made[0].dice == pytest.approx(np.mean(dice))
    features = json.loads((tmp_path / "out" / "geojson" / f"{name}.geojson").read_text())["features"]
    assert {feature["properties"]["classification"]["name"] for feature in features} <= {"blob", "left"}
