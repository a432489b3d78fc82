"""Steps on a GPU beside plain PyTorch's, and where their time goes.

    python bench/gpu.py [--seconds 360] [--rows exact,plain,ours,kernels,lightstream,paper,slide,bag,cpu] [--quick]

Every row is one training step (float32, SGD) of one network on one image from memory, and prints one JSON line: plain
autograd, gigagrad as it plans by itself, and for gigagrad how long the GPU was busy, in how many launches and copies.
Steps of gigagrad are listed one by one: the first is computed, the second recorded, the others are replayed, where the
plan allows it; `--rows exact` compares all of them with plain autograd in float64. Further rows: a step and a
prediction from a JPEG slide; a bag of patches, beside its encoder in batches; ResNet-18 by lightstream, with frozen
norms, where that is installed. The rows stop where `--seconds` are over. Without a GPU, or with `--quick`, everything
runs small on what is there, so that this script keeps working. The last line holds all rows. Needs timm and
segmentation-models-pytorch.
"""

from __future__ import annotations

import argparse
import gc
import importlib.util
import json
import os
import time
from collections import deque
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import imagecodecs
import numpy as np
import tifffile
import torch
import torch.nn.functional as F
from torch import nn
from torch.profiler import ProfilerActivity, profile

import gigagrad as gg
from gigagrad.errors import BudgetError
from gigagrad.models import resolve, torchvision_operators  # noqa: F401
from gigagrad.models.networks import PaperUNet

GIB = 2**30
ON_GPU = torch.cuda.is_available()
DEVICE = "cuda" if ON_GPU else "cpu"
UNET, RESNET = "smp:Unet?encoder_name=resnet34&encoder_weights=None", "timm:resnet18?num_classes=2"

Row = dict[str, Any]
Job = tuple[str, int, list[tuple[str, bool]]]
"""A network, the side of its image, and budgets, each with whether what fits is computed in tiles all the same."""

_SMALL: list[Job] = [(UNET, 128, [("2GiB", False), ("2GiB", True)]), (RESNET, 128, [("2GiB", False)])]
_LARGE: list[Job] = [
    (UNET, 2048, [("16GiB", False), ("4GiB", True)]),
    (RESNET, 4096, [("16GiB", False), ("2GiB", False)]),
    (UNET, 4096, [("8GiB", False)]),
    (UNET, 8192, [("24GiB", False)]),
    (RESNET, 8192, [("8GiB", False)]),
]


class FromBytes(nn.Module):
    """A network that reads bytes."""

    def __init__(self, net: nn.Module) -> None:
        super().__init__()
        self.net = net

    def forward(self, image: torch.Tensor) -> torch.Tensor:
        return self.net(image.float() / 255)


class OneMinus(nn.Module):
    """The paper's network reads 1 where a slide is black."""

    def __init__(self) -> None:
        super().__init__()
        self.net = PaperUNet()

    def forward(self, image: torch.Tensor) -> torch.Tensor:
        return self.net(1 - image.float() / 255)


def network(name: str) -> nn.Module:
    """A network as PyTorch's guide to channels last has it, for both sides alike."""
    torch.manual_seed(0)
    net = OneMinus() if name == "paper" else FromBytes(resolve(name)).train()
    return net.to(memory_format=torch.channels_last)  # type: ignore[call-overload]


def loss(output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    if output.ndim == 2:
        return F.cross_entropy(output, target)
    return F.binary_cross_entropy_with_logits(output, target.float())


def pair(name: str, height: int, width: int) -> tuple[torch.Tensor, torch.Tensor]:
    draw = torch.Generator().manual_seed(1)
    image = torch.randint(0, 256, (1 if name == "paper" else 3, height, width), dtype=torch.uint8, generator=draw)
    if name == RESNET:
        return image, torch.tensor([1])
    return image, torch.randint(0, 2, (1, height, width), dtype=torch.uint8, generator=draw)


def synchronised() -> float:
    if ON_GPU:
        torch.cuda.synchronize()
    return time.perf_counter()


def forget() -> None:
    gc.collect()
    if ON_GPU:
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()


def peak_gib() -> float | None:
    return round(torch.cuda.max_memory_reserved() / GIB, 2) if ON_GPU else None


def plain(name: str, height: int, width: int, steps: int = 4) -> Row:
    """Plain autograd, the best of some steps."""
    forget()
    row: Row = {"what": "plain", "network": name, "px": [height, width]}
    try:
        model = network(name).to(DEVICE)
        image, target = (
            value[None].to(DEVICE) if value.ndim == 3 else value.to(DEVICE) for value in pair(name, height, width)
        )
        image = image.contiguous(memory_format=torch.channels_last)
        best = float("inf")
        for _ in range(steps):
            model.zero_grad()
            begun = synchronised()
            value = loss(model(image), target)
            value.backward()
            best = min(best, synchronised() - begun)
        return row | {"seconds": round(best, 4), "peak_gib": peak_gib(), "loss": value.item()}
    except torch.OutOfMemoryError:
        return row | {"error": "out of memory"}
    except RuntimeError as error:
        return row | {"error": str(error)[:160]}


def exact(net: nn.Module, steps: int = 4) -> Row:
    """The largest relative errors of losses and gradients in float64, of the steps of one engine on other images."""
    torch.manual_seed(0)
    model, errors = net.double().to(DEVICE).train(), list[tuple[float, float]]()
    engine = gg.compile(model, F.mse_loss, device=DEVICE, tile=(48, 40), progress=False)
    engine.in_tiles = True
    for step in range(steps):
        draw = torch.Generator().manual_seed(step)
        image, target = (torch.rand(c, 160, 200, dtype=torch.float64, generator=draw) for c in (3, 1))
        model.zero_grad()
        found = engine.backward(image, target)
        gradients = [p.grad.clone() for p in model.parameters() if p.grad is not None]
        model.zero_grad()
        expected = F.mse_loss(model(image[None].to(DEVICE)), target[None].to(DEVICE))
        expected.backward()
        wanted = [p.grad for p in model.parameters() if p.grad is not None]
        off = sum((a - b).square().sum() for a, b in zip(gradients, wanted, strict=True))
        size = sum(one.square().sum() for one in wanted)
        errors.append((abs(found.item() / expected.item() - 1), torch.as_tensor(off / size).sqrt().item()))
    return {"what": "exactness, float64", "off": errors, "within_1e-11": max(map(max, errors)) <= 1e-11}


def networks() -> Iterator[nn.Module]:
    """Small networks with norms over the image, resampling, pooling and borders of other kinds."""
    norm, up = nn.BatchNorm2d, nn.Upsample(scale_factor=2, mode="bilinear")
    conv = nn.Conv2d(8, 1, 3, padding=1, padding_mode="reflect")
    down = nn.Conv2d(8, 8, 3, stride=2, padding=1)
    yield nn.Sequential(nn.Conv2d(3, 8, 3, padding=1), norm(8), nn.ReLU(), down, norm(8), nn.ReLU(), up, conv)
    yield nn.Sequential(
        nn.Conv2d(3, 8, 7, stride=2, padding=3),
        nn.GroupNorm(2, 8),
        nn.GELU(),
        nn.MaxPool2d(2),
        nn.ConvTranspose2d(8, 1, 4, stride=4),
    )


def ours(
    name: str, height: int, width: int, memory: str, steps: int = 5, *, busy: bool = False, in_tiles: bool = False
) -> Row:
    """The engine as it plans by itself, or `in_tiles`; `busy`: the last step once more under a profiler."""
    forget()
    model = network(name).to(DEVICE)
    image, target = pair(name, height, width)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    engine = gg.compile(model, loss, memory=memory, device=DEVICE, optimizer=optimizer, progress=False)
    engine.in_tiles = in_tiles
    begun = time.perf_counter()
    plan = engine.plan(image, target)
    row: Row = {
        "what": "gigagrad",
        "network": name,
        "px": [height, width],
        "memory": memory,
        "plan_seconds": round(time.perf_counter() - begun, 2),
        "predicted_seconds": round(plan.predicted_seconds, 3),
        "predicted_gib": round(plan.predicted_peak_bytes / GIB, 2),
        "whole_image": plan.whole is not None,
        "segments": len(plan.segments),
        "passes": len(plan.passes),
        "tiles": plan.tile_count,
    }
    found = []
    for _ in range(steps):
        model.zero_grad()
        begun = synchronised()
        value = engine.backward(image, target)
        found.append(round(synchronised() - begun, 4))
    row |= {"seconds": min(found), "all_seconds": found, "peak_gib": peak_gib(), "loss": value.item()}
    if busy:
        row |= kernels(lambda: engine.backward(image, target))
    return row


def kernels(step: Any) -> Row:
    """How long a GPU works in a step, in how many launches, and what takes longest."""
    activity = ProfilerActivity.CUDA if ON_GPU else ProfilerActivity.CPU
    begun = synchronised()
    with profile(activities=[activity]) as found:
        step()
        seconds = synchronised() - begun
    name = "self_device_time_total" if ON_GPU else "self_cpu_time_total"
    rows = sorted(found.key_averages(), key=lambda row: -getattr(row, name))
    copies = [row for row in rows if row.key.startswith("Memcpy")]
    return {
        "profiled_seconds": round(seconds, 3),
        "busy_seconds": round(sum(getattr(row, name) for row in rows) / 1e6, 4),
        "launches": sum(row.count for row in rows),
        "copies": sum(row.count for row in copies),
        "copy_seconds": round(sum(getattr(row, name) for row in copies) / 1e6, 4),
        "longest": [[row.key[:60], row.count, round(getattr(row, name) / 1e6, 4)] for row in rows[:6]],
    }


def timed(steps: int, step: Any) -> list[float]:
    found = []
    for _ in range(steps):
        begun = synchronised()
        step()
        found.append(round(synchronised() - begun, 4))
    return found


def jpeg_slide(path: Path, height: int, width: int) -> None:
    """Write a grey slide of JPEG tiles, of which 16 differ."""
    draw = np.random.default_rng(0)
    smooth = (np.kron(draw.normal(128, 50, (64, 64)), np.ones((8, 8))) for _ in range(16))
    noisy = [(tile + draw.normal(0, 12, tile.shape)).clip(0, 255).astype(np.uint8) for tile in smooth]
    encoded = [imagecodecs.jpeg8_encode(tile, level=80) for tile in noisy]
    count = -(-height // 512) * -(-width // 512)
    settings: Any = {"tile": (512, 512), "compression": "jpeg", "photometric": "minisblack", "metadata": None}
    data = (encoded[i % len(encoded)] for i in range(count))
    tifffile.imwrite(path, data, shape=(height, width), dtype=np.uint8, **settings)


def from_slide(height: int, width: int, memory: str, steps: int = 4) -> Iterator[Row]:
    """Steps and predictions of the paper's network, of a JPEG slide."""
    with TemporaryDirectory() as folder:
        path = Path(folder, "slide.tif")
        jpeg_slide(path, height, width)
        model, target = network("paper").to(DEVICE), pair("paper", height, width)[1]
        row: Row = {"network": "paper", "px": [height, width], "memory": memory}
        engine = gg.compile(model, loss, memory=memory, device=DEVICE, progress=False)
        found = timed(steps, lambda: engine.backward(path, target))
        yield row | {"what": "step from a JPEG slide", "seconds": min(found), "all_seconds": found}
        predicting = gg.compile(model, memory=memory, device=DEVICE, progress=False)
        forget()
        found = timed(3, lambda: deque(predicting.stream(path), 0))
        yield row | {"what": "prediction of a JPEG slide", "seconds": min(found), "peak_gib": peak_gib()}


def bag(patches: int, side: int, memories: tuple[str, ...]) -> Iterator[Row]:
    """Steps of an encoder and an aggregator over a bag, beside the encoder alone in batches."""
    torch.manual_seed(0)
    model = resolve("mil:encoder=timm:resnet18&head=abmil&classes=2").to(DEVICE)
    images, label = torch.randint(0, 256, (patches, 3, side, side), dtype=torch.uint8), torch.tensor([1])
    encoder = nn.Sequential(model.get_submodule("preprocess"), model.get_submodule("network.encoder"))

    def plainly(size: int) -> None:
        for part in images.to(DEVICE).split(size):
            encoder(part).sum().backward()

    best = {size: min(timed(3, partial(plainly, size))) for size in (64, 256, 512)}
    yield {"what": "plain encoder in batches", "patches": patches, "px": side, "seconds": best}
    for memory in memories:
        forget()
        engine = gg.compile(model, F.cross_entropy, memory=memory, device=DEVICE, progress=False)
        plan = engine.plan(images, label)
        step = partial(engine.backward, images, label)
        row: Row = {"what": "a bag", "patches": patches, "px": side, "memory": memory, "tiles": plan.tile_count}
        row |= {"predicted_seconds": round(plan.predicted_seconds, 3), "all_seconds": timed(5, step)}
        yield row | {"peak_gib": peak_gib()} | kernels(step)


def lightstream(side: int, tile: int) -> Row:
    """ResNet-18 by lightstream, whose norms are frozen."""
    forget()
    torch.manual_seed(0)
    constructor = importlib.import_module("lightstream.core.constructor").StreamingConstructor
    net = resolve(RESNET).get_submodule("network").eval()
    for module in net.modules():
        if isinstance(module, nn.BatchNorm2d):
            module.requires_grad_(False)
    names = ("conv1", "bn1", "act1", "maxpool", "layer1", "layer2", "layer3", "layer4")
    body, head = nn.Sequential(*map(net.get_submodule, names)), net.get_submodule("fc").to(DEVICE)
    settings = {"mean": [0.5] * 3, "std": [0.25] * 3, "add_keep_modules": [nn.BatchNorm2d], "copy_to_gpu": True}
    streaming = constructor(body, tile, verbose=False, deterministic=False, **settings).prepare_streaming_model()
    importlib.import_module("lightstream.core.utils").freeze_normalization_layers(streaming.to(DEVICE))
    for name, value in list(vars(streaming).items()):
        if isinstance(value, torch.Tensor):
            setattr(streaming, name, value.to(DEVICE))
        if isinstance(value, torch.device):
            setattr(streaming, name, torch.device(DEVICE))
    image, label = pair(RESNET, side, side)

    def step() -> None:
        features = streaming(image[None]).to(DEVICE).requires_grad_()
        loss(head(features.mean((2, 3))), label.to(DEVICE)).backward()
        streaming.backward(image[None], features.grad)

    found = timed(3, step)
    return {"what": "lightstream", "px": [side, side], "tile": tile, "seconds": min(found), "peak_gib": peak_gib()}


def on_cpu(height: int, width: int, threads: int) -> Iterator[Row]:
    """A step of the paper's network and one of a deep one on the processor beside the GPU."""
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    for name, size, memory in (("paper", (height, width), "4GiB"), (UNET, (height // 4, height // 4), "6GiB")):
        model = network(name)
        image, target = pair(name, *size)
        engine = gg.compile(model, loss, memory=memory, device="cpu", progress=False)
        try:
            engine.plan(image, target)
            begun = time.perf_counter()
            engine.backward(image, target)
            found: Row = {"seconds": round(time.perf_counter() - begun, 2)}
        except BudgetError as error:
            found = {"error": str(error)[:160]}
        yield {"what": "on the processor", "network": name, "px": list(size), "threads": threads} | found
    torch.set_num_threads(before)


def rows(wanted: set[str], *, small: bool) -> Iterator[Row]:
    if "exact" in wanted:
        yield from map(exact, networks())
    for name, side, memories in _SMALL if small else _LARGE:
        if "plain" in wanted:
            yield plain(name, side, side)
        for memory, in_tiles in memories if "ours" in wanted else ():
            yield ours(name, side, side, memory, busy="kernels" in wanted, in_tiles=in_tiles)
        if name == RESNET and "lightstream" in wanted and ON_GPU and importlib.util.find_spec("lightstream"):
            yield lightstream(side, 2880)
    if "paper" in wanted:
        yield ours("paper", *((256, 320) if small else (16000, 64000)), "8GiB", busy="kernels" in wanted)
    if "slide" in wanted:
        yield from from_slide(*((600, 1100) if small else (16000, 64000)), "8GiB")
    if "bag" in wanted:
        yield from bag(*((20, 64, ("2GiB",)) if small else (2000, 224, ("40GiB", "3GiB"))))
    if "cpu" in wanted:
        for threads in (2,) if small else (16, 8, 2):
            yield from on_cpu(*((256, 320) if small else (4000, 16000)), threads)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seconds", type=float, default=360)
    parser.add_argument("--rows", default="exact,plain,ours,kernels,lightstream,paper,slide,bag,cpu")
    parser.add_argument("--quick", action="store_true")
    args = parser.parse_args()
    begun, found = time.perf_counter(), list[Row]()
    machine = {
        "gpu": torch.cuda.get_device_name() if ON_GPU else None,
        "cores": os.cpu_count(),
        "torch": torch.__version__,
    }
    for row in rows(set(args.rows.split(",")), small=args.quick or not ON_GPU):
        found.append(row)
        print(json.dumps(row), flush=True)
        if time.perf_counter() - begun > args.seconds:
            break
    print(json.dumps({"machine": machine, "rows": found, "seconds": round(time.perf_counter() - begun, 1)}))


if __name__ == "__main__":
    main()
