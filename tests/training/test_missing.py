"""Training leaves out pixels without data, whatever the mask says of them."""

from __future__ import annotations

import json

import numpy as np
import pytest
import torch
from torch import nn

import gigagrad as gg
from gigagrad.boxes import Box
from gigagrad.cohorts import check_images, read_cohort
from gigagrad.errors import TargetError
from gigagrad.events import Notice
from gigagrad.images import InputView
from gigagrad.losses import named_loss
from gigagrad.masks import IGNORED, ClassTable
from gigagrad.training.dataset import Dataset
from gigagrad.training.targets import TargetRule
from tests.images.test_georeference import H, W, make

RNG = np.random.default_rng(4)
MISSING = RNG.random((H, W)) < 0.3


def cohort(folder, nodata=0, mask_nodata=None, foreground=1):
    """One slide, to train on and to validate, and its mask, foreground where the slide is missing."""
    pixels = RNG.integers(1, 200, (3, H, W)).astype(np.uint16)
    pixels[:, MISSING] = 0
    ids = (foreground * ((RNG.random((1, H, W)) < 0.4) | MISSING)).astype(np.uint8)
    make(folder / "a.tif", pixels, nodata=nodata)
    make(folder / "m.tif", ids, nodata=mask_nodata)
    (folder / "c.csv").write_text("slide,mask,split\na.tif,m.tif,train\n")
    return read_cohort(folder / "c.csv"), ids[0]


def pairs(folder, loss="bce", ignores=True, table=None):
    rule = TargetRule(named_loss(loss), 1, ignores)
    return Dataset(rule, level=0, look=InputView(), labels=folder, table=table)


@pytest.mark.parametrize("turn", [0, 3])
def test_targets_are_ignored_where_slides_are_missing(tmp_path, turn) -> None:
    (row,), ids = cohort(tmp_path)[0].rows, cohort(tmp_path)[1]
    made = pairs(tmp_path)
    made.check_seen(made.prepare(row, nn.Sequential(nn.Identity())))
    expected = np.where(MISSING, IGNORED, ids)
    with made.open(row, turn) as (slide, target):
        found = target.read(Box.whole(*target.shape[1:]))[0]
        np.testing.assert_array_equal(found, np.rot90(expected, turn))
        assert not (np.rot90(MISSING, turn) & (slide.read(Box.whole(*slide.shape[1:])) > 0)).any()
    known = ids[~MISSING]
    np.testing.assert_array_equal(made.counts(row)[:2], np.bincount(known, minlength=2))


def test_who_has_gaps(tmp_path):
    def gaps(found, table=None):
        (size,) = check_images(found, 0, table=table)
        return size.gaps

    assert gaps(cohort(tmp_path)[0])
    assert not gaps(cohort(tmp_path, nodata=None)[0])
    of_mask = cohort(tmp_path, nodata=None, mask_nodata=255)[0]
    assert gaps(of_mask)
    assert not gaps(of_mask, ClassTable.parse(["1=1"]))  # it says what becomes of them


@pytest.mark.parametrize(("mask_nodata", "said"), [(None, "--classes 255=1"), (0, "say --classes 255=1")])
def test_what_255_or_0_means_is_asked(tmp_path, mask_nodata, said) -> None:
    (row,) = cohort(tmp_path, mask_nodata=mask_nodata, foreground=255)[0].rows
    made = pairs(tmp_path)
    seen = made.prepare(row, nn.Sequential(nn.Identity()))
    with pytest.raises(TargetError, match=said):
        made.check_seen(seen)
    named = pairs(tmp_path, table=ClassTable.parse(["255=1"]))
    named.check_seen(named.prepare(row, nn.Sequential(nn.Identity())))


class Constant(nn.Module):
    """The logit 1 everywhere, for a beginning."""

    def __init__(self) -> None:
        super().__init__()
        self.bias = nn.Parameter(torch.ones(()))

    def forward(self, x):
        return x[:, :1].float() * 0 + self.bias


def unmasked(output, target):
    return (output - (target != 0).float()).square().mean()


def test_a_run_logs_the_loss_of_what_is_there(tmp_path) -> None:
    _, ids = cohort(tmp_path)
    settings = {"slides": str(tmp_path / "c.csv"), "model": f"{__name__}:Constant", "epochs": 1, "augment": False}
    said: list[str] = []

    def listen(event) -> None:
        said.extend([event.text] if isinstance(event, Notice) else [])

    def first_loss(loss: str) -> float:
        gg.fit({**settings, "out": str(tmp_path / loss[-4:]), "loss": loss}, [listen])
        lines = (tmp_path / loss[-4:] / "metrics.jsonl").read_text().splitlines()
        return next(json.loads(line)["values"]["loss"] for line in lines if json.loads(line).get("split") == "train")

    share = ids[~MISSING].mean()
    assert first_loss("bce") == pytest.approx(np.log1p(np.e) - share, rel=1e-5)
    assert not any("takes every pixel" in text for text in said)
    assert first_loss(f"{__name__}:unmasked") == pytest.approx((ids == 0).mean(), rel=1e-5)
    assert any("the loss takes every pixel, those without data among them" in text for text in said)
