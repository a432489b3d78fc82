"""Signs of life, and what is said of failures."""

from __future__ import annotations

import threading

import pytest
from torch.distributed import HashStore  # type: ignore[attr-defined]

from gigagrad.errors import RankError
from gigagrad.ranks.process_group import Heartbeat, start_call, store_keeper


@pytest.fixture
def heartbeats():
    store = HashStore()
    made = [Heartbeat(own, store, 5.0) for own in range(3)]
    yield made
    for heartbeat in made:
        heartbeat.end()


def hears(heartbeat):
    while True:
        heartbeat.listen()


def test_a_call_is_waited_for_as_long_as_one_likes():
    come = threading.Event()
    call = start_call(lambda: come.wait(9))
    with pytest.raises(TimeoutError):
        call.result(0.01)
    come.set()
    assert call.result(5) is True
    with pytest.raises(ZeroDivisionError):
        start_call(lambda: 1 / 0).result(5)


def test_who_is_silent_is_named(heartbeats):
    never = start_call(lambda: threading.Event().wait(5))
    heartbeats[1].end()
    with pytest.raises(RankError, match=r"^rank 1 is silent"):
        heartbeats[0].wait_while_alive(never, range(3), 2.0)


def test_an_error_of_what_is_waited_for_is_not_that_of_a_lack_of_time(heartbeats):
    def fail():
        raise RuntimeError("connection reset")

    call = start_call(fail)
    with pytest.raises(RankError, match=r"^the ranks lost each other: connection reset"):
        heartbeats[0].wait_while_alive(call, range(3), 9.0)


def test_ranks_that_are_out_of_step_begin_nothing_new(heartbeats):
    for heartbeat in heartbeats:
        heartbeat.check()
    own = threading.Thread(target=lambda: heartbeats[1].fail(ValueError("no room"), 3))
    own.start()
    for heartbeat in (heartbeats[0], heartbeats[2]):
        with pytest.raises(RankError, match=r"^rank 1 failed: no room"):
            hears(heartbeat)
    own.join(timeout=2)  # it has been heard
    assert not own.is_alive()
    for heartbeat in heartbeats:
        with pytest.raises(RankError, match=r"^the ranks are out of step: rank 1 failed: no room; start them anew"):
            heartbeat.check()


def test_a_store_without_an_answer_tells_of_the_first_rank_unless_torchrun_keeps_it(monkeypatch):
    monkeypatch.delenv("TORCHELASTIC_USE_AGENT_STORE", raising=False)
    assert [store_keeper(own) for own in range(3)] == [[], [0], [0]]
    monkeypatch.setenv("TORCHELASTIC_USE_AGENT_STORE", "True")
    assert [store_keeper(own) for own in range(3)] == [[], [], []]
