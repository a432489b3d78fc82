"""One exact training step of the paper's network on a gigapixel slide: seconds and peak memory of the whole process.

    python bench/gigapixel_step.py --height 16000 --width 64000 --memory 1GiB [--steps 2] [--slide PATH --mask PATH]
        [--precision bfloat16 | --predict] [--grey]

Reads a pyramidal JPEG BigTIFF and its mask (made first, in a process of their own, unless given), takes `--steps` steps
of Adam and prints one JSON line last. `seconds_per_step` is the median step, from reading the slide to the new weights;
capture and planning, once per size, are `plan_seconds`. With `--predict` it is that of predictions whose pieces nobody
keeps. `--grey` reads the slide in one channel, its JPEG tiles' luma. `page_faults` and `system_seconds` are the whole
process's.
"""

from __future__ import annotations

import argparse
import json
import resource
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from gigagrad.events import Event, Notice


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--height", type=int, default=16000)
    parser.add_argument("--width", type=int, default=64000)
    parser.add_argument("--memory", default="1GiB")
    parser.add_argument("--steps", type=int, default=1)
    parser.add_argument("--slide", type=Path)
    parser.add_argument("--mask", type=Path)
    parser.add_argument("--grey", action="store_true")
    what = parser.add_mutually_exclusive_group()
    what.add_argument("--precision")
    what.add_argument("--predict", action="store_true")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        slide, mask = args.slide, args.mask
        if slide is None or mask is None:
            slide, mask = Path(folder) / "slide.tif", Path(folder) / "mask.tif"
            make = (
                "import sys; from gigagrad.images import make_slide; "
                "slide, mask, height, width = sys.argv[1:]; "
                "make_slide(slide, height=int(height), width=int(width), seed=0, mask_path=mask)"
            )
            subprocess.run(
                [sys.executable, "-c", make, str(slide), str(mask), str(args.height), str(args.width)], check=True
            )
        if args.predict:
            found = predict(slide, args.memory, args.steps, grey=args.grey)
        else:
            found = {
                **measure(slide, mask, args.memory, args.steps, args.precision, grey=args.grey),
                "precision": args.precision,
            }
    usage = resource.getrusage(resource.RUSAGE_SELF)
    found["grey"] = args.grey
    print(json.dumps({**found, "page_faults": usage.ru_minflt, "system_seconds": round(usage.ru_stime, 1)}))


def measure(
    slide: Path, mask: Path, memory: str, steps: int, precision: str | None, *, grey: bool
) -> dict[str, object]:
    """Takes steps of Adam on the paper's loss, each from reading the first pixel to the new weights."""
    import torch

    import gigagrad as gg

    torch.manual_seed(0)
    network = gg.models.resolve("paper-unet").train()
    optimizer = torch.optim.Adam(network.parameters(), lr=1e-3)
    engine = gg.compile(network, gg.losses.bce, memory=memory, precision=precision)
    engine.events.subscribe(show)
    seconds: list[float] = []
    with gg.open_image(slide) as opened, gg.open_image(mask) as target:
        image = opened.grey() if grey else opened
        start = time.perf_counter()
        plan = engine.plan(image, target)
        plan_seconds = time.perf_counter() - start
        print(plan, flush=True)
        for _ in range(steps):
            start = time.perf_counter()
            optimizer.zero_grad()
            loss = float(engine.backward(image, target))
            optimizer.step()
            seconds.append(time.perf_counter() - start)
            print(f"loss {loss:.6f} in {seconds[-1]:.1f} s", flush=True)
        last = engine.last_run
        assert last is not None
        return {
            "height": image.height,
            "width": image.width,
            "pixels": image.height * image.width,
            "seconds_per_step": round(statistics.median(seconds), 2),
            "plan_seconds": round(plan_seconds, 2),
            "peak_rss_bytes": last.peak_bytes,
            "budget_bytes": last.budget_bytes,
            "predicted_peak_bytes": plan.predicted_peak_bytes,
            "predicted_seconds": plan.predicted_seconds,
            "loss": loss,
            "steps": steps,
            "threads": torch.get_num_threads(),
        }


def predict(slide: Path, memory: str, steps: int, *, grey: bool) -> dict[str, object]:
    import gigagrad as gg

    engine = gg.compile(gg.models.resolve("paper-unet").eval(), memory=memory)
    with gg.open_image(slide) as opened:
        image = opened.grey() if grey else opened
        plan, seconds = engine.plan(image), []
        for _ in range(steps):
            start = time.perf_counter()
            pixels = sum(box.area for box, _ in engine.stream(image))
            seconds.append(time.perf_counter() - start)
    assert engine.last_run is not None
    return {
        "pixels": pixels,
        "seconds_per_prediction": round(statistics.median(seconds), 2),
        "peak_rss_bytes": engine.last_run.peak_bytes,
        "predicted_peak_bytes": plan.predicted_peak_bytes,
        "steps": steps,
    }


def show(event: Event) -> None:
    if isinstance(event, Notice):
        print(event.text, flush=True)


if __name__ == "__main__":
    main()
