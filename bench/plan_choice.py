"""Is the chosen plan the fastest? Against random legal plans of the same network, image and budget.

    python bench/plan_choice.py [--cases 30 | --only 9 21] [--plans 20] [--measured 2] [--rounds 2] [--seed 0]
        [--out choices.jsonl]

A case is a published network in training or evaluation mode, an image and a budget between the smallest and twice that.
Half of the random plans change the chosen one (fields given up and added, tiles of half and twice the side), the others
keep any convolutions and sums of branches with tiles of any size; those that do not fit are drawn again. Of each case
the plans that are predicted to be fastest and as many others are timed in turns with the chosen one, every time in a
process of its own: one that has run another plan holds more, and has less room in its budget. The fastest of the later
steps counts. Lines already in `--out` are not run again. Prints one JSON line last: ratios of the chosen plan's seconds
to the best random plan's.
"""

from __future__ import annotations

import argparse
import json
import random
import subprocess
import sys
import time
import warnings
from pathlib import Path
from statistics import geometric_mean
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

NETWORKS = (
    ("paper-unet", (2400, 3200)),
    ("smp:Unet?encoder_name=mobilenet_v2", (512, 640)),
    ("timm:resnet34", (768, 1024)),
    ("timm:regnety_008", (640, 640)),
    ("smp:Unet?encoder_name=resnet18", (640, 640)),
    ("smp:Unet?encoder_name=resnet34", (768, 512)),
    ("smp:FPN?encoder_name=efficientnet-b0", (384, 512)),
    ("smp:DeepLabV3Plus?encoder_name=resnet34", (512, 512)),
    ("smp:UnetPlusPlus?encoder_name=resnet18", (384, 384)),
    ("smp:Linknet?encoder_name=resnet18", (640, 512)),
    ("timm:resnet18", (1024, 1024)),
    ("timm:resnet50", (512, 640)),
    ("timm:efficientnet_b0", (640, 512)),
    ("timm:convnext_tiny", (480, 480)),
    ("timm:densenet121", (384, 384)),
)
_GROWN_BYTES = 16 * 2**20
"""All budgets of timed plans are larger by so much: a process holds a little more or less from start to start."""
_STEPS = 4
"""Of a process; the first one does not count."""
_MOST_DRAWN = 6
"""For each plan that is wanted: most of some kind may not fit."""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--cases", type=int, default=2 * len(NETWORKS))
    parser.add_argument("--only", type=int, nargs="+", help="these cases")
    parser.add_argument("--plans", type=int, default=20)
    parser.add_argument("--measured", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--out", type=Path)
    parser.add_argument("--one", type=int, help=argparse.SUPPRESS)
    parser.add_argument("--time", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.time is not None:
        print(json.dumps(timed(**json.loads(args.time))))
        return
    if args.one is not None:
        print(json.dumps(planned(args.one, args.plans, args.measured, args.seed)))
        return
    known = [json.loads(line) for line in args.out.read_text().splitlines()] if args.out and args.out.exists() else []
    cases = {case["case"]: case for case in known}
    for number in args.only or range(args.cases):
        if number in cases:
            continue
        cases[number] = compared(number, args)
        line = json.dumps(cases[number])
        print(line, flush=True)
        if args.out:
            with args.out.open("a") as file:
                file.write(line + "\n")
    print(json.dumps(summarise(list(cases.values()))))


def in_a_process(*options: str) -> dict[str, Any] | None:
    """What this script prints with these options; None where it fails."""
    command = [sys.executable, __file__, *options]
    done = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=False)
    found: dict[str, Any] | None = json.loads(done.stdout.splitlines()[-1]) if done.returncode == 0 else None
    return found


def compared(number: int, args: argparse.Namespace) -> dict[str, Any]:
    """One case: plans are made in one process and timed in others, in turns."""
    options = [f"--{name}={getattr(args, name)}" for name in ("plans", "measured", "seed")]
    case = in_a_process(f"--one={number}", *options)
    if case is None:
        return {"case": number, "failed": True}
    choices, states = case.pop("choices"), case.pop("states")
    seconds: list[list[float]] = [[] for _ in choices]
    for _ in range(args.rounds):
        for own, choice in zip(seconds, choices, strict=True):
            what = {"number": number, "budget": case["budget_bytes"] + _GROWN_BYTES, "choice": choice, "states": states}
            run = in_a_process(f"--time={json.dumps(what)}")
            if run is not None and run["same"]:
                own.append(run["seconds"])
    best = [min(own) if own else None for own in seconds]
    others = [own for own in best[1:] if own is not None]
    ratio = round(best[0] / min(others), 3) if others and best[0] is not None else None
    return {**case, "seconds": best, "timed": len(others), "measured_ratio": ratio}


def timed(number: int, budget: int, choice: dict[str, Any], states: list[str]) -> dict[str, Any]:
    """Steps of one plan, in this process; whether it was that plan."""
    warnings.simplefilter("ignore")
    import gigagrad as gg
    import gigagrad.models.torchvision_operators
    from bench.calibration import loss
    from gigagrad.execution.choice import Choice

    network, image, target = subject_of(number)
    engine = gg.compile(network, loss, memory=budget)
    engine.load_state_dict({"choices": dict.fromkeys(states, choice)})
    seconds = []
    for _ in range(_STEPS):
        start = time.perf_counter()
        engine.backward(image, target)
        seconds.append(time.perf_counter() - start)
    same = Choice.of(engine.plan(image, target)) == Choice.from_dict(choice)
    return {"seconds": round(min(seconds[1:]), 3), "same": same}


def subject_of(number: int) -> tuple[Any, Any, Any]:
    """The network of a case in its mode, its image and its target."""
    from bench.calibration import subject

    name, size = NETWORKS[number % len(NETWORKS)]
    network, image, target = subject(name, size)
    return network.train(number // len(NETWORKS) % 2 == 0), image, target


def summarise(cases: list[dict[str, Any]]) -> dict[str, Any]:
    done = [case for case in cases if case.get("timed")]
    predicted, measured = ([case[kind] for case in done] for kind in ("predicted_ratio", "measured_ratio"))
    return {
        "cases": len(cases),
        "failed": sum(bool(case.get("failed")) for case in cases),
        "compared": len(done),
        "predicted_ratio": [round(f(predicted), 3) for f in (min, geometric_mean, max)] if done else None,
        "measured_ratio": [round(f(measured), 3) for f in (min, geometric_mean, max)] if done else None,
        "more_than_a_tenth_worse": [case["case"] for case in done if case["measured_ratio"] > 1.1],
    }


def planned(number: int, count: int, measured: int, seed: int) -> dict[str, Any]:
    """The chosen plan of a case and random ones."""
    warnings.simplefilter("ignore")
    import gigagrad as gg
    import gigagrad.models.torchvision_operators
    from bench.calibration import loss
    from gigagrad.errors import BudgetError
    from gigagrad.execution.choice import Choice

    rng = random.Random(f"{seed} {number}")
    network, image, target = subject_of(number)
    try:
        gg.compile(network, loss, memory="64MiB").plan(image, target)
        raise AssertionError("no process is as small as that")
    except BudgetError as error:
        budget = int(error.smallest_bytes * rng.choice([1.0, 1.2, 1.5, 2]))
    engine = gg.compile(network, loss, memory=budget)
    chosen = engine.plan(image, target)
    others = drawn(engine.problem(image, target), chosen, rng, count)
    others.sort(key=lambda plan: plan.modelled_seconds)
    few = [*others[:measured], *rng.sample(others[measured:], min(measured, max(0, len(others) - measured)))]
    name, size = NETWORKS[number % len(NETWORKS)]
    return {
        "case": number,
        "network": name,
        "size": size,
        "mode": "training" if network.training else "evaluation",
        "budget_bytes": budget,
        "plans": len(others),
        "stages": [len(plan.stages) for plan in (chosen, *few)],
        "tiles": [plan.tile_count for plan in (chosen, *few)],
        "predicted_seconds": [round(plan.modelled_seconds, 3) for plan in (chosen, *few)],
        "predicted_ratio": round(chosen.modelled_seconds / others[0].modelled_seconds, 3) if others else None,
        "choices": [Choice.of(plan).to_dict() for plan in (chosen, *few)],
        "states": list(engine.state_dict()["choices"]),
    }


def scaled(tile: tuple[int, int], rng: random.Random) -> tuple[int, int]:
    height, width = (max(1, int(px * rng.choice([0.5, 1, 1, 2]))) for px in tile)
    return height, width


def drawn(problem: Any, chosen: Any, rng: random.Random, count: int) -> list[Any]:
    """Up to so many random legal plans."""
    from gigagrad.errors import BudgetError
    from gigagrad.plans import Costs, make_plan

    graph = problem.graph
    joints = ("aten.conv2d", "aten.conv_transpose2d", "aten.add.", "aten.cat.", "aten.max_pool2d")
    fields = [n.id for n in graph.nodes if n.is_field and n.op.startswith(joints) and not n.is_source]
    required = {i for i in fields if graph.gathers(i)}
    kept = {field.node for field in chosen.kept}
    costs, plans = Costs(graph, problem.machine, problem.packing), list[Any]()
    for attempt in range(_MOST_DRAWN * count):
        if len(plans) == count:
            break
        if attempt % 2:
            gone = {i for i in kept if rng.random() < 0.2}
            wanted, tiles = (kept - gone) | set(rng.sample(fields, min(len(fields), rng.randint(0, 2)))), None
            if rng.random() < 0.5:
                wanted, tiles = kept, tuple(scaled(stage.tile, rng) for stage in chosen.stages)
        else:
            share = rng.random()
            wanted = {i for i in fields if rng.random() < share}
            side = 2 ** rng.uniform(4, 10)
            tiles = ((int(side), int(side * rng.choice([0.5, 1, 2]))),)
        where = dict.fromkeys(wanted | required, problem.memory.name)
        try:
            plan = make_plan(problem, memory_format=chosen.memory_format, tiles=tiles, kept=where, costs=costs)
        except BudgetError:
            continue
        plans.append(plan)
    return plans


if __name__ == "__main__":
    main()
