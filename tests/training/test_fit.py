"""The whole loop on a tiny cohort: what it learns, writes, continues and refuses."""

import json
import shutil
import signal
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tifffile
import torch

from gigagrad.at_work import works_in
from gigagrad.cohorts import read_cohort
from gigagrad.errors import BudgetError, CaptureError, ConfigError, ModelError, TargetError
from gigagrad.events import JobAdvanced, JobFinished, JobStarted, MetricsLogged, Notice, SlideBegun, TileDone
from gigagrad.models import load_model
from gigagrad.prediction import PredictConfig, predict
from gigagrad.prediction.cohort_scores import evaluate_model
from gigagrad.training import FitConfig, FitResult, fit
from gigagrad.training.folder import Checkpoint, RunFolder
from gigagrad.training.sharing import Shards


@pytest.fixture
def two_classes(tmp_path, monkeypatch):
    """The name of a model with two output channels, in a module of the user's own."""
    (tmp_path / "networks_of_test_fit.py").write_text(
        "import torch\n"
        "from gigagrad.models import Preprocess\n"
        "def two():\n"
        "    return torch.nn.Sequential(Preprocess(), torch.nn.Conv2d(1, 2, 3, padding=1))\n"
    )
    monkeypatch.chdir(tmp_path)
    return "networks_of_test_fit:two"


def config_of(cohort_csv, out):
    return FitConfig(slides=str(cohort_csv), out=str(out), epochs=2, checkpoint_seconds=0)


@pytest.fixture
def config(cohort_csv, tmp_path):
    return config_of(cohort_csv, tmp_path / "run")


@pytest.fixture(scope="module")
def whole(cohort_csv, tmp_path_factory):
    """The folder of a run of `config` that nothing has interrupted."""
    out = tmp_path_factory.mktemp("whole") / "run"
    fit(config_of(cohort_csv, out))
    return out


@pytest.fixture(scope="module")
def stopped(cohort_csv, tmp_path_factory):
    out = tmp_path_factory.mktemp("stopped") / "run"
    with pytest.raises(KeyboardInterrupt):
        fit(config_of(cohort_csv, out), [stop_after(2)])
    return out


@pytest.fixture
def begun(stopped, config):
    """The folder of `config`, with a run that was stopped after two steps."""
    shutil.copytree(stopped, config.out)
    return RunFolder(Path(config.out))


def metrics_of(run):
    lines = [json.loads(line) for line in RunFolder(run).metrics.read_text().splitlines()]
    return [(m["split"], m["epoch"], m["step"]) for m in lines if m["event"] == "metrics"]


def weights(run):
    return Checkpoint.load(RunFolder(run).checkpoint).model


def same_bits(one, other):
    assert one.keys() == other.keys()
    return all(torch.equal(one[key], other[key]) for key in one)


def stop_after(steps):
    """A listener that ends the run in the middle, as Ctrl-C would."""

    def listener(event):
        if isinstance(event, JobAdvanced) and event.job == "train" and event.done == steps:
            raise KeyboardInterrupt

    return listener


def test_a_run_writes_everything_that_others_read(config, tmp_path):
    events: list[Any] = []
    random_before = torch.get_rng_state()
    result = fit(config, [events.append])
    assert torch.equal(torch.get_rng_state(), random_before)
    run = RunFolder(tmp_path / "run")
    names = {path.name for path in run.path.iterdir()}
    assert names == {
        "config.yaml", "environment.json", "metrics.jsonl", "checkpoint.pt", "best.pt", "summary.json",
        "plan.json", "plan.txt", "model",
    }  # fmt: skip
    assert metrics_of(run.path) == [
        *(("train", 1, step) for step in (1, 2, 3)), ("val", 1, 3),
        *(("train", 2, step) for step in (4, 5, 6)), ("val", 2, 6), ("test", 2, 6),
    ]  # fmt: skip
    summary = json.loads(run.summary.read_text())
    assert summary["dice"].keys() == {"slide4", "slide5"}
    assert summary["mean"] == pytest.approx(np.mean(list(summary["dice"].values())))
    assert (summary["steps"], summary["parameters"], summary["model"]) == (6, 4492, "paper-unet")
    assert result.scores == summary["dice"]
    assert FitConfig.from_yaml(run.config) == config
    assert torch.__version__.startswith(json.loads(run.environment.read_text())["packages"]["torch"].split("+")[0])
    assert json.loads(run.plan_data.read_text())
    assert run.plan_text.read_text().strip()
    spec, model = load_model(result.best)
    assert spec == "paper-unet"
    assert sum(parameter.numel() for parameter in model.parameters()) == 4492

    jobs = [event for event in events if isinstance(event, (JobStarted, JobFinished))]
    assert [event.job for event in jobs] == [
        "label", "label", "train", "validate", "validate", "validate", "validate", "train", "test", "test"
    ]  # fmt: skip
    steps = [event for event in events if isinstance(event, JobAdvanced) and event.job == "train"]
    assert [(event.done, event.total) for event in steps] == [(done, 6) for done in range(1, 7)]
    assert "epoch 2 of 2, loss" in steps[-1].detail


def test_while_it_trains_it_says_of_which_slide_which_tile_is_computed(config, tmp_path, monkeypatch):
    monkeypatch.setattr("gigagrad.at_work._EVERY_SECONDS", 0.001)
    monkeypatch.setattr("gigagrad.at_work._SHARE", 0)
    told, slides = [], [""]

    def listen(event):
        if isinstance(event, SlideBegun):
            slides.append(str(event.slide))
        if isinstance(event, TileDone):
            end = time.monotonic() + 60
            while not (found := [work for work in works_in(tmp_path / "run") if is_this(work)]):
                assert time.monotonic() < end, "nothing is written"
                time.sleep(0.001)
            told.extend(found)

    def is_this(work):
        return work["slide"] == slides[-1] and "boxes" in work

    fit(replace(config, epochs=1), (listen,))
    rows = {str(row.slide): row for row in read_cohort(config.slides).rows}
    assert {work["slide"] for work in told} == {*rows}
    assert {work["job"] for work in told} == {"train", "validate", "test"}
    for work in told:
        with rows[work["slide"]].open() as slide:
            assert work["boxes"] == [[0, 0, slide.height, slide.width]]
    assert not list((tmp_path / "run").glob(".now*"))


def test_the_weights_of_the_lowest_validation_loss_are_kept(config, tmp_path, monkeypatch):
    losses = iter([0.9, 0.5, 0.7])
    monkeypatch.setattr("gigagrad.training.loop.validate", lambda *told: next(losses))
    result = fit(FitConfig(**{**config.to_dict(), "epochs": 3}))
    assert (result.best_epoch, result.best_loss) == (2, 0.5)
    monkeypatch.undo()
    fit(FitConfig(**{**config.to_dict(), "epochs": 2, "out": str(tmp_path / "two")}))
    best = load_model(result.best)[1].state_dict()
    assert same_bits(best, weights(tmp_path / "two"))
    assert not same_bits(best, weights(tmp_path / "run"))


def test_it_learns(config):
    losses = []

    def listener(event):
        if isinstance(event, MetricsLogged) and event.split == "val":
            losses.append(event.values["loss"])

    result = fit(FitConfig(**{**config.to_dict(), "epochs": 30, "learning_rate": 1e-2}), [listener])
    assert losses[-1] < 0.6 * losses[0]
    assert result.mean > 0.8


@pytest.mark.parametrize("stop", [3, 4])
def test_an_interrupted_run_ends_with_the_same_bits(config, tmp_path, whole, stop):
    with pytest.raises(KeyboardInterrupt):
        fit(config, [stop_after(stop)])
    notices = []
    fit(config, [lambda event: notices.append(event.text) if isinstance(event, Notice) else None])
    # The listener stopped it before the checkpoint of that very step was due; what is whole is saved all the same.
    assert notices == [f"continuing {config.out} after step {stop}"]
    assert same_bits(weights(tmp_path / "run"), weights(whole))
    for name in ("best.pt", "summary.json"):
        one, other = (out / name for out in (tmp_path / "run", whole))
        if name == "best.pt":
            assert same_bits(load_model(one)[1].state_dict(), load_model(other)[1].state_dict())
        else:
            assert one.read_text() == other.read_text()
    assert metrics_of(tmp_path / "run") == metrics_of(whole)


def test_slides_of_several_sizes_are_turned_and_continued_too(config, mixed_csv, tmp_path):
    mixed = FitConfig(**{**config.to_dict(), "slides": str(mixed_csv)})
    fit(FitConfig(**{**mixed.to_dict(), "out": str(tmp_path / "whole")}))
    with pytest.raises(KeyboardInterrupt):
        fit(mixed, [stop_after(2)])
    fit(mixed)
    assert same_bits(weights(tmp_path / "run"), weights(tmp_path / "whole"))


_PROGRAM = """
import os, signal, sys, threading, torch
torch.set_num_threads(1)
from gigagrad.events import MetricsLogged
from gigagrad.training import fit
left = int(sys.argv[2])

def listen(event):
    global left
    left -= isinstance(event, MetricsLogged)
    if not left:  # not at a moment of its choosing: perhaps in a step, perhaps while a checkpoint is being written
        left = -1
        threading.Timer(0.003 * int(sys.argv[2]), os.kill, (os.getpid(), signal.SIGKILL)).start()

fit(sys.argv[1], [listen])
"""


def test_a_killed_process_continues_with_the_same_bits(config, tmp_path, whole):
    config.save(tmp_path / "run.yaml")
    for steps in (2, 4):
        ended = subprocess.run([sys.executable, "-c", _PROGRAM, str(tmp_path / "run.yaml"), str(steps)])
        assert ended.returncode == -signal.SIGKILL
    fit(config)
    assert same_bits(weights(tmp_path / "run"), weights(whole))
    assert metrics_of(tmp_path / "run") == metrics_of(whole)


def test_a_finished_run_is_returned_and_can_be_lengthened(config, tmp_path):
    first = fit(config)
    events: list[Any] = []
    assert fit(config, [events.append]) == first
    assert len(events) == 1
    longer = fit(FitConfig(**{**config.to_dict(), "epochs": 3, "checkpoint_seconds": 1e9}))
    assert (longer.epochs, longer.steps) == (3, 9)
    fit(FitConfig(**{**config.to_dict(), "epochs": 3, "out": str(tmp_path / "whole")}))
    assert same_bits(weights(tmp_path / "run"), weights(tmp_path / "whole"))


@pytest.mark.usefixtures("begun")
def test_another_configuration_is_not_mixed_in(config):
    changed = FitConfig(**{**config.to_dict(), "seed": 1, "learning_rate": 0.1})
    with pytest.raises(ConfigError, match=r"learning_rate: 0.001 then, 0.1 now; seed: 0 then, 1 now.*--overwrite"):
        fit(changed)
    assert fit(changed, overwrite=True).steps == 6


def test_the_optimizer_s_shards_of_a_step_are_written_once(config, monkeypatch):
    """While they are written, those of the same step that lie there are needed, by the checkpoint."""
    written, save = [], Shards.save

    def noted(self, optimizer, folder):
        written.append(folder.name)
        return save(self, optimizer, folder)

    monkeypatch.setattr(Shards, "save", noted)
    config = replace(config, shard_optimizer=True)
    fit(config)
    fit(replace(config, epochs=3))
    assert written == [f"step-{step}" for step in range(1, 10)]


def test_what_torchrun_starts_again_overwrites_once(config, monkeypatch):
    """Also where they fail before they have overwritten anything."""

    def launched(name, **changed):
        monkeypatch.setenv("TORCHELASTIC_ERROR_FILE", f"/tmp/{name}/attempt_1/0/error.json")
        return fit(replace(config, **changed), overwrite=True)

    fit(config)
    path = RunFolder(Path(config.out)).checkpoint
    before = path.stat().st_mtime_ns
    with pytest.raises(BudgetError):
        launched("a", memory="1 MiB")
    assert path.stat().st_mtime_ns == before
    launched("a", seed=1)
    began = path.stat().st_mtime_ns
    assert began > before
    launched("a", seed=1)
    assert path.stat().st_mtime_ns == began
    launched("b", seed=1)
    assert path.stat().st_mtime_ns > began


def test_a_changed_cohort_is_noticed(config, cohort_csv, tmp_path):
    mine = cohort_csv.with_name("changing.csv")
    mine.write_text(cohort_csv.read_text())
    mine_config = FitConfig(**{**config.to_dict(), "slides": str(mine)})
    with pytest.raises(KeyboardInterrupt):
        fit(mine_config, [stop_after(2)])
    mine.write_text("\n".join(cohort_csv.read_text().splitlines()[:-1]))
    with pytest.raises(ConfigError, match=r"rows of .*changing\.csv changed"):
        fit(mine_config)


def test_a_damaged_checkpoint_says_so(config, begun):
    checkpoint = begun.checkpoint
    checkpoint.write_bytes(checkpoint.read_bytes()[:1000])
    with pytest.raises(ConfigError, match=r"cannot continue the run: .*checkpoint\.pt is damaged.*--overwrite"):
        fit(config)


def test_files_of_somebody_else_are_left_alone(config, tmp_path):
    folder = tmp_path / "run"
    folder.mkdir()
    (folder / "config.yaml").write_text("mine")
    (folder / "notes.txt").write_text("mine")
    with pytest.raises(ConfigError, match=r"config\.yaml exists and belongs to no run"):
        fit(config)
    assert (folder / "config.yaml").read_text() == "mine"
    fit(config, overwrite=True)
    assert (folder / "notes.txt").read_text() == "mine"


@pytest.mark.parametrize(
    ("changes", "error"),
    [
        ({"memory": "1 MiB"}, BudgetError),
        ({"model": "paper-unett"}, ModelError),
        ({"loss": "dice2"}, ConfigError),
        ({"slides": "nowhere.csv"}, ConfigError),
    ],
)
def test_what_cannot_work_fails_before_anything_is_written(config, tmp_path, changes, error):
    with pytest.raises(error):
        fit(FitConfig(**{**config.to_dict(), **changes}))
    assert not (tmp_path / "run").exists()


def test_a_mask_the_loss_cannot_take_is_named_with_its_line(config, cohort_csv, two_classes):
    tifffile.imwrite(cohort_csv.with_name("bad.tif"), np.full((176, 176), 3, np.uint8), tile=(64, 64))
    bad = cohort_csv.with_name("bad.csv")
    bad.write_text("slide,mask,split\nslide0.tif,bad.tif,train\n")
    with pytest.raises(TargetError, match=r"bad\.csv line 2: the mask of bad holds class 3; ce takes 0 to 1"):
        fit(FitConfig(**{**config.to_dict(), "slides": str(bad), "loss": "ce", "model": two_classes}))


def test_a_wrong_value_between_the_samples_is_found_by_the_first_step(config, cohort_csv):
    slide = cohort_csv.with_name("large.tif")
    tifffile.imwrite(slide, np.zeros((1600, 1600, 3), np.uint8), tile=(256, 256), photometric="rgb")
    large = np.ones((1600, 1600), np.uint8)
    large[0, 0] = 7
    tifffile.imwrite(cohort_csv.with_name("rare.tif"), large, tile=(256, 256))
    rare = cohort_csv.with_name("rare.csv")
    rare.write_text("slide,mask,split\nlarge.tif,rare.tif,train\n")
    settings = FitConfig(**{**config.to_dict(), "slides": str(rare)})
    steps = []
    with pytest.raises(TargetError, match="a binary loss takes 0 and one other value"):
        fit(settings, [lambda event: steps.append(event) if isinstance(event, MetricsLogged) else None])
    assert not steps


def test_a_network_of_the_users_own_with_several_classes(config, cohort_csv, two_classes):
    result = fit(FitConfig(**{**config.to_dict(), "loss": "ce", "model": two_classes}))
    assert result.metric == "dice"
    assert result.scores.keys() == {"slide4", "slide5"}


def test_in_grey_a_network_of_one_channel_is_trained_and_used(config, tmp_path, monkeypatch):
    (tmp_path / "one_channel_of_test_fit.py").write_text(
        "import torch\n"
        "class Net(torch.nn.Module):\n"
        "    def __init__(self):\n"
        "        super().__init__()\n"
        "        self.conv = torch.nn.Conv2d(1, 1, 3, padding=1)\n"
        "    def forward(self, x):\n"
        "        return self.conv(x / 255)\n"
    )
    monkeypatch.chdir(tmp_path)
    name = "one_channel_of_test_fit:Net"
    with pytest.raises(CaptureError, match="1 channel"):
        fit(replace(config, model=name))
    grey = replace(config, model=name, grey=True, out=str(tmp_path / "grey"))
    result = fit(grey)
    settings = {"run": grey.out, "slides": (config.slides,), "split": "test", "out": tmp_path / "out", "trust": (name,)}
    predicted = predict(PredictConfig(**settings))
    assert {slide.name: slide.dice for slide in predicted} == pytest.approx(result.scores)
    evaluation = evaluate_model(grey.out, config.slides, split="test", trust=[name])
    assert evaluation.dice[0] == pytest.approx(result.mean)
    with pytest.raises(ConfigError, match="colours"):
        predict(PredictConfig(**settings, grey=False))


def test_slides_without_masks_are_labelled_by_the_recipe_once(config, cohort_csv, tmp_path):
    unlabelled = cohort_csv.with_name("unlabelled.csv")
    unlabelled.write_text("slide,split\nslide0.tif,train\nslide4.tif,test\n")
    settings = FitConfig(**{**config.to_dict(), "slides": str(unlabelled)})
    with pytest.raises(KeyboardInterrupt):
        fit(settings, [stop_after(1)])
    labels = RunFolder(tmp_path / "run").labels
    made = {path.name: path.stat().st_mtime_ns for path in labels.iterdir()}
    assert made.keys() == {"slide0.tif", "slide4.tif"}
    notices = []
    result = fit(settings, [lambda event: notices.append(event.text) if isinstance(event, Notice) else None])
    assert {path.name: path.stat().st_mtime_ns for path in labels.iterdir()} == made
    assert any("split 'val'" in text for text in notices)
    assert (result.best_loss, result.best_epoch) == (None, 2)


def test_a_loss_that_is_no_longer_a_number_ends_the_run(config):
    with pytest.raises(ConfigError, match="lower learning_rate"):
        fit(FitConfig(**{**config.to_dict(), "learning_rate": 1e30, "epochs": 10}))


def test_a_validation_that_is_no_number_from_the_start_ends_the_run(config, cohort_csv, two_classes):
    """No loss is lower than NaN: the first epoch's weights were kept, whatever came behind."""
    ids = np.full((176, 176), 255, np.uint8)
    tifffile.imwrite(cohort_csv.with_name("ignored.tif"), ids, tile=(64, 64), photometric="minisblack")
    ignored = cohort_csv.with_name("ignored.csv")
    ignored.write_text(cohort_csv.read_text().replace("slide3.mask.tif", "ignored.tif"))
    with pytest.raises(ConfigError, match=r"validation loss of the first epoch is no number.*split 'val'"):
        fit(FitConfig(**{**config.to_dict(), "slides": str(ignored), "model": two_classes, "loss": "ce"}))


def test_turns_reach_the_engine_and_can_be_left_out(config, tmp_path):
    fit(config)
    fit(FitConfig(**{**config.to_dict(), "out": str(tmp_path / "plain"), "augment": False}))
    assert not same_bits(weights(tmp_path / "run"), weights(tmp_path / "plain"))


def test_a_mapping_will_do(config):
    assert fit(config.to_dict()).steps == 6


def test_a_run_of_a_function_says_that_only_classes_are_loaded_again(config, two_classes):
    events: list[Any] = []
    result = fit(FitConfig(**{**config.to_dict(), "model": two_classes, "loss": "ce", "epochs": 1}), [events.append])
    assert set(result.scores) == {"slide4", "slide5"}
    assert any("only a class can be loaded again" in event.text for event in events if isinstance(event, Notice))
    with pytest.raises(ModelError, match="was not called"):
        load_model(result.best, (two_classes,))


def test_what_lies_in_a_run_folder_is_neither_run_nor_followed(config, begun, tmp_path, monkeypatch):
    """A stranger's folder: a model that names code, and files that are links to somewhere else."""
    monkeypatch.chdir(tmp_path)
    run = begun
    checkpoint = Checkpoint.load(run.checkpoint)
    probe = "subprocess:getoutput?cmd=touch+ran"
    replace(checkpoint, config={**checkpoint.config, "model": probe, "loss": probe}).save(run.checkpoint)
    with pytest.raises(ConfigError, match="other settings"):
        fit(config)
    checkpoint.save(run.checkpoint)
    precious = tmp_path / "precious"
    precious.write_text("mine")
    run.metrics.unlink()
    run.metrics.symlink_to(precious)
    with pytest.raises(ConfigError, match=r"metrics\.jsonl is a link"):
        fit(config)
    run.metrics.unlink()
    run.labels.symlink_to(tmp_path)
    fit(config, overwrite=True)
    assert precious.read_text() == "mine"
    assert not (tmp_path / "ran").exists()


@pytest.mark.parametrize(
    "changes",
    [
        {"config": 3},
        {"model": {"a": 1}},
        {"model": {}},
        {"optimizer": {"state": {}, "param_groups": 5}},
        {"engine": {"choices": {"a": 1}}},
        {"engine": {}},
        {"metrics_bytes": -1},
        {"metrics_bytes": 1e9},
        {"tile": 3},
        {"progress": {"epoch": -1}},
        {"progress": {"epoch": "1"}},
        {"progress": {"best_loss": "0"}},
        {"progress": {"no": 1}},
        {"progress": None},
    ],
)
def test_other_things_in_a_checkpoint_are_one_line(config, begun, changes):
    path = begun.checkpoint
    torch.save(torch.load(path, weights_only=True) | changes, path)
    with pytest.raises(ConfigError, match=r"cannot continue the run.*--overwrite") as caught:
        fit(config)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    "text", ["[]", "{", "[" * 5000, '{"metric": "dice", "dice": 3}', '{"metric": "model", "model": "a"}']
)
def test_other_things_in_a_summary_are_one_line(tmp_path, text):
    (tmp_path / "summary.json").write_text(text)
    with pytest.raises(ConfigError, match=r"summary\.json"):
        FitResult.load(tmp_path)
