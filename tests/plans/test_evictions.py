"""Which fields leave the memory first, and where they go."""

from dataclasses import replace

from torch import nn

from gigagrad.devices import Machine
from gigagrad.plans.cost import Costs
from gigagrad.plans.evictions import Asked, Eviction, evictions, placed
from gigagrad.plans.segments import split_segments
from gigagrad.stores.disk import PlannedDiskTier
from tests.plans.networks import chain_of, graph_of, kept_at_best, problem_of, residual

USUAL = Machine()
FAST = Machine(disk_write_bytes_per_second=1e15, disk_read_bytes_per_second=1e15, file_bytes_per_second=1e15)


def order_of(graph, kept, room=0, machine=USUAL, dropping=True):
    problem = problem_of(graph, machine=machine)
    disk = PlannedDiskTier(room)
    problem = replace(problem, tiers=(*problem.tiers, disk), rooms={disk.name: room})
    return [*evictions(problem, Costs(graph, machine), frozenset(kept), dropping=dropping, moving=room > 0)]


def test_every_field_leaves_once_and_those_dear_by_the_byte_last():
    """A convolution of many products for few bytes stays longer than one of few for many."""
    dear, cheap = nn.Conv2d(64, 4, 7, padding=3), nn.Conv2d(3, 64, 1)
    graph = graph_of(nn.Sequential(cheap, nn.BatchNorm2d(64), dear, nn.BatchNorm2d(4), nn.Conv2d(4, 1, 1)), size=512)
    kept = kept_at_best(graph)
    order = order_of(graph, kept)
    assert sorted(eviction.field for eviction in order) == kept
    assert all(eviction.tier is None for eviction in order)
    assert [graph[eviction.field].shape[1] for eviction in order] == [64, 4]


def test_fields_go_to_a_tier_where_that_takes_less_time_as_far_as_it_has_room():
    graph = graph_of(residual(3), size=512)
    kept = kept_at_best(graph)
    assert len(kept) > 3
    assert {eviction.tier for eviction in order_of(graph, kept, room=2**40, machine=FAST)} == {"disk"}
    slow = replace(FAST, disk_write_bytes_per_second=1.0)
    assert {eviction.tier for eviction in order_of(graph, kept, room=2**40, machine=slow)} == {None}
    most = max(graph[i].nbytes for i in kept)
    some = [eviction for eviction in order_of(graph, kept, room=2 * most, machine=FAST) if eviction.tier is not None]
    assert 0 < 2 * sum(graph[eviction.field].nbytes for eviction in some) <= 2 * most
    assert len(some) < len(kept)
    assert order_of(graph, kept, room=2 * most, machine=FAST, dropping=False) == some


def test_what_is_dropped_is_computed_again_by_those_that_read_it():
    """As each field goes, the passes that are left take longer, up to those of a plan that keeps nothing."""
    graph = graph_of(residual(2), size=256)
    kept, costs = frozenset(kept_at_best(graph)), Costs(graph, Machine())
    order = order_of(graph, kept)
    left, seconds = dict.fromkeys(kept, "memory"), []
    for eviction in order:
        (left,) = placed(left, [eviction])
        seconds.append(sum(costs.usual_seconds(segment)[0] for segment in split_segments(graph, left)))
    assert not left
    assert seconds[-1] > seconds[0]
    assert len(chain_of(graph).selections()[-1].kept) == 0


def test_fields_are_placed_as_they_leave():
    kept = {1: "memory", 2: "memory", 3: "memory"}
    found = [*placed(kept, [Eviction(2, None), Eviction(3, "disk")])]
    assert found == [{1: "memory", 3: "memory"}, {1: "memory", 3: "disk"}]
    assert kept == {1: "memory", 2: "memory", 3: "memory"}


def test_fields_that_nobody_asks_for_are_not_looked_for():
    found = iter([{1: "memory"}, {2: "memory"}, {3: "memory"}])
    asked = Asked(found, 3)
    assert [asked[1], asked[0], asked[1]] == [{2: "memory"}, {1: "memory"}, {2: "memory"}]
    assert (len(asked), [*found]) == (3, [{3: "memory"}])
