"""What MLflow, Weights & Biases, trackio and TensorBoard hold of a run, read back by their own means."""

import struct
import sys
from contextlib import nullcontext
from typing import Any

import mlflow
import pytest
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from wandb.proto.wandb_internal_pb2 import Record

from gigagrad.errors import ConfigError
from gigagrad.events import JobAdvanced, Notice
from gigagrad.training import FitConfig, fit
from gigagrad.training.folder import RunFolder
from gigagrad.training.trackers import TRACKERS

pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning", "ignore::UserWarning")


@pytest.fixture
def config(cohort_csv, tmp_path):
    return FitConfig(slides=str(cohort_csv), out=str(tmp_path / "run"), epochs=2, checkpoint_seconds=0)


@pytest.fixture
def offline(tmp_path, monkeypatch):
    """Every program keeps what it gets in `tmp_path`."""
    monkeypatch.setenv("MLFLOW_ALLOW_FILE_STORE", "true")
    monkeypatch.setenv("TRACKIO_DIR", str(tmp_path / "trackio"))
    monkeypatch.setenv("WANDB_DIR", str(tmp_path))
    monkeypatch.setenv("WANDB_MODE", "offline")
    monkeypatch.setenv("WANDB_SILENT", "true")
    mlflow.set_tracking_uri((tmp_path / "mlflow").as_uri())
    yield
    mlflow.set_tracking_uri(None)


def records(path):
    """What a file of W&B holds: LevelDB's log, which is blocks of 32 KiB of parts of records, behind 7 bytes."""
    data, at, whole = path.read_bytes(), 7, b""
    while at + 7 <= len(data):
        if 2**15 - at % 2**15 < 7:
            at += 2**15 - at % 2**15
            continue
        _, size, kind = struct.unpack_from("<IHB", data, at)
        whole += data[at + 7 : at + 7 + size]
        at += 7 + size
        if kind in (1, 4):  # whole, or the last part
            yield Record.FromString(whole)
            whole = b""


def of_wandb(folder):
    """`{step: names}` and ids of the runs kept under `folder`."""
    steps: dict[int, set[str]] = {}
    ids = set()
    for path in sorted(folder.glob("wandb/offline-run-*/*.wandb")):
        for record in records(path):
            if record.HasField("run"):
                ids.add(record.run.run_id)
            if record.HasField("history"):
                names = {item.key or "/".join(item.nested_key) for item in record.history.item}
                steps.setdefault(record.history.step.num, set()).update(name for name in names if name[0] != "_")
    return steps, ids


def interrupt(event):
    if isinstance(event, JobAdvanced) and event.job == "train" and event.done == 4:
        raise KeyboardInterrupt


def test_an_interrupted_run_is_one_run_with_every_number(config, tmp_path, offline):
    config = FitConfig(**{**config.to_dict(), "trackers": ("tensorboard", "mlflow", "wandb")})
    with pytest.raises(KeyboardInterrupt):
        fit(config, [interrupt])
    assert mlflow.active_run() is None
    logged: list[Any] = []
    fit(config, [logged.append])
    key = RunFolder(tmp_path / "run").tracking.read_text()

    curves = EventAccumulator(str(RunFolder(tmp_path / "run").curves)).Reload()
    assert [scalar.step for scalar in curves.Scalars("train/loss")] == [1, 2, 3, 4, 5, 6]
    assert [scalar.step for scalar in curves.Scalars("val/loss")] == [3, 6]

    (run,) = mlflow.search_runs(output_format="list")
    assert (run.info.run_name, run.info.status) == ("run", "FINISHED")
    assert (run.data.params["model"], run.data.params["learning_rate"]) == ("paper-unet", "0.001")
    history = mlflow.MlflowClient().get_metric_history(run.info.run_id, "train/loss")
    assert {metric.step for metric in history} == {1, 2, 3, 4, 5, 6}
    last = {event.step: event.values["loss"] for event in logged if getattr(event, "split", "") == "train"}
    assert history[-1].value == pytest.approx(last[6])
    assert 0 < run.data.metrics["test/dice_mean"] <= 1

    steps, ids = of_wandb(tmp_path)
    assert ids == {key}
    assert set(steps) == {1, 2, 3, 4, 5, 6}
    assert "train/loss" in steps[4]
    assert {"train/loss", "val/loss", "test/dice_mean"} <= steps[6]


def test_trackio(config, offline):
    trackio = pytest.importorskip("trackio")
    fit(FitConfig(**{**config.to_dict(), "epochs": 1, "trackers": ("trackio",)}))
    (run,) = trackio.Api().runs("gigagrad")
    assert run.name.startswith("run-")


class Failing:
    """A program that is at its end after so many calls."""

    def __init__(self, calls):
        self.calls = calls

    def __call__(self, values, step):
        self.calls -= 1
        if self.calls < 0:
            raise OSError("the server\nis gone")


def test_a_run_outlives_its_tracker(config, monkeypatch):
    monkeypatch.setitem(TRACKERS, "mlflow", lambda *run: nullcontext(Failing(1)))
    told: list[Any] = []
    result = fit(FitConfig(**{**config.to_dict(), "epochs": 1, "trackers": ("mlflow",)}), [told.append])
    assert result.steps == 3
    notices = [event.text for event in told if isinstance(event, Notice) and event.warning]
    assert [text for text in notices if "tracker mlflow failed" in text and text.endswith("the server is gone")]
    assert sum("tracker" in text for text in notices) == 1


def test_a_tracker_that_does_not_begin_ends_the_run_in_one_line(config, monkeypatch):
    def refuse(run):
        raise RuntimeError("no key;\nlog in")

    monkeypatch.setattr(mlflow, "search_runs", lambda **_: refuse(None))
    asked = FitConfig(**{**config.to_dict(), "trackers": ("mlflow",)})
    with pytest.raises(ConfigError, match="the tracker mlflow does not begin: no key; log in"):
        fit(asked)
    monkeypatch.setitem(sys.modules, "mlflow", None)
    with pytest.raises(ConfigError, match=r"pip install 'gigagrad\[mlflow\]'"):
        fit(asked)


def test_an_unknown_tracker_is_answered_with_the_nearest_one(config):
    with pytest.raises(ConfigError, match=r"trackers must be one of .*did you mean 'mlflow'"):
        FitConfig(**{**config.to_dict(), "trackers": ("MLFlow",)})


def test_a_run_keeps_its_key_until_it_is_overwritten(tmp_path):
    folder = RunFolder(tmp_path)
    key = folder.tracking_key()
    assert RunFolder(tmp_path).tracking_key() == key
    folder.clear()
    assert folder.tracking_key() != key
    folder.tracking.write_text("' or 1 = 1")
    assert folder.tracking_key().isalnum(), "it goes into a query"
