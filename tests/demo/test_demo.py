"""The demo in miniature: all of its parts, what it does when started again, and what it refuses."""

import csv
import dataclasses
import json
import re
from typing import Any

import pytest

from gigagrad.demo.run import QUICK, run_demo
from gigagrad.demo.step import measured_step
from gigagrad.errors import ConfigError
from gigagrad.events import Events, JobAdvanced, JobStarted, Notice
from gigagrad.view import page

TINY = dataclasses.replace(QUICK, slides=3, height=256, width=320, epochs=2, large_height=400, large_width=900)
MEMORY = "16GiB"


@pytest.fixture(scope="module", autouse=True)
def one_thread():
    """For the large step, which is a process of its own."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("OMP_NUM_THREADS", "1")
        yield


@pytest.fixture(scope="module")
def finished(some_page, tmp_path_factory):
    """The folder of a demo, which every test leaves as it was, its result, and what it told."""
    out = tmp_path_factory.mktemp("demo") / "out"
    events: list[Any] = []
    return out, run_demo(out, TINY, memory=MEMORY, listeners=(events.append,)), events


def cohort(out):
    with (out / "cohort.csv").open(newline="") as file:
        return list(csv.DictReader(file))


def test_a_demo_leaves_a_report_of_everything(finished):
    out, result, events = finished
    assert result.report == out / "report.html"
    (data,) = re.findall('id="report-data">(.*?)</script>', result.report.read_text())
    told = json.loads(data)
    assert ["Pixels", "360 kpx", "400 x 900 px"] in told["step_cards"]
    assert [layer["name"] for layer in told["slides"][0]["info"]["layers"]] == ["Label", "Prediction", "Errors"]
    assert str(result).splitlines()[-1] == str(result.report)
    assert len(result.fit.scores) == 1
    assert [row["split"] for row in cohort(out)] == ["train", "val", "test"]
    parts = [event.text[:5] for event in events if isinstance(event, Notice) and event.text.startswith("[")]
    assert parts == [f"[{part}/6]" for part in range(1, 7)]


def test_its_network_learns_the_recipe_and_is_scored_against_the_exact_outline_too(finished):
    out, result, _ = finished
    assert all(row["mask"] == str(out / "labels" / f"synthetic-00{index}.tif") for index, row in enumerate(cohort(out)))
    assert [score.name for score in result.exact.scores] == list(result.fit.scores)


def test_the_large_step_is_measured_in_a_process_of_its_own(finished):
    out, result, events = finished
    step = result.step
    assert (step["height"], step["width"], step["pixels"]) == (400, 900, 360_000)
    assert step == json.loads((out / "large" / "step.json").read_text())
    assert step["peak_rss_bytes"] <= step["predicted_peak_bytes"] <= step["budget_bytes"] == 16 * 2**30
    started = [event for event in events if isinstance(event, JobStarted) and event.job == "large step"]
    advanced = [event for event in events if isinstance(event, JobAdvanced) and event.job == "large step"]
    assert len(started) == 1
    assert [event.done for event in advanced] == list(range(1, started[0].total + 1))


def test_started_again_it_finds_everything_done(finished):
    out, result, _ = finished
    before = {path: path.stat().st_mtime_ns for path in out.rglob("*") if path.suffix in (".tif", ".pt", ".jsonl")}
    again = run_demo(out, TINY, memory=MEMORY)
    assert before == {path: path.stat().st_mtime_ns for path in before}
    assert (again.fit, again.step) == (result.fit, result.step)


def test_it_makes_again_what_is_missing(finished):
    out, result, _ = finished
    slide = out / "large" / "slide.tif"
    made = slide.stat().st_mtime_ns
    parts = {out / name: (out / name).read_bytes() for name in ("large/step.json", "report.html")}
    for part in parts:
        part.unlink()
    again = run_demo(out, TINY, memory=MEMORY)
    assert again.step["loss"] == result.step["loss"]
    assert slide.stat().st_mtime_ns == made
    for part, before in parts.items():
        assert part.exists()
        part.write_bytes(before)


def test_it_refuses_a_folder_with_something_else(finished, tmp_path):
    out, _, _ = finished
    with pytest.raises(ConfigError, match="other settings"):
        run_demo(out, QUICK, memory=MEMORY)
    (tmp_path / "thesis.txt").write_text("mine")
    with pytest.raises(ConfigError, match="holds no demo"):
        run_demo(tmp_path, TINY, memory=MEMORY)
    assert [path.name for path in tmp_path.iterdir()] == ["thesis.txt"]


def test_without_the_page_one_line_says_why_there_is_no_report(finished, monkeypatch):
    out, result, _ = finished
    monkeypatch.setattr(page, "_NAMES", ("missing.html",))
    events: list[Any] = []
    again = run_demo(out, TINY, memory=MEMORY, listeners=(events.append,))
    assert (again.report, again.step) == (None, result.step)
    assert str(again).splitlines()[-1].startswith("one exact training step")
    said = [event.text for event in events if isinstance(event, Notice)][-1]
    assert said.startswith("no report: the page is not built")
    assert "\n" not in said


def test_real_slides_take_the_place_of_the_test_slides(jpeg_slide, tmp_path):
    out = tmp_path / "out"
    result = run_demo(out, TINY, slides=jpeg_slide.parent, memory=MEMORY)
    assert result.fit.scores.keys() == {"small"}
    assert result.exact is None
    assert [row["slide"] for row in cohort(out) if row["split"] == "test"] == [str(jpeg_slide)]
    assert (out / "labels" / "small.tif").exists()


def test_a_step_that_fails_says_why_in_one_line(jpeg_slide, jpeg_label, run_dir, tmp_path):
    model = run_dir / "best.pt"
    with pytest.raises(ConfigError, match=r"nowhere\.tif does not exist"):
        measured_step(jpeg_slide, tmp_path / "nowhere.tif", model, MEMORY, Events())
    with pytest.raises(ConfigError, match="the budget is 64 MiB"):
        measured_step(jpeg_slide, jpeg_label, model, "64MiB", Events())
