"""Does peak memory grow with the image? One training step at several sizes, each slide and step in its own process.

    python bench/memory_growth.py [--sizes 8000x8000 16000x64000 64000x64000] [--memory 1GiB]

Prints one JSON line last: peak of the whole process by size, and the growth of the largest over the smallest.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
from pathlib import Path

from gigagrad.units import parse_size


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--sizes", nargs="+", default=["8000x8000", "16000x64000", "64000x64000"])
    parser.add_argument("--memory", default="1GiB")
    args = parser.parse_args()
    results = []
    for size in args.sizes:
        height, width = parse_size(size)
        script = Path(__file__).with_name("gigapixel_step.py")
        command = [sys.executable, str(script), "--height", str(height), "--width", str(width), "--memory", args.memory]
        done = subprocess.run(command, capture_output=True, text=True, check=True)
        results.append(json.loads(done.stdout.splitlines()[-1]))
        print(f"{size}: {json.dumps(results[-1])}", flush=True)
    peaks = [result["peak_rss_bytes"] for result in results]
    line = {
        "sizes": args.sizes,
        "peak_rss_bytes": peaks,
        "seconds_per_step": [result["seconds_per_step"] for result in results],
        "growth": round(max(peaks) / peaks[0] - 1, 4),
    }
    print(json.dumps(line))


if __name__ == "__main__":
    main()
