"""Is a prediction kept step after step with an optimizer, and does each step keep its memory?

    python bench/optimizer_steps.py [--runs 5] [--steps 4] [--networks ...] [--optimizers Adam SGD AdamW]

Each run is a process of its own without a budget: some steps of the whole image in training mode. Measured is the
process's highest resident memory over all steps, of what the plan said before the first; and the page faults of the
last step. Prints one JSON line last and exits with 1 where a prediction was exceeded.
"""

from __future__ import annotations

import argparse
import json
import resource
import sys
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import gigagrad as gg
import gigagrad.models.torchvision_operators
from bench.deep_unet import child
from gigagrad.models import resolve

NETWORKS = {
    "timm:resnet18": (943, 1061),
    "smp:Unet?encoder_name=resnet34": (704, 704),
    "timm:mobilenetv3_large_100": (512, 768),
}
OPTIMIZERS: dict[str, Any] = {
    "Adam": lambda weights: torch.optim.Adam(weights, lr=1e-4),
    "SGD": lambda weights: torch.optim.SGD(weights, lr=1e-3, momentum=0.9),
    "AdamW": lambda weights: torch.optim.AdamW(weights, lr=1e-4),
}


def run(network: str, optimizer_name: str, steps: int) -> dict[str, Any]:
    """Measures some steps in this process."""
    torch.manual_seed(0)
    model, (height, width) = resolve(network).train(), NETWORKS[network]
    optimizer, is_unet = OPTIMIZERS[optimizer_name](model.parameters()), "Unet" in network
    engine = gg.compile(model, F.binary_cross_entropy_with_logits if is_unet else F.cross_entropy)
    image = torch.rand(3, height, width)
    target = (torch.rand(1, height, width) > 0.5).float() if is_unet else torch.tensor([1])
    predicted, faults, peak = engine.plan(image, target).predicted_peak_bytes, 0, 0
    for _ in range(steps):
        optimizer.zero_grad()
        before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
        engine.backward(image, target)
        faults = resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before
        optimizer.step()
        assert engine.last_run is not None
        peak = engine.last_run.peak_bytes
    return {"peak_of_predicted": round(peak / predicted, 3), "predicted_bytes": predicted, "last_step_faults": faults}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--runs", type=int, default=5)
    parser.add_argument("--steps", type=int, default=4)
    parser.add_argument("--networks", nargs="+", default=list(NETWORKS), choices=NETWORKS)
    parser.add_argument("--optimizers", nargs="+", default=list(OPTIMIZERS), choices=OPTIMIZERS)
    parser.add_argument("--run", nargs=2, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.run:
        network, optimizer = args.run
        print(json.dumps(run(network, optimizer, args.steps)))
        return
    rows = []
    for network in args.networks:
        for optimizer in args.optimizers:
            own = ["--steps", str(args.steps), "--run", network, optimizer]
            rows.append(
                {"network": network, "optimizer": optimizer, "runs": [child(__file__, own) for _ in range(args.runs)]}
            )
            print(json.dumps(rows[-1]), file=sys.stderr, flush=True)
    print(json.dumps({"steps": args.steps, "rows": rows}))
    sys.exit(any(one["peak_of_predicted"] > 1 for row in rows for one in row["runs"]))


if __name__ == "__main__":
    main()
