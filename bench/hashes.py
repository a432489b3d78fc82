"""The bits of 100 generated networks: what a change that is to leave the arithmetic alone must give again.

    python bench/hashes.py [--networks 100] [--first 0] [--expect bench/results/2026-11-29-hashes.json]

Even numbers are networks of tests/exactness/generated.py, odd ones of tests/exactness/networks, all in float64. Each
takes one step with forced tiles, one in a small budget, and one as it is planned freely (in tiles), by one process;
every fourth network with forced tiles also by two, three, four or five ranks, in threads. A budget of 2 or 3 MiB is
replaced by the smallest that works. For it and the free plan images of even numbers are six times as large. A hash is
SHA-256 of the loss, all gradients and all buffers, of which the first 16 digits are told; they are those of one
processor and one build of PyTorch. Memory is counted on a device of this script's own, whose process weighs nothing, so
that plans are the same in every run. Prints what ranks do not agree on and what is not as expected, and one JSON line
last; exits with 1 if there was any.
"""

from __future__ import annotations

import argparse
import gc
import json
import random
import sys
import time
import warnings
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from gigagrad.devices import Device, Machine
from gigagrad.errors import BudgetError
from tests.exactness import generated, networks
from tests.exactness.networks.cases import Case
from tests.ranks.bits import bits_by_ranks

RANKS = (2, 3, 4, 5)
DIGITS = 16


class Weightless(Device):
    """The host, of which one thread computes at typical rates and nothing is held but what a plan holds."""

    kind = "weightless"
    is_host = True

    def __init__(self) -> None:
        super().__init__(self.kind, "cpu")

    def held_bytes(self) -> int:
        return 0

    def peak_bytes(self) -> int:
        return 0

    def trim(self) -> None:
        """There is nothing to give back."""

    def machine(self, say: object = None) -> Machine:
        return Machine()


def make_subject(number: int) -> Case:
    """Makes the network of that number, from its seed alone."""
    if number % 2 == 0:
        case = generated.make_case(number // 2)
        return Case(case.model, case.loss, case.image, case.target, case.tile)
    draw, recipe = random.Random(f"hashes {number}").randint, None
    while recipe is None:
        recipe = networks.draw_recipe(draw)
    return networks.make_case(recipe)


def enlarge(subject: Case) -> Case:
    """Repeats the image, and its target as far as the output then reaches: budgets bound larger fields."""
    image, target = subject.image.repeat(1, 6, 6), subject.target
    if target.ndim == 3:
        with torch.no_grad():
            height, width = subject.model(image[None]).shape[-2:]
        target = target.repeat(1, -(-height // target.shape[1]), -(-width // target.shape[2]))[:, :height, :width]
    return replace(subject, image=image, target=target.contiguous())


def hash_subject(number: int) -> tuple[dict[str, str], list[str], int]:
    """Returns the hash of each placement, what ranks do not agree on, and how many steps by ranks were taken."""
    subject = make_subject(number)
    larger = enlarge(subject) if number % 2 == 0 else subject
    places: dict[str, tuple[Case, dict[str, Any]]] = {
        "tile": (subject, {"tile": subject.tile}),
        "budget": (larger, {"memory": (3 if number % 2 == 0 else 2) * 2**20}),
        "free": (larger, {}),
    }
    found, apart, steps = dict[str, str](), list[str](), 0
    for place, (one, options) in places.items():
        ranks = [RANKS[number // 8 % len(RANKS)]] if place == "tile" and number % 8 in (0, 3) else []
        hashed = partial(bits_by_ranks, one.model, one.loss, one.image, one.target, ranks=ranks, device=Weightless())
        try:
            alone, *others = hashed(**options)
        except BudgetError as error:
            alone, *others = hashed(memory=error.smallest_bytes)
        except Exception as error:  # one process does it, or there is nothing to hash
            alone, others = hashed(ranks=[], **options)[0], [f"{type(error).__name__}: {error}"]
        found[place] = alone[:DIGITS]
        apart += [f"{place} by {n} ranks: {bits}" for n, bits in zip(ranks, others, strict=True) if bits != alone]
        steps += len(others)
    return found, apart, steps


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--networks", type=int, default=100)
    parser.add_argument("--first", type=int, default=0, help="the first number")
    parser.add_argument("--expect", type=Path, help="a file of bench/results")
    args = parser.parse_args()
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    gc.collect()
    gc.freeze()  # what was imported need not be looked through in every capture
    expected = json.loads(args.expect.read_text())["result"]["hashes"] if args.expect else {}
    hashes: dict[str, dict[str, str]] = {}
    apart = differing = steps = 0
    start = time.perf_counter()
    for number in range(args.first, args.first + args.networks):
        hashes[str(number)], disagreeing, taken = hash_subject(number)
        steps += taken
        apart += len(disagreeing)
        wanted = expected.get(str(number), {})
        other = [place for place, bits in hashes[str(number)].items() if args.expect and wanted.get(place) != bits]
        differing += len(other)
        if disagreeing or other:
            print(f"network {number}: ranks differ: {disagreeing}; not as expected: {other}", flush=True)
        if number % 10 == 9:
            print(f"up to number {number}, {time.perf_counter() - start:.0f} s", file=sys.stderr)
    line = {
        "networks": args.networks,
        "first": args.first,
        "hashes_compared": sum(map(len, hashes.values())),
        "differing": differing if args.expect else None,
        "steps_by_ranks": steps,
        "differing_among_ranks": apart,
        "seconds": round(time.perf_counter() - start, 1),
        "hashes": hashes,
    }
    print(json.dumps(line))
    return int(differing + apart > 0)


if __name__ == "__main__":
    sys.exit(main())
