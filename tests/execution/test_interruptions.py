"""Runs that end before their end: whatever is raised, wherever, nothing of them stays but the exception.

An exception is kept here with its traceback, as a notebook keeps the last one.
"""

from __future__ import annotations

import contextlib
import dis
import gc
import inspect
import os
import sys
import threading
import time
import traceback
import weakref
from types import CodeType, FrameType, SimpleNamespace

import pytest
import tifffile
import torch
from torch import nn

import gigagrad as gg
from gigagrad import threads
from gigagrad.devices.heap import resident_bytes
from gigagrad.errors import StoreError
from gigagrad.execution import Engine, sources
from gigagrad.execution import run as running
from gigagrad.execution.buffers import Buffers
from gigagrad.execution.executor import ahead
from gigagrad.execution.predictions import Predictions
from gigagrad.execution.probes import Progress
from gigagrad.execution.scalars import ScalarGraph
from gigagrad.execution.sinks import Pyramid, Several, WholeTensor
from gigagrad.execution.sources import Source
from gigagrad.execution.tile_program import TileProgram
from gigagrad.images import Image, opening, tiff
from gigagrad.stores import DiskTier, HostStore, Scratch
from gigagrad.stores.scratch import _Place
from tests.faults.watched import Watched, failing, is_of_a_run

linux = pytest.mark.skipif(not os.path.isdir("/proc/self/fd"), reason="this system does not tell what a process holds")


@pytest.fixture(scope="module")
def watched(tmp_path_factory):
    return Watched(tmp_path_factory.mktemp("scratch"), "disk")


@pytest.fixture(scope="module")
def in_memory(tmp_path_factory):
    return Watched(tmp_path_factory.mktemp("unused"), "memory")


ERRORS = [KeyboardInterrupt(), MemoryError(), OSError(5, "Input/output error"), StoreError("a store failed")]


PLACES = [
    (Source, "view", 2),
    (TileProgram, "run", 5),
    (Buffers, "allocate", 2),
    (Buffers, "release", 2),
    (Progress, "tile_done", 7),
    (ScalarGraph, "backward_from", 1),
]


@linux
@pytest.mark.parametrize(("owner", "name", "after"), PLACES, ids=[name for _, name, _ in PLACES])
@pytest.mark.parametrize("error", ERRORS, ids=[type(error).__name__ for error in ERRORS])
def test_whatever_is_raised_wherever_nothing_stays(watched, monkeypatch, owner, name, after, error):
    with monkeypatch.context() as patch:
        patch.setattr(owner, name, failing(getattr(owner, name), error, after))
        with pytest.raises((type(error), StoreError)) as kept:
            watched.engine.backward(*watched.pair)
    watched.check()
    del kept


@linux
def test_files_go_before_the_traceback_does(watched, monkeypatch):
    """Many runs that failed, all of their tracebacks held."""
    kept = []
    with monkeypatch.context() as patch:
        patch.setattr(Buffers, "release", failing(Buffers.release, MemoryError(), 0))
        for _ in range(5):
            try:
                watched.engine.backward(*watched.pair)
            except MemoryError as error:
                kept.append(error)
    assert len(kept) == 5
    watched.check()


def test_fields_in_memory_go_before_the_traceback_does(in_memory, monkeypatch):
    """They are shared by the crops that frames in the traceback have at hand."""
    fields = []
    made = HostStore.__init__

    def noted(self, *given, **named):
        made(self, *given, **named)
        fields.append(weakref.ref(self._tensor.untyped_storage()))

    with monkeypatch.context() as patch:
        patch.setattr(HostStore, "__init__", noted)
        patch.setattr(running.torch.autograd, "grad", failing(torch.autograd.grad, MemoryError(), 3))  # type: ignore[attr-defined]
        with pytest.raises(MemoryError) as kept:
            in_memory.engine.backward(*in_memory.pair)
    assert len(fields) > 2
    gc.collect()
    assert [field() for field in fields if field() is not None] == []
    assert kept.tb is not None
    in_memory.check()


class Interrupt:
    """Raises KeyboardInterrupt in these functions, the n-th time that the interpreter looks for signals there: as a
    function begins, as a loop goes round, and after a call.
    """

    def __init__(self, codes: set[CodeType], at: int) -> None:
        self.left = at
        self._names = {code: {i.offset: i.opname for i in dis.get_instructions(code)} for code in codes}
        self._last = ""

    def __enter__(self):
        sys.settrace(self._call)

    def __exit__(self, *_):
        sys.settrace(None)

    def _call(self, frame: FrameType, event: str, arg: object):
        if frame.f_code not in self._names:
            return None
        frame.f_trace_opcodes = True
        return self._instruction

    def _instruction(self, frame: FrameType, event: str, arg: object):
        if event == "opcode":
            name = self._names[frame.f_code].get(frame.f_lasti, "")
            looks = name in ("RESUME", "JUMP_BACKWARD") or self._last.startswith("CALL")
            self._last = name
            self.left -= looks
            if looks and self.left == 0:
                raise KeyboardInterrupt
        return self._instruction


OPENING_AND_CLOSING = {
    function.__code__
    for function in (
        running.Run.__enter__,
        running.Run.__exit__,
        running.Run.close,
        running.Run._close,
        Buffers.open,
        Buffers.close,
        DiskTier.open,
        Scratch.__init__,
        Scratch.create,
        Scratch.close,
        _Place.open,
        _Place._claimed,
        _Place.create,
        _Place.close,
        threads.uninterrupted,
    )
}


@linux
def test_an_interrupt_anywhere_in_opening_and_closing_leaves_nothing(watched):
    counting = Interrupt(OPENING_AND_CLOSING, -1)
    with counting:
        watched.gradients()
    count = -1 - counting.left
    assert count > 50
    for at in range(1, count + 1):
        for p in watched.model.parameters():
            p.grad = torch.ones_like(p)
        with pytest.raises(KeyboardInterrupt) as kept, Interrupt(OPENING_AND_CLOSING, at):
            watched.engine.backward(*watched.pair)
        threads.settle()
        assert watched.held() == watched.before, f"{at} of {count}"
        assert all(bool((p.grad == 1).all()) for p in watched.model.parameters())
        del kept
    watched.check()


def test_the_main_thread_waits_for_others_without_a_condition(watched, monkeypatch, tmp_path):
    """Ctrl-C in the middle of one leaves its lock held, and whoever needs it waits for ever: one in a few hundred."""
    entered = []
    enter = threading.Condition.__enter__

    def noted(self):
        if threading.get_ident() == threading.main_thread().ident:
            entered.append(traceback.format_stack())
        return enter(self)

    monkeypatch.setattr(threading.Condition, "__enter__", noted)
    watched.gradients()
    watched.predictor.forward(watched.pair[0], out=tmp_path / "out.tif")
    watched.predictor.forward(watched.pair[0], out=Several([Pyramid(tmp_path / "a.tif"), WholeTensor(torch.float32)]))
    assert entered == []


READING = {
    inspect.unwrap(function).__code__
    for function in (
        Engine.forward,
        Engine.stream,
        inspect.unwrap(sources.opened_sources),
        Predictions.delivered,
        Predictions.pieces,
        sources.image_source,
        sources.Source.close,
        opening.open_image,
        opening._open_path,
        tiff.open_tiff,
        tiff.TiffImage.__init__,
        tiff.TiffImage._release,
        Image.close,
        contextlib._GeneratorContextManager.__enter__,
        contextlib._GeneratorContextManager.__exit__,
    )
}


@linux
@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
@pytest.mark.parametrize("written", [False, True])
def test_an_interrupt_anywhere_in_opening_an_image_leaves_it_closed(watched, tmp_path, written):
    path = tmp_path / "image.tif"
    tifffile.imwrite(path, watched.pair[0].permute(1, 2, 0).numpy(), tile=(16, 16), photometric="rgb")
    out = tmp_path / "prediction.tif" if written else None

    def open_files():
        links = [f"/proc/self/fd/{descriptor}" for descriptor in os.listdir("/proc/self/fd")]
        return [target for link in links if os.path.islink(link) and str(tmp_path) in (target := os.readlink(link))]

    watched.predictor.forward(path, out=out)  # which plans
    (tmp_path / "prediction.tif").unlink(missing_ok=True)
    counting = Interrupt(READING, -1)
    with counting:
        watched.predictor.forward(path, out=out)
    count = -1 - counting.left
    assert count > 30
    for at in range(1, count + 1):
        (tmp_path / "prediction.tif").unlink(missing_ok=True)
        with pytest.raises(KeyboardInterrupt) as kept, Interrupt(READING, at):
            watched.predictor.forward(path, out=out)
        threads.settle()
        assert open_files() == [], f"{at} of {count}"
        del kept
    watched.check()


@linux
@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")  # Python closes it, and says so
def test_an_interrupt_while_memory_is_looked_at_leaves_no_descriptor():
    def held():
        return set(os.listdir("/proc/self/fd"))

    looking = {resident_bytes.__code__}
    counting = Interrupt(looking, -1)
    with counting:
        resident_bytes()
    before = held()
    for at in range(1, -counting.left):
        with pytest.raises(KeyboardInterrupt), Interrupt(looking, at):
            resident_bytes()
        assert held() == before, at


@linux
def test_a_stream_that_its_own_reading_thread_collects_leaves_nothing(watched, monkeypatch):
    """Garbage is collected in whatever thread makes some. It must not wait for itself."""
    holder = SimpleNamespace(stream=gg.compile(nn.Conv2d(3, 1, 3), tile=(8, 8)).stream(watched.pair[0]))
    holder.itself = holder
    read, begun, dropped, collected = Source.view, [], threading.Event(), threading.Event()

    def reading(self, box):
        begun.append(box)
        if len(begun) == 6:
            assert dropped.wait(60)
            gc.collect()
            collected.set()
        return read(self, box)

    with monkeypatch.context() as patch:
        patch.setattr(Source, "view", reading)
        gc.disable()
        try:
            for _ in range(4):  # two more are read ahead
                next(holder.stream)
            del holder
            dropped.set()
            assert collected.wait(60)
        finally:
            gc.enable()
    threads.settle()
    for thread in threading.enumerate():
        if is_of_a_run(thread):
            while thread.ident is None:  # it is about to begin
                time.sleep(0.001)
            thread.join(60)
    watched.check()


def test_what_is_read_ahead_is_not_waited_for_once_its_thread_has_ended():
    """As when the traceback of an error outlives the run: what was never begun will never be done."""
    begun, go_on = threading.Event(), threading.Event()

    def work(item):
        if item:
            begun.set()
            assert go_on.wait(60)
        return item

    with threads.SideThreads(1, "gigagrad-read") as pool:
        results = ahead(range(9), work, pool, 3)
        assert next(results) == 0
        assert begun.wait(60)
        threading.Timer(0.1, go_on.set).start()
        pool.shutdown(cancel=True)
        results.close()  # type: ignore[attr-defined]
