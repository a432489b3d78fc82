"""What ranks tell each other, tried with threads that stand for them; processes are in tests/training/test_mesh.py."""

from __future__ import annotations

from functools import partial

import pytest
import torch

from gigagrad.errors import ConfigError, RankError
from gigagrad.ranks import Mesh, SingleRank, run_threaded


@pytest.mark.parametrize("count", [1, 2, 3, 5])
def test_items_are_shared_out_in_their_order(count):
    def work(ranks):
        own, done = [], []

        def find(item):
            own.append(item)
            return item / 3

        found = ranks.map(range(7), find, lambda *told: done.append(told))
        return found, own, done

    results = run_threaded(count, work)
    for rank, (found, own, done) in enumerate(results):
        assert found == [item / 3 for item in range(7)]
        assert own == list(range(rank, 7, count))
        assert done == [(item + 1, item / 3) for item in range(7)]


def test_messages_of_any_length_are_delivered():
    def work(ranks):
        others = set(range(3)) - {ranks.index}
        return ranks.all_to_all({rank: torch.full((ranks.index + 3 * rank,), ranks.index).byte() for rank in others})

    for rank, found in enumerate(run_threaded(3, work)):
        # What has no length does not travel.
        assert {sender: len(message) for sender, message in found.items()} == {
            sender: sender + 3 * rank for sender in range(3) if sender != rank and sender + 3 * rank
        }
        assert all(set(message.tolist()) == {sender} for sender, message in found.items())


@pytest.mark.parametrize(("error", "mendable"), [(ConfigError("no"), True), (TypeError("no"), False)])
def test_others_hear_whose_error_it_was_and_of_which_kind(error, mendable):
    heard = []

    def work(ranks):
        try:
            with ranks.job_error_scope():
                if ranks.index == 1:
                    raise error
                ranks.all_gather_object(1)
        except RankError as other:
            heard.append((str(other), other.reported, other.mendable))
            raise

    with pytest.raises(type(error)):
        run_threaded(3, work)
    assert heard == [("rank 1 failed: no", True, mendable)] * 2


def test_a_mesh_is_of_as_many_ranks_as_there_are():
    mesh = Mesh.of(SingleRank())
    assert (mesh.data.count, mesh.tile.count, mesh.first) == (1, 1, True)
    with pytest.raises(ConfigError, match="a mesh of 2x2 takes 4 ranks, got 1"):
        Mesh.of(SingleRank(), (2, 2))
    for shape, counts in (((1, 3), (1, 3)), ((3, 1), (3, 1)), (None, (1, 3))):
        made = run_threaded(3, partial(Mesh.of, mesh=shape))
        assert [(mesh.data.count, mesh.tile.count) for mesh in made] == [counts] * 3
        assert [mesh.first for mesh in made] == [True, False, False]
