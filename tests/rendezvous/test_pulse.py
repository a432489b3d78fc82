"""Signs of life, and what is said of failures."""

from __future__ import annotations

import threading

import pytest
from torch.distributed import HashStore  # type: ignore[attr-defined]

from gigagrad.errors import RankError
from gigagrad.ranks.pulse import Pulse, begun, keeper


@pytest.fixture
def pulses():
    store = HashStore()
    made = [Pulse(own, store, 5.0) for own in range(3)]
    yield made
    for pulse in made:
        pulse.end()


def hears(pulse):
    while True:
        pulse.listen()


def test_a_call_is_waited_for_as_long_as_one_likes():
    come = threading.Event()
    call = begun(lambda: come.wait(9))
    with pytest.raises(TimeoutError):
        call.result(0.01)
    come.set()
    assert call.result(5) is True
    with pytest.raises(ZeroDivisionError):
        begun(lambda: 1 / 0).result(5)


def test_who_is_silent_is_named(pulses):
    never = begun(lambda: threading.Event().wait(5))
    pulses[1].end()
    with pytest.raises(RankError, match=r"^rank 1 is silent"):
        pulses[0].watched(never.result, never.done, range(3), 2.0)


def test_an_error_of_what_is_waited_for_is_not_that_of_a_lack_of_time(pulses):
    def fail():
        raise RuntimeError("connection reset")

    call = begun(fail)
    with pytest.raises(RankError, match=r"^the ranks lost each other: connection reset"):
        pulses[0].watched(call.result, call.done, range(3), 9.0)


def test_ranks_that_are_out_of_step_begin_nothing_new(pulses):
    for pulse in pulses:
        pulse.check()
    own = threading.Thread(target=lambda: pulses[1].fail(ValueError("no room"), 3))
    own.start()
    for pulse in (pulses[0], pulses[2]):
        with pytest.raises(RankError, match=r"^rank 1 failed: no room"):
            hears(pulse)
    own.join(timeout=2)  # it has been heard
    assert not own.is_alive()
    for pulse in pulses:
        with pytest.raises(RankError, match=r"^the ranks are out of step: rank 1 failed: no room; start them anew"):
            pulse.check()


def test_a_store_without_an_answer_tells_of_the_first_rank_unless_torchrun_keeps_it(monkeypatch):
    monkeypatch.delenv("TORCHELASTIC_USE_AGENT_STORE", raising=False)
    assert [keeper(own) for own in range(3)] == [[], [0], [0]]
    monkeypatch.setenv("TORCHELASTIC_USE_AGENT_STORE", "True")
    assert [keeper(own) for own in range(3)] == [[], [], []]
