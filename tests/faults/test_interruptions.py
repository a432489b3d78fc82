"""Runs that end before their end, as a user sees it: whatever is raised, nothing of them stays but the exception.

An exception is kept here with its traceback, as a notebook keeps the last one. bench/attack_interruptions.py draws
thousands of such ends; tests/execution/test_interruptions.py has those that only somebody inside can cause.
"""

from __future__ import annotations

import gc
import os
import signal
import sys
from pathlib import Path
from types import FrameType
from typing import Any

import pytest
import tifffile
import torch
from torch import nn

import gigagrad as gg
from gigagrad.boxes import Box
from gigagrad.errors import GigagradError, ImageError, StoreError, WriteError
from gigagrad.events import TileDone
from tests.faults.watched import failing

linux = pytest.mark.skipif(not os.path.isdir("/proc/self/fd"), reason="this system does not tell what a process holds")
pytestmark = linux

ERRORS = [KeyboardInterrupt(), MemoryError(), OSError(5, "Input/output error")]
PLACES = {"writing": ("pwrite", "pwritev"), "reading": ("preadv", "pread"), "reserving": ("posix_fallocate",)}
"""What the system is asked for while fields go to files and come back."""


@pytest.mark.parametrize("place", PLACES)
@pytest.mark.parametrize("error", ERRORS, ids=[type(error).__name__ for error in ERRORS])
def test_whatever_files_raise_nothing_stays(watched, monkeypatch, place, error):
    with monkeypatch.context() as patch:
        for name in PLACES[place]:
            patch.setattr(os, name, failing(getattr(os, name), error, 2))
        with pytest.raises((type(error), StoreError)) as kept:
            watched.engine.backward(*watched.pair)
    watched.check()
    del kept


class Pixels(gg.Image):
    """An image that fails after so many reads."""

    def __init__(self, tensor: torch.Tensor, error: BaseException, after: int) -> None:
        super().__init__(shape=tuple(tensor.shape), dtype=tensor.dtype, name="pixels")  # type: ignore[arg-type]
        self.read_them = failing(lambda box: tensor[:, box.y0 : box.y1, box.x0 : box.x1].clone(), error, after)

    def _read_inside(self, box: Box) -> Any:
        return self.read_them(box)


@pytest.mark.parametrize("after", [0, 3])
@pytest.mark.parametrize("error", [KeyboardInterrupt(), MemoryError(), ImageError("the file is corrupt there")])
def test_an_image_that_fails_ends_the_run(watched, error, after):
    image = Pixels(watched.pair[0], error, after)
    with pytest.raises(type(error)) as kept:
        watched.engine.backward(image, watched.pair[1])
    with pytest.raises(type(error)) as kept_too:
        list(watched.predictor.stream(Pixels(watched.pair[0], error, after)))
    watched.check()
    del kept, kept_too


FAILS = {"forward": False, "backward": False}


@torch.library.custom_op("judges::may_fail", mutates_args=())
def may_fail(x: torch.Tensor, phase: str) -> torch.Tensor:
    if FAILS[phase]:
        raise RuntimeError(f"{phase} failed")
    return x.clone()


@may_fail.register_fake
def _(x, phase):
    return torch.empty_like(x)


may_fail.register_autograd(
    lambda ctx, g: (may_fail(g, "backward"), None), setup_context=lambda ctx, inputs, output: None
)


class MayFail(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.head = nn.Conv2d(3, 4, 3, padding=1), nn.Conv2d(4, 1, 1)

    def forward(self, x):
        return self.head(may_fail(self.first(x).relu(), "forward").tanh())


@pytest.mark.parametrize("phase", FAILS)
def test_an_operator_that_fails_leaves_gradients_and_memory_as_they_were(phase, monkeypatch):
    torch.manual_seed(0)
    model, pair = MayFail(), (torch.rand(3, 96, 110), torch.rand(1, 96, 110))
    engine = gg.compile(model, nn.functional.mse_loss, tile=(20, 30))
    engine.backward(*pair)
    before, expected = live_bytes(), [p.grad.clone() for p in model.parameters()]
    monkeypatch.setitem(FAILS, phase, True)
    with pytest.raises((RuntimeError, GigagradError), match=f"{phase} failed") as kept:
        engine.backward(*pair)
    del kept
    grown = live_bytes() - before - sum(gradient.nbytes for gradient in expected)
    assert grown < pair[1].nbytes  # less than one channel of the image
    for p, gradient in zip(model.parameters(), expected, strict=True):
        assert p.grad is not None
        assert torch.equal(p.grad, gradient)
    monkeypatch.setitem(FAILS, phase, False)
    engine.backward(*pair)
    for p, gradient in zip(model.parameters(), expected, strict=True):
        torch.testing.assert_close(p.grad, 2 * gradient)


def live_bytes() -> int:
    """Counts what tensors of this process hold that Python knows of."""
    gc.collect()
    storages = {}
    for one in gc.get_objects():
        if type(one) is torch.Tensor and one.device.type == "cpu" and one.layout is torch.strided:
            storage = one.untyped_storage()
            storages[storage.data_ptr()] = storage.nbytes()
    return sum(storages.values())


class Interrupt:
    """Raises KeyboardInterrupt as the n-th function of gigagrad begins in this thread, as Ctrl-C may."""

    INSIDE = str(Path(gg.__file__).parent)

    def __init__(self, at: int) -> None:
        self.at, self.count = at, 0

    def __enter__(self):
        sys.settrace(self.called)
        return self

    def __exit__(self, *_):
        sys.settrace(None)

    def called(self, frame: FrameType, event: str, arg: object) -> None:
        if frame.f_code.co_filename.startswith(self.INSIDE):
            self.count += 1
            if self.count == self.at:
                raise KeyboardInterrupt


POINTS = 40
"""Of some thousands: bench/attack_interruptions.py takes any moment."""


@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")  # Python closes generators, and says so
def test_an_interrupt_anywhere_in_a_step_leaves_nothing(watched):
    with Interrupt(0) as counting:
        watched.gradients()
    assert counting.count > 10 * POINTS
    step = counting.count // POINTS
    for number in range(POINTS):
        watched.reset()
        at = 1 + number * step + number % step  # not always the same place of a loop
        try:
            with Interrupt(at):
                watched.engine.backward(*watched.pair)
        except KeyboardInterrupt as error:
            watched.settle()
            assert watched.held() == watched.before, f"{at} of {counting.count}"
            unchanged = all(bool((p.grad == 1).all()) for p in watched.model.parameters())
            assert unchanged or number > POINTS - 3, f"{at} of {counting.count}"  # .grad is added to at the very end
            del error
    watched.reset()
    watched.check()


@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
@pytest.mark.parametrize("written", [False, True])
def test_an_interrupt_anywhere_in_a_prediction_leaves_its_image_closed(watched, tmp_path, written):
    path = tmp_path / "image.tif"
    tifffile.imwrite(path, watched.pair[0].permute(1, 2, 0).numpy(), tile=(16, 16), photometric="rgb")
    out = tmp_path / "prediction.tif" if written else None

    def open_files():
        links = [f"/proc/self/fd/{descriptor}" for descriptor in os.listdir("/proc/self/fd")]
        return [target for link in links if os.path.islink(link) and str(tmp_path) in (target := os.readlink(link))]

    for _ in range(2):  # the first one of this size is planned
        (tmp_path / "prediction.tif").unlink(missing_ok=True)
        with Interrupt(0) as counting:
            watched.predictor.forward(path, out=out)
    step, interrupted = max(1, counting.count // (POINTS + 1)), 0
    for number in range(POINTS):
        (tmp_path / "prediction.tif").unlink(missing_ok=True)
        at = 1 + number * step
        try:
            with Interrupt(at):
                watched.predictor.forward(path, out=out)
        except KeyboardInterrupt as error:
            watched.settle()
            assert open_files() == [], f"{at} of {counting.count}"
            interrupted += 1
            del error
    assert (
        interrupted > POINTS * 3 // 4
    )  # how often threads wait for each other, and so the count, is not always the same
    watched.check()


def test_streams_that_are_dropped_or_closed_or_never_begun_leave_nothing(watched):
    stream, image = watched.predictor.stream, watched.pair[0]
    for _ in stream(image):
        break
    watched.check()
    begun, never, closed = stream(image), stream(image), stream(image)
    next(begun), next(closed)
    assert watched.held() != watched.before
    closed.close()
    del begun, never
    watched.check()


def test_a_file_that_cannot_be_written_ends_the_run(watched, monkeypatch, tmp_path):
    import imagecodecs

    for error in (OSError(28, "No space left on device"), KeyboardInterrupt()):
        with monkeypatch.context() as patch:
            patch.setattr(imagecodecs, "deflate_encode", failing(imagecodecs.deflate_encode, error, 0))
            with pytest.raises((WriteError, KeyboardInterrupt)) as kept:
                watched.predictor.forward(watched.pair[0], out=tmp_path / "out.tif")
        assert not list(tmp_path.iterdir())
        watched.check()
        del kept


def test_a_listener_that_fails_ends_the_run(watched):
    failed: list[Any] = []

    def fail(event):
        if isinstance(event, TileDone) and event.done == 5 and not failed:
            failed.append(event)
            raise RuntimeError("the listener's own")

    with watched.engine.events.listening(fail), pytest.raises(RuntimeError, match="the listener's own") as kept:
        watched.engine.backward(*watched.pair)
    watched.check()
    del kept


def test_after_ctrl_c_the_engine_is_as_before(watched):
    """The signal itself, in the middle of a sweep."""
    interrupted: list[TileDone] = []

    def interrupt(event):
        if isinstance(event, TileDone) and event.done == event.total // 2 and not interrupted:
            interrupted.append(event)
            os.kill(os.getpid(), signal.SIGINT)

    before = signal.signal(signal.SIGINT, signal.default_int_handler)  # whatever a library has put there
    try:
        with watched.engine.events.listening(interrupt), pytest.raises(KeyboardInterrupt):
            watched.engine.backward(*watched.pair)
    finally:
        signal.signal(signal.SIGINT, before)
    assert interrupted
    watched.check()
