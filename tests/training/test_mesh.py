"""A run by several processes: the same bits as by one, one voice, and no hang where one of them is lost."""

from __future__ import annotations

import json
import shutil
import signal
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from gigagrad.training import FitConfig, fit
from gigagrad.training.folder import Checkpoint, RunFolder
from tests.ranks.forked import Rank, command, forked

_NETWORK = """
from torch import nn

class Normed(nn.Sequential):
    def __init__(self):
        layers = nn.Conv2d(3, 4, 3, 2, 1), nn.BatchNorm2d(4), nn.Dropout(0.3), nn.ConvTranspose2d(4, 1, 4, 2, 1)
        super().__init__(*layers)

    def forward(self, image):
        return super().forward(image / 255)
"""


@pytest.fixture(scope="module")
def first_step(cohort_csv, tmp_path_factory):
    """A run that has taken the first step of three slides and goes on with small tiles, beside its network."""
    folder = tmp_path_factory.mktemp("mesh")
    (folder / "networks_of_test_mesh.py").write_text(_NETWORK)
    config = FitConfig(
        slides=str(cohort_csv),
        out=str(folder / "begun"),
        model="networks_of_test_mesh:Normed",
        epochs=1,
        accumulate=3,
        checkpoint_seconds=0,
    )
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        fit(config)
    path = RunFolder(folder / "begun").checkpoint
    state = torch.load(path, weights_only=True)
    for choice in state["engine"]["choices"].values():
        choice["tiles"], choice["workers"] = [[40, 48]] * len(choice["tiles"]), 2  # so that no operator is shared
    torch.save(state, path)
    return config


@pytest.fixture
def begun(first_step, tmp_path, monkeypatch):
    """A run of three steps of three slides that goes on behind the first of them."""
    shutil.copytree(Path(first_step.out).parent, tmp_path, dirs_exist_ok=True)
    monkeypatch.chdir(tmp_path)
    return replace(first_step, out=str(tmp_path / "begun"), epochs=3)


def start(count: int, config: FitConfig, *flags: str) -> list[Rank]:
    """`gigagrad fit` by so many processes, as torchrun starts them."""
    config.save(path := Path("run.yaml"))
    return forked(command, (["fit", "--config", str(path), "--trust", config.model, *flags],), count)


def ended(ranks: list[Rank]) -> tuple[list[int], list[str], list[str]]:
    """Exit codes, and what was said on standard output and error, by rank."""
    codes, out, errors = zip(*(rank.ended() for rank in ranks), strict=True)
    return list(codes), list(out), list(errors)


def same_bits(one: Path, other: Path) -> bool:
    states = [Checkpoint.load(RunFolder(run).checkpoint) for run in (one, other)]
    losses = []
    for run in (one, other):
        lines = map(json.loads, RunFolder(run).metrics.read_text().splitlines())
        losses.append([(m["step"], m["values"].get("loss")) for m in lines if m["event"] == "metrics"])
    alike = all(torch.equal(tensor, states[1].model[name]) for name, tensor in states[0].model.items())
    summaries = [RunFolder(run).summary.read_text() for run in (one, other)]
    return alike and states[0].progress == states[1].progress and losses[0] == losses[1] and len(set(summaries)) == 1


def test_two_groups_of_two_ranks_go_on_as_one_process_does(begun, tmp_path):
    one = tmp_path / "one"
    shutil.copytree(begun.out, one)
    ranks = start(4, replace(begun, mesh="2x2"), "--shard-optimizer")
    fit(replace(begun, out=str(one)))
    codes, out, errors = ended(ranks)
    assert (codes, "".join(errors)) == ([0] * 4, "")
    assert out[0].count(" steps, best epoch") == 1
    assert out[1:] == [""] * 3
    assert same_bits(one, Path(begun.out))
    shards = RunFolder(Path(begun.out)).optimizer
    assert [path.name for path in shards.iterdir()] == ["step-9"]
    assert len([*shards.rglob("*.safetensors")]) == 4
    for run in (begun.out, str(one)):  # by one process, which needs them all
        fit(replace(begun, out=run, epochs=4))
    assert same_bits(one, Path(begun.out))


def test_who_is_killed_or_stopped_is_named_and_the_run_goes_on(begun, tmp_path):
    one = tmp_path / "one"
    shutil.copytree(begun.out, one)
    for blow, lost in ((signal.SIGSTOP, 1), (signal.SIGKILL, 0)):
        ranks = start(2, replace(begun, rank_timeout=8, epochs=99))
        next(line for line in ranks[0].lines() if line.startswith("val"))  # an epoch is over
        ranks[lost].send(blow)
        code, _, errors = ranks[1 - lost].ended(timeout=120)
        ranks[lost].kill()
        assert (code, errors) == (2, f"gigagrad: error: rank {lost} is silent: stopped, killed, or out of reach\n")
    assert Checkpoint.load(RunFolder(Path(begun.out)).checkpoint).progress.step > 3
    for run in (begun.out, str(one)):  # by one process, and in one go
        fit(replace(begun, out=run))
    assert same_bits(one, Path(begun.out))


def test_what_ends_at_a_time_limit_has_saved_its_last_step(begun, tmp_path):
    one = tmp_path / "one"
    shutil.copytree(begun.out, one)
    (alone,) = start(1, replace(begun, epochs=99, checkpoint_seconds=1e9))
    lines = alone.lines()
    for _ in range(2):
        next(line for line in lines if line.startswith("val"))
    alone.send(signal.SIGTERM)
    codes, _, errors = ended([alone])
    assert (codes, errors) == (
        [130],
        ["gigagrad: interrupted; give the same command again to go on from what is finished\n"],
    )
    steps = Checkpoint.load(RunFolder(Path(begun.out)).checkpoint).progress.step
    assert steps > 3
    epochs = steps // 3 + 1
    for run in (begun.out, str(one)):
        fit(replace(begun, out=run, epochs=epochs))
    assert same_bits(one, Path(begun.out))


def test_an_error_is_said_once(begun, tmp_path):
    for flags in (["--slides", str(tmp_path / "nothing.csv")], ["--no-such-flag"]):
        codes, out, errors = ended(start(2, begun, *flags))
        assert codes == [2, 2]
        assert "".join(out) == ""
        assert len("".join(errors).splitlines()) == 1
