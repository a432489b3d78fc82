"""Planning for sizes no machine at hand could run: how long a plan, its simulation and its trade-off curve take.

    python bench/planning.py [--cases NAME ...] [--no-curve]

Every case in a process of its own, with the model's parameters on PyTorch's meta device: nothing of the network or of
the image has any storage, and nothing runs. Prints one JSON line last.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

CASES = {
    "terapixel": ("paper-unet", (1_000_000, 1_000_000)),
    "gigapixel": ("smp:Unet?encoder_name=resnet34", (16_000, 64_000)),
    "300 million parameters": ("timm:convnext_xlarge", (16_000, 64_000)),
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--cases", nargs="+", choices=CASES, default=list(CASES))
    parser.add_argument("--no-curve", action="store_true", help="leave out the trade-off curve")
    parser.add_argument("--one", choices=CASES, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.one:
        print(json.dumps(measured(*CASES[args.one], curve=not args.no_curve)))
        return
    results = {}
    for name in args.cases:
        command = [sys.executable, __file__, "--one", name, *(["--no-curve"] if args.no_curve else [])]
        done = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True)
        results[name] = json.loads(done.stdout.splitlines()[-1])
        print(f"{name}: {json.dumps(results[name])}", flush=True)
    print(json.dumps({"cases": results, "faults": sum(result["faults"] for result in results.values())}))


def measured(model: str, size: tuple[int, int], *, curve: bool) -> dict[str, Any]:
    sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
    import torch

    import tests.torchvision_operators  # noqa: F401
    from gigagrad.devices import Machine
    from gigagrad.devices.heap import peak_resident_bytes
    from gigagrad.graphs import InputSpec, capture
    from gigagrad.models import resolve
    from gigagrad.plans import Amount, Costs, Problem, ledger, make_plan, simulate, trade_off
    from gigagrad.training.losses import named_loss

    seconds: dict[str, float] = {}

    def timed(name: str, call: Any) -> Any:
        start = time.perf_counter()
        result = call()
        seconds[name] = round(time.perf_counter() - start, 3)
        return result

    with torch.device("meta"):
        module = resolve(model).train()
    parameters = sum(parameter.numel() for parameter in module.parameters())
    image = InputSpec((1, 3, *size), torch.uint8, field=True)
    if model.startswith("timm:"):
        loss, target = named_loss("ce").function, InputSpec((1,), torch.int64, field=False)
    else:
        loss, target = named_loss("bce").function, InputSpec((1, 1, *size), torch.uint8, field=True)
    graph = timed("capture", lambda: capture(module, loss, image, target))
    machine = Machine.detect(torch.get_num_threads())
    costs = Costs(graph, machine)
    process = 512 * 2**20
    held = (Amount(ledger.PROCESS, process), Amount(ledger.STEP, 160 * 2**20))
    problem = Problem(graph=graph, backward=True, machine=machine, held=held)

    def plan_at(budget_bytes: int | None) -> Any:
        return make_plan(dataclasses.replace(problem, budget_bytes=budget_bytes), costs=costs)

    plan = timed("plan", lambda: plan_at(None))
    simulation = timed("simulate", lambda: simulate(problem, plan))
    for fault in simulation.faults:
        print(fault)
    points = timed("curve", lambda: trade_off(plan_at)) if curve else ()
    return {
        "model": model,
        "height": size[0],
        "width": size[1],
        "parameters": parameters,
        "stages": len(plan.stages),
        "tiles": plan.tile_count,
        "predicted_peak_bytes": plan.predicted_peak_bytes,
        "faults": len(simulation.faults),
        "seconds": seconds,
        "points": [(point.predicted_peak_bytes, round(point.seconds, 1), point.kept) for point in points],
        "peak_rss_bytes": peak_resident_bytes(),
    }


if __name__ == "__main__":
    main()
