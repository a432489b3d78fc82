"""Planning for sizes no machine at hand could run: how long a plan, its check and its trade-off curve take.

    python bench/planning.py [--cases NAME ...] [--no-curve] [--dozen]

Seconds are the processor's, so that other programs matter little; those of planning are apart from those of capture.
What an engine considers is considered: the whole image at once, and fields of few pixels that may be whole.
Cases with a budget have no curve; of one that is refused there is the smallest budget that would do.

Every case in a process of its own, with parameters on PyTorch's meta device (but for `--dozen`, the networks
of `bench/zoo.py --quick`): nothing of the network or of the image has any storage, and nothing runs. Prints one JSON
line last.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

GIB = 2**30
FREE_BYTES = 20 * GIB
"""What a machine has free beside the process, where no budget is named."""
UNET = "smp:Unet?encoder_name=resnet34"
NESTED = "smp:UnetPlusPlus?encoder_name=resnet34"
CONVNEXT = "timm:convnext_xlarge"


@dataclass(frozen=True, kw_only=True)
class Case:
    """Sizes in pixels, memory in bytes; without a budget only speed decides. `room_bytes`: of scratch files."""

    model: str
    size: tuple[int, int]
    training: bool = True
    budget_bytes: int | None = None
    room_bytes: int = 0


CASES = {
    "terapixel": Case(model="paper-unet", size=(1_000_000, 1_000_000)),
    "gigapixel": Case(model=UNET, size=(16_000, 64_000)),
    "gigapixel, 8 GiB": Case(model=UNET, size=(16_000, 64_000), budget_bytes=8 * GIB),
    "gigapixel, 8 GiB and scratch": Case(model=UNET, size=(16_000, 64_000), budget_bytes=8 * GIB, room_bytes=73 * GIB),
    "gigapixel, evaluation, 8 GiB and scratch": Case(
        model=UNET, size=(16_000, 64_000), training=False, budget_bytes=8 * GIB, room_bytes=73 * GIB
    ),
    "10 gigapixel, 4 GiB and scratch": Case(
        model=UNET, size=(100_000, 100_000), budget_bytes=4 * GIB, room_bytes=73 * GIB
    ),
    "10 gigapixel, 16 GiB and scratch": Case(
        model=UNET, size=(100_000, 100_000), budget_bytes=16 * GIB, room_bytes=73 * GIB
    ),
    "2048 px, evaluation, 2 GiB": Case(model=UNET, size=(2048, 2048), training=False, budget_bytes=2 * GIB),
    "8192 px, evaluation, 2 GiB": Case(model=UNET, size=(8192, 8192), training=False, budget_bytes=2 * GIB),
    "nested decoder, 4 GiB": Case(model=NESTED, size=(4096, 4096), budget_bytes=4 * GIB),
    "nested decoder, 6 GiB": Case(model=NESTED, size=(4096, 4096), budget_bytes=6 * GIB),
    "nested decoder, 8 GiB": Case(model=NESTED, size=(4096, 4096), budget_bytes=8 * GIB),
    "nested decoder, 8 GiB and scratch": Case(
        model=NESTED, size=(4096, 4096), budget_bytes=8 * GIB, room_bytes=40 * GIB
    ),
    "nested decoder, 12 GiB": Case(model=NESTED, size=(4096, 4096), budget_bytes=12 * GIB),
    "nested decoder, 2048 px, 3 GiB": Case(model=NESTED, size=(2048, 2048), budget_bytes=3 * GIB),
    "nested decoder, 1 GiB, refused": Case(model=NESTED, size=(1024, 1024), budget_bytes=GIB),
    "four resolutions, 3 GiB": Case(model="timm:hrnet_w18_small", size=(4096, 4096), budget_bytes=3 * GIB),
    "four resolutions, 16 GiB": Case(model="timm:hrnet_w18_small", size=(16_000, 64_000), budget_bytes=16 * GIB),
    "3461 operators, 4 GiB": Case(model="timm:densenet121", size=(4096, 4096), budget_bytes=4 * GIB),
    "3461 operators, 16 GiB, refused": Case(model="timm:densenet121", size=(16_000, 64_000), budget_bytes=16 * GIB),
    "mixed kernels, 8 GiB": Case(model="timm:inception_v4", size=(4096, 4096), budget_bytes=8 * GIB),
    "mixed kernels, 2 GiB, refused": Case(model="timm:inception_v4", size=(4096, 4096), budget_bytes=2 * GIB),
    "searched cells, 8 GiB": Case(model="timm:nasnetalarge", size=(4096, 4096), budget_bytes=8 * GIB),
    "searched cells, 4 GiB, refused": Case(model="timm:nasnetalarge", size=(4096, 4096), budget_bytes=4 * GIB),
    "searched cells, 16 GiB, refused": Case(model="timm:nasnetalarge", size=(16_000, 64_000), budget_bytes=16 * GIB),
    "300 million parameters": Case(model=CONVNEXT, size=(16_000, 64_000)),
    "300 million parameters, 16 GiB and scratch": Case(
        model=CONVNEXT, size=(16_000, 64_000), budget_bytes=16 * GIB, room_bytes=200 * GIB
    ),
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--cases", nargs="+", choices=CASES, default=list(CASES))
    parser.add_argument("--dozen", action="store_true", help="the zoo's dozen networks instead, several sizes of each")
    parser.add_argument("--no-curve", action="store_true", help="leave out the trade-off curve")
    parser.add_argument("--one", help=argparse.SUPPRESS)
    args = parser.parse_args()
    cases = dozen() if args.dozen else {name: CASES[name] for name in args.cases}
    if args.one:
        case = cases[args.one]
        print(json.dumps(measured(case, curve=case.budget_bytes is None and not args.no_curve)))
        return
    results = {}
    for name in cases:
        command = [sys.executable, __file__, *sys.argv[1:], "--one", name]
        done = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True)
        results[name] = json.loads(done.stdout.splitlines()[-1])
        print(f"{name}: {json.dumps(results[name])}", flush=True)
    print(
        json.dumps(
            {
                "cases": results,
                "faults": sum(result["faults"] for result in results.values()),
                "longest": max(result["seconds"]["plan"] for result in results.values()),
            }
        )
    )


def measured(case: Case, *, curve: bool) -> dict[str, Any]:
    sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
    import torch

    from gigagrad.devices import Machine
    from gigagrad.devices.heap import peak_resident_bytes
    from gigagrad.errors import BudgetError
    from gigagrad.execution.seeds import drawing
    from gigagrad.graphs import InputSpec, capture
    from gigagrad.plans import Amount, Costs, Problem, check, estimate, make_plan, trade_off
    from gigagrad.stores import DiskTier, MemoryTier

    seconds: dict[str, float] = {}

    def timed(name: str, call: Any) -> Any:
        start = time.process_time()
        try:
            return call()
        finally:
            seconds[name] = round(time.process_time() - start, 3)

    module, loss, dense, dtype = zoo_step(case) if "/" in case.model else named_step(case)
    parameters = sum(parameter.numel() for parameter in module.parameters())
    image = InputSpec((1, 3, *case.size), dtype, field=True)
    mask, label = InputSpec((1, 1, *case.size), torch.uint8, field=True), InputSpec((1,), torch.int64, field=False)
    graph = timed("capture", lambda: capture(module, loss, image, mask if dense else label))
    machine = Machine.detect(torch.get_num_threads())
    costs = Costs(graph, machine)
    process = 512 * 2**20
    held = (Amount(estimate.PROCESS, process), Amount(estimate.STEP, 160 * 2**20))
    scratch = (DiskTier(Path(), case.room_bytes),) if case.room_bytes else ()
    problem = Problem(
        graph=graph,
        backward=True,
        machine=machine,
        held=held,
        tiers=(MemoryTier(), *scratch),
        rooms={tier.name: case.room_bytes for tier in scratch},
        whole=None if drawing(graph) else graph.whole.get(True),
    )

    def asked_for(budget_bytes: int | None) -> Problem:
        free = FREE_BYTES if budget_bytes is None else None
        return dataclasses.replace(problem, budget_bytes=budget_bytes, free_bytes=free)

    def plan_at(budget_bytes: int | None) -> Any:
        return make_plan(asked_for(budget_bytes), costs=costs)

    asked = {**dataclasses.asdict(case), "operators": sum(not node.is_source for node in graph.nodes)}
    try:
        plan = timed("plan", lambda: plan_at(case.budget_bytes))
    except BudgetError as refusal:
        return {**asked, "refused_below_bytes": refusal.smallest_bytes, "faults": 0, "seconds": seconds}
    faults = timed("check", lambda: check(asked_for(case.budget_bytes), plan))
    for fault in faults:
        print(fault)
    points = timed("curve", lambda: trade_off(plan_at)) if curve else ()
    return {
        **asked,
        "parameters": parameters,
        "whole_pixels": plan.whole_pixels,
        "segments": len(plan.segments),
        "tiles": plan.tile_count,
        "predicted_peak_bytes": plan.predicted_peak_bytes,
        "predicted_seconds": plan.modelled_seconds,
        "faults": len(faults),
        "seconds": seconds,
        "points": [(point.predicted_peak_bytes, round(point.seconds, 1), point.kept) for point in points],
        "peak_rss_bytes": peak_resident_bytes(),
    }


Step = tuple[Any, Any, bool, Any]
"""A network, its loss, whether the target is a mask, and the dtype of images."""


def named_step(case: Case) -> Step:
    import torch

    import gigagrad.models.torchvision_operators  # noqa: F401
    from gigagrad.losses import named_loss
    from gigagrad.models import resolve

    with torch.device("meta"):
        module = resolve(case.model).train(case.training)
    dense = not case.model.startswith("timm:")
    return module, named_loss("bce" if dense else "ce").function, dense, torch.uint8


def zoo_step(case: Case) -> Step:
    """Build one of the zoo's dozen; norms that would see one value a channel at a small size are in evaluation mode."""
    import torch

    from bench.zoo_models import subjects
    from bench.zoo_step import build, loss, settle

    subject = next(each for each in subjects(case.model.partition("/")[0]) if each.name == case.model)
    return build(subject, torch.float32, settle(subject)["frozen"]), loss, subject.dense, torch.float32


def dozen() -> dict[str, Case]:
    """Return cases of each of the zoo's dozen networks: of three sizes, or the only one, in three budgets."""
    sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
    from bench.zoo_models import QUICK

    found = {}
    for model in QUICK:
        for size in ((224, 224),) if "_224" in model else ((1024, 1024), (4096, 4096), (16_000, 64_000)):
            for gib, room in ((1, 0), (4, 0), (8, 73)):
                case = Case(model=model, size=size, budget_bytes=gib * GIB, room_bytes=room * GIB)
                found[f"{model}, {size[0]} x {size[1]} px, {gib} GiB{' and scratch' if room else ''}"] = case
    return found


if __name__ == "__main__":
    main()
