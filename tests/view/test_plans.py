"""The page draws a run's own tiles, and those that it computes now, whatever the files say that somebody made."""

import json
import time

import numpy as np
import pytest
import torch

from gigagrad.at_work import WorkFile, works_in
from gigagrad.boxes import Box
from gigagrad.events import SlideBegun, TileBegun, TilePlace
from gigagrad.execution import compile as compile_engine
from gigagrad.images import open_image
from gigagrad.view.plans import read_plan, work_on


@pytest.fixture(scope="module")
def run(jpeg_slide, jpeg_label, tmp_path_factory):
    """A run folder as far as the page reads it, with the plan of a network of two segments."""
    folder = tmp_path_factory.mktemp("runs") / "first"
    folder.mkdir()
    table = folder.with_name("cohort.csv")
    table.write_text(f"slide,mask,split\n{jpeg_slide},{jpeg_label},train\n")
    (folder / "config.yaml").write_text(f"slides: {table}\n")
    (folder / "metrics.jsonl").touch()
    network = torch.nn.Sequential(torch.nn.InstanceNorm2d(3), torch.nn.Conv2d(3, 1, 5, 5))
    engine = compile_engine(network, lambda y, t: y.mean(), memory="2GiB")
    engine.in_tiles = True
    plan = engine.plan(np.zeros((3, 700, 900), np.float32), torch.zeros(1))
    assert len(plan.segments) > 1
    (folder / "plan.json").write_text(json.dumps(plan.to_dict()))
    return folder, plan


def test_the_tiles_of_a_run_s_plan_are_told_with_the_fields_that_they_are_of(run, jpeg_slide, serve):
    folder, plan = run
    (told,) = serve(folder).get("slides/0").json()["plans"]
    assert told["of"].endswith("/first")
    assert told["shape"] == [700, 900]
    assert len(told["segments"]) == len(plan.segments)
    first, last = plan.segments[0], plan.segments[-1]
    assert first.shape == (700, 900)
    for segment, said in ((first, told["segments"][0]), (last, told["segments"][-1])):
        assert said == {name: [*getattr(segment, name)] for name in ("tile", "shape", "crop", "read_shape")}
    assert last.shape == (140, 180)
    with open_image(jpeg_slide, level=1) as small:
        assert read_plan("a", folder / "plan.json", small) == {**told, "of": "a"}  # of level 0 all the same


def test_a_plan_of_another_size_tells_of_which(run, tmp_path):
    with open_image(np.zeros((3, 70, 90), np.uint8)) as slide:
        told = read_plan("a", run[0] / "plan.json", slide)
    assert told == {"of": "a", "shape": [700, 900], "segments": [], "exact": None}


@pytest.mark.parametrize(
    "change",
    [
        {"image_shape": [4, 3, 700, 900]},
        {"image_shape": "x"},
        {"segments": [{}]},
        {"segments": [{"tile": [0, 1], "shape": [1, 1], "crop": [1, 1], "read_shape": [1, 1]}]},
        {"segments": [{"tile": [1, 1], "shape": [0, 0], "crop": [1, 1], "read_shape": [1, 1]}]},
        {"segments": [{"tile": [1e999, 1], "shape": [1, 1], "crop": [1, 1], "read_shape": [1, 1]}]},
    ],
)
def test_a_plan_that_is_damaged_or_of_a_bag_is_none(change, tmp_path, jpeg_slide):
    path = tmp_path / "plan.json"
    path.write_text(json.dumps({"image_shape": [1, 3, 700, 900], "segments": [], **change}))
    with open_image(jpeg_slide) as slide:
        assert read_plan("a", path, slide) is None
        assert read_plan("a", tmp_path / "missing.json", slide) is None


def test_a_plan_that_is_a_link_out_of_the_run_is_left_out(run, serve, tmp_path):
    folder = tmp_path / "run"
    folder.mkdir()
    for name in ("config.yaml", "metrics.jsonl"):
        (folder / name).write_bytes((run[0] / name).read_bytes())
    (folder / "plan.json").symlink_to(run[0] / "plan.json")
    assert serve(folder).get("slides/0").json()["plans"] == []


WORK = {
    "slide": "/a/slide.svs",
    "job": "train",
    "done": 3,
    "jobs": 10,
    "phase": "forward",
    "segment": 0,
    "segments": 2,
    "tile": 1,
    "tiles": 5,
    "boxes": [[0, 0, 8, 8]],
    "crop": [0, 0, 10, 10],
    "grid": [8, 8],
    "far": [False, True],
}


def test_what_a_job_says_is_passed_on_with_the_slide_s_number():
    told = work_on(WORK | {"host": "secret", "detail": "x" * 10**4}, {"/a/slide.svs": 7})
    assert (told["slide"], told["name"], told["job"], told["boxes"]) == (7, "slide.svs", "train", [[0, 0, 8, 8]])
    assert "host" not in told
    assert len(told["detail"]) == 200
    assert work_on(WORK, {})["slide"] is None


@pytest.mark.parametrize(
    "change",
    [
        {"boxes": [[0, 0, 8]]},
        {"boxes": 5},
        {"boxes": [["x", 0, 8, 8]]},
        {"crop": [0, 0, float("nan"), 8]},
        {"grid": [0, 8]},
        {"grid": [8, float("inf")]},
        {"far": [True]},
        {"tile": "many"},
        {"seconds_left": float("nan")},
    ],
)
def test_what_no_job_says_is_refused(change):
    with pytest.raises((ValueError, TypeError)):
        work_on(WORK | change, {})


def test_the_server_tells_what_a_run_computes_while_it_does(run, jpeg_slide, serve, monkeypatch):
    monkeypatch.setattr("gigagrad.at_work._EVERY_SECONDS", 0.001)
    monkeypatch.setattr("gigagrad.at_work._SHARE", 0)
    client = serve(run[0])
    assert client.get("catalog").json()["works"]
    assert client.get("now").json() == []
    with WorkFile(run[0]) as work:
        work(SlideBegun(jpeg_slide, (700, 900), (700, 900)))
        work(TileBegun("forward", 0, 1, 0, 9, lambda: TilePlace(Box(0, 0, 70, 90), Box(0, 0, 75, 95), (70.0, 90.0))))
        end = time.monotonic() + 60
        while not any("boxes" in told for told in works_in(run[0])):
            assert time.monotonic() < end, "nothing is written"
        (told,) = client.get("now").json()
        assert (told["slide"], told["boxes"], told["crop"]) == (0, [[0, 0, 70, 90]], [0, 0, 75, 95])
        assert told["of"].endswith("/first")
        (run[0] / ".now-x-1.json").write_text('{"format": "gigagrad at work 1", "host": "x", "slide": "a", "far": 1}')
        assert len(client.get("now").json()) == 2  # it says nothing of tiles
        (run[0] / ".now-x-1.json").write_text('{"format": "gigagrad at work 1", "host": "x", "slide": "a", "boxes": 1}')
        assert len(client.get("now").json()) == 1
        (run[0] / ".now-x-1.json").unlink()
    assert client.get("now").json() == []
