"""Exported networks: size, Dice and time in float32 and INT8 beside the runs they are of, and what 2:4 sparsity adds.

    python bench/export.py --cohort COHORT.csv --runs RUN [RUN ...] [--vit FILE [--train SECONDS]] [--rounds 3]

`gigagrad export` writes each run's best network twice, in INT8 calibrated on the training slides. Dice of the test
slides, pixels of all together, and how much the mask of float32 and that of INT8 agree. Seconds for a slide nine times
as large, in turns: the engine, ONNX Runtime in float32, in INT8; the best of the rounds counts. `--vit` adds a vision
transformer over windows of 224 px, which `--train` trains for so long. With `--sparse` each network is also pruned: of
four weights in a row the two smallest are 0. Needs `gigagrad[export]`. Prints one JSON line last.
"""

from __future__ import annotations

import argparse
import gzip
import json
import shutil
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

sys.path.pop(0)  # this folder: onnxruntime has a module of the same name as one in there
sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import numpy as np
import torch
from torch import nn

import gigagrad as gg
from gigagrad.boxes import Box
from gigagrad.cohorts.rows import Row, read_rows
from gigagrad.config.predict import PredictConfig
from gigagrad.images import InputView, open_image
from gigagrad.images.views import ArrayImage
from gigagrad.masks import open_mask
from gigagrad.models import Normalise, load_model, save_model
from gigagrad.models.exported import ExportedNetwork
from gigagrad.models.libraries import import_library
from gigagrad.prediction.export import export
from gigagrad.prediction.exported import ExportedEngine

TRUST = ("bench.export:WindowedViT",)
WINDOW, PATCH, WIDTH = 224, 16, 192


class WindowedViT(nn.Module):
    """ViT-Tiny of each window of 224 px; a linear layer makes the logits of a patch's pixels of its token."""

    def __init__(self) -> None:
        super().__init__()
        timm = import_library("timm", "vit", extra="timm")
        self.norm, self.head = Normalise(), nn.Linear(WIDTH, PATCH**2)
        self.vit = timm.create_model("vit_tiny_patch16_224", num_classes=0)

    def forward(self, x_NCHW: torch.Tensor) -> torch.Tensor:
        _, channels, height, width = x_NCHW.shape
        x_NCHW = nn.functional.pad(self.norm(x_NCHW), (0, -width % WINDOW, 0, -height % WINDOW))
        rows, columns = x_NCHW.shape[-2] // WINDOW, x_NCHW.shape[-1] // WINDOW
        windows = x_NCHW.reshape(channels, rows, WINDOW, columns, WINDOW).permute(1, 3, 0, 2, 4)
        tokens = self.vit.forward_features(windows.reshape(rows * columns, channels, WINDOW, WINDOW))[:, 1:]
        side = WINDOW // PATCH
        logits = self.head(tokens).reshape(rows, columns, side, side, PATCH, PATCH).permute(0, 2, 4, 1, 3, 5)
        return logits.reshape(1, 1, rows * WINDOW, columns * WINDOW)[..., :height, :width]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--cohort", type=Path, required=True)
    parser.add_argument("--runs", type=Path, nargs="*", default=[])
    parser.add_argument("--vit", type=Path)
    parser.add_argument("--train", type=float, default=0.0)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--sparse", action="store_true")
    args = parser.parse_args()
    rows = read_rows(args.cohort)[1]
    if args.train:
        train(args.vit, [row for row in rows if row.split == "train"], args.train)
    found = []
    for run in [*args.runs, *([args.vit] if args.vit else [])]:
        with tempfile.TemporaryDirectory() as folder:
            found.append(compared(run, rows, args, Path(folder)))
            if args.sparse:
                pruned = prune(run, Path(folder) / "run")
                found.append({"pruned": True} | compared(pruned, rows, args, Path(folder) / "pruned"))
        print(json.dumps(found[-1]), flush=True)
    print(json.dumps({"threads": torch.get_num_threads(), "torch": torch.__version__, "networks": found}))


def compared(run: Path, rows: tuple[Row, ...], args: argparse.Namespace, folder: Path) -> dict[str, Any]:
    """One network by its engine, exported, and exported in INT8."""
    spec, model = load_model(run, TRUST)
    look = PredictConfig(run=run, slides=(run,), out=folder).resolved_input_view
    export(run, folder / "float32", trust=TRUST)
    export(run, folder / "int8", trust=TRUST, int8=args.cohort)
    engine = gg.compile(model)
    files = {kind: folder / kind / "model.onnx" for kind in ("float32", "int8")}
    ways: dict[str, Callable[[Any], Any]] = {"engine": engine.forward}
    ways |= {kind: ExportedEngine(ExportedNetwork.read(file)).forward for kind, file in files.items()}
    counts, same = {way: np.zeros(3, np.int64) for way in ways}, 0
    largest = 0.0
    test = [row for row in rows if row.split == "test"]
    for row in test:
        pixels, label = read(row, look)
        outputs = {way: forward(ArrayImage(pixels)).numpy()[0, 0] for way, forward in ways.items()}
        largest = max(largest, float(np.abs(outputs["float32"] - outputs["engine"]).max()))
        masks = {way: output > 0 for way, output in outputs.items()}
        for way, mask in masks.items():
            counts[way] += [int((mask & label).sum()), int(mask.sum()), int(label.sum())]
        same += int((masks["int8"] == masks["engine"]).sum())
    large = ArrayImage(np.tile(pixels, (1, 3, 3)))
    seconds: dict[str, list[float]] = {way: [] for way in ways}
    for _ in range(args.rounds + 1):  # the first round plans and warms up
        for way, forward in ways.items():
            start = time.perf_counter()
            forward(large)
            seconds[way].append(time.perf_counter() - start)
    megapixels = large.height * large.width / 1e6
    return {
        "model": spec,
        "bytes": {kind: file.stat().st_size for kind, file in files.items()},
        "gzip_bytes": {kind: len(gzip.compress(file.read_bytes())) for kind, file in files.items()},
        "largest_difference": largest,
        "dice": {way: round(float(2 * both / (made + true)), 5) for way, (both, made, true) in counts.items()},
        "same_pixels": round(same / sum(read(row, look)[1].size for row in test), 6),
        "seconds_per_megapixel": {way: round(min(times[1:]) / megapixels, 4) for way, times in seconds.items()},
    }


def read(row: Row, look: InputView) -> tuple[Any, Any]:
    """A slide as the network sees it, `(C, H, W)`, and its label `(H, W)`."""
    with open_image(row.slide) as image, open_mask(row.masks, image) as mask:
        whole = Box.whole(image.height, image.width)
        return np.asarray(look.of(image).read(whole)).copy(), np.asarray(mask.read(whole))[0] > 0


def prune(run: Path, folder: Path) -> Path:
    """The same run with 2:4 sparse weights: along a convolution's or a linear layer's inputs."""
    spec, model = load_model(run, TRUST)
    folder.mkdir()
    for module in model.modules():
        if isinstance(module, nn.Conv2d | nn.Linear) and module.weight.shape[1] % 4 == 0:
            fours = module.weight.data.movedim(1, -1).unflatten(-1, (-1, 4))
            smallest = fours.abs().argsort(-1)[..., :2]
            pruned = fours.scatter(-1, smallest, 0.0).flatten(-2).movedim(-1, 1)
            module.weight.data.copy_(pruned)
    save_model(folder / "best.pt", spec, model)
    if (run / "config.yaml").is_file():
        shutil.copy(run / "config.yaml", folder)
    return folder


def train(path: Path, rows: list[Row], seconds: float) -> None:
    """A vision transformer from random weights, by plain PyTorch: whole slides, flipped, one a step."""
    torch.manual_seed(0)
    model = WindowedViT()
    optimizer = torch.optim.AdamW(model.parameters(), 1e-3)
    slides = [read(row, InputView()) for row in rows]
    start, step = time.perf_counter(), 0
    while (left := 1 - (time.perf_counter() - start) / seconds) > 0:
        for group in optimizer.param_groups:
            group["lr"] = 1e-3 * min(1.0, (step + 1) / 20) * max(left, 0.05)
        pixels, label = slides[step % len(slides)]
        flips = [axis for axis in (-2, -1) if torch.rand(()) < 0.5]
        image, truth = torch.from_numpy(pixels)[None].flip(flips), torch.from_numpy(label)[None, None].float()
        loss = nn.functional.binary_cross_entropy_with_logits(model(image), truth.flip(flips))
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        step += 1
    save_model(path, TRUST[0], model.eval())
    print(f"{step} steps, loss {loss.item():.4f}", flush=True)


if __name__ == "__main__":
    main()
