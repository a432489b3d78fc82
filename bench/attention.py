"""Attention among all positions of an image: time and memory by their number, beside PyTorch's own kernel.

    python bench/attention.py [--sides 128 256 512] [--written products] [--rounds 2] [--plain-pairs-gib 8]

A network of one head of 64 channels: query, key and value of every pixel by 1 x 1 convolutions, and attention among all
of them, written as two products with a softmax between them. Each of these is a process of its own: a step of the
engine; one of plain autograd on the same network, unless its matrix of all pairs has more than `--plain-pairs-gib`; and
one of plain autograd with `F.scaled_dot_product_attention` in their place, the fastest that PyTorch has. The first step
of each is not timed, where there are several rounds. A sample of rows of the output is compared with float64, and up to
`--exact-side` the gradients of all weights are. Prints one JSON line last.
"""

from __future__ import annotations

import argparse
import copy
import json
import resource
import sys
import time
import warnings
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import gigagrad as gg
from bench.deep_unet import child

WIDTH = 64
ROWS = 16
"""Rows of the output that are compared with float64."""


class Attention(nn.Module):
    """Attention among all pixels."""

    def __init__(self, written: str) -> None:
        super().__init__()
        self.written = written
        self.query, self.key, self.value = (nn.Conv2d(3, WIDTH, 1) for _ in range(3))

    def parts(self, x_NCHW: Tensor) -> list[Tensor]:
        """Compute query, key and value, each `(1, 1, H W, C)`."""
        return [
            one(x_NCHW).flatten(2).transpose(1, 2)[:, None].contiguous() for one in (self.query, self.key, self.value)
        ]

    def forward(self, x_NCHW: Tensor) -> Tensor:
        q, k, v = self.parts(x_NCHW)
        if self.written == "kernel":
            y = F.scaled_dot_product_attention(q, k, v)
        else:
            y = (q @ k.transpose(-2, -1) * WIDTH**-0.5).softmax(-1) @ v
        return y.transpose(2, 3).reshape(1, WIDTH, *x_NCHW.shape[-2:])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--sides", type=int, nargs="+", default=[128, 256, 512], help="pixels; positions are its square"
    )
    parser.add_argument("--written", choices=["products", "kernel"], default="products")
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--plain-pairs-gib", type=float, default=8)
    parser.add_argument("--exact-side", type=int, default=128)
    parser.add_argument("--no-kernel", action="store_true", help="without PyTorch's kernel beside it")
    parser.add_argument("--memory", help="budget of the engine")
    parser.add_argument("--threads", type=int)
    parser.add_argument("--way", choices=["ours", "kernel", "plain"], help="only this, in this process")
    args = parser.parse_args()
    warnings.simplefilter("ignore")
    if args.threads:
        torch.set_num_threads(args.threads)
    if args.way:
        print(json.dumps(measured(args, args.way, args.sides[0])))
        return
    found = []
    for side in args.sides:
        ways = ["ours", "kernel"]
        if 4 * side**4 <= args.plain_pairs_gib * 2**30:
            ways.append("plain")
        if args.no_kernel:
            ways.remove("kernel")
        row: dict[str, Any] = {"positions": side**2}
        for way in ways:
            row[way] = child(__file__, [*sys.argv[1:], "--sides", str(side), "--way", way])
        if "kernel" in row:
            row["times_kernel"] = round(row["ours"]["seconds"] / row["kernel"]["seconds"], 3)
        found.append(row)
        print(json.dumps(row), flush=True)
    print(json.dumps({"threads": args.threads or torch.get_num_threads(), "torch": torch.__version__, "jobs": found}))


def measured(args: argparse.Namespace, way: str, side: int) -> dict[str, Any]:
    """Steps of one kind, timed; the peak of the process; and the largest errors, relative to the largest value."""
    torch.manual_seed(0)
    network = Attention("kernel" if way == "kernel" else args.written)
    image, target = torch.rand(1, 3, side, side), torch.rand(1, WIDTH, side, side)
    engine = gg.compile(network, F.mse_loss, memory=args.memory)
    found: dict[str, Any] = {}
    if way == "ours":
        plan = engine.plan(image, target)
        found |= {"whole": plan.whole, "predicted_seconds": round(plan.predicted_seconds, 2)}
        found["predicted_mib"] = plan.predicted_peak_bytes >> 20
    seconds = []
    for _ in range(args.rounds):
        network.zero_grad()
        start = time.perf_counter()
        if way == "ours":
            engine.backward(image, target)
        else:
            F.mse_loss(network(image), target).backward()
        seconds.append(time.perf_counter() - start)
    found |= {
        "seconds": round(min(seconds[1:] or seconds), 2),
        "peak_mib": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss >> 10,
    }
    if way == "ours":
        found["error_of_rows"] = error_of_rows(network, engine.forward(image), image)
        if side <= args.exact_side:
            found["error_of_gradients"] = error_of_gradients(network, image, target)
    return found


def error_of_rows(network: Attention, output_NCHW: Tensor, image: Tensor) -> float:
    """Compare some positions of the output with float64."""
    with torch.no_grad():
        q, k, v = (part[0, 0].double() for part in copy.deepcopy(network).double().parts(image.double()))
        rows = torch.linspace(0, len(q) - 1, ROWS).long()
        expected = (q[rows] @ k.T * WIDTH**-0.5).softmax(-1) @ v
    made = output_NCHW[0].flatten(1).T[rows]
    return float((made - expected).abs().max() / expected.abs().max())


def error_of_gradients(network: Attention, image: Tensor, target: Tensor) -> float:
    """Compare the gradients of all weights with plain autograd's in float64, by PyTorch's kernel."""
    double = copy.deepcopy(network).double()
    double.written = "kernel"
    double.zero_grad()
    F.mse_loss(double(image.double()), target.double()).backward()
    pairs = list(zip(network.parameters(), double.parameters(), strict=True))
    errors = [(own.grad - other.grad).abs().max() for own, other in pairs]  # type: ignore[operator]
    return float(max(errors) / max(other.grad.abs().max() for _, other in pairs))  # type: ignore[union-attr]


if __name__ == "__main__":
    main()
