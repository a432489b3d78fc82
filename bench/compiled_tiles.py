"""A tile compiled ahead of time beside the same tile run operator by operator: what a compiler would bring.

    python bench/compiled_tiles.py [--model paper-unet] [--tile 800] [--stages 0 1 ...] [--repeats 9]

The middle tile of a backward sweep over 3 x 3 tiles is recorded with what it read. Its function, from crops and
parameters to sums and vector-Jacobian products, is traced to ATen operators (`make_fx`: the gradient is derived ahead
of time) and compiled by Inductor for these shapes. Both run on one thread, in turns. Prints one
JSON line last: CPU seconds per gigapixel of the tile, the processor's and the clock's seconds of tracing and compiling,
and by how much results differ.
"""

from __future__ import annotations

import argparse
import json
import resource
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import torch.nn.functional as F
from torch.fx.experimental.proxy_tensor import make_fx

import gigagrad as gg
import tests.torchvision_operators  # noqa: F401
from gigagrad.execution.tile import StageProgram, TileInputs

Tile = tuple[StageProgram, Any, TileInputs, dict[int, torch.Tensor], dict[int, torch.Tensor]]
Function = Callable[..., tuple[torch.Tensor, ...]]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="paper-unet")
    parser.add_argument("--tile", type=int, default=800, help="side in pixels")
    parser.add_argument("--stages", type=int, nargs="+", help="default: all that have a tile in the middle")
    parser.add_argument("--repeats", type=int, default=9)
    args = parser.parse_args()
    found = recorded(args.model, args.tile)
    torch.set_num_threads(1)
    results = {}
    for index in args.stages or sorted(found):
        results[str(index)] = compared(found[index], args)
        print(index, results[str(index)], flush=True)
    print(json.dumps({"model": args.model, "tile": args.tile, "stages": results}))


def recorded(model: str, side: int) -> dict[int, Tile]:
    """What the fifth of nine tiles of each stage is given in a backward sweep."""
    seen: dict[int, int] = {}
    found: dict[int, Tile] = {}
    run = StageProgram.run_for_gradient

    def copies(values: dict[int, torch.Tensor]) -> dict[int, torch.Tensor]:
        return {i: value.detach().clone().requires_grad_(value.requires_grad) for i, value in values.items()}

    def noting(self: StageProgram, tile: Any, inputs: TileInputs, globals_: Any, cotangents: Any, *more: Any) -> Any:
        index = self.stage.index
        seen[index] = seen.get(index, 0) + 1
        if seen[index] == 5:
            own = TileInputs(copies(inputs.crops), copies(inputs.cotangents), copies(inputs.stored))
            program = StageProgram(self.graph, self.stage, self.device)
            found[index] = program, tile, own, copies(globals_), copies(cotangents)
        return run(self, tile, inputs, globals_, cotangents, *more)

    StageProgram.run_for_gradient = noting  # type: ignore[assignment, method-assign]
    torch.manual_seed(0)
    image = torch.randint(0, 256, (3, 3 * side, 3 * side), dtype=torch.uint8)
    mask = torch.randint(0, 2, (1, 3 * side, 3 * side), dtype=torch.uint8)
    net = gg.models.resolve(model)
    given = image if model == "paper-unet" else image.float() / 255
    engine = gg.compile(net, lambda y, t: F.binary_cross_entropy_with_logits(y, t.float()), tile=(side, side))
    engine.backward(given, mask)
    StageProgram.run_for_gradient = run  # type: ignore[method-assign]
    return found


def as_function(tile: Tile) -> tuple[Function, list[torch.Tensor]]:
    """The tile as a function of everything that it reads."""
    program, geometry, inputs, globals_, cotangents = tile
    parts = (inputs.crops, inputs.cotangents, inputs.stored, globals_, cotangents)
    names = [(part, i) for part, values in enumerate(parts) for i in values]
    wants = {(part, i): parts[part][i].requires_grad for part, i in names}

    def run(*given: torch.Tensor) -> tuple[torch.Tensor, ...]:
        values: tuple[dict[int, torch.Tensor], ...] = tuple({} for _ in parts)
        for (part, i), value in zip(names, given, strict=True):
            values[part][i] = value.detach().requires_grad_(wants[part, i])
        leaves = [values[part][i] for part, i in names if part in (0, 3) and wants[part, i]]
        sums, outputs, seeds = program.run_for_gradient(geometry, TileInputs(*values[:3]), values[3], values[4])
        found = torch.autograd.grad(outputs, leaves, seeds, allow_unused=True) if outputs and leaves else ()
        return (*sums.values(), *(gradient for gradient in found if gradient is not None))

    return run, [parts[part][i].detach() for part, i in names]


def compared(tile: Tile, args: argparse.Namespace) -> dict[str, Any]:
    run, given = as_function(tile)
    start, cpu = time.perf_counter(), cpu_seconds()
    traced = make_fx(run)(*given)
    with torch.no_grad():
        compiled = torch.compile(traced, fullgraph=True, dynamic=False)
        made = compiled(*given)
        costs = {"wall": time.perf_counter() - start, "cpu": cpu_seconds() - cpu}
        expected = run(*given)
        best = {"by rows": float("inf"), "compiled": float("inf")}
        for _ in range(args.repeats):
            for name, one in (("by rows", run), ("compiled", compiled)):
                before = cpu_seconds()
                one(*given)
                best[name] = min(best[name], cpu_seconds() - before)
    gigapixels = max(tile[1].wanted(i).area for i in tile[0].targets) / 1e9
    errors = [
        ((a - b).abs().max() / a.abs().max().clamp(min=1e-30)).item() for a, b in zip(expected, made, strict=True)
    ]
    return {
        "cpu_seconds_per_gigapixel": {name: round(seconds / gigapixels, 1) for name, seconds in best.items()},
        "compile_seconds": {name: round(seconds, 1) for name, seconds in costs.items()},
        "largest_difference": max(errors),
    }


def cpu_seconds() -> float:
    """Of this process and of the compilers that it started."""
    own, children = (resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN))
    return own.ru_utime + own.ru_stime + children.ru_utime + children.ru_stime


if __name__ == "__main__":
    main()
