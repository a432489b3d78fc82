"""Processors that round alike."""

from __future__ import annotations

from gigagrad.ranks import Alone, alike, run_virtual
from gigagrad.ranks.alike import unlike


def test_ranks_of_one_process_compute_alike():
    assert unlike(Alone()) == []
    assert run_virtual(3, unlike) == [[]] * 3


def test_one_that_rounds_otherwise_is_named(monkeypatch):
    probes = iter("aab")
    monkeypatch.setattr(alike, "_probe", lambda: next(probes))
    named = run_virtual(3, unlike)
    assert named[0] == named[1] == named[2]
    assert named[0] in ([1], [2], [1, 2])
