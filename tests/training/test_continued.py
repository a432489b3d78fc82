"""What a run is continued with: one writer at a time, and the files it began with."""

import json
import os
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import tifffile
import torch
from filelock import FileLock

from gigagrad.errors import ConfigError
from gigagrad.events import Event, JobAdvanced, Notice
from gigagrad.files import content_digest
from gigagrad.losses import Loss
from gigagrad.models import load_model
from gigagrad.ranks import Mesh, SingleRank
from gigagrad.training import FitConfig, fit
from gigagrad.training.folder import Checkpoint, RunFolder
from gigagrad.training.learner import Learner
from tests.training.conftest import write_cohort

_HOLDER = """
import sys, time
from pathlib import Path
from gigagrad.training.folder import RunFolder
with RunFolder(Path(sys.argv[1])).written():
    print("there", flush=True)
    time.sleep(600)
"""


def stop_after(steps):
    def listener(event):
        if isinstance(event, JobAdvanced) and event.job == "train" and event.done == steps:
            raise KeyboardInterrupt

    return listener


def begun(config, steps=2):
    with pytest.raises(KeyboardInterrupt):
        fit(config, [stop_after(steps)])


def test_a_run_that_is_being_written_is_left_alone_until_its_process_is_gone(tmp_path):
    slides, run = write_cohort(tmp_path, [(176, 176)]), RunFolder(tmp_path / "run")
    config = FitConfig(slides=str(slides), out=str(run.path), epochs=2, checkpoint_seconds=0)
    begun(config, 1)
    before = run.checkpoint.read_bytes()
    holder = subprocess.Popen([sys.executable, "-c", _HOLDER, str(run.path)], stdout=subprocess.PIPE, text=True)
    assert holder.stdout.readline() == "there\n"
    for overwrite in (False, True):
        with pytest.raises(ConfigError, match=rf"process {holder.pid} on .*, started .*, is writing the run in"):
            fit(config, overwrite=overwrite)
    assert run.checkpoint.read_bytes() == before
    holder.kill()
    holder.communicate()
    assert fit(config).steps == 2
    assert not [path for path in run.path.iterdir() if path.name.startswith(".")]


def test_a_run_that_is_killed_and_then_ends_earlier_has_the_weights_that_it_tells(tmp_path, monkeypatch):
    """Those of a later epoch, of which its checkpoint did not know, were tested as if they were of the best one."""
    config = FitConfig(slides=str(write_cohort(tmp_path, [(176, 176)])), out=str(tmp_path / "run"), epochs=1)
    fit(config)
    with monkeypatch.context() as killed:  # at once, as by SIGKILL: nothing is saved at the end
        killed.setattr("gigagrad.training.loop._Run._save_interrupted", lambda _: None)
        begun(replace(config, epochs=4), 3)
    result = fit(replace(config, epochs=1))
    whole = fit(replace(config, epochs=result.epochs, out=str(tmp_path / "whole")))
    assert result.best_epoch == whole.best_epoch
    best, expected = (load_model(each.best)[1].state_dict() for each in (result, whole))
    assert all(torch.equal(best[name], expected[name]) for name in expected)


def test_what_cannot_be_begun_leaves_no_folder_of_its_own(tmp_path):
    folder = RunFolder(tmp_path / "a" / "b")
    with folder.written():
        assert folder.path.is_dir()
    assert list(tmp_path.iterdir()) == []


def test_one_of_a_torchrun_s_waits_for_the_one_that_it_replaces(tmp_path):
    folder, launch = RunFolder(tmp_path), ["here:/tmp/launch"]
    replaced = folder.written(launch)
    replaced.__enter__()
    with pytest.raises(ConfigError, match=f"process {os.getpid()} on"), folder.written(["other"], 60):
        pass
    start = time.monotonic()
    with pytest.raises(ConfigError, match="is writing the run"), folder.written(launch, 0.3):
        pass
    assert time.monotonic() - start >= 0.3
    ends = threading.Timer(0.3, replaced.__exit__, (None, None, None))
    ends.start()
    with folder.written(launch, 60):
        ends.join()
        assert json.loads((tmp_path / ".writer.json").read_text())["launches"] == launch


def test_a_writer_that_has_removed_its_name_is_about_to_end(tmp_path):
    folder = RunFolder(tmp_path)
    replaced = folder.written()
    replaced.__enter__()
    (tmp_path / ".writer.json").unlink()
    ends = threading.Timer(0.3, replaced.__exit__, (None, None, None))
    ends.start()
    with folder.written(["another"]):
        ends.join()
    assert list(tmp_path.iterdir()) == []


def test_where_nothing_can_be_locked_a_run_goes_on_without(tmp_path, monkeypatch):
    def no_locks(*_, **__):
        raise OSError(37, "No locks available")

    monkeypatch.setattr(FileLock, "acquire", no_locks)
    with RunFolder(tmp_path / "run").written():
        pass
    (tmp_path / "file").touch()
    with RunFolder(tmp_path / "file").written():  # whoever writes there says what is wrong
        pass


def _outlines(path, size):
    corners = [[10, 10], [10 + size, 10], [10 + size, 90], [10, 90], [10, 10]]
    feature = {
        "type": "Feature",
        "properties": {"classification": {"name": "tumour"}},
        "geometry": {"type": "Polygon", "coordinates": [corners]},
    }
    path.write_text(json.dumps({"type": "FeatureCollection", "features": [feature]}))


def _annotated(folder):
    cohort = write_cohort(folder, [(176, 176)])
    for index in range(4):
        _outlines(folder / f"slide{index}.geojson", 60 + index)
    cohort.write_text(cohort.read_text().replace(".mask.tif", ".geojson"))
    return cohort


def _masked(folder):
    return write_cohort(folder, [(176, 176)])


def _unlabelled(folder):
    cohort = write_cohort(folder, [(176, 176)])
    rows = [line.split(",") for line in cohort.read_text().splitlines()]
    lines = [f"{slide},{'' if at else mask},{split}\n" for at, (slide, mask, split) in enumerate(rows)]
    cohort.write_text("".join(lines))
    return cohort


def _rewrite_mask(folder):
    path = folder / "slide1.mask.tif"
    tifffile.imwrite(path, 1 - tifffile.imread(path), tile=(64, 64), photometric="minisblack", compression="deflate")


def _rewrite_slide(folder):
    path = folder / "slide0.tif"
    tifffile.imwrite(path, 255 - tifffile.imread(path), tile=(64, 64), photometric="rgb")


def _rewrite_label(folder):
    path = folder / "run" / "labels" / "slide0.tif"
    tifffile.imwrite(path, np.ones((176, 176), np.uint8), photometric="minisblack", tile=(64, 64))


CHANGES: dict[str, tuple[Callable[[Path], Path], Callable[[Path], None], str]] = {
    "outlines": (_annotated, lambda folder: _outlines(folder / "slide0.geojson", 59), "slide0.geojson"),
    "mask": (_masked, _rewrite_mask, "slide1.mask.tif"),
    "slide": (_masked, _rewrite_slide, "slide0.tif"),
    "made label": (_unlabelled, _rewrite_label, "labels/slide0.tif"),
}


@pytest.mark.parametrize("change", CHANGES)
def test_a_run_goes_on_with_the_files_it_began_with_alone(tmp_path, change):
    make, rewrite, named = CHANGES[change]
    cohort = make(tmp_path)
    config = FitConfig(slides=str(cohort), out=str(tmp_path / "run"), epochs=2, checkpoint_seconds=0)
    begun(config, 1)
    for path in tmp_path.glob("slide*"):
        os.utime(path, (1e9, 1e9))  # what was copied, or touched, is the same
    begun(config, 2)
    before = RunFolder(tmp_path / "run").checkpoint.read_bytes()
    rewrite(tmp_path)
    with pytest.raises(ConfigError, match=rf"{named} changed since the run in .* began; restore .* or .*--overwrite"):
        fit(config)
    assert RunFolder(tmp_path / "run").checkpoint.read_bytes() == before


def test_a_run_that_took_no_step_is_bound_to_no_files(tmp_path):
    cohort = write_cohort(tmp_path, [(176, 176)])
    config = FitConfig(slides=str(cohort), out=str(tmp_path / "run"), epochs=1, checkpoint_seconds=0)

    def stop(event):
        if isinstance(event, JobAdvanced):  # of labels
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        fit(config, [stop])
    _rewrite_mask(tmp_path)
    assert fit(config).steps == 1


def test_checkpoints_that_did_not_look_at_files_still_go_on(tmp_path):
    cohort = write_cohort(tmp_path, [(176, 176)])
    config = FitConfig(slides=str(cohort), out=str(tmp_path / "run"), epochs=2, checkpoint_seconds=0)
    begun(config, 1)
    path = RunFolder(tmp_path / "run").checkpoint
    payload = torch.load(path, weights_only=True)
    assert len(payload.pop("contents")) == 8
    torch.save(payload, path)
    _rewrite_mask(tmp_path)
    assert fit(config).steps == 2
    assert len(Checkpoint.load(path).contents) == 8


@pytest.mark.parametrize("size", [0, 1000, (4 << 20) + 1, 9 << 20])
def test_a_digest_changes_with_the_size_and_what_is_sampled(tmp_path, size):
    path, rng = tmp_path / "mask.bin", np.random.default_rng(0)
    data = bytearray(rng.bytes(size))
    path.write_bytes(data)
    first = content_digest(path)
    os.utime(path, (1, 1))
    assert content_digest(path) == first
    found = {first, content_digest(path, whole=True)}
    for at in (0, size - 1) if size else ():
        data[at] ^= 1
        path.write_bytes(data)
        found.add(content_digest(path))
        data[at] ^= 1
    data[size // 3 : size // 3] = b"x"  # as where something compressed differs: all that follows moves
    path.write_bytes(data)
    found.add(content_digest(path))
    assert len(found) == (2 if size == 0 else 4 if size <= 4 << 20 else 5)
    assert content_digest(tmp_path / "missing") == ""


def test_the_digest_of_a_folder_is_of_its_files(tmp_path):
    folder = tmp_path / "mask.zarr"
    found = set()
    for name in ("0/0.0", "0/0.1", "zarr.json"):
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(name)
        found.add(content_digest(folder))
    (folder / "0/0.1").write_text("else")
    found.add(content_digest(folder))
    assert len(found) == 4


_FORGETFUL = """
import random
import torch
from gigagrad.models import Preprocess


class Forgetful(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.seen, self.conv, self.calls, self.sizes = Preprocess(), torch.nn.Conv2d(1, 1, 3, padding=1), 0, []
        self.register_buffer("level", torch.zeros(()), persistent=False)

    def forward(self, x):
        self.calls += 1
        self.sizes.append(x.shape[-1])
        y = self.conv(self.seen(x)) * (1 + 0.1 * self.calls + 0.1 * random.random()) + len(self.sizes)
        with torch.no_grad():
            self.level.add_(y.mean())
        return y + self.level


class Scaled(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.largest = torch.nn.Buffer(torch.ones(()))

    def forward(self, output, target):
        loss = torch.nn.functional.binary_cross_entropy_with_logits(output, target.to(output.dtype))
        with torch.no_grad():
            self.largest.mul_(0.9).add_(loss)
        return loss / self.largest
"""


def test_what_no_state_dict_has_is_continued_too(tmp_path, monkeypatch):
    """Counters, buffers that are not saved, those of the loss, and random numbers of Python."""
    (tmp_path / "networks_of_test_continued.py").write_text(_FORGETFUL)
    monkeypatch.chdir(tmp_path)
    slides = write_cohort(tmp_path, [(64, 64)])
    slides.write_text("\n".join(line for line in slides.read_text().splitlines() if not line.endswith("test")))
    model, loss = (f"networks_of_test_continued:{name}" for name in ("Forgetful", "Scaled"))
    weights = []
    for out, stop in (("whole", 0), ("stopped", 1)):
        config = FitConfig(slides=str(slides), out=out, model=model, loss=loss, epochs=2, checkpoint_seconds=0)
        if stop:
            begun(config, stop)
            run = RunFolder(tmp_path / out)
            known = json.loads(run.environment.read_text())
            run.environment.write_text(json.dumps({**known, "packages": {**known["packages"], "torch": "1.0"}}))
        said: list[Event] = []
        fit(config, [said.append])
        told = [event.text for event in said if isinstance(event, Notice) and "versions are others" in event.text]
        assert len(told) == stop, "of PyTorch"
        assert all("torch 1.0 then, 2." in text and text.count(" then, ") == 1 for text in told)
        found = Checkpoint.load(RunFolder(tmp_path / out).checkpoint)
        weights.append({**found.model, **found.further["tensors"]})
        assert found.further["attributes"] == {"model": {"calls": 4, "sizes": [64] * 4}}
    assert weights[0].keys() == weights[1].keys() >= {"model.level", "loss 0.largest"}
    assert all(torch.equal(tensor, weights[1][name]) for name, tensor in weights[0].items())


class Ramp:
    """A loss that is no module."""

    def __init__(self):
        self.steps = 0

    def __call__(self, output, target):
        self.steps += 1
        return self.steps * output.mean()


def test_losses_that_are_no_modules_are_continued_too():
    """They counted from the beginning again."""
    mesh, config = Mesh(*[SingleRank()] * 3), FitConfig(slides="", out="")

    def learner(ramp):
        return Learner(config, torch.nn.Conv2d(1, 1, 1), Loss(((1.0, ramp),)), mesh, grouped=False)

    before, after = Ramp(), Ramp()
    stopped, continued = learner(before), learner(after)
    before.steps = 7
    continued._further.load(stopped.state(None)["further"])
    assert after.steps == 7
