"""What rates make of a graph: seconds, and tiles."""

import dataclasses

import pytest

from gigagrad.devices import Machine
from tests.plans.networks import plan_of


def test_a_backward_takes_longer_and_two_threads_less(unet, gate):
    tiles = ((40, 40),)
    for graph in (unet, gate):
        full = plan_of(graph, machine=Machine(), tiles=tiles).predicted_seconds
        assert 0 < plan_of(graph, machine=Machine(), backward=False, tiles=tiles).predicted_seconds < full
        assert plan_of(graph, machine=Machine(threads=2), tiles=tiles).predicted_seconds < full


def test_passes_share_out_the_predicted_time(gate):
    plan = plan_of(gate, machine=Machine())
    assert len(plan.passes) > 1
    assert sum(plan.pass_shares) == pytest.approx(1)
    timed = dataclasses.replace(plan, timed_seconds=(3.0, 1.0, *(0.0 for _ in plan.passes[2:])))
    assert timed.predicted_seconds == 4
    assert timed.pass_shares[:2] == (0.75, 0.25)


def test_dearer_calls_make_larger_tiles(unet):
    """What the rates say decides: where every call costs a fortune, there are few of them."""
    cheap = plan_of(unet, machine=Machine(seconds_per_operator=0.0))
    dear = plan_of(unet, machine=Machine(seconds_per_operator=10.0))
    assert dear.tile_count == 1 <= cheap.tile_count
