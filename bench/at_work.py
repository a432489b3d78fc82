"""What telling of the tile at work costs a step: its events, and the thread that writes them down, in seconds of CPU.

    python bench/at_work.py [--model smp:Unet?encoder_name=resnet18] [--side 1536] [--memory 1400MiB]

One training step on random bytes, listened to as `fit` does. An event is timed by itself, as the fastest of many; the
thread's time is what the system counts for it. Prints one JSON line last.
"""

from __future__ import annotations

import argparse
import json
import tempfile
import time
from pathlib import Path
from timeit import repeat

import numpy as np
import torch

from gigagrad.at_work import Work, WorkFile
from gigagrad.events import Event, Events, SlideBegun, StepMeasured, TileBegun, TileDone
from gigagrad.execution import compile as compile_engine
from gigagrad.losses import bce
from gigagrad.models import resolve


class Timed(WorkFile):
    """Knows what its thread took, and how often the file was replaced."""

    seconds = 0.0
    written = 0

    def _write_on(self) -> None:
        super()._write_on()
        self.seconds = time.thread_time()

    def _replace(self, content: dict[str, object]) -> None:
        self.written += 1
        super()._replace(content)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="smp:Unet?encoder_name=resnet18&encoder_weights=none")
    parser.add_argument("--side", type=int, default=1536)
    parser.add_argument("--memory", default="1400MiB")
    args = parser.parse_args()
    torch.manual_seed(0)
    engine = compile_engine(resolve(args.model), bce, memory=args.memory)
    image = np.random.default_rng(0).integers(0, 255, (3, args.side, args.side), np.uint8)
    mask = (image[:1] > 127).astype(np.uint8)
    engine.plan(image, mask)
    heard: list[Event] = []
    engine.events.subscribe(heard.append)
    slide = SlideBegun(Path("a"), (args.side, args.side), (args.side, args.side))
    with tempfile.TemporaryDirectory() as folder, Timed(Path(folder)) as told:
        told(slide)
        engine.events.subscribe(told)
        before = time.process_time()
        engine.backward(image, mask)
        cpu_seconds = time.process_time() - before
    begun = [event for event in heard if isinstance(event, TileBegun)]
    step = next(event for event in heard if isinstance(event, StepMeasured))
    event_seconds = seconds_of(begun[0])
    cost = len(begun) * event_seconds + told.seconds
    line = {
        "network": args.model,
        "side": args.side,
        "memory": args.memory,
        "tiles": len(begun),
        "step_seconds": round(step.seconds, 2),
        "step_cpu_seconds": round(cpu_seconds, 2),
        "microseconds_per_tile": round(1e6 * event_seconds, 2),
        "file_replaced": told.written,
        "thread_cpu_seconds": round(told.seconds, 4),
        "share_of_seconds": round(cost / step.seconds, 6),
        "share_of_cpu": round(cost / cpu_seconds, 6),
    }
    print(json.dumps(line), flush=True)


def seconds_of(event: TileBegun) -> float:
    """Return what making an event and telling it to a listener takes, and telling it that the tile is done."""
    work, done = Work(), TileDone("forward", 1, 2, 1.0)
    events = Events((work,))
    work(SlideBegun(Path("a"), (1, 1), (1, 1)))

    def one() -> None:
        events.emit(TileBegun(event.phase, event.segment, event.segments, event.done, event.total, event.place))
        work(done)

    return min(repeat(one, number=1000, repeat=20)) / 1000


if __name__ == "__main__":
    main()
