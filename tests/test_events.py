"""What a long job tells, and that it says so when it ends."""

import pytest

from gigagrad.events import Events, Preparing


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
