"""Processes that predict a cohort side by side, some of which are killed: the files of one process, byte for byte."""

import dataclasses
import importlib
import json
import os
import pickle
import platform
import signal
import subprocess
import sys
import threading
from concurrent.futures import ProcessPoolExecutor, ThreadPoolExecutor
from contextlib import contextmanager
from functools import cache
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import pytest
import tifffile

from gigagrad.cohorts import Row
from gigagrad.cohorts.records import read_records
from gigagrad.config.predict import PredictConfig
from gigagrad.errors import ConfigError
from gigagrad.events import Event, JobStarted, Notice, TileDone
from gigagrad.prediction.predict import predict
from tests.prediction.networks import Brightness, Darkness

module: Any = importlib.import_module("gigagrad.prediction.predict")
outputs: Any = importlib.import_module("gigagrad.prediction.outputs")
predictor: Any = importlib.import_module("gigagrad.prediction.predict")


def saved(model):
    """In the place of `load_model`."""
    return lambda path, trust: (type(model).__name__, model.eval())


def write_cohort(folder, count):
    """Slides of one size whose files differ in theirs; a name has a space, and two slides are of one patient."""
    folder.mkdir()
    random = np.random.default_rng(0)
    lines = ["slide,label,case"]
    for number in range(count):
        pixels = random.integers(0, 256, (48, 64, 3), np.uint8)
        pixels[: 5 * number] = 20 * number
        tifffile.imwrite(folder / f"slide {number}.tif", pixels, tile=(16, 16), photometric="rgb", compression="zlib")
        lines.append(f"slide {number}.tif,{number // 2 % 2},patient {number // 2}")
    cohort = folder / "cohort.csv"
    cohort.write_text("\n".join(lines) + "\n")
    return cohort


@pytest.fixture
def config(tmp_path, monkeypatch):
    (tmp_path / "best.pt").write_bytes(b"weights")
    (tmp_path / "config.yaml").write_text("loss: bce\n")
    monkeypatch.setattr(predictor, "load_model", saved(Darkness()))
    monkeypatch.setattr(predictor, "compile_engine", cache(predictor.compile_engine))  # one capture serves all
    cohort = write_cohort(tmp_path / "slides", 8)

    def make(out, **settings):
        return PredictConfig(run=tmp_path / "best.pt", slides=(cohort,), out=tmp_path / out, mpp=0.5, **settings)

    return make


def files_of(out):
    """What every file holds; of the records all but how long it took."""
    files = {str(path.relative_to(out)): path.read_bytes() for path in out.rglob("*") if path.is_file()}
    for name in files:
        if name.startswith("records/"):
            files[name] = json.loads(files[name]) | {"seconds": 0}
    return files


def killed_at(slide, settings):
    """Run in a process of its own: predict, and be killed between the files of this slide."""
    predictor.load_model = saved(Darkness())
    write = outputs.write_overlay

    def write_or_die(path, *rest):
        if path.stem == slide:
            os.kill(os.getpid(), signal.SIGKILL)
        write(path, *rest)

    outputs.write_overlay = write_or_die
    predict(json.loads(settings))


@pytest.mark.slow
def test_shares_of_which_one_is_killed_and_repeated_leave_the_files_of_one_process(config, tmp_path):
    predict(config("alone"))
    second = [result.name for result in predict(config("apart", share="1/2"))]
    assert len(second) == 4
    last = sorted({f"slide {number}" for number in range(8)} - set(second))[-1]
    settings = {name: value for name, value in dataclasses.asdict(config("apart", share="2/2")).items() if value}
    program = f"import sys; from {__name__} import killed_at; killed_at(*sys.argv[1:])"
    argv = [sys.executable, "-c", program, last, json.dumps(settings, default=str)]
    assert subprocess.run(argv, check=False, cwd=Path(__file__).parents[2]).returncode == -signal.SIGKILL
    assert read_records(tmp_path / "apart")[last].status == "running"
    assert (tmp_path / "apart/masks" / f"{last}.tif").exists()
    assert len(json.loads((tmp_path / "apart/predictions.json").read_text())["slides"]) == 4
    assert len(list((tmp_path / "apart").glob(".claim-*"))) == 1

    heard: list[Event] = []
    repeated = predict(config("apart", share="2/2"), (heard.append,))
    assert heard[0] == JobStarted("predict (share 2 of 2)", 4, "Darkness")
    assert sum("done before" in getattr(event, "detail", "") for event in heard) == 3
    assert {result.name for result in repeated}.isdisjoint(second)
    assert files_of(tmp_path / "apart") == files_of(tmp_path / "alone")

    # Any share of any number finds everything done.
    times = {path: path.stat().st_mtime_ns for path in (tmp_path / "apart").rglob("*") if path.is_file()}
    assert len(predict(config("apart", share="3/3"))) == 2
    assert {path: path.stat().st_mtime_ns for path in times} == times


def test_tables_of_scores_are_of_all_shares(config, tmp_path, monkeypatch):
    monkeypatch.setattr(predictor, "load_model", saved(Brightness()))
    predict(config("alone"))
    begun: list[Row] = []
    attempt = predictor.Predictor.attempt

    def attempt_beside(self, entry):
        """The other share begins and ends within this one's first slide."""
        if not begun:
            begun.append(entry)
            predict(config("apart", share="2/2"))
        return attempt(self, entry)

    monkeypatch.setattr(predictor.Predictor, "attempt", attempt_beside)
    predict(config("apart", share="1/2"))
    files = files_of(tmp_path / "apart")
    assert files == files_of(tmp_path / "alone")
    assert {"slides.csv", "cases.csv", "predictions.json"} < set(files)
    assert len(files["cases.csv"].splitlines()) == 1 + 4


def test_one_at_work_on_the_slides_is_left_to_it(config, tmp_path):
    parent = psutil.Process(os.getppid())
    (tmp_path / "out").mkdir()
    claim = {"share": "1/2", "host": platform.node(), "pid": parent.pid, "started": parent.create_time()}
    (tmp_path / "out/.claim-x.json").write_text(json.dumps({**claim, "slides": ["slide 3"]}))
    with pytest.raises(ConfigError, match="is at work on slide 3"):
        predict(config("out"))
    assert os.listdir(tmp_path / "out") == [".claim-x.json"]


class Later:
    """An executor that can submit and nothing else; what it is given is pickled, and run when the result is asked for.

    `folder` is where its workers run."""

    def __init__(self, folder):
        self.folder, self.calls = folder, []

    def submit(self, fn, /, *args):
        self.calls.append(pickle.dumps((fn, args)))
        return Promise(self.calls[-1], self.folder)


class Promise:
    def __init__(self, call, folder):
        self.call, self.folder = call, folder

    def result(self):
        before = os.getcwd()
        os.chdir(self.folder)
        try:
            fn, args = pickle.loads(self.call)
            return fn(*args)
        finally:
            os.chdir(before)


def test_an_executor_gets_a_task_for_each_slide_and_one_engine_does_them(config, tmp_path, monkeypatch):
    made, make = [], predictor.Predictor

    def counted(*args):
        made.append(args)
        return make(*args)

    monkeypatch.setattr(module, "Predictor", counted)
    predict(config("alone"))
    monkeypatch.chdir(tmp_path)
    relative = PredictConfig(run="best.pt", slides=tuple(sorted(Path("slides").glob("*.tif"))), out="apart", mpp=0.5)
    bad = Path("slides/slide 3.tif").read_bytes()
    Path("slides/slide 3.tif").write_bytes(bad[:300])
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    heard: list[Event] = []
    executor = Later(elsewhere)
    results = predict(relative, (heard.append,), executor)
    assert [result.status for result in results] == [*3 * ["done"], "failed", *4 * ["done"]]
    assert [event.text.partition(":")[0] for event in heard if isinstance(event, Notice)] == ["slide 3"]
    assert len(executor.calls) == 8
    assert len(made) == 3  # of one process; of whoever submits, and of the worker
    assert max(map(len, executor.calls)) < 3000
    assert not any(elsewhere.iterdir())
    Path("slides/slide 3.tif").write_bytes(bad)
    assert len(predict(dataclasses.replace(relative, share="1/2"), executor=executor)) == 4
    predict(relative, executor=executor)
    assert len(executor.calls) == 9
    masks = [{p.name: p.read_bytes() for p in (tmp_path / out / "masks").iterdir()} for out in ("alone", "apart")]
    assert masks[0] == masks[1]


@contextmanager
def dask_client():
    distributed = pytest.importorskip("distributed")
    settings = {"n_workers": 1, "threads_per_worker": 2, "processes": False, "dashboard_address": None}
    with distributed.LocalCluster(**settings) as cluster, distributed.Client(cluster) as client:
        yield client


@pytest.mark.parametrize("executor", [lambda: ThreadPoolExecutor(2), dask_client], ids=["threads", "dask"])
def test_threads_of_a_worker_predict_one_slide_at_a_time(config, tmp_path, monkeypatch, executor):
    busy = threading.Lock()
    attempt = predictor.Predictor.attempt

    def alone(self, entry):
        assert busy.acquire(blocking=False)
        try:
            return attempt(self, entry)
        finally:
            busy.release()

    monkeypatch.setattr(predictor.Predictor, "attempt", alone)
    with executor() as running:
        results = predict(config("out"), executor=running)
    assert [result.status for result in results] == 8 * ["done"]
    assert read_records(tmp_path / "out") == {result.name: result for result in results}


@pytest.mark.slow
def test_a_pool_of_spawned_processes(run_dir, tmp_path, jpeg_slide):
    slides = []
    for name in "ab":
        slides.append(tmp_path / f"{name}.tif")
        slides[-1].write_bytes(jpeg_slide.read_bytes())
    heard: list[Event] = []
    settings = {"run": run_dir, "slides": slides, "out": tmp_path / "out", "outputs": ["mask"]}
    with ProcessPoolExecutor(1, get_context("spawn")) as executor:
        results = predict(settings, (heard.append,), executor)
    assert [result.status for result in results] == ["done", "done"]
    assert not any(isinstance(event, TileDone) for event in heard)
    assert predict(settings) == results
    assert sorted(path.name for path in (tmp_path / "out/masks").iterdir()) == ["a.tif", "b.tif"]
