"""How many threads read: what plans ask for, what it takes, and what a budget leaves of it."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest
from torch import nn

from gigagrad.devices import Machine
from gigagrad.errors import BudgetError
from gigagrad.plans import Plan, estimate, make_plan
from gigagrad.plans.plan import amount_of
from gigagrad.plans.problem import Reading
from tests.plans.networks import MIB, graph_of, problem_of

GRAPH = graph_of(nn.Conv2d(3, 4, 3, padding=1), size=1024)
TILE = (128, 128)


def plan(reading, *, budget=None, tile=TILE, threads=4):
    problem = problem_of(GRAPH, base=100 * MIB, budget=budget, machine=Machine(threads=threads))
    return make_plan(replace(problem, reading=reading), tiles=None if tile is None else (tile,))


def reading(seconds, *, threads=4, beside=True, thread_bytes=0):
    return Reading(seconds={"image": seconds}, threads=threads, beside=beside, thread_bytes=thread_bytes)


def test_what_is_in_memory_is_read_by_one_thread():
    found = plan(reading(0.0))
    assert found.readers == 1
    assert found == plan(Reading())


def test_beside_tiles_no_more_threads_read_than_keep_them_fed():
    computing = plan(Reading()).predicted_seconds
    readers = [plan(reading(share * computing)).readers for share in (0.1, 0.4, 0.7, 1.2, 100)]
    assert readers == [1, 1, 2, 3, 4]


def test_beside_another_device_all_threads_read():
    assert plan(reading(1e-6, threads=16, beside=False)).readers == 16
    assert plan(reading(0.0, threads=16, beside=False)).readers == 1


def test_what_reading_takes_counts_in_the_time():
    computing = plan(Reading()).predicted_seconds
    assert plan(reading(0.4)).predicted_seconds == pytest.approx(computing + 0.1)  # on the same four cores
    long = 100 * computing
    assert plan(reading(long)).predicted_seconds == pytest.approx(computing + long / 4)
    assert plan(reading(long, beside=False)).predicted_seconds == pytest.approx(long / 4)
    assert plan(reading(long, threads=1, beside=False)).predicted_seconds == pytest.approx(long)


@pytest.mark.parametrize("readers", [1, 2, 4])
def test_what_readers_hold_is_counted(readers):
    """Crops that wait, one for each reader and one more, and one in the queue; what further readers make theirs of; and
    the tiles of files that are decoded."""
    found = plan(reading(100.0, threads=readers, beside=False, thread_bytes=1000), threads=2)
    assert (found.readers, found.workers) == (readers, 2)
    crop = 130 * 130 * 3 * 4 + 128 * 128 * 4
    assert amount_of(found.memory_at_peak, estimate.WAITING) == (readers + 2 + readers - 1) * crop + readers * 1000


def test_a_tight_budget_reads_with_fewer_and_has_the_same_tiles():
    def asked(threads):
        return reading(100.0, beside=False, threads=threads, thread_bytes=MIB)

    free, fewer = plan(asked(8), threads=1), plan(asked(7), threads=1)
    each = amount_of(free.memory_at_peak, estimate.WAITING) - amount_of(fewer.memory_at_peak, estimate.WAITING)
    without = free.predicted_peak_bytes - amount_of(free.memory_at_peak, estimate.ALLOCATOR_CACHE)
    found = [plan(asked(8), threads=1, budget=without - short * each) for short in range(8)]
    assert [one.readers for one in found] == [8, 7, 6, 5, 4, 3, 2, 1]
    assert all(one.predicted_peak_bytes <= one.budget_bytes for one in found)
    with pytest.raises(BudgetError):
        plan(asked(8), threads=1, budget=without - 8 * each)


def test_readers_are_told_and_survive_json():
    found = plan(reading(100.0, beside=False))
    assert "tiles at a time, read by 4 threads" in str(found)
    assert "read by" not in str(plan(Reading()))
    data = json.loads(json.dumps(found.to_dict()))
    assert Plan.from_dict(data) == found
    del data["readers"]  # as earlier versions wrote it
    assert Plan.from_dict(data) == replace(found, readers=1)
