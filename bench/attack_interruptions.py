"""Runs that end before their end leave nothing behind, and the next one gives the same bits.

    python bench/attack_interruptions.py [--count 100] [--kills 20] [--seed 0] [--only NUMBER]

From the seed, every case takes a job (training steps with fields in files and in memory, from tensors and from a TIFF,
with tiles side by side; predictions in memory, streamed, and written to a TIFF) and ends it early: Ctrl-C at a moment
drawn from the whole length of the run, of a new engine with its capture too, in part of the cases twice; an error at a
random one of the calls that read, write, sync, allocate, start threads, compute or listen; a stream that is dropped
after some tiles. The exception is held with its traceback, as a notebook holds the last one, while descriptors, files,
threads, tensors, settings and `.grad` (bit by bit) are compared with before. Then the same job runs undisturbed. The
last `--kills` cases are processes that are killed in the middle; whoever runs next must clean up. What hangs or dies
counts, too. Progress on stderr; one JSON line last. `--only` repeats one case in this process.
"""

from __future__ import annotations

import argparse
import builtins
import errno
import gc
import multiprocessing
import os
import random
import signal
import sys
import tempfile
import threading
import time
import traceback
import warnings
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import imagecodecs
import numpy as np
import torch
import torch.nn.functional as F
from torch import nn

import gigagrad as gg
from bench.attack_worker import Judge, Verdict, Worker, campaign, options, report
from gigagrad.boxes import Box
from gigagrad.errors import GigagradError, ImageError
from gigagrad.events import TileDone
from gigagrad.images import Image, open_image, write_pyramid
from gigagrad.threads import settle
from tests.exactness.normed import Net, dice
from tests.exactness.steering import with_fields_in, with_workers

HEIGHT, WIDTH, TILE = 118, 134, (40, 48)
PATIENCE, SECONDS = 10.0, 120.0
"""Until a case counts as hung: other programs may want the processor, too."""


class Rows(nn.Module):
    """What a whole-field operator reads may be put into a file."""

    def __init__(self) -> None:
        super().__init__()
        self.conv, self.rows, self.head = nn.Conv2d(3, 4, 3, padding=1), nn.Linear(WIDTH, WIDTH), nn.Conv2d(4, 1, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.rows(self.conv(x)).relu())


# Jobs.


@dataclass(frozen=True)
class Job:
    """Something to interrupt: a method of an engine, and where its kept fields lie."""

    name: str
    network: type[nn.Module]
    loss: Any
    method: str
    tier: str
    workers: int
    from_file: bool = False


JOBS = (
    Job("step in files", Net, dice, "backward", "disk", 1),
    Job("step in files, side by side", Net, dice, "backward", "disk", 2),
    Job("step in memory", Net, dice, "backward", "memory", 2),
    Job("step of a TIFF", Net, dice, "backward", "disk", 2, from_file=True),
    Job("step of a whole-field operator", Rows, F.mse_loss, "backward", "disk", 1),
    Job("prediction", Net, None, "forward", "disk", 2),
    Job("stream", Net, None, "stream", "disk", 1),
    Job("stream of a TIFF", Net, None, "stream", "disk", 2, from_file=True),
    Job("prediction to a TIFF", Net, None, "out", "disk", 2, from_file=True),
)


class Stand:
    """A job with its model and its inputs, in a folder."""

    def __init__(self, job: Job, folder: Path, choices: dict[str, Any] | None = None) -> None:
        self.job = job
        self.scratch, self.out = folder / "scratch", folder / "out"
        self.path = self.out / "prediction.tif"
        for made in (folder, self.scratch, self.out):
            made.mkdir(exist_ok=True)
        torch.manual_seed(0)
        self.model = job.network()
        image, target = torch.rand(3, HEIGHT, WIDTH), (torch.rand(1, HEIGHT, WIDTH) > 0.5).float()
        self.state = {name: value.clone() for name, value in self.model.state_dict().items()}
        self.given = [torch.rand_like(p) for p in self.model.parameters()]
        first = write_image(folder / "image.tif", image) if job.from_file else image
        self.inputs = (first, target) if job.method == "backward" else (first,)
        self.choices = self._choices() if choices is None else choices
        self.engine = self.new_engine()
        self.reset()

    def _choices(self) -> dict[str, Any]:
        """What the planner would choose, with the kept fields in this job's tier: which plan is fastest is a matter of
        the moment, and small fields go to memory.
        """
        engine = gg.compile(self.model, self.job.loss, tile=TILE, scratch=self.scratch)
        image, target = (*self.inputs, None)[:2]
        with_workers(with_fields_in(engine, image, target, self.job.tier), image, target, self.job.workers)
        return engine.state_dict()

    def new_engine(self) -> gg.Engine:
        engine = gg.compile(self.model, self.job.loss, tile=TILE, scratch=self.scratch)
        engine.load_state_dict(self.choices)
        return engine

    def reset(self) -> None:
        self.model.load_state_dict(self.state)
        for p, given in zip(self.model.parameters(), self.given, strict=True):
            p.grad = given.clone()
        self.path.unlink(missing_ok=True)

    def run(self, engine: gg.Engine, tiles: int | None = None) -> torch.Tensor | Path | None:
        """The loss, the prediction, or where it is; nothing of a stream that is left after so many tiles."""
        if self.job.method == "backward":
            return engine.backward(*self.inputs)
        if self.job.method == "out":
            return Path(engine.forward(*self.inputs, out=self.path))
        if self.job.method == "forward":
            prediction: torch.Tensor = engine.forward(*self.inputs)
            return prediction
        joined = torch.zeros(1, 1, HEIGHT, WIDTH)
        for count, (box, crop) in enumerate(engine.stream(*self.inputs)):
            if count == tiles:
                return None
            joined[..., box.y0 : box.y1, box.x0 : box.x1] = crop
        return joined

    def gradients(self) -> list[torch.Tensor]:
        return [p.grad.clone() for p in self.model.parameters() if p.grad is not None]


class Watched(Stand):
    """A job, and what an undisturbed run of it gives and takes."""

    def __init__(self, job: Job, folder: Path) -> None:
        super().__init__(job, folder)
        began = time.perf_counter()
        self.expected = pixels_of(self.run(self.new_engine()))
        self.cold_seconds = time.perf_counter() - began
        self.finished = self.gradients()
        assert not self.again(self.engine), "two undisturbed runs differ"
        began = time.perf_counter()
        self.again(self.engine)
        self.seconds = time.perf_counter() - began

    def again(self, engine: gg.Engine) -> list[str]:
        """What is wrong with an undisturbed run."""
        self.reset()
        wrong = [] if self.is_right(self.run(engine)) else ["wrong: the next run's result has other bits"]
        wrong += [] if alike(self.gradients(), self.finished) else ["wrong: the next run's .grad has other bits"]
        self.reset()
        return wrong

    def is_right(self, result: torch.Tensor | Path | None) -> bool:
        return torch.equal(pixels_of(result), self.expected)


def write_image(path: Path, image: torch.Tensor) -> Path:
    pixels = image.permute(1, 2, 0).numpy()
    shape = (*image.shape[1:], len(image))
    return write_pyramid(path, [pixels], shape=shape, dtype=pixels.dtype, nearest=False, tile=32, overwrite=True)


def pixels_of(result: torch.Tensor | Path | None) -> torch.Tensor:
    if isinstance(result, Path):
        with open_image(result) as image:
            return torch.as_tensor(np.array(image.read(Box.whole(image.height, image.width))))
    assert result is not None
    return result


def alike(ours: list[torch.Tensor], theirs: list[torch.Tensor]) -> bool:
    return len(ours) == len(theirs) and all(torch.equal(a, b) for a, b in zip(ours, theirs, strict=True))


# What a process holds.


def descriptors() -> Counter[str]:
    """By what they lead to, files without a name too: as long as one is open, its disk space is taken."""
    found: Counter[str] = Counter()
    for name in os.listdir("/proc/self/fd"):
        try:
            found[os.readlink(f"/proc/self/fd/{name}")] += 1
        except FileNotFoundError:  # the listing's own
            continue
    return found


@contextmanager
def replaced(owner: Any, name: str, other: Callable[..., Any]) -> Iterator[None]:
    before = getattr(owner, name)
    setattr(owner, name, other)
    try:
        yield
    finally:
        setattr(owner, name, before)


def field_bytes() -> int:
    """Counts the memory of tensors that are larger than a prediction: fields, and views that keep them."""
    found = {}
    for one in gc.get_objects():
        if type(one) is torch.Tensor and one.layout is torch.strided:
            storage = one.untyped_storage()
            found[storage.data_ptr()] = storage.nbytes()
    return sum(nbytes for nbytes in found.values() if nbytes > 4 * HEIGHT * WIDTH)


@dataclass(frozen=True)
class Held:
    """What must be as before."""

    descriptors: Counter[str]
    files: set[str]
    threads: set[str]
    settings: tuple[Any, ...]
    field_bytes: int

    @classmethod
    def now(cls, stand: Stand) -> Held:
        settle()  # an interrupt ends the waiting for what closes, not its work
        gc.collect()
        settle()  # of a stream that was dropped, too
        files = {str(path) for folder in (stand.scratch, stand.out) for path in folder.rglob("*")}
        names = {thread.name for thread in threading.enumerate() if thread.name != "gigagrad-close"}
        settings = (torch.get_num_threads(), torch.is_grad_enabled(), torch.get_default_dtype(), dict(vars(builtins)))
        return cls(descriptors(), files, names, settings, field_bytes())

    def leaks(self, before: Held) -> list[str]:
        found = {
            "descriptors": dict(self.descriptors - before.descriptors),
            "descriptors closed": dict(before.descriptors - self.descriptors),
            "files": self.files - before.files,
            "threads": self.threads - before.threads,
            "settings": self.settings[:3] if self.settings != before.settings else None,
            "bytes of fields": max(0, self.field_bytes - before.field_bytes),
        }
        return [f"leaked: {name}: {what}" for name, what in found.items() if what]


def leaks(stand: Stand, before: Held) -> list[str]:
    """Lists what stays: an interrupt ends the waiting for what closes, not its work, so that some seconds may pass."""
    end = time.monotonic() + PATIENCE
    while (found := Held.now(stand).leaks(before)) and time.monotonic() < end:
        time.sleep(0.02)
    return found


# Ways to end a run.


@dataclass(frozen=True)
class Outcome:
    """How an attack ended: the exception with its frames, the result of a run that came to its end, or a stream."""

    error: BaseException | None = None
    result: torch.Tensor | Path | None = None
    stream: Any = None


def interrupted(stand: Watched, rng: random.Random, *, cold: bool, twice: bool) -> Outcome:
    """Ctrl-C at some moment of the run; a second one comes while the first is dealt with."""
    engine = stand.new_engine() if cold else stand.engine
    moment = rng.uniform(1e-4, (stand.cold_seconds if cold else stand.seconds) * 1.05)
    second = rng.uniform(1e-4, 0.02) if twice else 0.0
    left = [2 if twice else 1]

    def interrupt(*_: object) -> None:
        left[0] -= 1
        if left[0] == 0:
            signal.setitimer(signal.ITIMER_REAL, 0)
        raise KeyboardInterrupt

    signal.signal(signal.SIGALRM, interrupt)
    try:
        try:
            signal.setitimer(signal.ITIMER_REAL, moment, second)
            return Outcome(result=stand.run(engine))
        finally:
            signal.setitimer(signal.ITIMER_REAL, 0)
    except BaseException as error:
        return Outcome(error)


OPERATOR = type(torch.ops.aten.relu.default)

PLACES: dict[str, tuple[Any, str, BaseException]] = {
    "writing scratch": (os, "pwrite", OSError(errno.EIO, "Input/output error")),
    "reading scratch": (os, "preadv", OSError(errno.EIO, "Input/output error")),
    "reserving scratch": (os, "posix_fallocate", OSError(errno.ENOSPC, "No space left on device")),
    "syncing": (os, "fsync", OSError(errno.ENOSPC, "No space left on device")),
    "renaming": (os, "replace", OSError(errno.EACCES, "Permission denied")),
    "encoding": (imagecodecs, "deflate_encode", MemoryError()),
    "reading": (Image, "read", ImageError("the file is corrupt there")),
    "computing": (OPERATOR, "__call__", MemoryError()),
    "an operator": (OPERATOR, "__call__", RuntimeError("it failed")),
    "differentiating": (torch.autograd, "grad", MemoryError()),
    "starting a thread": (threading.Thread, "start", RuntimeError("can't start new thread")),
}


def failed(stand: Watched, rng: random.Random, place: str) -> Outcome:
    """An error at a random one of the calls that a run makes there."""
    owner, name, error = PLACES[place]
    original, calls, at = getattr(owner, name), 0, 0

    def failing(*given: Any, **named: Any) -> Any:
        nonlocal calls
        calls += 1
        if calls == at:
            raise type(error)(*error.args)
        return original(*given, **named)

    with replaced(owner, name, failing):
        stand.run(stand.engine)
    stand.reset()
    at, calls = rng.randint(1, max(1, calls)), 0
    try:
        with replaced(owner, name, failing):
            return Outcome(result=stand.run(stand.engine))
    except BaseException as raised:
        return Outcome(raised)


def told(stand: Watched, rng: random.Random) -> Outcome:
    """A listener of the caller's raises."""
    engine, left = stand.new_engine(), rng.randint(1, 20)

    def listen(event: object) -> None:
        nonlocal left
        left -= isinstance(event, TileDone)
        if left == 0:
            raise RuntimeError("the listener's own")

    engine.events.subscribe(listen)
    try:
        return Outcome(result=stand.run(engine))
    except RuntimeError as error:
        return Outcome(error)


def dropped(stand: Watched, rng: random.Random) -> Outcome:
    """A stream is left, closed, never begun or collected as garbage, or what reads it fails."""
    way = rng.choice(("left", "closed", "never begun", "collected", "failed"))
    stream = stand.engine.stream(*stand.inputs)
    if way == "left":
        stand.run(stand.engine, rng.randint(1, 8))
    if way in ("left", "never begun"):
        return Outcome(stream=stream)
    for _ in range(rng.randint(1, 8)):
        next(stream)
    if way == "closed":
        stream.close()
        return Outcome(stream=stream)
    try:
        if way == "failed":
            for _ in stream:
                raise ValueError("the reader's own")
    except ValueError as error:
        del stream
        return Outcome(error)
    cycle: list[Any] = [stream]
    cycle.append(cycle)
    return Outcome()


def draw(rng: random.Random) -> tuple[Job, str, Callable[[Watched], Outcome]]:
    """A case: the job, the way it ends, and what does it."""
    kind = rng.choice(("interrupt", "interrupt", "interrupt", "cold", "twice", "error", "error", "listener", "drop"))
    streams = [job for job in JOBS if job.method == "stream"]
    job = rng.choice(streams if kind == "drop" else JOBS)
    if kind == "error":
        place = rng.choice(tuple(PLACES))
        return job, f"an error in {place}", partial(failed, rng=rng, place=place)
    if kind == "listener":
        return job, "a listener that raises", partial(told, rng=rng)
    if kind == "drop":
        return job, "a dropped stream", partial(dropped, rng=rng)
    attack = partial(interrupted, rng=rng, cold=kind == "cold", twice=kind == "twice")
    return job, {"cold": "Ctrl-C, cold", "twice": "Ctrl-C twice"}.get(kind, "Ctrl-C"), attack


# Cases.


def run_case(stand: Watched, way: str, attack: Callable[[Watched], Outcome]) -> Verdict:
    """How it ended: of several faults the first names the kind."""
    stand.reset()
    before = Held.now(stand)
    outcome = attack(stand)
    error = outcome.error
    faults = []
    if outcome.result is not None and not stand.is_right(outcome.result):
        faults.append("wrong: a run that came to its end has other bits")
    if stand.path.exists():  # Ctrl-C may come when all is done
        faults += [] if stand.is_right(stand.path) else ["wrong: the file that was written has other bits"]
        stand.path.unlink()
    faults += leaks(stand, before)
    gradients = stand.gradients()
    done = outcome.result is not None or (way.startswith("Ctrl-C") and alike(gradients, stand.finished))
    if not alike(gradients, stand.finished if done else stand.given):
        faults.append("leaked: .grad is neither as before nor as after")
    if error is not None and not expected(way, error):
        faults.append(f"foreign: {type(error).__name__}: {error}")
        traceback.print_exception(error)
    kind = "refused" if isinstance(error, GigagradError) else "fine"
    faults += stand.again(stand.new_engine() if "cold" in way else stand.engine)
    del outcome, error
    return judged(kind, [*faults, *leaks(stand, before)])


def judged(kind: str, faults: list[str]) -> Verdict:
    return (faults[0].partition(":")[0], "; ".join(faults)) if faults else (kind, "")


def expected(way: str, error: BaseException) -> bool:
    """Ours, or what was raised; what the system says about files must be ours."""
    if way.startswith("Ctrl-C"):
        return isinstance(error, KeyboardInterrupt)
    return isinstance(error, GigagradError) or not isinstance(error, OSError)


def after_kill(stand: Watched) -> Verdict:
    """The next run removes what the killed one left."""
    faults = stand.again(stand.engine)
    files = [path for folder in (stand.scratch, stand.out) for path in folder.rglob("*")]
    return judged("fine", faults + [f"leaked: {path} of a killed process" for path in files])


class Cases:
    """The cases of one campaign by number, each repeatable; jobs are set up when they come first."""

    def __init__(self, chosen: argparse.Namespace, folder: Path) -> None:
        self._first_kill, self._seed, self._folder = chosen.count - chosen.kills, chosen.seed, folder
        self._stands: dict[str, Watched] = {}
        self.left_by_kills = 0

    def drawn(self, index: int) -> tuple[random.Random, Job, str, Callable[[Watched], Outcome] | None]:
        rng = random.Random(f"{self._seed}/{index}")
        if index >= self._first_kill:
            return rng, rng.choice(JOBS), "SIGKILL", None
        return rng, *draw(rng)

    def set_up(self, _: int = 0) -> Judge:
        quiet()
        return self.run

    def run(self, index: int) -> Verdict:
        _, job, way, attack = self.drawn(index)
        stand = self._stands.get(job.name)
        if stand is None:
            self._stands[job.name] = stand = Watched(job, self.folder_of(job))
            gc.collect()
            gc.freeze()  # a model and its graphs need not be walked in every case
        kind, said = run_case(stand, way, attack) if attack is not None else after_kill(stand)
        return kind, f"{job.name}, {way}: {said}"

    def folder_of(self, job: Job) -> Path:
        return self._folder / job.name.replace(" ", "-")

    def kill(self, index: int) -> None:
        """If this case is a kill: let a process do the job and kill it. Counts those that left something."""
        rng, job, _, attack = self.drawn(index)
        if attack is not None:
            return
        context = multiprocessing.get_context("forkserver")
        here, there = context.Pipe()
        process = context.Process(target=go_on, args=(job, self.folder_of(job), there))
        process.start()
        there.close()
        here.recv()
        time.sleep(rng.uniform(0, 1))
        process.kill()
        process.join()
        folder = self.folder_of(job)
        left = [path for name in ("scratch", "out") for path in (folder / name).iterdir() if path.suffix != ".tif"]
        self.left_by_kills += bool(left)


def go_on(job: Job, folder: Path, pipe: Connection) -> None:
    """A process that works until it is killed."""
    quiet()
    stand = Stand(job, folder)
    stand.run(stand.engine)  # what captures has no files yet
    pipe.send("ready")
    while True:
        stand.reset()
        stand.run(stand.engine)


def quiet() -> None:
    warnings.simplefilter("ignore")
    signal.signal(signal.SIGINT, signal.default_int_handler)


def main() -> int:
    parser = options(__doc__, 100)
    parser.add_argument("--kills", type=int, default=20, help="of the count")
    chosen = parser.parse_args()
    multiprocessing.get_context("forkserver").set_forkserver_preload(["torch", "gigagrad", "tests.exactness.normed"])
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as name:
        cases = Cases(chosen, Path(name))
        if chosen.only is not None:
            cases.kill(chosen.only)
            print(*cases.set_up()(chosen.only))
            return 0
        found = campaign(chosen, [Worker(cases.set_up, SECONDS, start="forkserver")], cases.kill)
    return report("interruptions", chosen, {"kills": chosen.kills, "left by kills": cases.left_by_kills, **found})


if __name__ == "__main__":
    sys.exit(main())
