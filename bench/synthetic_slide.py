"""How long and how much memory one synthetic slide takes. Prints one JSON line last.

python bench/synthetic_slide.py --height 16000 --width 64000 [--mask] [--keep PATH]
"""

from __future__ import annotations

import argparse
import json
import tempfile
import time
from pathlib import Path

from gigagrad.images.synthetic import make_slide


def peak_resident_bytes() -> int:
    """The highest resident memory of this process alone (Linux), without loading PyTorch to ask."""
    with open("/proc/self/status") as status:
        return next(int(line.split()[1]) * 1024 for line in status if line.startswith("VmHWM:"))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--height", type=int, default=16000)
    parser.add_argument("--width", type=int, default=64000)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--mask", action="store_true", help="write the exact mask as well")
    parser.add_argument("--keep", type=Path, help="write the slide to this path and leave it there")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        slide = args.keep or Path(folder) / "slide.tif"
        mask = slide.with_suffix(".mask.tif") if args.mask else None
        start = time.perf_counter()
        make_slide(slide, height=args.height, width=args.width, seed=args.seed, mask_path=mask, overwrite=True)
        seconds = time.perf_counter() - start
        written = [path.stat().st_size for path in (slide, mask) if path is not None]
    result = {
        "height": args.height,
        "width": args.width,
        "pixels": args.height * args.width,
        "seconds": round(seconds, 2),
        "peak_rss_bytes": peak_resident_bytes(),
        "bytes_written": sum(written),
    }
    print(json.dumps(result))


if __name__ == "__main__":
    main()
