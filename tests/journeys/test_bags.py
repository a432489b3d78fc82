"""Refuse settings of bags that do not go together, through the command line; `test_tutorials.py` has those that do."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import tifffile

from gigagrad.cli import main

MODEL = "mil:encoder=networks_of_a_bag_journey:Encoder&features=4&head=abmil&head.width=4&head.hidden=3&classes=2"
ENCODER = """
import torch
class Encoder(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.conv = torch.nn.Conv2d(3, 4, 3, stride=4)
    def forward(self, x):
        return torch.relu(self.conv(x / 255)).mean((2, 3))
"""


@pytest.fixture
def cohort(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Four images of one colour: two to train on, one to validate, one to test; with labels and, beside it, masks."""
    monkeypatch.chdir(tmp_path)
    lines = {"labels": ["slide,label,split"], "cohort": ["slide,mask,split"]}
    for number, split in enumerate(("train", "train", "val", "test")):
        pixels = np.full((96, 96, 3), 150, np.uint8)
        tifffile.imwrite(
            f"{number}.tif", pixels, photometric="rgb", tile=(32, 32), resolution=(2e4, 2e4), resolutionunit=3
        )
        tifffile.imwrite(f"{number}-mask.tif", np.ones((96, 96), np.uint8), tile=(32, 32))
        lines["labels"].append(f"{number}.tif,{number % 2},{split}")
        lines["cohort"].append(f"{number}.tif,{number}-mask.tif,{split}")
    for name, rows in lines.items():
        (tmp_path / f"{name}.csv").write_text("\n".join(rows) + "\n")
    (tmp_path / "networks_of_a_bag_journey.py").write_text(ENCODER)
    monkeypatch.syspath_prepend(tmp_path)
    return tmp_path / "labels.csv"


def test_what_does_not_go_together_is_told(cohort: Path, capsys: pytest.CaptureFixture[str]) -> None:
    slides = ["--slides", str(cohort), "--loss", "ce", "--out", "run"]
    for flags, told in (
        (["--model", MODEL], "give patch_size"),
        (["--model", "timm:test_resnet?num_classes=2", "--patch-size", "32"], "expected one answer for all of them"),
        (["--model", MODEL, "--patch-size", "32", "--tissue", "mask"], "has no mask of tissue"),
    ):
        assert main(["fit", *slides, *flags]) == 2
        assert told in capsys.readouterr().err
    masked = ["--slides", str(cohort.with_name("cohort.csv")), "--model", MODEL, "--patch-size", "32", "--out", "run"]
    assert main(["fit", *masked]) == 2
    assert "learns from a label of the slide" in capsys.readouterr().err
