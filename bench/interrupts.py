"""Interrupts at random moments end a command, and of two fits of one folder one runs and the other says so.

    python bench/interrupts.py [--interrupts 100] [--starts 40] [--seconds 2] [--seed 0]

Every interrupt is a new process of `fit`, `predict`, `plan` or `label`, which gets SIGINT, SIGTERM or SIGHUP at a
moment of its first `--seconds`, or, every second four, of the whole time that an undisturbed one takes: in imports, in
the capture, in steps and on its way out. It is to end within 60 s with exit code 130 and the one line that says so, or
with 0 where all was done, without a traceback, and interrupted fits are to go on to the end from what they left. "by
Python": the interpreter was still starting, or already ending, and ends by the signal.

Every pair is a fit that is started twice, the second one up to three seconds later and every third time with
`--overwrite`: one is to end with 0, the other with 2 and a line that names the first. One JSON line last.
"""

from __future__ import annotations

import argparse
import json
import random
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from tests.training.conftest import write_cohort

_LONG_SECONDS = 60.0
_SIGNALS = (signal.SIGINT, signal.SIGINT, signal.SIGTERM, signal.SIGTERM, signal.SIGHUP)
_LINE = "gigagrad: interrupted; give the same command again to go on from what is finished"
_AT_WORK = "is writing the run in"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--interrupts", type=int, default=100)
    parser.add_argument("--starts", type=int, default=40)
    parser.add_argument("--seconds", type=float, default=2.0)
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    rng = random.Random(args.seed)
    with tempfile.TemporaryDirectory() as name:
        stand = Stand(Path(name))
        ended = interrupted(stand, args.interrupts, args.seconds, rng)
        started = started_twice(stand, args.starts, rng)
    print(json.dumps({"interrupts": args.interrupts, **ended, "starts": args.starts, **started}))


class Stand:
    """A cohort, a finished run, and commands that work on them."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.cohort = folder, write_cohort(folder, [(176, 176)] * 3)
        self.run = folder / "finished"
        self.seconds: dict[str, float] = {}
        begun(self.fit(self.run)).communicate()
        for command in ("fit", "predict", "plan", "label"):
            start = time.monotonic()
            process = begun(self.command(command, folder / f"first-{command}"))
            said = process.communicate()[1]
            assert process.returncode == 0, said
            self.seconds[command] = time.monotonic() - start
        print(f"undisturbed, s: { {name: round(value, 1) for name, value in self.seconds.items()} }", file=sys.stderr)

    def fit(self, out: Path, epochs: int = 2) -> list[str]:
        return [*"fit --slides".split(), str(self.cohort), "--out", str(out), "--epochs", str(epochs)]

    def command(self, name: str, out: Path) -> list[str]:
        slides = ["--slides", str(self.cohort), "--out", str(out)]
        return {
            "fit": self.fit(out),
            "predict": ["predict", "--run", str(self.run), *slides],
            "plan": "plan --model paper-unet --size 20000x30000 --memory 1GiB".split(),
            "label": ["label", *map(str, sorted(self.folder.glob("slide?.tif"))), "--out", str(out)],
        }[name]


def begun(command: list[str]) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "-m", "gigagrad", *command], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )


def interrupted(stand: Stand, count: int, seconds: float, rng: random.Random) -> dict[str, object]:
    found: Counter[str] = Counter()
    slowest = 0.0
    for index in range(count):
        name, number = ("fit", "predict", "plan", "label")[index % 4], rng.choice(_SIGNALS)
        moment = rng.uniform(0, seconds if index % 8 < 4 else stand.seconds[name])
        out = stand.folder / f"out-{index}"
        process = begun(stand.command(name, out))
        time.sleep(moment)
        process.send_signal(number)
        start = time.monotonic()
        try:
            _, said = process.communicate(timeout=_LONG_SECONDS)
        except subprocess.TimeoutExpired:
            process.kill()
            _, said = process.communicate()
            said = f"it went on: {said}"
        took = time.monotonic() - start
        kind = judged(process.returncode, number, said)
        if kind == "ended" and name == "fit" and index % 8 == 4:  # and goes on
            again = begun(stand.command(name, out))
            said = again.communicate()[1]
            kind = kind if again.returncode == 0 else "wrong"
        found[kind] += 1
        slowest = max(slowest, took)
        print(f"{index} {name} {number.name} after {moment:.2f} s: {kind} in {took:.1f} s", file=sys.stderr)
        if kind == "wrong":
            print(f"exit code {process.returncode}: {said[-2000:]}", file=sys.stderr)
        shutil.rmtree(out, ignore_errors=True)
    kinds = ("ended", "done", "by Python", "wrong")
    return {**{kind: found[kind] for kind in kinds}, "longest until the end, s": round(slowest, 1)}


def judged(code: int, number: signal.Signals, said: str) -> str:
    """How a command ended, by its exit code and what it said."""
    if code == 130 and said.strip() in (_LINE, ""):
        return "ended" if said else "wrong"
    if code == 0 and not said:
        return "done"
    # Only Python's own start, and the import of a package that may not touch signals, has Python's own words.
    outside = "gigagrad/cli" not in said and "Exception ignored" not in said
    return "by Python" if (code == -number and outside) or "Could not import runpy" in said else "wrong"


def started_twice(stand: Stand, count: int, rng: random.Random) -> dict[str, object]:
    found: Counter[str] = Counter()
    for index in range(count):
        out = stand.folder / f"twice-{index}"
        command, moment = stand.fit(out, epochs=2), rng.choice((0.0, rng.uniform(0, 3)))
        first = begun(command)
        time.sleep(moment)
        second = begun([*command, "--overwrite"] if index % 3 == 2 else command)
        ends = [(one.communicate()[1], one.returncode) for one in (first, second)]
        (_, ran), (said, refused) = sorted(ends, key=lambda end: end[1])
        # Where the first one had ended before the second one came that far, both are right.
        kind = "one ran" if (ran, refused) == (0, 2) and _AT_WORK in said else "wrong"
        kind = "one after the other" if (ran, refused) == (0, 0) and index % 3 < 2 else kind
        found[kind] += 1
        print(f"pair {index}, {moment:.2f} s apart: {kind}", file=sys.stderr)
        if kind == "wrong":
            print(ends, file=sys.stderr)
        shutil.rmtree(out, ignore_errors=True)
    return {**{kind: found[kind] for kind in ("one ran", "one after the other")}, "wrong starts": found["wrong"]}


if __name__ == "__main__":
    main()
