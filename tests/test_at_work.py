"""What is computed now is told to other processes: where it lies on the slide, and not a moment longer than it is."""

import json
import os
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest

from gigagrad import at_work
from gigagrad.at_work import Work, WorkFile, works_in
from gigagrad.boxes import Box
from gigagrad.events import (
    JobAdvanced,
    JobFinished,
    JobStarted,
    SlideBegun,
    StepMeasured,
    TileBegun,
    TileDone,
    TilePlace,
)
from gigagrad.files import HOST
from gigagrad.images import open_image
from gigagrad.shares import this_process
from gigagrad.training.dataset import D4_TRANSFORMS, D4View

SLIDE = Path("/slides/a.tif")


def tile(box: Box, crop: Box | None = None, segment: int = 0, phase: str = "forward") -> TileBegun:
    return TileBegun(phase, segment, 3, 4, 20, lambda: TilePlace(box, crop or box, (32.0, 16.0)))


@pytest.mark.parametrize("transform", range(D4_TRANSFORMS))
def test_boxes_lie_where_the_pixels_of_a_turned_slide_come_from(transform: int) -> None:
    numbers = np.arange(40 * 60, dtype=np.int32).reshape(1, 40, 60)
    seen = D4View(open_image(numbers), transform)
    box = Box(3, 5, 9, 21)
    work = Work()
    work(SlideBegun(SLIDE, (80, 120), (40, 60), transform))
    work(tile(box, Box(1, 2, 12, 25)))
    told = work.describe()
    assert told is not None
    y0, x0, y1, x1 = (side // 2 for side in told["boxes"][0])  # level 0 is twice as large
    assert {*numbers[0, y0:y1, x0:x1].flat} == {*np.asarray(seen.read(box)).flat}
    first = np.asarray(seen.read(Box(0, 0, 1, 1))).item()
    assert told["far"] == [first // 60 > 0, first % 60 > 0]
    assert told["grid"] == ([32.0, 64.0] if transform % 2 else [64.0, 32.0])
    crop = told["crop"]
    assert crop[0] < 2 * y0 < 2 * y1 < crop[2]
    assert crop[1] < 2 * x0 < 2 * x1 < crop[3]


def test_tiles_are_at_work_from_their_beginning_to_their_end() -> None:
    work = Work()
    assert work.describe() is None
    work(JobStarted("train", 40, "a model"))
    work(SlideBegun(SLIDE, (64, 64), (64, 64)))
    work(JobAdvanced("train", 3, 40, "epoch 1"))
    work(tile(Box(0, 0, 32, 32)))
    work(tile(Box(0, 32, 32, 64)))
    told = work.describe()
    assert told is not None
    assert told["boxes"] == [[0, 0, 32, 32], [0, 32, 32, 64]]
    assert [told[name] for name in ("job", "done", "jobs", "detail")] == ["train", 3, 40, "epoch 1"]
    assert [told[name] for name in ("phase", "segment", "segments", "tile", "tiles")] == ["forward", 0, 3, 4, 20]
    work(TileDone("forward", 5, 20, 7.5))
    told = work.describe()
    assert told is not None
    assert (told["boxes"], told["seconds_left"]) == ([[0, 32, 32, 64]], 7.5)
    work(JobStarted("validate", 2))
    work(StepMeasured("forward", 1, 1.0, 1, 1, 0))
    told = work.describe()
    assert told is not None
    assert told["job"] == "validate"
    assert "boxes" not in told
    work(JobFinished("validate", 1.0))
    assert (work.describe() or {})["job"] == "train"


def test_of_a_bag_the_patches_are_told() -> None:
    work = Work()
    with work.on(SlideBegun(SLIDE)):
        work(tile(Box(8, 0, 24, 1)))
        told = work.describe()
        assert told is not None
        assert told["patches"] == [8, 24]
        assert "boxes" not in told
    assert work.describe() is None


def wait(folder: Path, name: str) -> dict:
    end = time.monotonic() + 60
    while time.monotonic() < end:
        if (found := next(works_in(folder), None)) and name in found:
            return found
        time.sleep(0.005)
    raise AssertionError("nothing was written")


def test_the_file_follows_and_is_gone_at_the_end(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(at_work, "_EVERY_SECONDS", 0.001)
    monkeypatch.setattr(at_work, "_SHARE", 0)
    with WorkFile(tmp_path) as work:
        work(SlideBegun(SLIDE, (64, 64), (64, 64)))
        assert "boxes" not in wait(tmp_path, "slide")
        work(tile(Box(0, 0, 32, 32)))
        assert wait(tmp_path, "boxes")["boxes"] == [[0, 0, 32, 32]]
        assert len(list(tmp_path.iterdir())) <= 2  # and the one that takes its place
    assert not list(tmp_path.iterdir())


def left_behind(folder: Path, **process: object) -> Path:
    path = folder / f".now-{HOST}-1.json"
    path.write_text(json.dumps({"format": "gigagrad at work 1", "slide": "a", **this_process(), **process}))
    return path


def test_what_a_killed_process_left_is_told_by_it_and_goes_with_the_next_job(tmp_path: Path) -> None:
    gone = subprocess.Popen([sys.executable, "-c", ""])
    gone.wait()
    assert len(list(works_in(tmp_path))) == 0
    path = left_behind(tmp_path)
    assert len(list(works_in(tmp_path))) == 1
    left_behind(tmp_path, pid=gone.pid)
    assert not list(works_in(tmp_path))
    with WorkFile(tmp_path):
        assert not path.exists()


def test_on_another_machine_it_is_told_by_its_age(tmp_path: Path) -> None:
    path = left_behind(tmp_path, host="elsewhere", pid=0)
    assert len(list(works_in(tmp_path))) == 1
    os.utime(path, (time.time() - 120, time.time() - 120))
    assert not list(works_in(tmp_path))


@pytest.mark.parametrize(
    "text", ["", "[]", "{}", "[" * 10**5, json.dumps({"format": "gigagrad at work 1"}), " " * 2**17]
)
def test_what_is_not_ours_is_left_alone(text: str, tmp_path: Path) -> None:
    (tmp_path / ".now-x-1.json").write_text(text)
    assert not list(works_in(tmp_path))


def test_a_link_is_not_followed(tmp_path: Path) -> None:
    (tmp_path / "inside").mkdir()
    (tmp_path / "inside" / ".now-x-1.json").symlink_to(left_behind(tmp_path))
    assert not list(works_in(tmp_path / "inside"))


def test_a_job_goes_on_where_nothing_can_be_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(at_work, "_EVERY_SECONDS", 0.001)
    with WorkFile(tmp_path / "missing") as work:
        work(SlideBegun(SLIDE, (64, 64), (64, 64)))
        time.sleep(0.05)
    assert not list(tmp_path.iterdir())
