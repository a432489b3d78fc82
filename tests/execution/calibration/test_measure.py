"""Calibration from end to end with made-up timings: what is measured, what is saved, what planning makes of it."""

import io

import numpy as np
import pytest
import torch
from rich.console import Console

import gigagrad as gg
from gigagrad.cli import main
from gigagrad.events import Events, JobFinished
from gigagrad.execution import calibration
from gigagrad.execution.calibration import Effort, calibrate
from gigagrad.execution.calibration.networks import draw_network, flops, is_dense, loss
from gigagrad.execution.calibration.timing import make_subject, pass_seconds, pass_work
from gigagrad.plans.machine import TimeModel
from gigagrad.reports.rates import rates_table
from gigagrad.training.losses import bce

EFFORT = Effort(networks=6, compared=2, seconds=1e9, rounds=1, disk_bytes=2**23, copy_bytes=2**20)


@pytest.fixture
def subject():
    torch.manual_seed(0)
    net = torch.nn.Sequential(Scaled(), torch.nn.Conv2d(3, 4, 3, padding=1), torch.nn.BatchNorm2d(4), Summed())
    return make_subject(net, loss, (40, 50), dense=True)


class Scaled(torch.nn.Module):
    def forward(self, x):
        return x.float()


class Summed(torch.nn.Module):
    def forward(self, x):
        return x.sum(1, keepdim=True)


@pytest.fixture
def profile(monkeypatch, tmp_path):
    """Timings that follow the typical rates exactly; the profile goes to a folder of the test's own."""
    path = tmp_path / "cache" / "machine.json"
    for module in ("gigagrad.plans.machine", "gigagrad.execution.calibration.measure"):
        monkeypatch.setattr(f"{module}.profile_path", lambda: path)

    def made_up(subject, prepared, rounds, clock=None):
        return [TimeModel({}, 0.0).seconds(work) for work in pass_work(prepared, 2**25)]

    monkeypatch.setattr("gigagrad.execution.calibration.measure.pass_seconds", made_up)
    monkeypatch.setattr("gigagrad.execution.calibration.measure.compare_in_a_process", lambda *_, passive: [])
    monkeypatch.setattr("gigagrad.execution.calibration.measure.cache_bytes", lambda: 2**25)
    return path


def test_the_passes_of_a_step_are_timed_one_by_one(subject):
    """The clock ticks once per look: each pass is as long as the looks since the one before."""
    prepared = subject.prepare((20, 50), workers=1)
    looks = iter(range(1000))
    seconds = pass_seconds(subject, prepared, 2, lambda: float(next(looks)))
    tiles = [prepared.plan.stages[step.stage].tile_count for step in prepared.plan.passes]
    assert len(tiles) > 1
    assert seconds == [*tiles[:-1], tiles[-1] + 1]


def test_timing_leaves_the_network_as_it_was(subject):
    prepared = subject.prepare((20, 20), workers=1)
    before = {name: value.clone() for name, value in subject.composite.state_dict().items()}
    subject.step(prepared, Events())
    assert all(torch.equal(value, before[name]) for name, value in subject.composite.state_dict().items())
    assert all(parameter.grad is None for parameter in subject.composite.parameters())


@pytest.mark.parametrize("seed", range(40))
def test_every_drawn_network_runs(seed):
    network = draw_network(seed)
    image = torch.zeros((1, 3, 96, 101), dtype=torch.uint8)
    output = network(image)
    assert output.shape == ((1, 1, 96, 101) if is_dense(network) else (1, 4))
    target = torch.zeros((1, 1, 96, 101)) if is_dense(network) else torch.tensor([1])
    assert torch.isfinite(loss(output, target))
    assert flops(network, (96, 96)) > 0


def test_the_same_seed_draws_the_same_network():
    state = torch.get_rng_state()
    one, two = draw_network(3).state_dict(), draw_network(3).state_dict()
    assert all(torch.equal(one[name], two[name]) for name in one)
    assert torch.equal(torch.get_rng_state(), state)


def test_calibration_is_saved_and_planning_uses_it(profile, tmp_path):
    pytest.importorskip("sklearn")
    events = []
    found = calibrate(EFFORT, scratch=tmp_path, listeners=(events.append,))
    assert found.path == profile
    assert found.networks <= EFFORT.networks
    assert found.machine.model.error < 0.01
    assert isinstance(events[-1], JobFinished)
    image, mask = np.zeros((3, 320, 320), np.uint8), np.zeros((1, 320, 320), np.uint8)
    engine = gg.compile(gg.models.resolve("paper-unet"), bce)
    plan = engine.plan(image, mask)
    assert plan.predicted_seconds == pytest.approx(sum(stage.seconds for stage in plan.stages))
    assert "predicted time" in str(plan)
    console = Console(file=io.StringIO(), width=100)
    console.print(rates_table(found))
    shown = console.file.getvalue()
    for text in (
        "convolution, many channels",
        "GFLOP/s",
        "disk, write",
        "fields in files",
        "mean error on unseen networks",
    ):
        assert text in shown


def test_the_command(profile, monkeypatch, tmp_path, capsys):
    pytest.importorskip("sklearn")
    monkeypatch.setattr(calibration, "QUICK", EFFORT)
    assert main(["calibrate", "--quick", "--scratch", str(tmp_path)]) == 0
    assert f"saved in {profile}" in " ".join(capsys.readouterr().out.split())
    assert profile.is_file()


def test_a_scratch_folder_that_is_missing_is_one_line(profile, tmp_path, capsys):
    assert main(["calibrate", "--scratch", str(tmp_path / "none")]) == 2
    assert capsys.readouterr().err.count("\n") == 1
    assert not profile.exists()


def test_a_damaged_profile_is_noticed_once_and_planning_goes_on(profile):
    profile.parent.mkdir()
    profile.write_text("{")
    image, mask = np.zeros((3, 192, 192), np.uint8), np.zeros((1, 192, 192), np.uint8)
    engine = gg.compile(gg.models.resolve("paper-unet"), bce)
    notices = []
    engine.events.subscribe(notices.append)
    assert engine.plan(image, mask).predicted_seconds is None
    engine.plan(image[:, :160], mask[:, :160])
    (notice,) = notices
    assert "gigagrad calibrate" in notice.text
    assert notice.warning
