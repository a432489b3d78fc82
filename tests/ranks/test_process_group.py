"""Ranks that are processes: bits, errors and silence."""

from __future__ import annotations

import json
import socket
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from tests.ranks import worker
from tests.ranks.forked import Rank, forked

WORKER = Path(__file__).with_name("worker.py")


def start(what: str, count: int, victim: int = 0) -> list[Rank]:
    return forked(worker.main, (what, victim), count)


def last_line(rank: Rank) -> str:
    _, printed, errors = rank.ended()
    assert printed, errors
    return printed.splitlines()[-1]


@pytest.mark.slow
def test_processes_get_the_bits_of_one_with_the_first_ones_random_numbers():
    first, second = (json.loads(last_line(rank)) for rank in start("step", 2))
    assert first == second
    torch.manual_seed(0)
    gradients, choices = first
    assert worker.step(choices=choices)[0] == gradients


@pytest.mark.slow
def test_an_error_is_told_as_it_was_by_its_rank_and_named_by_the_others():
    printed = [last_line(rank) for rank in start("fail", 2)]
    assert printed == ["RankError: rank 1 failed: no such slide", "OSError: no such slide"]


@pytest.mark.slow
@pytest.mark.parametrize("victim", [0, 1])
@pytest.mark.parametrize("when", ["work", "gather"])
def test_a_rank_that_is_stopped_is_named(when, victim):
    """The first of them keeps the store, which nobody can ask then."""
    ranks = start(when, 3, victim)
    stopped = ranks.pop(victim)
    try:
        for rank in ranks:
            assert last_line(rank) == f"rank {victim} is silent: stopped, killed, or out of reach"
    finally:
        stopped.kill()


@pytest.mark.slow
def test_two_machines_of_which_one_fails_meet_again():
    """Each machine's torchrun counts its own failures, and keeps a store with what was said before."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        place = f"127.0.0.1:{probe.getsockname()[1]}"
    flags = ["--nnodes=2", "--nproc-per-node=1", "--rdzv-backend=c10d", f"--rdzv-endpoint={place}", "--max-restarts=2"]
    command = [sys.executable, "-m", "torch.distributed.run", *flags, str(WORKER), "again", "1"]
    machines = [subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) for _ in "12"]
    said = [machine.communicate(timeout=200)[0] for machine in machines]
    lines = sorted(line for text in said for line in text.splitlines() if line.startswith("rank"))
    assert lines == ["rank 0 of 2 met 2", "rank 1 of 2 met 2"]
