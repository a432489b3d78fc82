"""How well does a calibrated machine foretell the time of a step? Published networks that calibration has not seen.

    gigagrad calibrate && python bench/calibration.py [--only NAME] [--rounds 3] [--passes 2] [--scratch DIR]

Every network takes a few training steps, in training and in evaluation mode, on noise of 512 to 2048 px, each size in a
process of its own; the fastest counts. Compared are the plan's seconds by the model of time (not by the trial of
layouts) with the clock; processor time stands beside it, for other programs disturb the clock, and the system's part of
it, most of which is what new memory costs. All is done once more in every further pass: `repeats_to` is by how much the
first two differ on average where the plan was the same, which no prediction can better. Before every size some of the
calibration's own networks are timed again: `reference` is what the profile predicts for them over what they take now,
so the machine's speed of the moment, and `error_beside_reference` is a case's error with that taken out. With
`OMP_NUM_THREADS=1` one thread's work is judged alone, which takes a profile of its own (`OMP_NUM_THREADS=1 gigagrad
calibrate`). With `--scratch` it is training steps in little memory instead, a quarter of the way from the smallest
budget that works to what the step takes without one, with fields in files. Prints one JSON line last. With
`--predictors` no network is run: three predictors are compared on the networks of the calibration itself, each network
held out in its turn.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import subprocess
import sys
import time
import warnings
from collections.abc import Callable, Sequence
from pathlib import Path
from statistics import fmean, median
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import gigagrad as gg
import tests.torchvision_operators  # noqa: F401
from gigagrad.errors import BudgetError
from gigagrad.events import Events
from gigagrad.execution.allocator import settle_allocator
from gigagrad.execution.calibration import FULL, QUICK
from gigagrad.execution.calibration.fit import Sample, fit_rates, held_out_error
from gigagrad.execution.calibration.measure import time_networks
from gigagrad.execution.calibration.timing import draw_subject, pass_seconds, pass_work
from gigagrad.plans.machine import Machine, TimeModel
from gigagrad.plans.work import Work

_REFERENCE = (0, 3, 6, 9, 12, 15)
"""Networks of the calibration, by seed; their tiles in pixels."""
_REFERENCE_TILE = (256, 256)
_CASES = (
    ("paper-unet", ((1024, 2048), (2048, 2048))),
    ("smp:Unet?encoder_name=resnet18", ((512, 512), (1024, 1024))),
    ("smp:FPN?encoder_name=resnet18", ((512, 768), (1024, 1024))),
    ("smp:Unet?encoder_name=efficientnet-b0", ((512, 512), (768, 1024))),
    ("smp:Linknet?encoder_name=resnet34", ((512, 512), (1024, 1024))),
    ("timm:resnet10t", ((512, 512), (2048, 2048))),
    ("timm:resnet34", ((512, 512), (1024, 1536))),
    ("timm:convnext_atto", ((512, 512), (1024, 1024))),
    ("timm:mobilenetv3_small_100", ((512, 1024), (2048, 2048))),
)


class Bytes(nn.Module):
    """A network for images of bytes."""

    def __init__(self, network: nn.Module) -> None:
        super().__init__()
        self.network = network

    def forward(self, image: Tensor) -> Tensor:
        result: Tensor = self.network(image.float() / 255)
        return result


def loss(output: Tensor, target: Tensor) -> Tensor:
    if output.ndim == 2:
        return F.cross_entropy(output, target)
    return F.binary_cross_entropy_with_logits(output, target.to(output.dtype))


def subject(name: str, size: tuple[int, int]) -> tuple[nn.Module, np.ndarray[Any, Any], Any]:
    """A published network, and noise and targets for it and `loss`."""
    torch.manual_seed(0)
    made = gg.models.resolve(name)
    rng = np.random.default_rng(0)
    image = rng.integers(0, 255, (3, *size), dtype=np.uint8)
    target = torch.tensor([1]) if name.startswith("timm:") else rng.integers(0, 2, (1, *size), dtype=np.uint8)
    return made if name == "paper-unet" else Bytes(made), image, target


def reference_ratio() -> float:
    """By the clock, seconds that the profile predicts for some of the calibration's own networks over what they take
    now, with all threads sharing each tile; the median.
    """
    threads = torch.get_num_threads()
    machine, ratios = Machine.detect(threads), []
    assert machine.model is not None, "no profile; run 'gigagrad calibrate' first"
    for number in _REFERENCE:
        drawn = draw_subject(number, random.Random(number))
        prepared = drawn.prepare(_REFERENCE_TILE, workers=1)
        predicted = sum(
            machine.wall_seconds(machine.model.split(work), 1, prepared.plan.stages[step.stage].tile_count)
            for step, work in zip(prepared.plan.passes, pass_work(prepared, machine.cache_bytes), strict=True)
        )
        ratios.append(predicted / sum(pass_seconds(drawn, prepared, 2, time.perf_counter)))
    return median(ratios)


def little_memory(network: nn.Module, image: Any, target: Any, scratch: str) -> int:
    """A quarter of the way from the smallest budget that works to what a step takes without one."""
    plenty = gg.compile(network, loss).plan(image, target)
    try:
        gg.compile(network, loss, memory=plenty.base_bytes, scratch=scratch).plan(image, target)
    except BudgetError as error:
        smallest = error.smallest_bytes
    return smallest + (plenty.predicted_peak_bytes - smallest) // 4


def try_case(
    name: str, size: tuple[int, int], *, train: bool, rounds: int, reference: float, scratch: str | None
) -> dict[str, Any]:
    """Predicted and measured seconds of a step of one network; in little memory if there is a folder for files."""
    network, image, target = subject(name, size)
    network.train(train)
    memory = little_memory(network, image, target, scratch) if scratch else None
    engine = gg.compile(network, loss, memory=memory, scratch=scratch)
    start = time.perf_counter()
    plan = engine.plan(image, target)
    planning = time.perf_counter() - start
    predicted = sum(stage.seconds or 0.0 for stage in plan.stages)
    wall = processor = system = float("inf")
    for _ in range(rounds + 1):
        before = os.times()
        engine.backward(image, target)
        after = os.times()
        processor = min(processor, after.user + after.system - before.user - before.system)
        system = min(system, after.system - before.system)
        assert engine.last_run is not None
        wall = min(wall, engine.last_run.seconds)
    return {
        "model": name,
        "size": list(size),
        "mode": "train" if train else "eval",
        "stages": len(plan.stages),
        "tiles": plan.tile_count,
        "tile": list(plan.tile),
        "workers": plan.workers,
        "budget": memory,
        "file_bytes": plan.scratch_bytes,
        "planning_seconds": round(planning, 2),
        "predicted": round(predicted, 3),
        "measured": round(wall, 3),
        "error": round(predicted / wall - 1, 3),
        "reference": round(reference, 3),
        "error_beside_reference": round(predicted / wall / reference - 1, 3),
        "processor": round(processor, 3),
        "system": round(system, 2),
    }


def compare_predictors(effort: str) -> dict[str, float]:
    """Mean relative error of whole steps, networks held out, of three predictors and of the constants without one."""
    from sklearn.ensemble import HistGradientBoostingRegressor

    samples = time_networks(FULL if effort == "full" else QUICK, Machine.detect(1).cache_bytes, Events())

    def by_quantity(work: Work) -> Work:
        summed: Work = {}
        for kind, amount in work.items():
            quantity = f"any.{kind.rpartition('.')[2]}"
            summed[quantity] = summed.get(quantity, 0.0) + amount
        return summed

    def three_rates(seen: Sequence[Sample]) -> Callable[[Work], float]:
        rates = fit_rates([Sample(s.network, s.step, by_quantity(s.work), s.seconds) for s in seen])
        model = TimeModel(rates, 0.0)
        return lambda work: model.seconds(by_quantity(work))

    def by_kind(seen: Sequence[Sample]) -> Callable[[Work], float]:
        return TimeModel(fit_rates(seen), 0.0).seconds

    def boosted(seen: Sequence[Sample]) -> Callable[[Work], float]:
        """Trees for what the sum of rates leaves over, in logarithms."""
        model = TimeModel(fit_rates(seen), 0.0)
        kinds = sorted({kind for sample in seen for kind in sample.work})

        def features(work: Work) -> list[float]:
            base = model.seconds(work)
            return [np.log(base), *(model.rates.get(kind, 0.0) * work.get(kind, 0.0) / base for kind in kinds)]

        left = [np.log(sample.seconds / model.seconds(sample.work)) for sample in seen]
        trees = HistGradientBoostingRegressor(max_iter=120, learning_rate=0.05, max_leaf_nodes=8, random_state=0)
        trees.fit(np.array([features(sample.work) for sample in seen]), np.array(left))
        return lambda work: float(model.seconds(work) * np.exp(trees.predict(np.array([features(work)]))[0]))

    constants = TimeModel({}, 0.0)
    return {
        "networks": len({s.network for s in samples}),
        "passes": len(samples),
        "constants": round(held_out_error(samples, lambda seen: constants.seconds), 3),
        "rates_by_quantity": round(held_out_error(samples, three_rates), 3),
        "rates_by_kind": round(held_out_error(samples, by_kind), 3),
        "rates_by_kind_boosted": round(held_out_error(samples, boosted), 3),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", default="", help="models whose name contains this")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--passes", type=int, default=2)
    parser.add_argument("--scratch", help="folder for files: training steps in little memory")
    parser.add_argument("--case", nargs=3, metavar=("NAME", "HEIGHT", "WIDTH"), help=argparse.SUPPRESS)
    parser.add_argument("--predictors", choices=("quick", "full"), help="compare predictors instead")
    args = parser.parse_args()
    warnings.simplefilter("ignore")
    if args.predictors:
        print(json.dumps(compare_predictors(args.predictors)))
        return
    if args.case:
        name, height, width = args.case
        settle_allocator()
        size, reference = (int(height), int(width)), reference_ratio()
        for train in (True,) if args.scratch else (True, False):
            found = try_case(name, size, train=train, rounds=args.rounds, reference=reference, scratch=args.scratch)
            print(json.dumps(found), flush=True)
        return
    passes: list[list[dict[str, Any]]] = []
    for _ in range(args.passes):
        passes.append([])
        for name, sizes in _CASES:
            for size in sizes if args.only in name else ():
                case = ["--case", name, *map(str, size), "--rounds", str(args.rounds)]
                case += ["--scratch", args.scratch] if args.scratch else []
                done = subprocess.run([sys.executable, __file__, *case], stdout=subprocess.PIPE, text=True, check=True)
                print(done.stdout, end="", flush=True)
                passes[-1] += [json.loads(line) for line in done.stdout.splitlines()]
    result = {
        "cases": len(passes[0]),
        "mean_error": [round(fmean(abs(record["error"]) for record in records), 3) for records in passes],
        "mean_error_beside_reference": [
            round(fmean(abs(record["error_beside_reference"]) for record in records), 3) for records in passes
        ],
        "mean_reference": [round(fmean(record["reference"] for record in records), 3) for records in passes],
        "mean_signed_error": [round(fmean(record["error"] for record in records), 3) for records in passes],
        "worst_error": [max((record["error"] for record in records), key=abs) for records in passes],
        "repeats_to": repeatability(*passes[:2]) if args.passes > 1 else None,
        "threads": torch.get_num_threads(),
    }
    print(json.dumps(result))


def repeatability(first: list[dict[str, Any]], second: list[dict[str, Any]]) -> float:
    """By how much the seconds of the same plans differ, relative to the mean of both."""
    plan = ("stages", "tiles", "tile", "workers")
    pairs = zip(first, second, strict=True)
    same = [(a["measured"], b["measured"]) for a, b in pairs if all(a[key] == b[key] for key in plan)]
    return round(fmean(2 * abs(a - b) / (a + b) for a, b in same), 3)


if __name__ == "__main__":
    main()
