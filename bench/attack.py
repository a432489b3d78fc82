"""An attack on every promise: the right gradient or one clear sentence, and nothing left behind.

    python bench/attack.py [--seed 0] [--cases 500] [--changes 240] [--interruptions 100] [--kills 20] [--images 50000]
                           [--slides DIR]

Runs four campaigns, each a script of its own in a process of its own: networks, losses and placements against plain
autograd (attack_cases.py), changes between two calls (attack_changes.py), interruptions, errors and kills at random
moments (attack_interruptions.py), damaged images over every reader (attack_images.py). Prints a table and one JSON line
last; exit code 1 if anything was wrong, leaked, crashed, hung or raised an exception that is not ours.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from bench.attack_worker import FAULTS

COUNTS = ("tried", "fine", "refused", *FAULTS)
HOURS = 2


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seed", type=int, default=0)
    for name, count in (("cases", 500), ("changes", 240), ("interruptions", 100), ("images", 50_000)):
        parser.add_argument(f"--{name}", type=int, default=count)
    parser.add_argument("--kills", type=int, default=20)
    parser.add_argument("--slides", type=Path)
    args = parser.parse_args()
    more = {
        "interruptions": ["--kills", str(args.kills)],
        "images": ["--slides", str(args.slides)] if args.slides else [],
    }
    found = [
        campaign(name, ["--count", str(getattr(args, name)), "--seed", str(args.seed), *more.get(name, [])])
        for name in ("cases", "changes", "interruptions", "images")
    ]
    print(f"| attack | {' | '.join(COUNTS)} |\n|---|{'---|' * len(COUNTS)}")
    for one in found:
        print(f"| {one['attack']} | {' | '.join(f'{one[count]:,}' for count in COUNTS)} |")
    print(json.dumps({"seed": args.seed, "attacks": found}))
    return int(any(one[fault] for one in found for fault in FAULTS))


def campaign(name: str, flags: list[str]) -> dict[str, Any]:
    """The JSON line that a campaign ends with; one that does not come to its end has crashed or hung itself."""
    script = Path(__file__).with_name(f"attack_{name}.py")
    failed = {"attack": name, **dict.fromkeys(COUNTS, 0), "examples": [f"{script.name} itself"]}
    try:
        done = subprocess.run(
            [sys.executable, str(script), *flags], stdout=subprocess.PIPE, text=True, timeout=HOURS * 3600, check=False
        )
        last: dict[str, Any] = json.loads(done.stdout.strip().splitlines()[-1])
    except subprocess.TimeoutExpired:
        return {**failed, "hung": 1}
    except (IndexError, json.JSONDecodeError):
        return {**failed, "crashed": 1}
    return last


if __name__ == "__main__":
    sys.exit(main())
