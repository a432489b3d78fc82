"""What a long job tells, and that it says so when it ends."""

from types import SimpleNamespace

import pytest

from gigagrad import events
from gigagrad.events import Events, JobAdvanced, Preparing


def test_preparations_count_what_was_tried_and_remember_the_fastest():
    heard: list[Preparing] = []
    with Events((heard.append,)).preparing("plan") as tried:  # type: ignore[arg-type]
        for seconds in (None, 5.0, 7.0, 3.0):
            tried(seconds)
    assert [event.doing for event in heard] == 6 * ["plan"]
    assert [event.tried for event in heard] == [0, 1, 2, 3, 4, 4]
    assert [event.best_seconds for event in heard] == [None, None, 5.0, 5.0, 3.0, 3.0]
    assert [event.over for event in heard] == 5 * [False] + [True]


def test_preparations_that_fail_are_over_too():
    heard: list[Preparing] = []
    with pytest.raises(KeyError), Events((heard.append,)).preparing("capture"):  # type: ignore[arg-type]
        raise KeyError
    assert [event.over for event in heard] == [False, True]


def test_the_time_left_follows_the_sizes_of_parts_and_not_their_number(monkeypatch):
    clock = iter([100.0, 104.0, 105.0, 110.0, 110.0])  # of this module alone: threads of others ask for the time, too
    monkeypatch.setattr(events, "time", SimpleNamespace(monotonic=lambda: next(clock)))
    heard: list[JobAdvanced] = []
    with Events((heard.append,)).job("predict", 4, sizes=[0, 8, 2, 2]) as advance:  # type: ignore[arg-type]
        for done in range(1, 5):
            advance(done, "")
    # What was done before took no time and says nothing of the rest; then a byte is half a second.
    assert [event.seconds_left for event in heard[1:-1]] == [0.0, 2.0, 1.0, 0.0]
