"""What ranks tell each other, tried with threads that stand for them; processes are in tests/training/test_fleet.py."""

from __future__ import annotations

from functools import partial

import pytest
import torch
from torch.distributed import TCPStore  # type: ignore[attr-defined]

from gigagrad.errors import ConfigError, RankError
from gigagrad.ranks import Alone, Fleet, fleet, from_environment, is_first, is_restart, run_virtual
from tests.ranks.started import variables_of


@pytest.mark.parametrize("count", [1, 2, 3, 5])
def test_items_are_shared_out_in_their_order(count):
    def work(ranks):
        own, done = [], []

        def find(item):
            own.append(item)
            return item / 3

        found = ranks.shared_out(range(7), find, lambda *told: done.append(told))
        return found, own, done

    results = run_virtual(count, work)
    for rank, (found, own, done) in enumerate(results):
        assert found == [item / 3 for item in range(7)]
        assert own == list(range(rank, 7, count))
        assert done == [(item + 1, item / 3) for item in range(7)]


def test_messages_of_any_length_are_delivered():
    def work(ranks):
        others = set(range(3)) - {ranks.index}
        return ranks.deliver({rank: torch.full((ranks.index + 3 * rank,), ranks.index).byte() for rank in others})

    for rank, found in enumerate(run_virtual(3, work)):
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
            with ranks.as_one():
                if ranks.index == 1:
                    raise error
                ranks.said(1)
        except RankError as other:
            heard.append((str(other), other.told, other.mendable))
            raise

    with pytest.raises(type(error)):
        run_virtual(3, work)
    assert heard == [("rank 1 failed: no", True, mendable)] * 2


def test_without_torchrun_there_is_one(monkeypatch):
    for name in ("RANK", "WORLD_SIZE", "MASTER_ADDR", "TORCHELASTIC_RESTART_COUNT"):
        monkeypatch.delenv(name, raising=False)
    assert isinstance(from_environment(), Alone)
    assert is_first()
    assert not is_restart()
    monkeypatch.setenv("WORLD_SIZE", "1")
    monkeypatch.setenv("RANK", "0")
    monkeypatch.setenv("MASTER_ADDR", "localhost")
    assert isinstance(from_environment(), Alone)
    monkeypatch.setenv("RANK", "3")
    monkeypatch.setenv("TORCHELASTIC_RESTART_COUNT", "2")
    assert not is_first()
    assert is_restart()


def test_a_mesh_is_of_as_many_ranks_as_there_are():
    fleet = Fleet.of(Alone())
    assert (fleet.data.count, fleet.tile.count, fleet.first) == (1, 1, True)
    with pytest.raises(ConfigError, match="a mesh of 2x2 takes 4 ranks, got 1"):
        Fleet.of(Alone(), (2, 2))
    for mesh, counts in (((1, 3), (1, 3)), ((3, 1), (3, 1)), (None, (1, 3))):
        made = run_virtual(3, partial(Fleet.of, mesh=mesh))
        assert [(fleet.data.count, fleet.tile.count) for fleet in made] == [counts] * 3
        assert [fleet.first for fleet in made] == [True, False, False]


@pytest.mark.parametrize("rank", [0, 1])
def test_who_does_not_join_is_not_waited_for_without_end(rank, monkeypatch):
    monkeypatch.setattr(fleet, "_JOINING_SECONDS", 1.0)
    (own, *_) = [variables for variables in variables_of(2) if variables["RANK"] == str(rank)]
    for name, value in (own | {"OMP_NUM_THREADS": "1"}).items():
        monkeypatch.setenv(name, value)
    with pytest.raises(RankError, match="some of 2 ranks did not join within 1 s"):
        from_environment(timeout=1.0)


def test_who_does_not_join_is_named_where_somebody_else_keeps_the_store(monkeypatch):
    monkeypatch.setattr(fleet, "_JOINING_SECONDS", 1.0)
    server = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    for name, value in next(iter(variables_of(3))).items():
        monkeypatch.setenv(name, value)
    monkeypatch.setenv("MASTER_PORT", str(server.port))
    monkeypatch.setenv("TORCHELASTIC_USE_AGENT_STORE", "True")  # as torchrun does
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    for waiting in ("ranks 1, 2", "rank 1"):
        with pytest.raises(RankError, match=f"^{waiting} did not join within 1 s"):
            from_environment(timeout=1.0)
        server.set("gigagrad-0/joined-2", "")
