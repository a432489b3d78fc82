"""Training on bags of patches: the exact step, cases, targets of all kinds, runs that go on, and what is told."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tifffile
import torch

import gigagrad as gg
from gigagrad.cohorts import Row
from gigagrad.cohorts.patches import Bags, Patches
from gigagrad.errors import ConfigError, ImageError, ModelError
from gigagrad.events import Event, MetricsLogged, Notice
from gigagrad.models import load_model, resolve
from gigagrad.prediction.encoding import Encoder
from gigagrad.training import FitConfig, fit, frozen
from gigagrad.training.folder import Checkpoint, RunFolder
from tests.ranks.forked import command, forked

ENCODER = """
import torch
class Tiny(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.conv = torch.nn.Conv2d(3, 4, 3, stride=2)
    def forward(self, x):
        return torch.relu(self.conv(x / 255)).mean((2, 3))
class OfEach(Tiny):
    def forward(self, x):
        return super().forward(x)[:, :2]
class Drawing(Tiny):
    def forward(self, x):
        return torch.nn.functional.dropout(super().forward(x), 0.5)
class Mixing(Tiny):
    def forward(self, x):
        y = super().forward(x)
        return y - y.mean(0)
"""
MODEL = "mil:encoder=networks_of_bags:Tiny&features=4&head=abmil&head.width=4&head.hidden=3&classes={}"
TRUST = ("networks_of_bags:Tiny",)
SPLITS = ("train", "train", "train", "val", "test", "test")


@pytest.fixture
def cohort(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """`cohort(header, *columns)`: a CSV of six slides, every second of them darker, beside more columns."""
    random = np.random.default_rng(0)
    for number in range(6):
        pixels = np.full((96, 96, 3), 245, np.uint8)
        side = 48 + 16 * (number % 3 == 0)
        pixels[:side, :64] = random.integers(40, 100, (side, 64, 3)) + 60 * (number % 2)
        tifffile.imwrite(tmp_path / f"s{number}.tif", pixels, tile=(32, 32), photometric="rgb")
    (tmp_path / "networks_of_bags.py").write_text(ENCODER)
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)

    def write(header: str, *columns: Sequence[object]) -> Path:
        lines = [f"s{i}.tif,{SPLITS[i]}" + "".join(f",{each[i]}" for each in columns) for i in range(6)]
        path = tmp_path / "cohort.csv"
        path.write_text("\n".join([f"slide,split,{header}", *lines]) + "\n")
        return path

    return write


def config(path: Path, **changes: object) -> FitConfig:
    settings = {"out": "run", "model": MODEL.format(2), "loss": "ce", "epochs": 2, "patch_size": 16, "patch_mpp": None}
    return FitConfig.from_dict({"slides": str(path), **settings, **changes})


LABELS = (0, 1, 0, 1, 0, 1)


def test_a_step_is_that_of_plain_pytorch_on_all_patches(cohort) -> None:
    path = cohort("label", LABELS)
    made = config(path, epochs=1, optimizer="sgd", learning_rate=0.1, accumulate=3, augment=False)
    fit(made)
    torch.manual_seed(made.seed)
    model = resolve(made.model).train()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for number in range(3):
        with Bags(Patches(16, None)).open(Row(path.parent / f"s{number}.tif")) as bag:
            pixels = torch.from_numpy(np.ascontiguousarray(bag.read(0, len(bag))))
        (torch.nn.functional.cross_entropy(model(pixels), torch.tensor([LABELS[number]])) / 3).backward()
    optimizer.step()
    _, trained = load_model("run/best.pt", TRUST)
    for (name, got), expected in zip(trained.named_parameters(), model.parameters(), strict=True):
        torch.testing.assert_close(got, expected, rtol=1e-5, atol=1e-7, msg=name)


def test_a_case_is_one_bag(cohort) -> None:
    path = cohort("label,patient", (0, 0, 1, 1, 0, 0), ("a", "a", "b", "c", "d", "d"))
    result = fit(config(path, optimizer="sgd", augment=False))
    assert (result.steps, [*result.scores]) == (2 * 2, ["d"])
    _, trained = load_model("run/best.pt", TRUST)
    with gg.open_bag([path.parent / "s4.tif", path.parent / "s5.tif"], 16, None) as bag:
        output = trained(torch.from_numpy(np.ascontiguousarray(bag.read(0, len(bag)))))
    assert result.scores["d"] == pytest.approx(
        float(torch.nn.functional.cross_entropy(output, torch.tensor([0])).detach()), 1e-5
    )


@pytest.mark.parametrize(
    ("header", "columns", "changes", "metric"),
    [
        ("label", [(0.5, 1, 1.5, 0.2, 0.1, 0.7)], {"model": MODEL.format(1), "loss": "mse"}, "loss"),
        ("label", [("a", "b", "c", "a", "b", "c")], {"model": MODEL.format(3)}, "loss"),
        ("label", [LABELS], {"model": MODEL.format(2).replace("abmil", "clam"), "loss": "clam"}, "loss"),
        (
            "time,event",
            [(3, 2, 1, 4, 5, 6), LABELS],
            {"model": MODEL.format(1), "loss": "cox", "accumulate": 3},
            "risk",
        ),
    ],
    ids=["numbers", "classes", "clam", "survival"],
)
def test_targets_of_slides(cohort, header, columns, changes, metric) -> None:
    result = fit(config(cohort(header, *columns), epochs=1, **changes))
    assert (result.metric, len(result.scores)) == (metric, 2)
    assert all(np.isfinite(value) for value in result.scores.values())


def test_a_run_that_goes_on_ends_with_the_same_bits(cohort) -> None:
    path = cohort("label", LABELS)
    varied = {"stain_jitter": 0.1, "colour_jitter": 0.1}
    fit(config(path, epochs=1, out="begun", **varied))
    for out in ("begun", "whole"):
        fit(config(path, epochs=2, out=out, **varied))
    begun, whole = (load_model(f"{out}/best.pt", TRUST)[1].state_dict() for out in ("begun", "whole"))
    assert all(torch.equal(begun[name], whole[name]) for name in whole)


@pytest.mark.parametrize("mesh", ["1x2"])
def test_two_processes_share_patches_or_slides(cohort, mesh) -> None:
    alone = config(cohort("label", LABELS), epochs=1, optimizer="sgd", accumulate=2, journal=True)
    fit(alone)
    replace(alone, out="shared", mesh=mesh).save(path := Path("run.yaml"))
    ranks = forked(command, (["fit", "--config", str(path), "--trust", TRUST[0]],), 2)
    assert [rank.ended()[0] for rank in ranks] == [0, 0]
    states = [Checkpoint.load(RunFolder(Path(out)).checkpoint).model for out in ("run", "shared")]
    for name, tensor in states[0].items():
        torch.testing.assert_close(states[1][name], tensor, rtol=1e-5, atol=1e-7)


def fit_on_corners(cohort: Path, folder: Path) -> None:
    """Train one epoch on patches whose corners are given."""
    (folder / "coords").mkdir()
    for number in range(6):
        (folder / "coords" / f"s{number}.csv").write_text("x,y\n0,0\n16,0\n0,16\n")
    fit(config(cohort, epochs=1, coords="coords"))


def test_corners_that_change_are_told_where_a_run_goes_on(cohort, tmp_path) -> None:
    path = cohort("label", LABELS)
    fit_on_corners(path, tmp_path)
    (tmp_path / "coords" / "s0.csv").write_text("x,y\n0,0\n16,0\n")
    with pytest.raises(ConfigError, match=r"s0\.csv"):
        fit(config(path, epochs=2, coords="coords"))


def test_the_folder_of_a_run_with_given_corners_asks_for_those_of_other_slides(cohort, tmp_path) -> None:
    """Without them it took patches of its own on tissue, which are others than the run's."""
    path = cohort("label", LABELS)
    fit_on_corners(path, tmp_path)
    given: dict[str, Any] = {"slides": ["s5.tif"], "trust": TRUST}
    ways: list[tuple[str, str, dict[str, Any]]] = [
        ("run-s", "run", {}),
        ("model-s", "run/model", {"coords": "coords"}),
        ("model-tissue", "run/model", {"tissue": "auto"}),
    ]
    found = [gg.predict(run, out=tmp_path / name, **settings, **given)[0] for name, run, settings in ways]
    assert found[0].scores == found[1].scores != found[2].scores
    with pytest.raises(ConfigError, match=r"run/model was trained on patches whose corners were given; give --coords"):
        gg.predict("run/model", out=tmp_path / "out", **given)


@pytest.mark.parametrize(
    ("changes", "error", "told"),
    [
        ({"patch_size": 0}, ConfigError, "takes patches, and slides are read whole; give patch_size"),
        ({"patch_size": 0, "model": MODEL.format(2).replace("abmil", "abmill")}, ModelError, "unknown head 'abmill'"),
        ({"level": 1}, ConfigError, "patches are read at patch_mpp, got level 1"),
        ({"patch_size": 0, "model": "paper-unet", "coords": "c"}, ConfigError, "give patch_size"),
        ({"overlap": 16}, ConfigError, "overlap by less"),
        ({"patch_mpp": 0}, ConfigError, "mpp must be a positive number"),
        ({"model": "networks_of_bags:OfEach"}, ModelError, "expected one answer for all of them"),
        ({"model": "networks_of_bags:OfEach", "loss": "mse"}, ModelError, "expected one answer for all of them"),
        ({"patch_mpp": 0.5}, ConfigError, "line 2: .*micrometres per pixel"),
    ],
)
def test_what_cannot_be_is_told_before_anything_is_written(cohort, changes, error, told) -> None:
    path = cohort("label", LABELS)
    with pytest.raises(error, match=told):
        fit(config(path, **changes))
    assert not Path("run").exists() or not [*Path("run").glob("*.pt")]


OF_FROZEN = {"model": MODEL.format(2) + "&head.dropout=0.25", "frozen": ["network.encoder"], "augment": False}


def losses(out: str) -> list[float]:
    lines = map(json.loads, Path(out, "metrics.jsonl").read_text().splitlines())
    return [line["values"]["loss"] for line in lines if "loss" in line.get("values", {})]


def told(path: Path, **changes: object) -> list[str]:
    texts: list[str] = []
    fit(config(path, **changes), [lambda event: texts.append(event.text) if isinstance(event, Notice) else None])
    return texts


def test_features_of_a_frozen_encoder_are_computed_once(cohort, monkeypatch) -> None:
    """The losses are those of steps that run the encoder, but for rounding in float32: batches are others."""
    path = cohort("label,patient", (0, 0, 1, 0, 1, 1), "aabcdd")
    encoded, features = list[str](), Encoder.features

    def noted(self, bag, *given):
        encoded.append(bag.name)
        return features(self, bag, *given)

    monkeypatch.setattr(Encoder, "features", noted)
    texts = told(path, **OF_FROZEN, features="kept")
    assert sorted(encoded) == [f"s{number}" for number in range(6)]
    assert any("computed once" in text and "kept" in text for text in texts)
    monkeypatch.setattr(frozen, "_sees_each_alone", lambda *_: False)
    assert any("in every step" in text for text in told(path, **OF_FROZEN, out="slow"))
    assert losses("run") == pytest.approx(losses("slow"), rel=1e-5)
    assert len(losses("run")) == 6


def test_features_that_another_run_has_replaced_meanwhile_are_told(cohort) -> None:
    path = cohort("label", LABELS)
    other = config(path, **OF_FROZEN, features="kept", out="other", seed=1, epochs=1)

    def train_another(event: Event) -> None:
        if isinstance(event, MetricsLogged) and not Path("other").exists():
            fit(other)

    with pytest.raises(ImageError, match=r"kept.s\d.h5 holds features of another encoder"):
        fit(config(path, **OF_FROZEN, features="kept"), [train_another])


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"augment": True}, "anew in each epoch"),
        ({"colour_jitter": 0.1}, "anew in each epoch"),
        ({"model": MODEL.format(2).replace("Tiny", "Drawing")}, "draws at random"),
        ({"model": MODEL.format(2).replace("Tiny", "Mixing")}, "see each patch by itself"),
        ({"frozen": ["network.encoder.conv.weight"]}, "frozen as a whole"),
    ],
)
def test_features_that_are_not_the_same_in_every_step_are_not_kept(cohort, changes, reason) -> None:
    path = cohort("label", LABELS)
    with pytest.raises(ConfigError, match=reason):
        fit(config(path, **{**OF_FROZEN, "features": "kept", **changes}))
