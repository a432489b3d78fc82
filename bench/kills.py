"""Ranks that are killed, and ranks that are stopped, in the middle of a fit: the others end and say who it was, and the
run goes on to the same bits.

    python bench/kills.py [--kills 100] [--stops 20] [--mesh 2x2] [--network Dropped] [--journal] [--seed 0]

A fit by as many processes as the mesh has, over gloo, loses one of them at a random moment, by SIGKILL or by SIGSTOP,
and is started again from its last checkpoint, as torchrun --max-restarts does, until it ends; then another one begins.
Every one must end with the hash of an undisturbed run of one process, no process may go on for long without the lost
one (8 s; a minute where it had not joined yet), and one that stopped must be named, where it had joined. One JSON line
last.
"""

from __future__ import annotations

import argparse
import json
import random
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from bench.meshes import NETWORKS, begin, digest, fitting

_TIMEOUT = 8.0
"""Seconds, of `--rank-timeout`."""
_LONG = 90.0
_EPOCHS = 5


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--kills", type=int, default=100)
    parser.add_argument("--stops", type=int, default=20)
    parser.add_argument("--mesh", default="2x2")
    parser.add_argument("--network", choices=NETWORKS, default="Dropped")
    parser.add_argument("--journal", action="store_true", help="go on inside steps")
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    rng = random.Random(args.seed)
    blows = [signal.SIGKILL] * args.kills + [signal.SIGSTOP] * args.stops
    rng.shuffle(blows)
    with tempfile.TemporaryDirectory() as folder:
        begun = Path(begin(Path(folder), args.network).out)
        expected, _ = undisturbed(begun, Path(folder) / "one", "1x1")
        usual, seconds = undisturbed(begun, Path(folder) / "many", args.mesh)
        found = struck(begun, blows, args.mesh, seconds, rng, ["--journal"] if args.journal else [])
    wrong = [other for other in (usual, *found["hashes"]) if other != expected]
    line = {
        "kills": args.kills,
        "stops": args.stops,
        "mesh": args.mesh,
        "journal": args.journal,
        "runs": len(found["hashes"]),
    }
    print(json.dumps(line | {"differing": len(wrong)} | {key: found[key] for key in found if key != "hashes"}))


def undisturbed(begun: Path, run: Path, mesh: str) -> tuple[str, float]:
    """Its hash, and the seconds that it took."""
    shutil.copytree(begun, run)
    start = time.monotonic()
    if any(ended := [rank.wait() for rank in fitting(run, mesh, epochs=_EPOCHS)]):
        raise SystemExit(f"{mesh}: exit codes {ended}")
    return digest(run), time.monotonic() - start


def struck(
    begun: Path, blows: list[signal.Signals], mesh: str, seconds: float, rng: random.Random, flags: list[str]
) -> dict[str, Any]:
    """The hashes of the runs that ended, how often the lost rank was named, how long the others were there, and how
    often ranks ended with an error that nothing had been done to.
    """
    hashes: list[str] = []
    counts = {"stops named": 0, "kills named": 0, "late": 0, "longest wait, s": 0.0, "unprovoked": 0}
    while blows or not hashes:
        run = begun.parent / f"run{len(hashes)}"
        shutil.copytree(begun, run)
        while True:
            ranks = fitting(run, mesh, "--rank-timeout", str(_TIMEOUT), *flags, epochs=_EPOCHS)
            met = bool(blows) and _strike(ranks, blows[-1], rng.random() * seconds, rng.randrange(len(ranks)), counts)
            if met:
                blows.pop()
            codes = [rank.wait() for rank in ranks]
            if not any(codes):
                break
            counts["unprovoked"] += not met
        hashes.append(digest(run))
        shutil.rmtree(run)
    return {"hashes": hashes, **counts}


def _strike(
    ranks: list[subprocess.Popen[str]], blow: signal.Signals, delay: float, chosen: int, counts: dict[str, float]
) -> bool:
    """Whether the blow met a process that was at work."""
    victim, end = ranks[chosen], time.monotonic() + delay
    while time.monotonic() < end and victim.poll() is None:
        time.sleep(0.01)
    if victim.poll() is not None:
        return False
    victim.send_signal(blow)
    others, begin, waited = [rank for rank in ranks if rank is not victim], time.monotonic(), 0.0
    while any(rank.poll() is None for rank in others) and waited < _LONG:
        time.sleep(0.05)
        waited = time.monotonic() - begin
    counts["longest wait, s"] = round(max(counts["longest wait, s"], waited), 1)
    counts["late"] += sum(rank.poll() is None for rank in others)
    codes, said = [rank.poll() for rank in ranks], ""
    for rank in ranks:
        rank.kill()
        said += rank.communicate()[1]
    kind = "stops named" if blow == signal.SIGSTOP else "kills named"
    counts[kind] += chosen in _named(said)
    print(
        f"{blow.name} of rank {chosen} after {delay:.1f} s, over in {waited:.1f} s, exit codes {codes}: "
        f"{' '.join(said.split())[-200:]}",
        flush=True,
    )
    return True


def _named(said: str) -> set[int]:
    """The ranks that are silent, or did not join, by what the others say."""
    found = re.findall(r"ranks? ([\d, ]+) (?:is silent|are silent|did not join)", said)
    return {int(rank) for ranks in found for rank in ranks.split(",")}


if __name__ == "__main__":
    main()
