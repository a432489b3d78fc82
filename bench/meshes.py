"""Training over the ranks of several meshes: the same bits for all of them.

    python bench/meshes.py [--meshes 1x1 1x2 1x4 2x1 2x2 4x1 3x1] [--networks NAME ...] [--shard-optimizer]

For each network, three steps of three slides of two sizes, over gloo by ranks of one thread each, all from one
checkpoint, which has the plans of all sizes: hashes of weights, buffers, optimizer and logged losses are compared.
Prints a line for each mesh that differs, and one JSON line last.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np
import tifffile
import torch
from safetensors.torch import load_file

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from gigagrad.training import FitConfig, fit
from tests.exactness.steering import with_tiles
from tests.ranks.started import started

NETWORKS = ("Plain", "Normed", "Dropped", "Cumulative")
_MODULE = """
import torch
from torch import nn

class Plain(nn.Sequential):
    def __init__(self, *inner):
        super().__init__(nn.Conv2d(3, 4, 3, 2, 1), *inner, nn.ReLU(), nn.ConvTranspose2d(4, 1, 4, 2, 1))

    def forward(self, image):
        return super().forward(image / 255)

class Normed(Plain):
    def __init__(self):
        super().__init__(nn.BatchNorm2d(4))

class Dropped(Plain):
    def __init__(self):
        super().__init__(nn.BatchNorm2d(4), nn.Dropout2d(0.3), nn.Dropout(0.3))

class Cumulative(Plain):
    def __init__(self):
        super().__init__(nn.BatchNorm2d(4, momentum=None))
"""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--meshes", nargs="+", default=["1x1", "1x2", "1x4", "2x1", "2x2", "4x1", "3x1"])
    parser.add_argument("--networks", nargs="+", choices=NETWORKS, default=list(NETWORKS))
    parser.add_argument("--shard-optimizer", action="store_true")
    args = parser.parse_args()
    flags = ["--shard-optimizer"] if args.shard_optimizer else []
    differing, hashes, seconds = 0, dict[str, str](), dict[str, float]()
    for network in args.networks:
        with tempfile.TemporaryDirectory() as folder:
            begun = begin(Path(folder), network)
            for mesh in args.meshes:
                run, start = Path(folder) / mesh, time.perf_counter()
                shutil.copytree(begun.out, run)
                ended = [rank.wait() for rank in fitting(run, mesh, *flags, epochs=2)]
                if any(ended):
                    raise SystemExit(f"{network} by {mesh}: exit codes {ended}")
                seconds[f"{network} {mesh}"] = round(time.perf_counter() - start, 1)
                if digest(run) != hashes.setdefault(network, digest(run)):
                    differing += 1
                    print(f"{network} by {mesh} differs", flush=True)
    line = {
        "meshes": args.meshes,
        "shard_optimizer": args.shard_optimizer,
        "networks": args.networks,
        "differing": differing,
        "hashes": hashes,
    }
    print(json.dumps(line | {"seconds": seconds}))


def begin(folder: Path, network: str) -> FitConfig:
    """A run of one epoch, which goes on with small tiles."""
    (folder / "mesh_networks.py").write_text(_MODULE)
    os.chdir(folder)  # where networks are found
    rng, lines = np.random.default_rng(0), ["slide,mask,split"]
    for number, split in enumerate(["train"] * 9 + ["val", "val", "test", "test"]):
        side = 112 if number % 3 else 144  # square, so that a turn needs no capture of its own
        pixels = rng.integers(0, 256, (side, side, 3), np.uint8)
        tifffile.imwrite(folder / f"{number}.tif", pixels, tile=(64, 64), photometric="rgb")
        mask = (pixels[..., 0] > 127).astype(np.uint8)
        tifffile.imwrite(folder / f"{number}.mask.tif", mask, tile=(64, 64), photometric="minisblack")
        lines.append(f"{number}.tif,{number}.mask.tif,{split}")
    (folder / "cohort.csv").write_text("\n".join(lines) + "\n")
    config = FitConfig(
        slides=str(folder / "cohort.csv"),
        out=str(folder / "begun"),
        model=f"mesh_networks:{network}",
        epochs=1,
        accumulate=3,
        checkpoint_seconds=0,
    )
    torch.set_num_threads(1)
    fit(config)
    path = Path(config.out) / "checkpoint.pt"
    state = torch.load(path, weights_only=True)
    with_tiles(state["engine"], (40, 48))
    torch.save(state, path)
    return config


def fitting(run: Path, mesh: str, *more: str, epochs: int) -> list[subprocess.Popen[str]]:
    """The ranks of a mesh, going on with the run in a folder beside its cohort until it has so many epochs."""
    groups, _, size = mesh.partition("x")
    count = int(groups) * int(size)
    command = [sys.executable, "-m", "gigagrad", "fit", "--config", str(run / "config.yaml"), "--out", str(run)]
    trusted = [f"--trust=mesh_networks:{name}" for name in NETWORKS]
    command += [*trusted, "--mesh", mesh, "--epochs", str(epochs), *more]
    errors = subprocess.PIPE if "--rank-timeout" in more else None
    return started(command, count, cwd=run.parent, stdout=subprocess.DEVNULL, stderr=errors)


def digest(run: Path) -> str:
    """Of what a run has come to: its weights, buffers, optimizer, and the losses that it logged."""
    checkpoint, found = torch.load(run / "checkpoint.pt", weights_only=True), hashlib.sha256()
    shards = sorted((run / "optimizer").rglob("*.safetensors"))
    shared = {name: tensor for path in shards for name, tensor in load_file(path).items()}
    states = [checkpoint["model"], dict(sorted(shared.items())), *checkpoint["optimizer"].get("state", {}).values()]
    for state in states:
        for name, tensor in state.items():
            found.update(name.encode() + tensor.contiguous().view(-1).view(torch.uint8).numpy().tobytes())
    lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    losses = [(line["split"], line["step"], _loss(line["values"])) for line in lines if line["event"] == "metrics"]
    found.update(json.dumps([losses, json.loads((run / "summary.json").read_text())]).encode())
    return found.hexdigest()


def _loss(values: dict[str, Any]) -> Any:
    return values.get("loss", values)


if __name__ == "__main__":
    main()
