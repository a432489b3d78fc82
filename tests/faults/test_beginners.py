"""Beginner's mistakes: each is answered by one line that says what arrived and shows what mends it."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tifffile
import torch
from torch import nn

import gigagrad as gg
from gigagrad import cli
from gigagrad.errors import GigagradError

SIDE = 64
BYTES, FLOATS = np.zeros((3, SIDE, SIDE), np.uint8), np.zeros((3, SIDE, SIDE), np.float32)
MASK = np.zeros((1, SIDE, SIDE), np.uint8)


class Centred(nn.Conv2d):
    def forward(self, input: torch.Tensor) -> torch.Tensor:
        return super().forward(input - input.mean())


class Branching(nn.Conv2d):
    def forward(self, input: torch.Tensor) -> torch.Tensor:
        output = super().forward(input)
        return output if output.mean() > 0 else -output


POOLED = nn.Sequential(nn.Conv2d(3, 4, 1), nn.AdaptiveAvgPool2d(1), nn.Flatten())
NORMALISE = r"the image arrives as torch\.uint8 of shape .*gg\.models\.Normalise\(\)"


@pytest.mark.parametrize(
    ("model", "loss", "image", "mask", "words"),
    [
        (nn.Conv2d(3, 1, 1), gg.losses.bce, BYTES, MASK, NORMALISE),
        (Centred(3, 1, 1), gg.losses.bce, BYTES, MASK, NORMALISE),
        (nn.Conv2d(3, 1, 1), nn.BCEWithLogitsLoss(), FLOATS, MASK, r"the target arrives .*target\.float\(\)"),
        (nn.Conv2d(3, 4, 1), gg.losses.bce, FLOATS, MASK, r"use the loss ce \(gg\.losses\.ce, --loss ce\)"),
        (Branching(3, 1, 1), gg.losses.bce, FLOATS, MASK, r"choose with torch\.where\(condition, a, b\)"),
        (nn.Conv2d(3, 1, 1), gg.losses.bce, FLOATS, MASK[:, 1:], "both need one size"),
        (nn.Conv2d(3, 1, 1), lambda output, target: output - target, FLOATS, MASK, r"reduce it with \.mean\(\)"),
        (nn.Conv2d(3, 1, 1), gg.losses.bce, BYTES.transpose(1, 2, 0), MASK, r"x\.transpose\(2, 0, 1\)"),
        (nn.Conv2d(3, 1, 1), gg.losses.bce, FLOATS[:1], MASK, r"has 1 channels, .* is made for 3: convert the image"),
        (POOLED, gg.losses.bce, FLOATS, MASK, r"one answer for the whole image.*paper-unet, smp:Unet"),
        (POOLED, gg.losses.ce, FLOATS, MASK, r"one answer for the whole image"),
        (gg.models.Normalise(), gg.losses.mse, np.zeros((4, SIDE, SIDE), np.uint8), MASK, "in_channels=4"),
        (nn.Conv2d(3, 1, 1), gg.losses.bce, FLOATS, Path("a.geojson"), r"gg\.open_mask\('a\.geojson', slide\)"),
    ],
)
def test_in_python(model: Any, loss: Any, image: Any, mask: Any, words: str, tmp_path: Path) -> None:
    if isinstance(mask, Path):
        mask = tmp_path / mask
        mask.write_text("{}")
    with pytest.raises(GigagradError, match=words) as caught:
        gg.compile(model, loss).backward(image, mask)
    assert "\n" not in str(caught.value)


@pytest.fixture
def cohort(tmp_path: Path) -> Path:
    """Slides as bytes and as floats up to 255, masks of 0 and 255, and outlines."""
    rng = np.random.default_rng(0)
    pixels, mask = rng.integers(0, 255, (160, 160, 3), np.uint8), np.zeros((160, 160), np.uint8)
    mask[:80] = 255
    tifffile.imwrite(tmp_path / "a.tif", pixels, tile=(64, 64), photometric="rgb")
    tifffile.imwrite(tmp_path / "floats.tif", pixels.astype(np.float32), tile=(64, 64), photometric="rgb")
    tifffile.imwrite(tmp_path / "mask.tif", mask, tile=(64, 64))
    ring = [[0, 0], [90, 0], [90, 90], [0, 0]]
    feature = {"type": "Feature", "geometry": {"type": "Polygon", "coordinates": [ring]}}
    feature["properties"] = {"classification": {"name": "Tumor"}}
    (tmp_path / "drawn.geojson").write_text(json.dumps({"type": "FeatureCollection", "features": [feature]}))
    return tmp_path


@pytest.mark.parametrize(
    ("lines", "flags", "words"),
    [
        ("slide,mask,split\na.tif,mask.tif,train", "--lr 0.01", "did you mean '--learning-rate'"),
        ("slide,masks,split\na.tif,mask.tif,train", "", "unknown column 'masks', did you mean 'mask'"),
        ("slide,mask,split\na.tif,drawn.geojson,train", "--classes tumor", "'tumor', did you mean 'Tumor'"),
        ("slide,mask,split\na.tif,drawn.geojson,train", "--classes 2", "name each class but the background: tumour=1"),
        ("slide,mask,split\nfloats.tif,mask.tif,train", "", "line 2: floats holds floats from .*divide them"),
        (
            "slide,mask,split\na.tif,mask.tif,train",
            "--loss ce --model smp:Unet?encoder_name=resnet18&classes=2",
            "--classes 255=1 if it is the foreground",
        ),
        pytest.param(
            "slide,mask,split\na.tif,mask.tif,train",
            "--device cuda",
            "finds no CUDA device here; use the device cpu",
            marks=pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU"),
        ),
    ],
)
def test_at_the_command_line(cohort: Path, capsys: Any, lines: str, flags: str, words: str) -> None:
    (cohort / "cohort.csv").write_text(lines + "\n")
    command = ["fit", "--slides", str(cohort / "cohort.csv"), "--out", str(cohort / "run"), "--epochs", "1"]
    assert cli.main([*command, *flags.split()]) == 2
    said = capsys.readouterr().err
    assert said.count("\n") == 1
    assert re.search(words, said), said
