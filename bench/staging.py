"""Crops on their way to and from a GPU: how fast they travel, whether tiles wait for them, and that nothing changes.

    python bench/staging.py [--quick]

Prints one JSON line: rates in both directions through pinned memory and without it, the paper's step on an image in
memory with and without, its copies by kind, and how far the gradients of a network whose fields lie in the host's
memory are from those with fields on the device. Without a GPU, or with `--quick`, everything runs small; on a processor
nothing is staged.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.profiler import ProfilerActivity, profile

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import gigagrad as gg
from bench.gpu import DEVICE, GIB, ON_GPU, loss, network, pair, synchronised
from gigagrad.devices import Device, device_for
from gigagrad.execution.calibration import fastest
from gigagrad.execution.staging import Staging

MIB = 2**20


@contextmanager
def unstaged(device: Device) -> Iterator[None]:
    """Let copies be waited for."""
    device.streams = lambda: None  # type: ignore[method-assign]
    try:
        yield
    finally:
        del device.streams


def rates(device: Device, side: int) -> dict[str, float]:
    """GB/s of crops that are half as wide as the field on the host that they belong to."""
    field = torch.zeros(1, 4, side, 2 * side)
    crop = field[..., side // 2 : side // 2 + side]
    there, nbytes = crop.to(device.torch_device), crop.nbytes
    streams, found = device.streams(), dict[str, float]()
    found["up_unstaged"] = nbytes / fastest(lambda: crop.to(device.torch_device), synchronised) / 1e9
    found["down_unstaged"] = nbytes / fastest(lambda: crop.copy_(there), synchronised) / 1e9
    if streams is None:
        return found
    staging = Staging(streams, device.torch_device, 1)
    found["up"] = nbytes / fastest(lambda: staging.upload(crop), synchronised) / 1e9
    found["down"] = nbytes / fastest(lambda: staging.download(there, crop.copy_, None).result(), synchronised) / 1e9
    pinned, back = streams.pinned_like(crop), streams.pinned_like(crop)
    found["bus_up"] = nbytes / fastest(lambda: pinned.to(device.torch_device, non_blocking=True), synchronised) / 1e9
    found["bus_down"] = nbytes / fastest(lambda: back.copy_(there, non_blocking=True), synchronised) / 1e9
    staging.close()
    return {name: round(rate, 1) for name, rate in found.items()}


def paper(device: Device, size: tuple[int, int]) -> dict[str, Any]:
    """The paper's step, and its copies by kind."""
    model = network("paper").to(DEVICE)
    image, target = pair("paper", *size)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    engine = gg.compile(model, loss, memory="8 GiB", device=device, optimizer=optimizer)
    found: dict[str, Any] = {}
    for name in ("staged", "unstaged"):
        if name == "unstaged":
            with unstaged(device):
                found[name] = round(fastest(lambda: engine.backward(image, target), synchronised), 4)
            continue
        found[name] = round(fastest(lambda: engine.backward(image, target), synchronised), 4)
        with profile(activities=[ProfilerActivity.CUDA if ON_GPU else ProfilerActivity.CPU]) as seen:
            engine.backward(image, target)
            synchronised()
        rows = [row for row in seen.key_averages() if row.key.startswith("Memcpy")]
        found["copies"] = {row.key: [row.count, round(row.self_device_time_total / 1e6, 4)] for row in rows}
    assert engine.last_run is not None
    found["peak_mib"], found["predicted_mib"] = (
        round(nbytes / MIB) for nbytes in (engine.last_run.peak_bytes, engine.last_run.predicted_peak_bytes)
    )
    return found


class Deep(nn.Module):
    """Norms between convolutions: fields are kept."""

    def __init__(self, width: int) -> None:
        super().__init__()
        widths = (3, width, width, width)
        self.convolutions = nn.ModuleList(nn.Conv2d(a, b, 3, padding=1) for a, b in pairwise(widths))
        self.norms = nn.ModuleList(nn.BatchNorm2d(width) for _ in widths[1:])
        self.head = nn.Conv2d(width, 1, 1)

    def forward(self, image: torch.Tensor) -> torch.Tensor:
        x = image.double() / 255
        for convolution, norm in zip(self.convolutions, self.norms, strict=True):
            x = norm(convolution(x)).relu()
        found: torch.Tensor = self.head(x)
        return found


def kept_on_the_host(device: Device, side: int, tile: int) -> dict[str, Any]:
    """Gradients with fields in the host's memory beside those with fields on the device, in float64."""
    torch.manual_seed(0)
    model = Deep(16).double().to(DEVICE)
    image, target = pair("deep", side, side)
    gradients, found = dict[str, torch.Tensor](), dict[str, Any]()
    for name, tier in (("device", "memory"), ("host", "host"), ("again", "host"), ("unstaged", "host")):
        engine = gg.compile(model, loss, device=device, tile=(tile, tile))
        engine.plan(image, target)
        if not device.is_host:
            state = engine.state_dict()
            for choice in state["choices"].values():
                choice["kept"] = [[node, tier] for node, _ in choice["kept"]]
            engine.load_state_dict(state)
        found[f"{name}_gib_on_host"] = round(engine.plan(image, target).bytes_in("host") / GIB, 2)

        def step(engine: gg.Engine = engine) -> None:
            model.zero_grad()
            engine.backward(image, target)

        if name == "unstaged":
            with unstaged(device):
                found[name] = round(fastest(step, synchronised), 4)
        else:
            found[name] = round(fastest(step, synchronised), 4)
        flat = [p.grad.flatten() for p in model.parameters() if p.grad is not None]
        gradients[name] = torch.cat(flat).cpu()
    scale = gradients["device"].abs().max()
    for name in ("device", "again", "unstaged"):  # a GPU's own kernels may add in another order
        found[f"off_{name}"] = ((gradients["host"] - gradients[name]).abs().max() / scale).item()
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true")
    small = parser.parse_args().quick or not ON_GPU
    device = device_for(DEVICE)
    device.records = False  # type: ignore[misc]  # a recorded step has its images on the device
    row = {
        "gpu": torch.cuda.get_device_name() if ON_GPU else None,
        "torch": torch.__version__,
        "gb_per_second": rates(device, 64 if small else 4096),
        "paper": paper(device, (256, 320) if small else (16000, 64000)),
        "kept_on_the_host": kept_on_the_host(device, *((64, 32) if small else (2048, 512))),
    }
    print(json.dumps(row))


if __name__ == "__main__":
    main()
