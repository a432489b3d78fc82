"""Measured <= predicted <= budget for the whole process, each case in a process of its own."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

_ONE_STEP = """
import json, os, sys
import numpy as np
import torch
import gigagrad as gg
from gigagrad.boxes import Box
from gigagrad.losses import bce

name, height, width, memory = sys.argv[1], int(sys.argv[2]), int(sys.argv[3]), sys.argv[4]
torch.manual_seed(0)
layers = {
    "wide": lambda: torch.nn.Sequential(
        gg.models.Normalise(), torch.nn.Conv2d(3, 32, 3, 2, 1), torch.nn.ReLU(), torch.nn.Conv2d(32, 32, 3, 1, 1),
        torch.nn.ReLU(), torch.nn.ConvTranspose2d(32, 1, 4, 2, 1)),
    "paper": lambda: gg.models.resolve("paper-unet"),
    "normed": lambda: torch.nn.Sequential(
        gg.models.Normalise(), *(layer for i, o in ((3, 16), (16, 16), (16, 16), (16, 16)) for layer in (
            torch.nn.Conv2d(i, o, 3, padding=1), torch.nn.BatchNorm2d(o), torch.nn.ReLU())),
        torch.nn.Conv2d(16, 1, 1)),
    "heavy": lambda: torch.nn.Sequential(  # weights of 9 MiB beside small tiles
        gg.models.Normalise(), torch.nn.Conv2d(3, 512, 8, 8), torch.nn.BatchNorm2d(512), torch.nn.ReLU(),
        *(layer for _ in range(4) for layer in (
            torch.nn.Conv2d(512, 512, 3, padding=1), torch.nn.BatchNorm2d(512), torch.nn.ReLU())),
        torch.nn.ConvTranspose2d(512, 1, 8, 8)),
}
model = layers[name]()
image = np.broadcast_to(np.random.default_rng(0).integers(0, 255, (3, 1, width), dtype=np.uint8), (3, height, width))
mask = np.broadcast_to(np.uint8(1), (1, height, width))
engine = gg.compile(model, bce, memory=memory, optimizer=torch.optim.SGD(model.parameters(), lr=0.1))
engine.in_tiles = sys.argv[5] == "tiles"
plan = engine.plan(image, mask)

for _ in range(2):
    if sys.argv[6:]:
        with gg.open_image(engine.image_gradient(image, mask, out=sys.argv[6])) as gradient:
            assert np.any(gradient.read(Box(3000, 2000, 3100, 2100)))
        os.remove(sys.argv[6])
    else:
        engine.backward(image, mask)
run = engine.last_run
print(json.dumps({"measured": run.peak_bytes, "predicted": run.predicted_peak_bytes, "budget": run.budget_bytes,
                  "tile": plan.tile, "tiles": plan.tile_count}))
"""


def run_step(name: str, height: int, width: int, memory: str, *more: str, way: str = "tiles") -> dict[str, int]:
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", _ONE_STEP, name, str(height), str(width), memory, way, *more],
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    result: dict[str, int] = json.loads(done.stdout.splitlines()[-1])
    return result


@pytest.mark.parametrize(
    ("name", "height", "width", "memory"),
    [
        ("paper", 3001, 4003, "1 GiB"),
        ("paper", 3000, 3000, "512 MiB"),
        ("wide", 1502, 2004, "800 MiB"),
        ("normed", 803, 1001, "1 GiB"),
        ("normed", 803, 1001, "600 MiB"),
        ("heavy", 512, 640, "720 MiB"),
    ],
)
def test_a_step_stays_below_prediction_and_budget(name: str, height: int, width: int, memory: str) -> None:
    result = run_step(name, height, width, memory)
    assert result["measured"] <= result["predicted"] <= result["budget"]
    assert result["tiles"] > 1


@pytest.mark.parametrize(
    ("name", "height", "width", "memory"),
    [
        ("normed", 803, 1001, "1060 MiB"),  # block by block
        ("normed", 803, 1001, "1120 MiB"),  # from the heap, watched
        ("heavy", 512, 640, "720 MiB"),
        ("wide", 700, 900, "900 MiB"),
        ("paper", 1730, 925, "987 MiB"),  # few channels, which kernels pad
    ],
)
def test_a_whole_image_stays_below_prediction_and_budget(name: str, height: int, width: int, memory: str) -> None:
    result = run_step(name, height, width, memory, way="whole image")
    assert result["measured"] <= result["predicted"] <= result["budget"]
    assert result["tiles"] == 1


def test_the_gradient_of_an_image_leaves_in_strips(tmp_path: Path) -> None:
    """Whole it would be 201 MiB, and not fit."""
    result = run_step("paper", 4403, 4001, "640 MiB", str(tmp_path / "gradient.tif"))
    assert result["measured"] <= result["predicted"] <= result["budget"]
