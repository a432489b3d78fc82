"""Measured <= predicted where several threads read a slide of JPEG tiles, in a process of its own."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from gigagrad.images import make_slide

_ONE_STEP = """
import json, sys
import torch
import gigagrad as gg
from gigagrad.images import open_image
from gigagrad.plans.problem import Reading

readers, grey, folder = int(sys.argv[1]), sys.argv[2] == "grey", sys.argv[3]
Reading.readers = lambda *_: readers
torch.manual_seed(0)
channels = 1 if grey else 3
normalise = gg.models.Normalise((0.5,) * channels, (0.2,) * channels)
model = torch.nn.Sequential(normalise, torch.nn.Conv2d(channels, 1, 3, padding=1))
engine = gg.compile(model, gg.losses.bce, memory="1 GiB", tile=(1500, 1250))
with open_image(f"{folder}/slide.tif") as opened, open_image(f"{folder}/mask.tif") as mask:
    slide = opened.grey() if grey else opened
    plan = engine.plan(slide, mask)
    for _ in range(2):
        engine.backward(slide, mask)
run = engine.last_run
print(json.dumps({"measured": run.peak_bytes, "predicted": run.predicted_peak_bytes, "budget": run.budget_bytes,
                  "readers": plan.readers}))
"""


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a slide and its mask."""
    folder = tmp_path_factory.mktemp("slides")
    make_slide(folder / "slide.tif", height=6000, width=5000, seed=0, mask_path=folder / "mask.tif")
    return folder


@pytest.mark.parametrize(("readers", "kind"), [(1, "colour"), (6, "grey")])
def test_crops_that_wait_stay_below_the_prediction(folder: Path, readers: int, kind: str) -> None:
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", _ONE_STEP, f"{readers}", kind, f"{folder}"],
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    result: dict[str, int] = json.loads(done.stdout.splitlines()[-1])
    assert result["measured"] <= result["predicted"] <= result["budget"]
    assert result["readers"] == readers
