"""One full training step on one large slide, in a process of its own so that its peak memory is its own.

    python -m gigagrad.demo.step SLIDE MASK MODEL MEMORY

MODEL is a saved model; the step starts from its weights and is not kept. Prints one JSON object a line: `{"done",
"total"}` as tiles finish, and last the numbers of the step, or `{"error"}` with exit code 2.
"""

from __future__ import annotations

import json
import subprocess
import sys
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from gigagrad.errors import ConfigError, GigagradError
from gigagrad.events import Event, Events, JobAdvanced, JobFinished, JobStarted, TileDone

_JOB = "large step"


def measured_step(slide: Path, mask: Path, model: Path, memory: str, events: Events) -> Mapping[str, Any]:
    """Take one step in a fresh interpreter; return its numbers. Emits the job `large step`.

    Raises `ConfigError` with the other process's reason if it fails.
    """
    # -P: a module in the working directory must not stand in for one of ours.
    command = [sys.executable, "-P", "-m", __name__, *map(str, (slide, mask, model)), memory]
    start, last = time.monotonic(), ""
    result: dict[str, Any] = {}
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True) as process:  # noqa: S603
        assert process.stdout is not None
        for line in process.stdout:
            last = line.strip() or last
            try:
                result = dict(json.loads(line))
            except ValueError:  # whatever else a library prints
                continue
            if "done" in result:
                if result["done"] == 1:
                    events.emit(JobStarted(_JOB, result["total"], "tiles"))
                events.emit(JobAdvanced(_JOB, result["done"], result["total"], "tiles"))
    if process.returncode != 0 or "pixels" not in result:
        reason = result.get("error", last) or f"it ended with code {process.returncode}, perhaps for want of memory"
        raise ConfigError(f"the step on {slide} failed: {reason}")
    events.emit(JobFinished(_JOB, time.monotonic() - start))
    return result


def take_step(slide: Path, mask: Path, model: str, memory: str) -> dict[str, Any]:
    """Take a step of Adam on the paper's loss, in grey, and measure it: pixels, seconds, bytes, the exact loss before.

    `seconds_per_step` is from reading the first pixel to the new weights; capture and planning, once per size, are
    `plan_seconds`. `peak_rss_bytes` is of the whole process since it started.
    """
    import torch

    from gigagrad.devices.heap import peak_resident_bytes
    from gigagrad.execution import compile
    from gigagrad.images import open_image
    from gigagrad.losses import bce
    from gigagrad.models import load_model
    from gigagrad.units import parse_bytes

    _, network = load_model(model)
    network.train()
    optimizer = torch.optim.Adam(network.parameters(), lr=1e-3)
    engine = compile(network, bce, memory=memory)
    engine.events.subscribe(_print_progress)
    with open_image(slide) as opened, open_image(mask) as target:
        image = opened.grey()
        start = time.perf_counter()
        plan = engine.plan(image, target)
        planned = time.perf_counter()
        loss = float(engine.backward(image, target))
        optimizer.step()
        end = time.perf_counter()
        return {
            "height": image.height,
            "width": image.width,
            "pixels": image.height * image.width,
            "seconds_per_step": round(end - planned, 2),
            "plan_seconds": round(planned - start, 2),
            "peak_rss_bytes": peak_resident_bytes(),
            "budget_bytes": parse_bytes(memory),
            "predicted_peak_bytes": plan.predicted_peak_bytes,
            "predicted_seconds": plan.predicted_seconds,
            "loss": loss,
            "steps": 1,
            "threads": torch.get_num_threads(),
        }


def _print_progress(event: Event) -> None:
    if isinstance(event, TileDone):
        _print({"done": event.done, "total": event.total})


def _print(record: Mapping[str, Any]) -> None:
    sys.stdout.write(json.dumps(record) + "\n")
    sys.stdout.flush()


def _main(slide: str, mask: str, model: str, memory: str) -> int:
    try:
        _print(take_step(Path(slide), Path(mask), model, memory))
    except GigagradError as error:
        _print({"error": str(error)})
        return 2
    except KeyboardInterrupt:
        return 130  # the parent was interrupted too, and says so
    return 0


if __name__ == "__main__":
    sys.exit(_main(*sys.argv[1:]))
