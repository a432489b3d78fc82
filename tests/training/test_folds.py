"""Cross-validation: a run for each fold, scored on its own fold."""

from __future__ import annotations

import io
import json
from dataclasses import replace
from pathlib import Path

import pytest
from rich.console import Console

from gigagrad.cli import main
from gigagrad.errors import ConfigError
from gigagrad.plans.description import Table
from gigagrad.prediction.cohort_scores import evaluate_model
from gigagrad.reports.tables import Shown, folds_table
from gigagrad.training import FitConfig, cross_validate, fit
from gigagrad.training.folds import FoldResult


@pytest.fixture
def config(cohort_csv, tmp_path):
    lines = [line.split(",") for line in cohort_csv.read_text().splitlines()[1:]]
    rows = [
        f"{cohort_csv.parent / slide},{cohort_csv.parent / mask},{k % 2}" for k, (slide, mask, _) in enumerate(lines)
    ]
    path = tmp_path / "folds.csv"
    path.write_text("\n".join(["slide,mask,fold", *rows[:4]]) + "\n")
    return FitConfig(slides=str(path), out=str(tmp_path / "runs"), epochs=1, augment=False)


def test_each_fold_is_validated_by_a_run_of_the_others(config, tmp_path, capsys):
    first, second = cross_validate(config)
    assert [(result.fold, result.slides, result.out.name) for result in (first, second)] == [
        (0, 2, "fold-0"),
        (1, 2, "fold-1"),
    ]
    alone = fit(replace(config, fold=1, out=str(tmp_path / "alone")))
    found = evaluate_model(alone.out, config.slides, split="val")
    assert [score.name for score in found.scores] == ["slide1", "slide3"]
    assert second.scores == {"dice": found.dice[0], "iou": found.iou[0]}
    written = json.loads((tmp_path / "runs" / "folds.json").read_text())["folds"]
    assert written[1]["scores"] == second.scores

    assert (
        main(["fit", "--folds", "--slides", config.slides, "--out", config.out, "--epochs", "1", "--no-augment"]) == 0
    )
    shown = capsys.readouterr().out
    assert "finished; --overwrite starts it anew" in " ".join(shown.split())
    assert f"{second.scores['dice']:.4f}" in shown


def test_scores_of_folds_stand_in_one_line_each_where_windows_are_narrow():
    scores = dict.fromkeys(("accuracy", "balanced_accuracy", "auc", "brier", "ece"), 0.5)
    folds = [FoldResult(fold, Path(), 2, 1, scores) for fold in range(2)]
    written = io.StringIO()
    console = Console(file=written, width=80)
    console.print(Shown(folds_table(folds)))
    console.print(Shown(Table("A title of several words", ("a", "b"), (("1", "2"),))))
    lines = written.getvalue().splitlines()
    assert "A title of several words" in lines
    found = [line.split() for line in lines if line.startswith(("mean", "sd"))]
    assert found == [["mean", *["0.5000"] * 5], ["sd", *["0.0000"] * 5]]


@pytest.mark.parametrize(("fold", "header", "words"), [(1, "fold", "one fold is named, 1"), (None, "part", "no folds")])
def test_what_cannot_be_validated_in_turn_is_said(config, tmp_path, fold, header, words):
    path = tmp_path / "folds.csv"
    path.write_text(path.read_text().replace("fold", header, 1))
    with pytest.raises(ConfigError, match=words):
        cross_validate(replace(config, fold=fold))
    assert not (tmp_path / "runs").exists()
