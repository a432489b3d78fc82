"""What all tests share: slides, a saved network, marker skips."""

from __future__ import annotations

import gc
import itertools
import os
import random
import sys
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from types import SimpleNamespace
from weakref import WeakValueDictionary

# Processes that tests start plan for two threads, however many cores there are. Read as PyTorch is loaded.
os.environ.setdefault("OMP_NUM_THREADS", "2")
# Beside another process, threads that wait spinning take the time that those at work need.
os.environ.setdefault("OMP_WAIT_POLICY", "passive")

import numpy as np
import pytest
import tifffile
import torch
from hypothesis import HealthCheck, settings

if not torch.cuda.is_available():
    os.environ.setdefault("TRITON_INTERPRET", "1")  # read as Triton is loaded, if that is here

from gigagrad.config.predict import PredictConfig
from gigagrad.devices import machine
from gigagrad.devices.cpu import Cpu, Residue
from gigagrad.devices.heap import LargeBlocks
from gigagrad.errors import ConfigError
from gigagrad.execution import trial
from gigagrad.images import open_image, write_label
from gigagrad.models import resolve, save_model, torchvision_operators  # noqa: F401
from gigagrad.prediction import predict
from gigagrad.view import page as built

# Two test processes share two cores; small tensors gain nothing from a second thread.
torch.set_num_threads(1)


# No test depends on time, and a slow machine is not a failure. The same examples in every run: the suite says what a
# change broke; campaigns in bench/ look for what is new.
settings.register_profile(
    "gigagrad",
    deadline=None,
    max_examples=30,
    derandomize=True,
    suppress_health_check=[HealthCheck.too_slow],
)
settings.register_profile("quick", settings.get_profile("gigagrad"), max_examples=5)
settings.load_profile("gigagrad")


@pytest.fixture(scope="session", autouse=True)
def no_profile(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """Whoever has calibrated this machine, and whatever its cache is, gets the plans that everybody gets; where a
    profile would be saved.
    """
    path = tmp_path_factory.mktemp("profile") / "machine.json"
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(machine, "profile_path", lambda card="": path.with_name("gpu.json") if card else path)
        patch.setattr(machine, "_CACHES", path.with_name("caches"))
        yield path


@pytest.fixture(scope="session", autouse=True)
def every_tile_takes_a_millisecond() -> Iterator[None]:
    """Trials of tiles run, and choose what they would on a machine where nothing disturbs them: as everywhere."""
    milliseconds = itertools.count()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(trial, "time", SimpleNamespace(perf_counter=lambda: next(milliseconds) / 1000))
        yield


@pytest.fixture(autouse=True)
def nothing_has_run(monkeypatch: pytest.MonkeyPatch) -> None:
    """What plans allow for a process's first step does not depend on the tests before."""
    monkeypatch.setattr(Cpu, "residue", Residue())


@pytest.fixture(autouse=True)
def nothing_to_look_through() -> None:
    """What was imported stays. Every capture collects garbage, and half its time would go into looking at that."""
    _set_aside(len(sys.modules))


@pytest.fixture
def no_other_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    """What the C library is told is the whole process's: runs that other tests left open are not heeded."""
    monkeypatch.setattr(LargeBlocks, "_wanting", WeakValueDictionary())
    monkeypatch.setattr(LargeBlocks, "_now", (False, False))
    monkeypatch.setattr(LargeBlocks, "_kept", False)


@cache
def _set_aside(modules: int) -> None:
    gc.collect()
    gc.freeze()


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_setup() -> None:
    """Let random numbers be the test's own, whatever has drawn some before; those of Hypothesis are in its profile."""
    random.seed(0)
    np.random.seed(0)
    torch.manual_seed(0)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    if torch.cuda.is_available():
        return
    for item in items:
        if item.get_closest_marker("cuda"):
            item.add_marker(pytest.mark.skip(reason="needs a CUDA device; torch.cuda.is_available() is False"))


@pytest.fixture(scope="session")
def real_slides() -> Path:
    """The folder with `slides/` and `masks/` of real tissue. Tests that use it carry the marker `slides`."""
    named = os.environ.get("GIGAGRAD_SLIDES")
    folder = Path(named) if named else Path(__file__).resolve().parents[2] / "shared" / "data"
    if not (folder / "slides").is_dir():
        pytest.skip(f"no real slides in {folder}; set GIGAGRAD_SLIDES to the folder that holds slides/ and masks/")
    return folder


@pytest.fixture(scope="session")
def jpeg_slide(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A small pyramidal JPEG TIFF, 3 x 700 x 900 in tiles of 256, 0.5 um/px: smooth colour with white at two edges."""
    y, x = np.mgrid[0:700, 0:900].astype(np.float32)
    rgb_HWC = np.stack([200 + 40 * np.sin(x / 60), 120 + 60 * np.cos(y / 45), 180 + 30 * np.sin((x + y) / 80)], axis=-1)
    rgb_HWC[600:] = rgb_HWC[:, 800:] = 255
    rgb_HWC = rgb_HWC.astype(np.uint8)
    path = tmp_path_factory.mktemp("slides") / "small.tif"
    with tifffile.TiffWriter(path) as writer:
        for step, kind in ((1, 0), (2, 1), (4, 1)):
            writer.write(
                rgb_HWC[::step, ::step],
                photometric="rgb",
                tile=(256, 256),
                compression="jpeg",
                compressionargs={"level": 90},
                resolution=(20000 / step, 20000 / step),
                resolutionunit="CENTIMETER",
                subfiletype=kind,
                metadata=None,
            )
    return path


@pytest.fixture(scope="session")
def jpeg_label(jpeg_slide: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The mask of `jpeg_slide` by the tissue recipe, a file of the same name."""
    with open_image(jpeg_slide) as slide:
        return write_label(slide, tmp_path_factory.mktemp("labels") / "small.tif")


@pytest.fixture(scope="session")
def run_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An untrained network, saved as a run would save it."""
    folder = tmp_path_factory.mktemp("run")
    save_model(folder / "best.pt", "paper-unet", resolve("paper-unet"))
    return folder


@pytest.fixture(scope="session")
def network_dir(tmp_path_factory):
    """A network with something to say, saved as a run would save it."""
    folder = tmp_path_factory.mktemp("network")
    torch.manual_seed(0)
    model = resolve("paper-unet")
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(2.5)
    save_model(folder / "best.pt", "paper-unet", model)
    return folder


@pytest.fixture(scope="session")
def predicted(network_dir, jpeg_slide, jpeg_label, tmp_path_factory):
    """A folder of predictions."""
    out = tmp_path_factory.mktemp("predicted")
    table = out.with_name("cohort.csv")
    table.write_text(f"slide,mask\n{jpeg_slide},{jpeg_label}\n")
    predict(PredictConfig(run=network_dir, slides=(table,), out=out, outputs=("mask", "probabilities", "geojson")))
    return out


@pytest.fixture(scope="module")
def some_page(tmp_path_factory):
    """The built page; where it is not built, files that stand for it: its own need Node.js."""
    with pytest.MonkeyPatch.context() as patch:
        try:
            built.read_page()
        except ConfigError:
            folder = tmp_path_factory.mktemp("built")
            (folder / "page").mkdir()
            for name in built._NAMES:
                (folder / "page" / name).write_text(name)
            index = Path(__file__).parents[1] / "web" / "index.html"
            (folder / "page" / "index.html").write_bytes(index.read_bytes())
            patch.setattr(built, "files", lambda _: folder)
        yield


@pytest.fixture
def no_direct_access(monkeypatch):
    """A file system that has no way past the page cache."""
    opened = os.open

    def refuse(path, flags, *rest, **options):
        if flags & getattr(os, "O_DIRECT", 0):
            raise OSError(22, "Invalid argument")
        return opened(path, flags, *rest, **options)

    monkeypatch.setattr(os, "open", refuse)
