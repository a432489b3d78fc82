"""A step that is killed in its middle, with a journal: what writing it takes, and what the second start computes again.

    python bench/journal.py [--model smp:Unet?encoder_name=resnet34] [--side 2048] [--memory 4GiB] [--kills 3]
        [--folder DIR]

Steps in float32 on random bytes, norms in training mode, each in a process of its own: without a journal, with one, and
with one but killed by SIGKILL at a random moment and started again. Every step's loss and gradients are compared by
hash. Prints one JSON line last.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import random
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from bench.scale import prepared
from gigagrad.events import Event, Notice, TileDone


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="smp:Unet?encoder_name=resnet34")
    parser.add_argument("--side", type=int, default=2048)
    parser.add_argument("--memory", default="4GiB")
    parser.add_argument("--kills", type=int, default=3)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--folder", type=Path, help="where the journal is, and fields are; default: temporary files")
    parser.add_argument("--scratch", type=Path, help=argparse.SUPPRESS)
    parser.add_argument("--worker", type=Path, help=argparse.SUPPRESS)
    parser.add_argument("--written", action="store_true", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.worker:
        print(json.dumps(step(args, args.worker)), flush=True)
        return
    with tempfile.TemporaryDirectory(dir=args.folder) as folder:
        rng = random.Random(args.seed)
        plain, written = started(folder), started(folder, "--written")
        again = [killed(Path(folder), rng.uniform(0.1, 0.9), written["seconds"]) for _ in range(args.kills)]
    line = {
        "network": args.model,
        "side": args.side,
        "tiles": plain["tiles"],
        "seconds": plain["seconds"],
        "seconds_with_journal": written["seconds"],
        "journal_ratio": round(written["seconds"] / plain["seconds"], 3),
        "kills": again,
        "differing": sum(one["hash"] != plain["hash"] for one in (written, *again)),
    }
    print(json.dumps(line))


def command(folder: str, *more: str) -> list[str]:
    return [sys.executable, __file__, *sys.argv[1:], "--worker", folder, *more]


def started(folder: str, *more: str) -> dict[str, Any]:
    found: dict[str, Any] = json.loads(subprocess.check_output(command(folder, *more), text=True).splitlines()[-1])
    return found


def killed(folder: Path, share: float, seconds: float) -> dict[str, Any]:
    """A step that ends at a share of what it takes, and is started again."""
    with subprocess.Popen(command(str(folder), "--written"), stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        process.stdout.readline()  # the step begins
        time.sleep(share * seconds)
        process.kill()
    nbytes = sum(path.stat().st_size for path in (folder / "journal").rglob("*") if path.is_file())
    found = started(str(folder), "--written")
    assert not [*(folder / "journal").iterdir()]
    return {"killed_at": round(share, 2), "journal_bytes": nbytes, **found}


def step(args: argparse.Namespace, folder: Path) -> dict[str, Any]:
    journal = folder / "journal" if args.written else None
    for left in folder.glob("gigagrad-*"):  # fields of the one that was killed
        shutil.rmtree(left, ignore_errors=True)
    args.scratch = folder
    engine, image, target = prepared(args, memory=args.memory, journal=journal)
    choice = folder / "choice.json"
    if choice.exists():
        engine.load_state_dict(json.loads(choice.read_text()))
    engine.plan(image, target)
    choice.write_text(json.dumps(engine.state_dict()))
    tiles, told = 0, ""

    def listen(event: Event) -> None:
        nonlocal tiles, told
        tiles += isinstance(event, TileDone)
        told = event.text if isinstance(event, Notice) else told

    print("begins", flush=True)
    with engine.events.listening(listen):
        start = time.perf_counter()
        value = engine.backward(image, target)
        seconds = time.perf_counter() - start
    digest = hashlib.sha256(value.numpy().tobytes())
    for parameter in engine.model.parameters():
        assert parameter.grad is not None
        digest.update(parameter.grad.contiguous().view(-1).view(torch.uint8).numpy().tobytes())
    return {"seconds": round(seconds, 2), "tiles": tiles, "told": told, "hash": digest.hexdigest()}


if __name__ == "__main__":
    main()
