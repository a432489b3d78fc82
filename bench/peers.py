"""Beside what else there is: plain autograd, checkpoints, save_on_cpu, lightstream, image by image until each dies.

    python bench/peers.py --out peers.jsonl --plot peers.svg [--megapixels 1 4 16 64 256 1024] [--rounds 3]
        [--networks paper-unet resnet18] [--methods plain gigagrad gigagrad:2GiB lightstream lightstream:1600 ...]
        [--memory 8GiB] [--seconds 7200] [--scratch DIR]

Nothing else should run. Every step (method, network, size, round) has a process of its own, which is ended where it
holds more than `--memory` or takes longer than `--seconds`; a method that dies is out for larger images. At each size
the methods take turns, in another order every round. Lines already in `--out` are not run again. Needs timm;
lightstream only if it is there: pip install lightstream==1.0.7 lightning.

Images are square, made of random cells and noise, uint8, in uncompressed TIFF files; a megapixel is 2**20 pixels here.
`paper-unet` has a mask and BCE; `resnet18` one class label, its norms in evaluation mode and frozen; `resnet18-train`
(if asked for) has them in training mode. gigagrad reads the file during its step, inside the budget `--memory` or its
own (`gigagrad:2GiB`); the others have the whole image in memory before theirs. Plain autograd, checkpoints (each level
or residual block, without reentry) and save_on_cpu compute in channels_last; huge pages are on for all. lightstream
streams its trunk in tiles of 2880 px, as its README does, or of its own size (`lightstream:1600`, as its tutorial),
where an image is not smaller. Seconds are those of a second step up to `--warm` megapixels, of the only one above,
without starting, loading and planning, and the median over rounds; peaks are of the whole process and the highest.
Errors are relative, in 2-norms, of the loss and of the worst parameter's gradient, against plain autograd in float64;
where that dies, against it in float32; where that dies too, against gigagrad. These gradients lie in a folder beside
`--out`. Where a gradient all but cancels over the image, as that of a bias near the loss, the error is what float32
makes of its sum. Prints one JSON line last.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np
import psutil

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from gigagrad.units import format_bytes, parse_bytes

METHODS = ("plain", "gigagrad", "checkpoint", "save_on_cpu", "lightstream")
REFERENCES = ("float64", "plain", "gigagrad")
"""Whose gradients the others' are compared with: the first that there is at a size."""
LIGHTSTREAM_TILE_PX = 2880
TILE_PX, CELL_PX = 512, 64
"""Of the images' files, and of what is in them."""
_POLL_SECONDS = 0.02
_LEFT_BYTES = 2**29
"""Where the system has less than this left, everything is stopped: other processes need it."""


@dataclass(frozen=True)
class Network:
    model: str
    dense: bool
    """A mask as target, or one class label."""
    train: bool = False


_RESNET = "timm:resnet18?zero_init_last=false"
"""With zeros in the last norm of a block, as timm begins, its convolutions would get no gradient."""
NETWORKS = {
    "paper-unet": Network("paper-unet", dense=True, train=True),
    "resnet18": Network(_RESNET, dense=False),
    "resnet18-train": Network(_RESNET, dense=False, train=True),
}
_CANNOT = {
    ("lightstream", "paper-unet"): "streams convolutions and local pooling only: after transposed convolutions the "
    "output that it puts together has a wrong size",
    ("lightstream", "resnet18-train"): "freezes norms in evaluation mode: their sums over the image are not streamed",
}


@dataclass
class Campaign:
    """What was asked for, and what is known so far."""

    args: argparse.Namespace
    limit: int
    records: list[dict[str, Any]] = field(default_factory=list)

    def died(self, network: str, method: str) -> dict[str, Any] | None:
        """The record of the smallest image that this method did not survive."""
        dead = (r for r in self.of(network, method) if "died" in r)
        return min(dead, key=lambda r: float(r["megapixels"]), default=None)

    def of(self, network: str, method: str) -> list[dict[str, Any]]:
        return [r for r in self.records if (r["network"], r["method"]) == (network, method)]

    def due(self, network: str, method: str, megapixels: float, turn: int) -> bool:
        if cannot(network, method):
            return False
        dead = self.died(network, method)
        known = ((r["megapixels"], r["round"]) for r in self.of(network, method))
        return (dead is None or megapixels < dead["megapixels"]) and (megapixels, turn) not in known

    def add(self, record: dict[str, Any]) -> None:
        self.records.append(record)
        with self.args.out.open("a") as out:
            out.write(json.dumps(record) + "\n")
        print(describe(record), file=sys.stderr, flush=True)


def main() -> None:
    args = arguments()
    # An exception, so that the process that runs is ended, too.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit("stopped; the same command goes on from here"))
    campaign = Campaign(args, parse_bytes(args.memory))
    if args.out.exists():
        records = map(json.loads, args.out.read_text().splitlines())
        campaign.records = [r for r in records if r["limit_bytes"] == campaign.limit]
    for megapixels in sorted(args.megapixels):
        run_size(campaign, megapixels)
    line = summarise(campaign)
    if args.plot:
        from bench.peers_plot import draw

        draw(line, args.plot)
    print(json.dumps(line))


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--megapixels", type=float, nargs="+", default=[1, 4, 16, 64, 256, 1024])
    parser.add_argument("--methods", nargs="+", default=list(METHODS))
    parser.add_argument("--networks", nargs="+", default=["paper-unet", "resnet18"], choices=NETWORKS)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--memory", default="8GiB", help="each process is ended where it holds more")
    parser.add_argument("--seconds", type=float, default=7200, help="each process is ended where it takes longer")
    parser.add_argument("--warm", type=float, default=16, help="megapixels up to which the second step is timed")
    parser.add_argument("--out", type=Path, default=Path("peers.jsonl"))
    parser.add_argument("--plot", type=Path)
    parser.add_argument("--scratch", type=Path, help="an existing folder for the images, 4 bytes a pixel")
    args = parser.parse_args()
    for method in args.methods:
        name, _, own = method.partition(":")
        if name not in METHODS or (own and name not in ("gigagrad", "lightstream")):
            parser.error(
                f"unknown method {method!r}; known are {', '.join(METHODS)}, gigagrad:MEMORY, lightstream:TILE"
            )
    if args.plot and args.plot.suffix not in (".png", ".svg"):
        parser.error(f"cannot draw {args.plot}: name a file that ends in .png or .svg")
    return args


def cannot(network: str, method: str) -> dict[str, Any]:
    """Why a method is not even tried."""
    name = method.partition(":")[0]
    if name == "lightstream" and not all(map(importlib.util.find_spec, ("lightstream", "lightning"))):
        return {"absent": "pip install lightstream==1.0.7 lightning"}
    reason = _CANNOT.get((name, network))
    return {"cannot": reason} if reason else {}


def run_size(campaign: Campaign, megapixels: float) -> None:
    args = campaign.args
    turns = [(network, "float64", 0) for network in args.networks]
    for turn in range(args.rounds):
        shift = turn % len(args.methods)
        order = [*args.methods[shift:], *args.methods[:shift]]
        turns += [(network, method, turn) for network in args.networks for method in order]
    if not any(campaign.due(network, method, megapixels, turn) for network, method, turn in turns):
        return
    side = max(TILE_PX, round((megapixels * 2**20) ** 0.5 / TILE_PX) * TILE_PX)
    with tempfile.TemporaryDirectory(dir=args.scratch) as name:
        folder = Path(name)
        make_images(folder, side)
        for network, method, turn in turns:
            if campaign.due(network, method, megapixels, turn):
                told = {"network": network, "method": method, "megapixels": megapixels, "side_px": side, "round": turn}
                campaign.add(told | {"limit_bytes": campaign.limit} | run_case(campaign, told, folder))


def make_images(folder: Path, side: int) -> None:
    """`image.tif`, three channels, and `mask.tif`, which follows from it."""
    import tifffile

    count = (side // TILE_PX) ** 2

    def cells(index: int) -> tuple[Any, Any]:
        rng = np.random.default_rng(index)
        coarse = rng.random((TILE_PX // CELL_PX,) * 2) < 0.5
        return np.kron(coarse, np.ones((CELL_PX, CELL_PX), np.uint8)).astype(np.uint8), rng

    def image() -> Iterator[Any]:
        for index in range(count):
            mask, rng = cells(index)
            noise = rng.integers(0, 64, (TILE_PX, TILE_PX, 3), np.uint8)
            yield 176 - 80 * mask[..., None] + noise

    shared: dict[str, Any] = {"dtype": np.uint8, "tile": (TILE_PX, TILE_PX), "bigtiff": True}
    tifffile.imwrite(folder / "image.tif", image(), shape=(side, side, 3), photometric="rgb", **shared)
    masks = (cells(index)[0] for index in range(count))
    tifffile.imwrite(folder / "mask.tif", masks, shape=(side, side), photometric="minisblack", **shared)


def run_case(campaign: Campaign, told: dict[str, Any], folder: Path) -> dict[str, Any]:
    """One process: what it said, or what it died of."""
    args = campaign.args
    gradients = folder / "gradients.npz"
    gradients.unlink(missing_ok=True)
    name, _, own = told["method"].partition(":")
    case = told | {
        "image": str(folder / "image.tif"),
        "mask": str(folder / "mask.tif"),
        "gradients": str(gradients),
        "steps": 2 if told["megapixels"] <= args.warm else 1,
        "budget": parse_bytes(own) if name == "gigagrad" and own else campaign.limit,
        "tile": int(own) if name == "lightstream" and own else LIGHTSTREAM_TILE_PX,
    }
    command = [sys.executable, str(Path(__file__).with_name("peers_case.py")), json.dumps(case)]
    with (folder / "out").open("w+") as out, (folder / "err").open("w+") as err:
        process = subprocess.Popen(command, stdout=out, stderr=err, cwd=folder, env=environment())
        ended, peak = watch(process, campaign.limit, args.seconds)
        out.seek(0)
        err.seek(0)
        said, complaint = out.read().splitlines(), err.read().strip().splitlines()
    if ended or process.returncode:
        reason = ended or (complaint or [f"exit {process.returncode}"])[-1][:300]
        return {"died": reason, "peak_rss_bytes": peak}
    result: dict[str, Any] = json.loads(said[-1])
    if "refused" in result:
        return {"died": result["refused"], "peak_rss_bytes": peak}
    return result | compare(campaign, told, result, gradients)


def environment() -> dict[str, str]:
    """A checkout's own modules, wherever a process runs."""
    paths = filter(None, os.environ.get("PYTHONPATH", "").split(os.pathsep))
    return {**os.environ, "PYTHONPATH": os.pathsep.join(os.path.abspath(path) for path in paths)}


def watch(process: subprocess.Popen[bytes], limit: int, seconds: float) -> tuple[str, int]:
    """Wait for a process, or end it; why, and the highest resident memory that was seen."""
    begun, peak = time.monotonic(), 0
    try:
        while process.poll() is None:
            peak = max(peak, peak_of(process.pid))
            if psutil.virtual_memory().available < _LEFT_BYTES:
                raise SystemExit("the machine's memory is nearly used up, by others too: run the same command later")
            if peak > limit:
                return f"more than {format_bytes(limit)}", peak
            if time.monotonic() - begun > seconds:
                return f"longer than {seconds:.0f} s", peak
            time.sleep(_POLL_SECONDS)
        return "", peak
    finally:
        process.kill()
        process.wait()


def peak_of(pid: int) -> int:
    """The highest resident memory of a process so far (Linux), or what it holds now; 0 for one that has ended."""
    try:
        with open(f"/proc/{pid}/status") as status:
            return next((int(line.split()[1]) * 1024 for line in status if line.startswith("VmHWM:")), 0)
    except OSError:
        try:
            return int(psutil.Process(pid).memory_info().rss)
        except psutil.Error:
            return 0


def compare(campaign: Campaign, told: dict[str, Any], result: dict[str, Any], gradients: Path) -> dict[str, Any]:
    """Errors against the reference of this size; the first gradients of a size that may be one become it."""
    network, method, megapixels = told["network"], told["method"], told["megapixels"]
    out = campaign.args.out
    store = out.with_name(out.name + ".references")
    files = {name: store / f"{network}-{megapixels:g}-{name}.npz" for name in REFERENCES}
    source = next((name for name, file in files.items() if file.exists()), None)
    if source is None:
        if method in REFERENCES:
            store.mkdir(exist_ok=True)
            np.savez(files[method], **dict(np.load(gradients)), **{"loss of the step": result["loss"]})
        return {}
    with np.load(files[source]) as right, np.load(gradients) as found:
        names = [name for name in right.files if name != "loss of the step"]
        assert set(names) == set(found.files), set(names) ^ set(found.files)
        errors = {name: relative(found[name], right[name]) for name in names}
        loss_error = relative(np.array(result["loss"]), right["loss of the step"])
    worst = max(errors, key=lambda name: errors[name])
    return {"reference": source, "loss_error": loss_error, "gradient_error": errors[worst], "worst": worst}


def relative(found: Any, right: Any) -> float:
    right = right.astype(np.float64)
    difference, size = float(np.linalg.norm(found - right)), float(np.linalg.norm(right))
    return difference / size if size else difference


def summarise(campaign: Campaign) -> dict[str, Any]:
    networks: dict[str, Any] = {}
    for network in campaign.args.networks:
        networks[network] = {}
        for method in campaign.args.methods:
            dead = campaign.died(network, method)
            networks[network][method] = cannot(network, method) or {
                "sizes": {
                    f"{megapixels:g}": of_size(found)
                    for megapixels in sorted({r["megapixels"] for r in campaign.of(network, method)})
                    if (found := [r for r in campaign.of(network, method) if is_of(r, megapixels)])
                },
                **({"died": {key: dead[key] for key in ("megapixels", "died", "peak_rss_bytes")}} if dead else {}),
            }
    return {"memory_bytes": campaign.limit, "rounds": campaign.args.rounds, "networks": networks}


def is_of(record: dict[str, Any], megapixels: float) -> bool:
    return record["megapixels"] == megapixels and "seconds" in record


def of_size(found: list[dict[str, Any]]) -> dict[str, Any]:
    seconds = median(r["seconds"] for r in found)
    compared = [r for r in found if "reference" in r]
    result = {
        "seconds": round(seconds, 4),
        "seconds_per_megapixel": round(seconds * 2**20 / found[0]["side_px"] ** 2, 4),
        "step": found[0]["step"],
        "peak_rss_bytes": max(r["peak_rss_bytes"] for r in found),
    }
    if compared:
        result |= {key: compared[0][key] for key in ("reference", "worst")}
        for key in ("loss_error", "gradient_error"):
            result[key] = float(f"{max(r[key] for r in compared):.2g}")
    return result


def describe(record: dict[str, Any]) -> str:
    what = f"{record['network']:12} {record['megapixels']:5g} Mpx  {record['method']:14} {record['round']}"
    if "died" in record:
        return f"{what}  died: {record['died']}"
    error = f"off by {record['gradient_error']:.1e} ({record['reference']})" if "reference" in record else ""
    return f"{what}  {record['seconds']:9.2f} s  {format_bytes(record['peak_rss_bytes']):>9}  {error}"


if __name__ == "__main__":
    main()
