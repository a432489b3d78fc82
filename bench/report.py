"""How large a report of many slides is, and how long writing it takes; prints one JSON line last.

python bench/report.py [--slides 20] [--height 3072 --width 4096] [--out FOLDER]

Slides are synthetic, JPEG pyramids, each with its true mask; predictions are these masks moved by some pixels, and the
run has 2000 steps. The page must be built (make page). `report_bytes` is the file, `script_bytes` the part of it that
is the page's script.
"""

from __future__ import annotations

import argparse
import json
import math
import sys
import tempfile
import time
from pathlib import Path

import numpy as np

from gigagrad.boxes import Box
from gigagrad.cohorts.records import MadeWith, SlideResult, summary, write_record
from gigagrad.images import make_cohort, open_image, write_pyramid
from gigagrad.reports.report import gather, write_report
from gigagrad.view.page import read_page

_MOVED_PX = 60


def make_predictions(cohort: Path, names: list[str], folder: Path) -> None:
    """Write what `predict` would of these slides."""
    made_with = MadeWith("best.pt", "0" * 64, 0.5, (), 0)
    records = []
    for number, name in enumerate(names):
        slide, file = cohort / "slides" / f"{name}.tif", f"masks/{name}.tif"
        with open_image(cohort / "masks" / f"{name}.tif") as mask:
            _, height, width = mask.shape
            ids = np.roll(np.asarray(mask.read(Box.whole(height, width)))[0] > 0, _MOVED_PX, axis=1).astype(np.uint8)
        (folder / "masks").mkdir(parents=True, exist_ok=True)
        write_pyramid(folder / file, iter([ids]), shape=(height, width, 1), dtype=np.uint8, nearest=True)
        done = {"status": "done", "files": {"mask": file}, "height": height, "width": width, "seconds": 12.5}
        scores = {"regions": 2, "dice": 0.9 + number / 1000}
        size = {"slide": str(slide.absolute()), "slide_bytes": slide.stat().st_size, "made_with": made_with}
        records.append(SlideResult(name=name, **size, **done, **scores))  # type: ignore[arg-type]
        write_record(folder, records[-1])
    (folder / "predictions.json").write_text(summary(records))


def make_run(folder: Path, cohort: Path, steps: int) -> None:
    """Write what `fit` would of so many steps."""
    folder.mkdir(parents=True)
    lines = []
    for step in range(1, steps + 1):
        sizes = {"peak_bytes": (600 << 20) + step, "predicted_peak_bytes": 700 << 20, "budget_bytes": 1 << 30}
        lines.append({"event": "step", "phase": "backward", "pixels": 1 << 26, "seconds": 2.0, **sizes})
        loss = 0.1 + 0.6 * 0.998**step + 0.03 * math.sin(step)
        lines.append(
            {"event": "metrics", "split": "train", "epoch": step // 50, "step": step, "values": {"loss": loss}}
        )
        if not step % 50:
            known = {"split": "val", "epoch": step // 50, "step": step, "values": {"loss": loss + 0.02}}
            lines.append({"event": "metrics", **known})
    (folder / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    (folder / "config.yaml").write_text(f"model: paper-unet\nslides: {cohort}\n")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--slides", type=int, default=20)
    parser.add_argument("--height", type=int, default=3072)
    parser.add_argument("--width", type=int, default=4096)
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as temporary:
        out = args.out or Path(temporary)
        made = out / "cohort"
        make_cohort(made, args.slides, height=args.height, width=args.width, seed=0, overwrite=True)
        make_predictions(made, sorted(path.stem for path in (made / "slides").glob("*.tif")), out / "predictions")
        make_run(out / "run", made / "cohort.csv", 2000)
        start = time.perf_counter()
        report = write_report(out / "run", out / "report.html", predictions_dir=out / "predictions")
        seconds = time.perf_counter() - start
        slides = gather(out / "run", out / "predictions")["slides"]
        found = {
            "slides": len(slides),
            "slide_px": [args.height, args.width],
            "layers": [layer["name"] for layer in slides[0]["info"]["layers"]],
            "overview_px": [slide["info"]["levels"][0] for slide in (slides[0], slides[-1])],
            "report_bytes": report.stat().st_size,
            "script_bytes": len(read_page()["page.js"]),
            "seconds": round(seconds, 2),
        }
    sys.stdout.write(json.dumps(found) + "\n")


if __name__ == "__main__":
    main()
