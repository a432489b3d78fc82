"""Ranks that would not do the same are stopped before they begin."""

from __future__ import annotations

import shutil
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import nn

from gigagrad.cohorts import read_cohort
from gigagrad.errors import ConfigError
from gigagrad.ranks import run_threaded
from gigagrad.training import FitConfig, sharing
from gigagrad.training.folder import RunFolder
from gigagrad.training.sharing import check_same_start, check_same_weights, check_seen


@pytest.mark.parametrize(
    ("changed", "said"),
    [
        ({}, None),
        ({"memory": "4 GiB", "scratch": "elsewhere", "out": "there", "rank_timeout": 9.0}, None),
        ({"accumulate": 4}, "ranks 0 and 1 differ in accumulate;"),
        ({"epochs": 3, "seed": 7}, "ranks 0 and 1 differ in epochs, seed;"),
    ],
)
def test_settings_are_the_same_on_all(changed, said, cohort_csv):
    config = FitConfig(slides=str(cohort_csv), out="run")

    def work(ranks):
        own = replace(config, **changed) if ranks.index == 1 else config
        check_same_start(ranks, RunFolder(Path(own.out)), None, own, read_cohort(own.slides), [(3, 8, 8)])

    if said is None:
        run_threaded(3, work)
    else:
        with pytest.raises(ConfigError, match=said):
            run_threaded(3, work)


def test_slides_are_the_same_on_all(cohort_csv, tmp_path):
    other = cohort_csv.with_name("other.csv")
    lines = cohort_csv.read_text().splitlines()
    other.write_text("\n".join([lines[0], *reversed(lines[1:])]))
    config = FitConfig(slides=str(cohort_csv), out="run")

    def work(ranks, path, shapes):
        cohort = read_cohort(path if ranks.index else cohort_csv)
        check_same_start(ranks, RunFolder(tmp_path), None, config, cohort, shapes[ranks.index])

    with pytest.raises(ConfigError, match="ranks 0 and 1 differ in rows of the cohort;"):
        run_threaded(2, lambda ranks: work(ranks, other, [1, 1]))
    with pytest.raises(ConfigError, match="ranks 0 and 1 differ in sizes of slides;"):
        run_threaded(2, lambda ranks: work(ranks, cohort_csv, [1, 2]))


def test_a_run_is_found_by_all_or_none(cohort_csv, tmp_path):
    config = FitConfig(slides=str(cohort_csv), out="run")
    cohort = read_cohort(cohort_csv)

    def work(ranks):
        check_same_start(ranks, RunFolder(tmp_path), ranks.index or None, config, cohort, [])

    with pytest.raises(ConfigError, match=r"rank 1 finds a run after step 1 in .*, and rank 0 no run; give an --out"):
        run_threaded(2, work)


def test_weights_are_the_same_on_all():
    torch.manual_seed(0)
    nets = [nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4)) for _ in range(3)]
    for net in nets:
        net.load_state_dict(nets[0].state_dict())
    run_threaded(3, lambda ranks: check_same_weights(ranks, nets[ranks.index]))
    nets[2].get_buffer("1.running_var")[3] += 1
    with pytest.raises(ConfigError, match=r"^other weights than those of the first rank are those of rank 2; make"):
        run_threaded(3, lambda ranks: check_same_weights(ranks, nets[ranks.index]))


def test_all_see_what_the_first_one_writes(tmp_path, monkeypatch):
    monkeypatch.setattr(sharing, "_SEEN_SECONDS", 0.2)
    folders = [tmp_path / "0", tmp_path / "1"]
    folders[0].mkdir()
    (folders[0] / "checkpoint.pt").touch()
    with pytest.raises(ConfigError, match=r"^rank 1 does not see what the first one writes into .*1; give an --out"):
        run_threaded(2, lambda ranks: check_seen(ranks, RunFolder(folders[ranks.index])))
    shutil.copytree(folders[0], folders[1])
    run_threaded(2, lambda ranks: check_seen(ranks, RunFolder(folders[ranks.index])))
