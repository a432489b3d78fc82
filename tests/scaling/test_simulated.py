"""ThreadedRank clocks, on threads whose processor time is told: against timelines, and against the simulator."""

from __future__ import annotations

import threading
import time

import pytest
import torch
from hypothesis import given, settings

from bench.simulated_ranks import SimulatedRanks
from gigagrad.ranks import SingleRank, run_threaded
from gigagrad.scaling import Link, clock
from tests.execution.by_ranks import outcome, prepared_for
from tests.scaling.test_tiles import steps

LINK = Link(bytes_per_second=100.0, latency_seconds=0.25)


def clocked(count, work, link=LINK):
    """`work(ranks, compute)` by so many ranks; `compute(seconds)` keeps a rank's processor busy."""

    def by_one(ranks):
        busy = [0.0]

        def compute(seconds):
            busy[0] += seconds

        return work(SimulatedRanks(ranks, link.seconds, lambda: busy[0]), compute)

    return run_threaded(count, by_one)


def message(nbytes):
    return torch.zeros(nbytes, dtype=torch.uint8)


def test_who_meets_waits_for_the_slowest_and_for_its_word():
    def work(ranks, compute):
        compute(ranks.index)
        ranks.barrier()
        met = ranks.clock
        ranks.all_gather_object("lengths, then words")
        compute(1.5)
        return met, ranks.clock

    assert clocked(3, work) == [(2.5, 2.5 + 4 * 0.25 + 1.5)] * 3


def test_messages_of_a_rank_go_one_after_the_other():
    def work(ranks, compute):
        sent = [{1: message(100), 2: message(300)}, {}, {0: message(50)}][ranks.index]
        received = [{2: 50}, {0: 100}, {0: 300}][ranks.index]
        found = ranks.exchange(sent, received)
        assert {rank: len(came) for rank, came in found.items()} == received
        return ranks.clock, ranks.sent_bytes

    begins = 2 * 0.25
    assert clocked(3, work) == [(begins + 4.25, 400), (begins + 1.25, 0), (begins + 4.25, 50)]


@settings(max_examples=40, deadline=None)
@given(steps())
def test_the_simulator_says_what_clocks_show(swept):
    def work(ranks, compute):
        for seconds, met in swept:
            compute(seconds[ranks.index])
            for fields, sums in met:
                sent, came = (fields + sums)[ranks.index], (fields + sums)[:, ranks.index]
                ranks.exchange({rank: message(n) for rank, n in enumerate(sent)}, dict(enumerate(came.tolist())))
        return ranks.clock

    shown = clocked(len(swept[0].seconds), work)
    assert max(shown) == pytest.approx(clock(swept, LINK))


def test_ranks_that_take_turns_compute_one_at_a_time():
    lock, at_work, seen = threading.Semaphore(), [], []

    class Turn:
        def __init__(self):
            self.has = False

        def acquire(self):
            self.has = lock.acquire()

        def release(self):
            if self.has:
                self.has = False
                lock.release()

    def work(ranks):
        turn = Turn()
        clocked = SimulatedRanks(ranks, LINK.seconds, turn=turn)
        for _ in range(5):
            clocked.exchange({(ranks.index + 1) % 3: message(9)}, {(ranks.index - 1) % 3: 9})
            at_work.append(ranks.index)
            time.sleep(0.002)
            seen.append(len(at_work))
            at_work.pop()
        turn.release()

    run_threaded(3, work)
    assert seen == [1] * 15


def test_a_step_by_clocked_ranks_has_the_same_bits_and_bytes():
    net = torch.nn.Sequential(torch.nn.Conv2d(1, 2, 3, padding=1), torch.nn.BatchNorm2d(2))
    run = prepared_for(
        net, lambda y, t: (y - t).square().mean(), torch.rand(1, 40, 30), torch.rand(2, 40, 30), tile=(9, 30)
    )
    plain = run_threaded(2, lambda ranks: outcome(run, ranks))
    assert run_threaded(2, lambda ranks: outcome(run, SimulatedRanks(ranks, LINK.seconds))) == plain
    assert outcome(run, SimulatedRanks(SingleRank(), LINK.seconds))[0] == plain[0][0]
