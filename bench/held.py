"""What ranks that share an image hold and send of its fields, by the plan alone, beside what they could not do without.

    python bench/held.py [--side 4096] [--ranks 2 3 4 5 7 8 16 64] [--networks NAME ...]

Of the bytes of all kept fields, `held` is the part that the rank with most has, over an even share and what its tiles
read of others' pixels; `cotangents` the same of their gradients. `sent` is what travels of fields and cotangents over
the halo volume: for each rank, the pixels that it reads and others write, once forward for each kept field, and
backward those that it adds to and others want, once for each segment that reads the field. All are 0 where a plan keeps
nothing. Prints a line for each network and number of ranks, and one JSON line last.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import sys
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import gigagrad as gg
from bench.deep_step import FromBytes, loss
from gigagrad.boxes import Box, apart, without
from gigagrad.plans import Plan, Problem, make_plan
from gigagrad.plans.partition import Partition

_NETWORKS = ("paper-unet", "smp:Unet?encoder_name=resnet34", "timm:resnet18", "smp:FPN?encoder_name=efficientnet-b0")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--side", type=int, default=4096, help="of the image, in pixels")
    parser.add_argument("--ranks", type=int, nargs="+", default=[2, 3, 4, 5, 7, 8, 16, 64])
    parser.add_argument("--networks", nargs="+", default=_NETWORKS)
    args = parser.parse_args()
    line = {name: of_network(name, args.side, args.ranks) for name in args.networks}
    print(json.dumps({"side": args.side, "networks": line}))


def of_network(name: str, side: int, counts: Iterable[int]) -> dict[int, dict[str, float]]:
    model = gg.models.resolve(name).train()
    label = name.startswith("timm:")
    engine = gg.compile(
        FromBytes(model) if name.startswith(("smp:", "timm:")) else model,
        torch.nn.functional.cross_entropy if label else loss,
        progress=False,
    )
    target = torch.tensor([1]) if label else torch.zeros(1, side, side, dtype=torch.uint8)
    problem, found = engine.problem(torch.zeros(3, side, side, dtype=torch.uint8), target), {}
    for count in counts:
        planned = dataclasses.replace(problem, ranks=count)
        found[count] = _Shared(planned, make_plan(planned, memory_format="channels_last")).found()
        print(f"{name:34} {count:3} ranks: {found[count]}", flush=True)
    return found


class _Shared:
    """The kept fields of a plan that several ranks share; those that every rank has whole are left out."""

    def __init__(self, problem: Problem, plan: Plan) -> None:
        self.graph = problem.graph
        self.partition = Partition(self.graph, plan, problem.ranks)
        self.kept = [field.node for field in plan.kept if not self.graph.gathers(field.node)]
        self.moved = [i for i in self.kept if self.graph[i].differentiable]
        self.adding = [(i, segment) for i in self.moved for segment in self.partition.adding(i)]

    def found(self) -> dict[str, float]:
        partition = self.partition
        ranks = range(partition.count)
        pairs = [(a, b) for a in ranks for b in ranks if a != b]
        halos = [sum(self.nbytes(i, self.halo(i, rank)) for i in self.kept) for rank in ranks]
        added = sum(self.nbytes(i, self.added(i, segment, rank)) for i, segment in self.adding for rank in ranks)
        sent = sum(self.nbytes(i, partition.halo(i, *pair)) for i in self.kept for pair in pairs)
        for i, segment in self.adding:
            for pair in pairs:
                overlaps = [box for _, box in partition.overlaps(segment, i, *pair)]
                sent += self.nbytes(i, [*partition.sums(segment, i, *pair), *overlaps])

        def unevenness(fields: Sequence[int], held: Callable[[int, int], list[Box]]) -> float:
            if not fields:
                return 0.0
            whole = sum(self.nbytes(i, [partition.whole(i)]) for i in fields)
            own = [sum(self.nbytes(i, held(i, rank)) for i in fields) for rank in ranks]
            return round(max(mine / (whole / partition.count + halo) for mine, halo in zip(own, halos, strict=True)), 3)

        return {
            "held": unevenness(self.kept, partition.held),
            "cotangents": unevenness(self.moved, partition.held_cotangents),
            "sent": round(sent / (sum(halos) + added), 3) if sent else 0.0,
        }

    def nbytes(self, field: int, boxes: Iterable[Box]) -> int:
        return self.graph[field].bytes_per_pixel * sum(box.area for box in boxes)

    def halo(self, field: int, rank: int) -> list[Box]:
        """What a rank reads and others write."""
        return without(self.partition.held(field, rank), self.partition.written(field, rank))

    def added(self, field: int, segment: int, rank: int) -> list[Box]:
        """What a rank adds to and others want."""
        wanted = self.partition.wanted_next(segment, field, rank)
        return without(apart(self.partition.read(segment, field, rank)), wanted)


if __name__ == "__main__":
    main()
