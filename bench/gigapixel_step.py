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
    import torch

    from gigagrad.demo.step import take_steps
    from gigagrad.models import resolve

    torch.manual_seed(0)
    network = resolve("paper-unet")
    return take_steps(network, slide, mask, memory, steps=steps, grey=grey, precision=precision, listeners=(show,))


def predict(slide: Path, memory: str, steps: int, *, grey: bool) -> dict[str, object]:
    import gigagrad as gg
    from gigagrad.devices.heap import peak_resident_bytes
    from gigagrad.images import open_image

    engine = gg.compile(gg.models.resolve("paper-unet").eval(), memory=memory)
    with open_image(slide) as opened:
        image = opened.grey() if grey else opened
        plan, seconds = engine.plan(image), []
        for _ in range(steps):
            start = time.perf_counter()
            pixels = sum(box.area for box, _ in engine.stream(image))
            seconds.append(time.perf_counter() - start)
    return {
        "pixels": pixels,
        "seconds_per_prediction": round(statistics.median(seconds), 2),
        "peak_rss_bytes": peak_resident_bytes(),
        "predicted_peak_bytes": plan.predicted_peak_bytes,
        "steps": steps,
    }


def show(event: Event) -> None:
    if isinstance(event, Notice):
        print(event.text, flush=True)


if __name__ == "__main__":
    main()
