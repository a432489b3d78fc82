"""How processes come together in a store that may be that of others before them."""

from __future__ import annotations

import threading
from datetime import timedelta

import pytest
from torch.distributed import TCPStore  # type: ignore[attr-defined]

from gigagrad.cli.interrupts import is_first
from gigagrad.errors import ConfigError, RankError
from gigagrad.files import HOST
from gigagrad.ranks import SingleRank, from_environment, launch, mesh
from gigagrad.ranks.mesh import Members, find_members
from gigagrad.ranks.process_group import WatchedStore
from tests.ranks.started import variables_of

TORCHRUN = "RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT", "TORCHELASTIC_ERROR_FILE"


@pytest.fixture
def store():
    return TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False, timeout=timedelta(seconds=60))


def met(store, ranks, count, seconds=60.0):
    """What these ranks find of so many, each by a connection of its own, once all of them are connected."""
    found, connected = {}, threading.Barrier(len(ranks))

    def find(rank):
        own = WatchedStore(store.clone(), 60.0)
        connected.wait(60)
        found[rank] = find_members(own, rank, count, seconds)

    threads = [threading.Thread(target=find, args=(rank,)) for rank in ranks]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return [found[rank] for rank in ranks]


def test_every_start_has_a_number_of_its_own_that_all_know(store):
    for start in (1, 2, 3):
        found = met(store, range(3), 3)
        assert [(one.start, one.missing, one.hosts) for one in found] == [(start, [], [HOST] * 3)] * 3


def test_nobody_takes_what_others_left_for_an_answer(store):
    """Of a first start rank 2 never came, of a second one rank 1."""
    assert [one.missing for one in met(store, [0, 1], 3, 1.0)] == [[2]] * 2
    assert [one.missing for one in met(store, [0, 2], 3, 1.0)] == [[1]] * 2
    assert [(one.start, one.missing) for one in met(store, range(3), 3)] == [(3, [])] * 3


def test_a_first_rank_of_an_earlier_start_gives_way(store):
    found = []
    earlier = threading.Thread(target=lambda: found.extend(met(store, [0], 3, 60.0)))
    earlier.start()
    while not store.add("starts", 0):
        pass
    assert [one.start for one in met(store, range(2), 2)] == [2, 2]
    earlier.join(timeout=60)
    assert [2 in one.missing for one in found] == [True]


def test_who_was_answered_by_a_first_rank_of_an_earlier_start_goes_over_to_the_later_one(store):
    found: dict[str, list[Members]] = {}
    earlier = threading.Thread(target=lambda: found.update(earlier=met(store, [0], 3)))
    follower = threading.Thread(target=lambda: found.update(follower=met(store, [1], 2)))
    earlier.start()
    while not store.add("starts", 0):
        pass
    follower.start()
    while not store.check(["1-1"]):
        pass
    assert [(one.start, one.missing) for one in met(store, [0], 2)] == [(2, [])]
    for thread in (earlier, follower):
        thread.join(timeout=60)
    assert [(one.start, one.missing) for one in found["follower"]] == [(2, [])]
    assert [2 in one.missing for one in found["earlier"]] == [True]


def test_without_torchrun_there_is_one(monkeypatch):
    for name in TORCHRUN:
        monkeypatch.delenv(name, raising=False)
    assert isinstance(from_environment(), SingleRank)
    assert is_first()
    assert launch() == ""
    for name, value in zip(TORCHRUN, ("0", "1", "localhost", "1234"), strict=False):
        monkeypatch.setenv(name, value)
    assert isinstance(from_environment(), SingleRank)
    monkeypatch.setenv("RANK", "3")
    assert not is_first()


def test_a_launch_is_the_same_for_all_that_it_starts(monkeypatch):
    told = set()
    for place in ("attempt_0/0", "attempt_0/1", "attempt_2/1"):
        monkeypatch.setenv("TORCHELASTIC_ERROR_FILE", f"/tmp/torchelastic_x/none_y/{place}/error.json")
        told.add(launch())
    assert told == {f"{HOST}:/tmp/torchelastic_x/none_y"}
    for nowhere in ("", "/dev/null"):
        monkeypatch.setenv("TORCHELASTIC_ERROR_FILE", nowhere)
        assert launch() == ""


@pytest.mark.parametrize("name", ["RANK", "WORLD_SIZE", "MASTER_PORT"])
def test_half_of_what_is_to_be_said_is_refused(name, monkeypatch):
    for known, value in next(iter(variables_of(2))).items():
        monkeypatch.setenv(known, value)
    monkeypatch.setenv(name, "x")
    with pytest.raises(ConfigError, match=f"^{name} of the environment is to be a number, got 'x'"):
        from_environment()


@pytest.mark.parametrize("timeout", [-1.0, float("inf"), float("nan")])
def test_a_timeout_is_some_time(timeout):
    with pytest.raises(ConfigError, match="after 1 to 1e\\+06 s of silence"):
        from_environment(timeout)


def joins(monkeypatch, own, seconds=1.0):
    monkeypatch.setattr(mesh, "JOINING_SECONDS", seconds)
    for name, value in (own | {"OMP_NUM_THREADS": "1"}).items():
        monkeypatch.setenv(name, value)
    from_environment(timeout=1.0)


@pytest.mark.parametrize("rank", [0, 1])
def test_who_does_not_join_is_not_waited_for_without_end(rank, monkeypatch):
    with pytest.raises(RankError, match=f"^rank {1 - rank} did not join within 1 s; look"):
        joins(monkeypatch, [*variables_of(2)][rank])


@pytest.mark.parametrize("rank", [0, 1])
def test_who_does_not_join_is_named_where_somebody_else_keeps_the_store(rank, store, monkeypatch):
    own = [*variables_of(3)][rank] | {"MASTER_PORT": str(store.port)}
    monkeypatch.setenv("TORCHELASTIC_USE_AGENT_STORE", "True")  # as torchrun does
    with pytest.raises(RankError, match=f"^{['ranks 1, 2', 'rank 0'][rank]} did not join within 1 s; look"):
        joins(monkeypatch, own)


def test_what_ends_it_at_once_is_said(store, monkeypatch):
    own = next(iter(variables_of(2))) | {"MASTER_PORT": str(store.port)}
    with pytest.raises(RankError, match=r"^some of 2 ranks did not join \(.*in use.*\); look"):
        joins(monkeypatch, own, 60.0)
