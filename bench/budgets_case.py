"""One case of `bench/budgets.py`, in a process of its own: three training steps under a budget, and what they took.

    python bench/budgets_case.py '{"model": "unet-batch", "height": 300, "width": 400, ...}'

Prints one JSON line last: either `refused` with the numbers of the `BudgetError`, or for every step the peak of the
process so far and the peak that was predicted before the step began; all in bytes.
"""

from __future__ import annotations

import json
import os
import sys
import time
import warnings
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import gigagrad as gg
import gigagrad.models.torchvision_operators
from gigagrad.errors import BudgetError, RankError
from gigagrad.losses import bce

_STEPS = 3


class UNet(nn.Module):
    """Three levels, skips by concatenation, a norm after every convolution; odd sizes are resized to fit."""

    def __init__(self, norm: str, width: int) -> None:
        super().__init__()
        self.front = gg.models.Normalise()
        widths = [width, 2 * width, 4 * width]
        self.down = nn.ModuleList(_block(i, o, norm) for i, o in zip((3, *widths[:2]), widths, strict=True))
        self.up = nn.ModuleList(_block(widths[i] + widths[i + 1], widths[i], norm) for i in (1, 0))
        self.head = nn.Conv2d(width, 1, 1)

    def forward(self, x: Tensor) -> Tensor:
        x = self.front(x)
        skips: list[Tensor] = []
        for level, block in enumerate(self.down):
            x = block(x if level == 0 else F.max_pool2d(x, 2))
            skips.append(x)
        for block, skip in zip(self.up, (skips[1], skips[0]), strict=True):
            x = block(torch.cat([F.interpolate(x, size=skip.shape[-2:], mode="nearest"), skip], 1))
        logits: Tensor = self.head(x)
        return logits


def _block(channels_in: int, channels_out: int, norm: str) -> nn.Sequential:
    layers: list[nn.Module] = []
    for channels in (channels_in, channels_out):
        normalise = nn.BatchNorm2d(channels_out) if norm == "batch" else nn.GroupNorm(4, channels_out)
        layers += [nn.Conv2d(channels, channels_out, 3, padding=1), normalise, nn.ReLU()]
    return nn.Sequential(*layers)


def build(name: str) -> nn.Module:
    """`unet-batch?WIDTH`, `unet-group?WIDTH`, or whatever `gg.models.resolve` knows."""
    if name.startswith("unet-"):
        norm, _, width = name.removeprefix("unet-").partition("?")
        return UNet(norm, int(width))
    return gg.models.resolve(name)


def make_image(case: dict[str, Any], seed: int) -> Any:
    height, width = case["height"], case["width"]
    if case["image"] == "tiff":
        return case["file"]
    noise = torch.randint(0, 256, (3, height, width), dtype=torch.uint8, generator=torch.Generator().manual_seed(seed))
    if case["image"] == "bytes":
        return noise.numpy()
    floats = torch.empty(3, height, width)
    for row in range(height):  # no whole temporaries: the process should not have been larger than it is
        floats[:, row] = noise[:, row] / 255
    return floats


def run(case: dict[str, Any]) -> dict[str, Any]:
    torch.manual_seed(0)
    if case["threads"]:
        torch.set_num_threads(case["threads"])
    model = build(case["model"]).train(case["train"])
    images = tuple(make_image(case, seed) for seed in range(2 if case["model"].startswith("multi-stain") else 1))
    image = images if len(images) > 1 else images[0]
    target = torch.tensor([1]) if case["label"] else make_image(case | {"image": "bytes"}, 9)[:1] > 127
    loss = F.cross_entropy if case["label"] else bce
    mesh = init_device_mesh("cpu", (int(os.environ["WORLD_SIZE"]),)) if "WORLD_SIZE" in os.environ else None
    engine = gg.compile(
        model, loss, memory=case["budget"], precision=case["precision"], mesh=mesh, scratch=case["folder"]
    )
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-4)
    try:
        plan = engine.plan(image, target)
        predicted, measured, seconds = [plan.predicted_peak_bytes], [], []
        for _ in range(_STEPS):
            start = time.perf_counter()
            optimizer.zero_grad()
            engine.backward(image, target)
            optimizer.step()
            assert engine.last_run is not None
            predicted.append(engine.last_run.predicted_peak_bytes)
            measured.append(engine.last_run.peak_bytes)
            seconds.append(round(time.perf_counter() - start, 2))
    except BudgetError as error:
        return {
            "refused": str(error),
            "needed": error.needed_bytes,
            "smallest": error.smallest_bytes,
        }
    except RankError as error:  # the first rank says which numbers
        return {"refused": str(error)}
    return {
        "predicted": predicted,
        "measured": measured,
        "seconds": seconds,
        "workers": plan.workers,
        "tiles": plan.tile_count,
        "scratch_bytes": plan.bytes_in("disk"),
        "parts": dict(plan.memory_parts()),
    }


def main() -> None:
    warnings.simplefilter("ignore")
    print(json.dumps(run(json.loads(sys.argv[1]))))


if __name__ == "__main__":
    main()
