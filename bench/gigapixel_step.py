"""One exact training step of the paper's network on a gigapixel slide: seconds and peak memory of the whole process.

    python bench/gigapixel_step.py --height 16000 --width 64000 --memory 1GiB [--steps 2] [--slide PATH --mask PATH]

Reads a pyramidal JPEG BigTIFF and its mask (made first, in a process of their own, unless given), takes `--steps` steps
of Adam and prints one JSON line last. `seconds_per_step` is the median step, from reading the slide to the new weights;
capture and planning, once per size, are `plan_seconds`.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--height", type=int, default=16000)
    parser.add_argument("--width", type=int, default=64000)
    parser.add_argument("--memory", default="1GiB")
    parser.add_argument("--steps", type=int, default=1)
    parser.add_argument("--slide", type=Path)
    parser.add_argument("--mask", type=Path)
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
        print(json.dumps(measure(slide, mask, args.memory, args.steps)))


def measure(slide_path: Path, mask_path: Path, memory: str, steps: int) -> dict[str, object]:
    import torch

    import gigagrad as gg
    from gigagrad.execution.process import peak_resident_bytes
    from gigagrad.training.losses import named_loss
    from gigagrad.units import parse_bytes

    torch.manual_seed(0)
    model = gg.models.resolve("paper-unet")
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
    engine = gg.compile(model, named_loss("bce").function, memory=memory)
    seconds, losses = [], []
    with gg.open_image(slide_path) as slide, gg.open_image(mask_path) as mask:
        start = time.perf_counter()
        plan = engine.plan(slide, mask)
        plan_seconds = time.perf_counter() - start
        print(plan, flush=True)
        for _ in range(steps):
            start = time.perf_counter()
            optimizer.zero_grad()
            losses.append(engine.backward(slide, mask).item())
            optimizer.step()
            seconds.append(time.perf_counter() - start)
            print(f"loss {losses[-1]:.6f} in {seconds[-1]:.1f} s", flush=True)
        pixels = slide.height * slide.width
    return {
        "pixels": pixels,
        "seconds_per_step": round(statistics.median(seconds), 2),
        "plan_seconds": round(plan_seconds, 2),
        "peak_rss_bytes": peak_resident_bytes(),
        "budget_bytes": parse_bytes(memory),
        "predicted_peak_bytes": plan.predicted_peak_bytes,
        "predicted_seconds": plan.predicted_seconds,
        "loss": losses[-1],
        "steps": steps,
        "threads": torch.get_num_threads(),
    }


if __name__ == "__main__":
    main()
