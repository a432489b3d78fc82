"""A tile compiled ahead of time beside the same tile run operator by operator: what a compiler would bring.

    python bench/compiled_tiles.py [--model paper-unet] [--eval] [--side 2400] [--memory 8GiB]
        [--most 100] [--repeats 5]

The middle tile of every stage's backward sweep, in the plan for an image of `--side` px, is recorded with what it read.
Its function, from crops and parameters to sums and vector-Jacobian products, is traced to ATen operators (`make_fx`:
the gradient is derived ahead of time) and compiled by Inductor for these shapes. Both run on one thread, in turns; the
`--most` stages that take longest. Prints one JSON line last: CPU seconds of each stage's tiles either way, the
processor's and the clock's seconds of tracing and compiling, and by how much results differ.
"""

from __future__ import annotations

import argparse
import json
import resource
import sys
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from torch.fx.experimental.proxy_tensor import make_fx

import gigagrad as gg
from bench.deep_step import loss, network, pair
from gigagrad.execution.tile_program import PassContext, TileInputs, TileProgram

Tile = tuple[TileProgram, Any, TileInputs, dict[int, torch.Tensor], dict[int, torch.Tensor], Mapping[int, torch.Tensor]]
Function = Callable[..., tuple[torch.Tensor, ...]]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="paper-unet")
    parser.add_argument("--eval", action="store_true", help="norms with running statistics")
    parser.add_argument("--side", type=int, default=2400, help="of the image, in pixels")
    parser.add_argument("--memory", default="8GiB")
    parser.add_argument("--most", type=int, default=100, help="how many stages")
    parser.add_argument("--repeats", type=int, default=5)
    args = parser.parse_args()
    found, counts = recorded(args)
    torch.set_num_threads(1)
    functions = {index: as_function(tile) for index, tile in found.items()}
    by_rows = {index: counts[index] * best_of(2, run, given) for index, (run, given) in functions.items()}
    longest = sorted(by_rows, key=lambda index: -by_rows[index])[: args.most]
    stages = {}
    for index in sorted(longest):
        stages[str(index)] = compared(*functions[index], counts[index], args.repeats)
        print(index, stages[str(index)], flush=True)
    total = {
        name: round(sum(stage["cpu_seconds"][name] for stage in stages.values()), 2) for name in ("by rows", "compiled")
    }
    left = round(sum(seconds for index, seconds in by_rows.items() if index not in longest), 2)
    compiling = round(sum(stage["compile_seconds"]["cpu"] for stage in stages.values()), 1)
    line = {"model": args.model, "eval": args.eval, "side": args.side, "memory": args.memory, "stages": stages}
    print(
        json.dumps({**line, "cpu_seconds": total, "compile_cpu_seconds": compiling, "not_compiled_cpu_seconds": left})
    )


def recorded(args: argparse.Namespace) -> tuple[dict[int, Tile], dict[int, int]]:
    """What the middle tile of each stage is given in a backward sweep, and of how many it is one."""
    seen: dict[int, int] = {}
    found: dict[int, Tile] = {}
    run = TileProgram.outputs

    def copies(values: dict[int, torch.Tensor]) -> dict[int, torch.Tensor]:
        return {i: value.detach().clone().requires_grad_(value.requires_grad) for i, value in values.items()}

    def noting(
        self: TileProgram,
        tile: Any,
        inputs: TileInputs,
        globals_: Any,
        cotangents: Any,
        context: Any,
        watch: Any,
        known: Any,
    ) -> Any:
        index = self.stage.index
        if seen.get(index, 0) == counts[index] // 2:
            own = TileInputs(copies(inputs.crops), copies(inputs.cotangents), copies(inputs.stored))
            found[index] = self, tile, own, copies(globals_), copies(cotangents), known
        seen[index] = seen.get(index, 0) + 1
        return run(self, tile, inputs, globals_, cotangents, context, watch, known)

    torch.manual_seed(0)
    image, target = pair(args, args.side, args.side)
    net = gg.models.resolve(args.model) if args.model == "paper-unet" else network(args)
    engine = gg.compile(net, loss, memory=args.memory)
    counts = {stage.index: stage.tile_count for stage in engine.plan(image, target).stages}
    TileProgram.outputs = noting  # type: ignore[assignment, method-assign]
    engine.backward(image, target)
    TileProgram.outputs = run  # type: ignore[method-assign]
    return found, counts


def as_function(tile: Tile) -> tuple[Function, list[torch.Tensor]]:
    """The tile as a function of everything that it reads."""
    program, geometry, inputs, globals_, cotangents, known = tile
    parts = (inputs.crops, inputs.cotangents, inputs.stored, globals_, cotangents)
    names = [(part, i) for part, values in enumerate(parts) for i in values]
    wants = {(part, i): parts[part][i].requires_grad for part, i in names}

    def run(*given: torch.Tensor) -> tuple[torch.Tensor, ...]:
        values: tuple[dict[int, torch.Tensor], ...] = tuple({} for _ in parts)
        for (part, i), value in zip(names, given, strict=True):
            values[part][i] = value.detach().requires_grad_(wants[part, i])
        leaves = [values[part][i] for part, i in names if part in (0, 3) and wants[part, i]]
        sums, outputs, seeds = program.outputs(
            geometry, TileInputs(*values[:3]), values[3], values[4], PassContext(), known=known
        )
        found = torch.autograd.grad(outputs, leaves, seeds, allow_unused=True) if outputs and leaves else ()
        return (*(() if known else sums.values()), *(gradient for gradient in found if gradient is not None))

    return run, [parts[part][i].detach() for part, i in names]


def compared(run: Function, given: list[torch.Tensor], tiles: int, repeats: int) -> dict[str, Any]:
    start, cpu = time.perf_counter(), cpu_seconds()
    traced = make_fx(run)(*given)
    for node in traced.graph.nodes:
        if node.target == torch.ops.aten.view.default:  # where Inductor lays a tensor out otherwise
            node.target = torch.ops.aten.reshape.default
    traced.recompile()
    with torch.no_grad():
        torch._dynamo.reset()  # else the second of one code is not compiled
        compiled = torch.compile(traced, fullgraph=True, dynamic=False)
        made = compiled(*given)
    costs = {"wall": time.perf_counter() - start, "cpu": cpu_seconds() - cpu}
    best = {"by rows": float("inf"), "compiled": float("inf")}
    for _ in range(repeats):
        best["by rows"] = min(best["by rows"], best_of(1, run, given))
        with torch.no_grad():
            best["compiled"] = min(best["compiled"], best_of(1, compiled, given))
    errors = [
        ((a - b).abs().max() / a.abs().max().clamp(min=1e-30)).item() for a, b in zip(run(*given), made, strict=True)
    ]
    return {
        "tiles": tiles,
        "cpu_seconds": {name: round(seconds * tiles, 3) for name, seconds in best.items()},
        "compile_seconds": {name: round(seconds, 1) for name, seconds in costs.items()},
        "largest_difference": max(errors, default=0.0),
    }


def best_of(repeats: int, run: Function, given: list[torch.Tensor]) -> float:
    """CPU seconds."""
    best = float("inf")
    for _ in range(repeats):
        before = cpu_seconds()
        run(*given)
        best = min(best, cpu_seconds() - before)
    return best


def cpu_seconds() -> float:
    """Of this process and of the compilers that it started."""
    own, children = (resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN))
    return own.ru_utime + own.ru_stime + children.ru_utime + children.ru_stime


if __name__ == "__main__":
    main()
