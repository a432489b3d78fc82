"""Processors that round alike."""

from __future__ import annotations

from gigagrad.ranks import SingleRank, ranks, run_threaded
from gigagrad.ranks.ranks import mismatched_numerics


def test_ranks_of_one_process_compute_alike():
    assert mismatched_numerics(SingleRank()) == []
    assert run_threaded(3, mismatched_numerics) == [[]] * 3


def test_one_that_rounds_otherwise_is_named(monkeypatch):
    probes = iter("aab")
    monkeypatch.setattr(ranks, "_probe", lambda: next(probes))
    named = run_threaded(3, mismatched_numerics)
    assert named[0] == named[1] == named[2]
    assert named[0] in ([1], [2], [1, 2])
