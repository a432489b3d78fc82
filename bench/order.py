"""What a fixed order of sums costs, against sums in the order in which tiles are done.

    python bench/order.py [--height 1024] [--width 2048] [--rounds 5] [--workers 2] [--networks NAME ...]

A step as planned adds tiles up in chunks, chunks in a tree, and what overlaps between chunks in sums of its own. The
same step with one chunk a segment, whose tiles are added up as they are done, is what is paid without. Counted are the
bytes that operators move by one worker, of the step and of the pass that order costs most; timed are whole steps
in turn, by processor time and by the clock, and their longer passes, of which the medians count. Prints one JSON line
last.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import sys
import time
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor, as_completed
from contextlib import ExitStack
from pathlib import Path
from statistics import median
from typing import Any
from unittest.mock import patch

import torch
import torch.nn.functional as F
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from gigagrad.execution.executor import Executor
from gigagrad.execution.tile_loops import TileLoops
from gigagrad.models import resolve
from gigagrad.plans.emit import shared_by
from gigagrad.ranks import SingleRank
from gigagrad.threads import operator_threads
from tests.execution.by_ranks import RankRun, outcome, prepared_for

NETWORKS = {
    "paper-unet": "paper-unet",
    "Unet(resnet18)": "smp:Unet?encoder_name=resnet18&encoder_weights=none",
}
LONG = 0.05
"""The share of a step from which on a pass is timed by itself."""


class Bytes(TorchDispatchMode):
    """Count the bytes that operators read and write, views and empty tensors left out."""

    total = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        found = func(*args, **(kwargs or {}))
        if not func.is_view and "empty" not in func.__name__:
            tensors = [one for one in tree_leaves((args, kwargs, found)) if isinstance(one, torch.Tensor)]
            self.total += sum(one.nbytes for one in tensors)
        return found


class AsDone(Executor):
    """Compute tiles in threads and deliver them as they are done, whatever their order."""

    def __init__(self, workers: int, threads: int) -> None:
        super().__init__(1, threads)
        self._side, self.at_a_time = ThreadPoolExecutor(workers), workers

    def in_order(self, items: Iterable[Any], work: Callable[[Any], Any]) -> Iterator[Any]:
        waiting = set()
        with operator_threads(1):
            for item in items:
                waiting.add(self._side.submit(work, item))
                while len(waiting) > self.at_a_time:
                    done = next(as_completed(waiting))
                    waiting.remove(done)
                    yield done.result()
            for done in as_completed(waiting):
                yield done.result()

    def close(self) -> None:
        self._side.shutdown()


def changed(run: RankRun, *, workers: int, chunks: int | None = None) -> RankRun:
    """Return the step with so many workers and, where named, so many chunks of every segment."""
    plan, planner = run.prepared.plan, run.engine._planner
    if chunks is not None:
        plan = dataclasses.replace(plan, segments=tuple(dataclasses.replace(s, chunks=chunks) for s in plan.segments))
        plan = dataclasses.replace(plan, steps=shared_by(run.prepared.problem, plan, 1).steps)
    plan = dataclasses.replace(plan, workers=workers)
    return dataclasses.replace(run, prepared=planner._prepared(run.prepared.problem, plan))


def metered(passes: dict[str, float], meter: Callable[[], float]) -> ExitStack:
    """Have each pass of steps that run meanwhile note what a meter gained over it."""

    def metering(one_pass: Callable[..., Any]) -> Callable[..., Any]:
        def run_pass(loops: TileLoops, step: Any, *more: Any) -> Any:
            before = meter()
            found = yield from one_pass(loops, step, *more)
            passes[f"{step.segment} {step.phase}"] = meter() - before
            return found

        return run_pass

    stack = ExitStack()
    for name in ("forward", "gradients"):
        stack.enter_context(patch.object(TileLoops, name, metering(getattr(TileLoops, name))))
    return stack


def moved_bytes(run: RankRun) -> tuple[int, dict[str, float]]:
    """Count the bytes that a step moves, and each of its passes. A step before has set up what is set up once."""
    counter, passes = Bytes(), dict[str, float]()
    outcome(run, SingleRank())
    with metered(passes, lambda: counter.total), counter:
        outcome(run, SingleRank())
    return counter.total, passes


def counted(run: RankRun) -> dict[str, Any]:
    """Count what order costs, in bytes: of the step, and of the pass that it costs most."""
    (whole, passes), (plain, as_done) = (moved_bytes(changed(run, workers=1, chunks=n)) for n in (None, 1))
    costs = {name: passes[name] / as_done[name] - 1 for name in passes}
    return {
        "bytes": whole,
        "bytes_as_done": plain,
        "cost": whole / plain - 1,
        "cost_of_a_pass": {"median": median(costs.values()), "most": max(costs.values())},
    }


def timed(run: RankRun, workers: int, rounds: int) -> dict[str, Any]:
    """Time steps of both kinds in turn, and the passes of which each takes a twentieth of the step or more."""
    kinds = {"ordered": changed(run, workers=workers), "as_done": changed(run, workers=workers, chunks=1)}
    found: dict[str, list[tuple[float, float]]] = {kind: [] for kind in kinds}
    passes: dict[str, list[dict[str, float]]] = {kind: [] for kind in kinds}
    for _ in range(rounds + 1):
        for kind, one in kinds.items():
            passes[kind].append({})
            by_turn = workers > 1 and kind == "as_done"
            as_done = patch("gigagrad.execution.run.Executor", AsDone) if by_turn else ExitStack()
            with as_done, metered(passes[kind][-1], time.perf_counter):
                start = time.perf_counter(), time.process_time()
                outcome(one, SingleRank())
                found[kind].append((time.perf_counter() - start[0], time.process_time() - start[1]))
    seconds = {kind: [median(each) for each in zip(*rows[1:], strict=True)] for kind, rows in found.items()}
    (wall, cpu), (wall_as_done, cpu_as_done) = seconds["ordered"], seconds["as_done"]
    ordered, as_done_passes = (
        {name: median(one[name] for one in passes[kind][1:]) for name in passes[kind][0]} for kind in kinds
    )
    costs = {
        name: round(ordered[name] / taken - 1, 4)
        for name, taken in as_done_passes.items()
        if taken >= LONG * wall_as_done
    }
    return {
        "seconds": wall,
        "seconds_as_done": wall_as_done,
        "cost_by_the_clock": wall / wall_as_done - 1,
        "cost_in_processor_time": cpu / cpu_as_done - 1,
        "cost_of_long_passes": costs,
    }


def step_of(name: str, height: int, width: int, **options: Any) -> RankRun:
    torch.manual_seed(0)
    model = resolve(name).train()
    image = torch.randint(0, 256, (3, height, width), dtype=torch.uint8)
    target = (torch.rand(1, height, width) > 0.5).float()
    return prepared_for(model, F.binary_cross_entropy_with_logits, image, target, **options)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--height", type=int, default=1024)
    parser.add_argument("--width", type=int, default=2048)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--memory", default="1GiB")
    parser.add_argument("--networks", nargs="+", default=list(NETWORKS))
    args = parser.parse_args()
    rows = {}
    for name in args.networks:
        run = step_of(NETWORKS[name], args.height, args.width, memory=args.memory)
        rows[name] = {"segments": [[s.tile_count, s.chunks] for s in run.prepared.plan.segments], **counted(run)}
        if args.rounds:
            rows[name] |= timed(run, args.workers, args.rounds)
        print(name, rows[name], flush=True)
    print(json.dumps({**vars(args), "torch": torch.__version__, "rows": rows}))


if __name__ == "__main__":
    main()
