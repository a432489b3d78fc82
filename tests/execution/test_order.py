"""Bits depend neither on the order in which tiles are done nor on who computes them, and this costs next to nothing."""

import random
from itertools import islice

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from bench.order import changed, counted
from gigagrad.execution.executor import Executor
from gigagrad.ranks import SingleRank, run_threaded
from tests.execution.by_ranks import outcome, prepared_for


class Shuffled(Executor):
    """Computes some tiles at a time, in an order of its own, and delivers them in order as all executors do."""

    seed = 0

    def __init__(self, workers, threads):
        super().__init__(1, threads)
        self.at_a_time = 5

    def in_order(self, items, work):
        items, draw = iter(items), random.Random(Shuffled.seed)
        while waiting := list(islice(items, self.at_a_time)):
            order = draw.sample(range(len(waiting)), len(waiting))
            found = {i: work(waiting[i]) for i in order}
            yield from (found[i] for i in range(len(waiting)))


def network():
    """Two segments or more: normalised, with halos, and a kept field whose cotangents overlap."""
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Conv2d(1, 4, 5, padding=2), nn.BatchNorm2d(4), nn.ReLU(),
        nn.Conv2d(4, 4, 3, 2), nn.BatchNorm2d(4), nn.ReLU(), nn.ConvTranspose2d(4, 1, 3, 2, output_padding=1),
    )  # fmt: skip


@pytest.fixture(scope="module")
def planned():
    image, target = torch.rand(1, 128, 160), torch.rand(1, 128, 160)
    return prepared_for(network(), F.binary_cross_entropy_with_logits, image, target, tile=(16, 16), seed=0)


def test_any_order_of_tiles_and_any_ranks_have_the_bits_of_one(planned, monkeypatch):
    expected, _ = outcome(changed(planned, workers=1), SingleRank())
    assert outcome(changed(planned, workers=3), SingleRank())[0] == expected
    one_worker = changed(planned, workers=1)
    monkeypatch.setattr("gigagrad.execution.run.Executor", Shuffled)
    for Shuffled.seed in range(3):
        assert outcome(one_worker, SingleRank())[0] == expected
        for count in (2, 3):
            assert {bits for bits, _ in run_threaded(count, lambda ranks: outcome(one_worker, ranks))} == {expected}


def test_tiles_added_up_as_they_are_done_have_other_bits(planned, monkeypatch):
    """So the test above would see it if order did not count."""
    single = changed(planned, workers=1, chunks=1)
    expected, _ = outcome(single, SingleRank())
    monkeypatch.setattr("gigagrad.execution.run.Executor", Shuffled)
    monkeypatch.setattr(Shuffled, "in_order", lambda self, items, work: map(work, reversed(list(items))))
    assert outcome(single, SingleRank())[0] != expected


def test_order_moves_a_few_bytes_more(planned):
    """The headline at small size, in bytes, which no machine's load changes: at most 6 % of a step."""
    cost = counted(planned)
    assert 0 < cost["cost"] <= 0.06
