"""Ranks in threads."""

from __future__ import annotations

import pytest
import torch

from gigagrad.errors import RankError
from gigagrad.ranks import SingleRank, run_threaded


def test_messages_of_bytes_reach_the_ranks_they_are_sent_to():
    def work(ranks):
        right, left = (ranks.index + 1) % ranks.count, (ranks.index - 1) % ranks.count
        message = torch.full((ranks.index + 1,), ranks.index, dtype=torch.uint8)
        found = ranks.exchange({right: message, left: message[:0]}, {left: left + 1, right: 0})
        return {rank: came.tolist() for rank, came in found.items()}, ranks.sent_bytes

    assert run_threaded(3, work) == [({2: [2, 2, 2]}, 1), ({0: [0]}, 2), ({1: [1, 1]}, 3)]


def test_everybody_hears_what_each_says():
    assert (
        run_threaded(3, lambda ranks: ranks.all_gather_object([ranks.index, None]))
        == [[[0, None], [1, None], [2, None]]] * 3
    )
    assert SingleRank().all_gather_object("x") == ["x"]


def test_who_does_not_come_is_named():
    def work(ranks):
        if ranks.index != 1:
            ranks.barrier()

    with pytest.raises(RankError, match="rank 1 has been silent"):
        run_threaded(3, work, timeout=1)


def test_two_errors_at_once_are_both_told_by_their_ranks():
    def work(ranks):
        with ranks.error_scope():
            raise ValueError(f"of {ranks.index}")

    with pytest.raises(ValueError, match="of 0"):
        run_threaded(2, work)


def test_an_error_that_nobody_expected_ends_all_at_once():
    told = []

    def work(ranks):
        if ranks.index == 1:
            raise KeyError("of 1")
        try:
            ranks.barrier()
        except RankError as error:
            told.append(str(error))
            raise

    with pytest.raises(KeyError, match="of 1"):
        run_threaded(3, work, timeout=60)
    assert told == ["rank 1 failed: 'of 1'"] * 2
