"""Comparing threads, on timings that are made up, and once on real ones."""

import json
import os

import pytest
import torch

from gigagrad.execution.calibration import threads as comparing
from gigagrad.execution.calibration.fit import Compared
from gigagrad.execution.calibration.threads import compare_in_a_process, compare_threads


@pytest.fixture
def two_threads(monkeypatch):
    """Two threads on one tile take 0.8 s a pass, on a tile each 0.5 s."""

    def made_up(subject, prepared, rounds, clock=None):
        return [0.5 if prepared.plan.workers == 2 else 0.8 for _ in prepared.plan.passes]

    monkeypatch.setattr("gigagrad.execution.calibration.threads.pass_seconds", made_up)
    monkeypatch.setattr("gigagrad.execution.calibration.threads._others_seconds", lambda: 0.0)


@pytest.mark.usefixtures("two_threads")
def test_threads_are_compared_on_few_and_on_many_tiles():
    steps = compare_threads(2, 2, 1)
    assert len(steps) == 4
    few, many = (sum(count for _, count in step.passes) for step in steps[:2])
    assert few < many
    for step in steps:
        assert step.shared == pytest.approx(0.8 * len(step.passes))
        assert step.side_by_side == pytest.approx(0.5 * len(step.passes))


@pytest.mark.usefixtures("two_threads")
def test_beside_other_programs_threads_are_not_judged(monkeypatch):
    used = iter((0.0, 1e9))
    monkeypatch.setattr("gigagrad.execution.calibration.threads._others_seconds", lambda: next(used))
    assert compare_threads(2, 2, 1) == []


@pytest.mark.parametrize("passive", [True, False])
def test_a_process_of_its_own_waits_as_asked(monkeypatch, passive):
    seen = {}

    class Done:
        returncode = 0
        stdout = '[{"passes": [[{"dense.f.flops": 2.0}, 3]], "shared": 0.5, "side_by_side": 0.4}]'

    def run(command, *, env, **more):
        seen.update(env)
        assert command[-3:] == ["2", "4", "1"]
        return Done()

    monkeypatch.setenv("OMP_WAIT_POLICY", "active")
    monkeypatch.setattr(comparing.subprocess, "run", run)
    (step,) = compare_in_a_process(2, 4, 1, passive=passive)
    assert seen.get("OMP_WAIT_POLICY") == ("passive" if passive else None)
    assert seen["PATH"] == os.environ["PATH"]
    assert (step.passes, step.shared, step.side_by_side) == ((({"dense.f.flops": 2.0}, 3),), 0.5, 0.4)


def test_what_the_process_prints_is_real_steps(monkeypatch, capsys):
    monkeypatch.setattr(comparing, "_others_seconds", lambda: 0.0)
    threads = torch.get_num_threads()
    comparing.main(["2", "1", "1"])
    torch.set_num_threads(threads)
    steps = [Compared.from_dict(step) for step in json.loads(capsys.readouterr().out)]
    assert [min(step.shared, step.side_by_side) > 0 for step in steps] == [True, True]
    assert all(sum(amount for amount in work.values()) > 0 for step in steps for work, _ in step.passes)


def test_a_process_that_fails_tells_nothing(monkeypatch):
    monkeypatch.setattr(comparing.sys, "executable", "/bin/false")
    assert compare_in_a_process(2, 1, 1, passive=True) == []
