"""Ranks that are processes: bits, errors and silence."""

from __future__ import annotations

import ast
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from tests.ranks.started import started
from tests.ranks.worker import step

WORKER = Path(__file__).with_name("worker.py")


def start(what: str, count: int, *more: str) -> list[subprocess.Popen[str]]:
    return started([sys.executable, str(WORKER), what, *more], count)


@pytest.mark.slow
def test_processes_get_the_bits_of_one_with_the_first_ones_random_numbers():
    printed = [rank.communicate()[0] for rank in start("step", 2)]
    torch.manual_seed(0)
    assert [ast.literal_eval(text.splitlines()[-1]) for text in printed] == [step(), step()]


@pytest.mark.slow
def test_an_error_is_told_as_it_was_by_its_rank_and_named_by_the_others():
    printed = [rank.communicate()[0].splitlines()[-1] for rank in start("fail", 2)]
    assert printed == ["RankError: rank 1 failed: no such slide", "OSError: no such slide"]


@pytest.mark.slow
@pytest.mark.parametrize("victim", [0, 1])
@pytest.mark.parametrize("when", ["work", "gather"])
def test_a_rank_that_is_stopped_is_named(when, victim):
    """The first of them keeps the store, which nobody can ask then."""
    ranks = start(when, 3, str(victim))
    stopped = ranks.pop(victim)
    try:
        for rank in ranks:
            assert (
                rank.communicate()[0].splitlines()[-1] == f"rank {victim} is silent: stopped, killed, or out of reach"
            )
    finally:
        stopped.kill()
        stopped.communicate()
