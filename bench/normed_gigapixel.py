"""The paper's network with batch normalisation after every convolution, in training mode, on a very large image.

    python bench/normed_gigapixel.py --scratch DIR [--height 100000 --width 100000] [--memory 2GiB]

The statistics of each of the seven norms are those of the whole image, so the network takes seven passes forward and as
many back; fields at a stride are kept, in memory or under `--scratch`, and those at full resolution (the widest would
take 120 GB at 100000 x 100000 px) are computed again. The image is a texture of 4099 px, repeated and shifted row by
row, made as it is read; its mask are the texture's dark parts. Before, the same network is compared with plain autograd
in float64 on 640 x 800 px, in tiles of 160 px. Prints one JSON line last: errors of that comparison, seconds, the peak
of the whole process beside what was predicted, the bytes in files, and the loss.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import gigagrad as gg
from gigagrad.boxes import Box
from gigagrad.events import Event, TileDone
from gigagrad.images import Image
from gigagrad.models import PaperUNet, Preprocess
from gigagrad.plans import estimate

PERIOD_PX = 4099
SHIFT_PX = 1237


class Texture(Image):
    """A random texture, smooth over some 30 px, repeated; each row of repeats is shifted against the one above."""

    def __init__(self, channels: int, height: int, width: int, *, mask: bool) -> None:
        super().__init__(shape=(channels, height, width), dtype=np.dtype(np.uint8), name="texture")
        noise = torch.from_numpy(np.random.default_rng(0).random((1, 3, PERIOD_PX // 30, PERIOD_PX // 30), np.float32))
        smooth = F.interpolate(noise, size=(PERIOD_PX, PERIOD_PX), mode="bicubic")[0].mul(255).clamp(0, 255)
        pixels = smooth.to(torch.uint8).numpy()
        self._pixels = (pixels.mean(0, keepdims=True) < 110).astype(np.uint8) if mask else pixels[:channels]

    def _read_inside(self, box: Box) -> Any:
        rows = np.arange(box.y0, box.y1)
        crop = np.empty((self.shape[0], *box.shape), np.uint8)
        for repeat in np.unique(rows // PERIOD_PX):
            here = rows // PERIOD_PX == repeat
            columns = (np.arange(box.x0, box.x1) + SHIFT_PX * int(repeat)) % PERIOD_PX
            crop[:, here] = self._pixels[:, rows[here] % PERIOD_PX][:, :, columns]
        return crop


class Normed(nn.Module):
    def __init__(self, convolution: nn.Conv2d | nn.ConvTranspose2d) -> None:
        super().__init__()
        self.convolution = convolution
        self.norm = nn.BatchNorm2d(convolution.out_channels)

    def forward(self, x: Tensor, **options: Any) -> Tensor:
        normed: Tensor = self.norm(self.convolution(x, **options))
        return normed


def network() -> nn.Sequential:
    torch.manual_seed(0)
    net = PaperUNet()
    for name, layer in list(net.named_children()):
        setattr(net, name, Normed(layer))  # type: ignore[arg-type]
    return nn.Sequential(Preprocess(), net).train()


def loss(output: Tensor, target: Tensor) -> Tensor:
    return F.binary_cross_entropy_with_logits(output, target.to(output.dtype))


def compare() -> dict[str, Any]:
    """The loss and the gradients of plain autograd and of the engine, in float64."""
    height, width = 640, 800
    image, mask = Texture(3, height, width, mask=False), Texture(1, height, width, mask=True)
    model = network().double()
    engine = gg.compile(model, loss, tile=(160, 160), precision="float64")
    value = engine.backward(image, mask)
    ours = [p.grad.clone() for p in model.parameters() if p.grad is not None]
    whole = Box.whole(height, width)
    plain = loss(
        model[1](model[0](torch.from_numpy(image.read(whole))[None]).double()), torch.from_numpy(mask.read(whole))[None]
    )
    theirs = torch.autograd.grad(plain, list(model.parameters()))
    error = torch.cat([(a - b).flatten() for a, b in zip(ours, theirs, strict=True)]).norm()
    return {
        "loss_error": abs((value - plain.detach()) / plain.detach()).item(),
        "gradient_error": (error / torch.cat([b.flatten() for b in theirs]).norm()).item(),
        "tiles": engine.plan(image, mask).tile_count,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--height", type=int, default=100_000)
    parser.add_argument("--width", type=int, default=100_000)
    parser.add_argument("--memory", default="2GiB")
    parser.add_argument("--scratch", type=Path, required=True)
    args = parser.parse_args()
    errors = compare()
    print(errors, flush=True)
    image, mask = (Texture(channels, args.height, args.width, mask=channels == 1) for channels in (3, 1))
    engine = gg.compile(network(), loss, memory=args.memory, scratch=args.scratch)
    plan = engine.plan(image, mask)
    print(plan, flush=True)
    shown = time.monotonic()

    def show(event: Event) -> None:
        nonlocal shown
        if isinstance(event, TileDone) and time.monotonic() - shown > 30:
            shown = time.monotonic()
            print(f"{event.phase} {event.done} of {event.total} tiles", flush=True)

    engine.events.subscribe(show)
    start = time.perf_counter()
    value = engine.backward(image, mask)
    seconds = time.perf_counter() - start
    step = engine.last_run
    assert step is not None
    gradient = torch.cat([p.grad.flatten() for p in engine.model.parameters() if p.grad is not None])
    line = {
        "network": "paper-unet with seven batch norms in training mode",
        "height": args.height,
        "width": args.width,
        "float64_640x800px": errors,
        "seconds_per_step": round(seconds, 1),
        "seconds_per_gigapixel": round(seconds / (args.height * args.width / 1e9), 1),
        "predicted_seconds": plan.predicted_seconds,
        "peak_rss_bytes": step.peak_bytes,
        "predicted_peak_bytes": step.predicted_peak_bytes,
        "budget_bytes": step.budget_bytes,
        "scratch_bytes": plan.bytes_in("disk"),
        "kept_bytes": plan.most(estimate.FIELDS, estimate.COTANGENTS),
        "tiles": plan.tile_count,
        "loss": value.item(),
        "gradient_norm": gradient.norm().item(),
        "gradient_is_finite": bool(gradient.isfinite().all()),
    }
    print(json.dumps(line))


if __name__ == "__main__":
    main()
