"""Seed random operators: one number for each run, and of it a seed for each operator.

So neither the order in which a plan computes them, nor what else it draws, nor who computes, shows in a mask.
"""

from __future__ import annotations

import threading
from collections.abc import Mapping
from types import MappingProxyType
from typing import Final

import torch

from gigagrad.graphs import Graph, Node
from gigagrad.graphs.draws import draws as may_draw
from gigagrad.graphs.graph import remembered
from gigagrad.graphs.operators import function, scrambled
from gigagrad.ranks import Ranks

GENERATORS: Final = threading.RLock()
"""Held by whoever seeds PyTorch's generators, which are those of all threads."""
SEED = "gigagrad.seed"
ROUNDINGS = -1
"""In the place of an operator's number: what rounds kept fields."""


def draws_of(run: int, seed: int | None, ranks: Ranks, *, drawn: bool) -> int:
    """Return the number that a run draws from, on all ranks the same, and set their generators to the first one's. With
    `seed`, the n-th run draws what the n-th run of any other engine with it draws; without, what the first rank's
    generator of PyTorch gives. 0, and nothing is taken from that generator, where nothing is `drawn`.
    """
    if seed is not None:
        # Any two (seed, run) pairs start apart: the multiplier is odd and larger than any number of runs.
        number = (seed * 1_000_003 + run) % 2**63
        return int(ranks.all_gather_object(number)[0]) if drawn else 0
    own = None
    if ranks.index == 0:
        own = int(torch.randint(2**62, ())) if drawn else 0, bytes(torch.get_rng_state().numpy()).hex()
    number, state = ranks.all_gather_object(own)[0] if ranks.count > 1 or own is None else own
    if ranks.index:
        with GENERATORS:
            torch.set_rng_state(torch.frombuffer(bytearray.fromhex(state), dtype=torch.uint8))
    return int(number)


@remembered
def drawing(graph: Graph) -> Mapping[int, int]:
    """Return the nodes that draw random numbers, each with a number of its own."""
    drawn = (node.id for node in graph.nodes if _draws(node))
    return MappingProxyType({i: number for number, i in enumerate(drawn)})


def seed_values(graph: Graph, draws: int) -> dict[int, torch.Tensor]:
    """Return what a run draws for the operators `gigagrad.seed`, as it would itself."""
    return {i: key_of(draws, number) for i, number in drawing(graph).items() if graph[i].op == SEED}


def key_of(run: int, number: int) -> torch.Tensor:
    """Return what an operator `gigagrad.seed` draws in a run, from a generator of its own."""
    return torch.randint(0, 2**62, (), generator=torch.Generator().manual_seed(seed_of(run, number)))


def seed_of(run: int, number: int) -> int:
    """Return what one of them is seeded with in a run, or `ROUNDINGS`."""
    return int(scrambled(torch.tensor(number), run)) % 2**63


def _draws(node: Node) -> bool:
    if node.is_source or node.op.startswith("gigagrad."):
        return node.op == SEED
    return may_draw(function(node.op), node.arguments)
