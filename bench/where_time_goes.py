"""What steps spend the processor's time on, by library: the paper's network on a slide, and a deep one on noise.

    python bench/where_time_goes.py [--cases paper deep] [--steps 3] [--keep DIR]

After a first step `perf` (of Linux) watches this process for as many as were asked for; capture and planning are not in
it. Kernels that oneDNN compiles as it goes have no library and are `JIT`. Prints one JSON line last: seconds of a step,
of the processor and by the clock, and shares in percent.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import signal
import subprocess
import sys
import tempfile
import time
import warnings
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

_DEEP = "smp:Unet?encoder_name=resnet34"
_SIZES = {"paper": (4000, 16000), "deep": (2048, 2048)}
_UNTIL_IT_WATCHES = 2.0
_ROW = re.compile(r"\s*([\d.]+)%\s+(\S+)")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--cases", nargs="+", choices=_SIZES, default=list(_SIZES))
    parser.add_argument("--steps", type=int, default=3)
    parser.add_argument("--keep", type=Path, help="leave perf's records in this folder")
    args = parser.parse_args()
    warnings.simplefilter("ignore")
    with tempfile.TemporaryDirectory() as folder:
        kept = args.keep or Path(folder)
        found = {name: watched(name, args.steps, Path(folder), kept / f"{name}.perf") for name in args.cases}
    print(json.dumps(found))


def watched(name: str, steps: int, folder: Path, record: Path) -> dict[str, Any]:
    import gigagrad as gg
    import gigagrad.models.torchvision_operators
    from bench.calibration import subject
    from gigagrad.images import make_slide

    image: Any
    target: Any
    if name == "paper":
        network, image, target = gg.models.resolve("paper-unet"), folder / "slide.tif", folder / "mask.tif"
        height, width = _SIZES[name]
        make_slide(image, height=height, width=width, seed=0, mask_path=target)
        engine = gg.compile(network, gg.losses.bce, memory="1 GiB")
    else:
        network, image, target = subject(_DEEP, _SIZES[name])
        engine = gg.compile(network.train(), gg.losses.bce, memory="8 GiB")
    engine.backward(image, target)
    command = ["perf", "record", "-e", "cpu-clock", "-F", "400", "-o", str(record), "-p", str(os.getpid())]
    perf = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    time.sleep(_UNTIL_IT_WATCHES)
    clock, processor = time.perf_counter(), time.process_time()
    for _ in range(steps):
        engine.backward(image, target)
    clock, processor = time.perf_counter() - clock, time.process_time() - processor
    perf.send_signal(signal.SIGINT)
    perf.wait()
    report = ["perf", "report", "-i", str(record), "--stdio", "-s", "dso"]
    done = subprocess.run(report, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True, check=True)
    shares = dict[str, float]()
    for line in done.stdout.splitlines():
        if row := _ROW.match(line):
            shares[row[2]] = shares.get(row[2], 0.0) + float(row[1])
    return {
        "size": _SIZES[name],
        "seconds": round(clock / steps, 2),
        "processor_seconds": round(processor / steps, 2),
        "percent": {library: round(share, 1) for library, share in shares.items() if share >= 0.5},
    }


if __name__ == "__main__":
    main()
