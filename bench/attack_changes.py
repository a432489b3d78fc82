"""Ways to change a model, a loss or Python around them between two calls: each counts in the next call.

    python bench/attack_changes.py [--count 240] [--seed 0]

The ways are those of tests/exactness/changes.py in turn, each time with another size, tile and number of calls.
After every call the loss, the gradients, the state of Python and the next random number must be those of PyTorch.
Progress on stderr; one JSON line last.
"""

from __future__ import annotations

import argparse
import faulthandler
import json
import random
import sys
from collections import Counter
from collections.abc import Callable
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import torch

import gigagrad as gg
from gigagrad.errors import CaptureError, GigagradError
from tests.exactness.changes import REFUSED, WAYS, Way, by_pytorch, difference, told

FAULTS = ("wrong", "leaked", "crashed", "hung", "foreign")
SECONDS = 120


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--count", type=int, default=3 * len(WAYS))
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    torch.set_num_threads(1)
    names, found, examples = list(WAYS), Counter[str](), []
    for index in range(args.count):
        name = names[index % len(names)]
        faulthandler.dump_traceback_later(SECONDS, exit=True)
        verdict, detail = judge(name, random.Random(f"{args.seed} {index}"))
        faulthandler.cancel_dump_traceback_later()
        found[verdict] += 1
        if verdict in FAULTS:
            examples.append(f"{index} {name}: {verdict}, {detail}")
            print(examples[-1], file=sys.stderr)
        if index % 20 == 19:
            print(f"{index + 1} of {args.count}", file=sys.stderr)
    counts = {verdict: found[verdict] for verdict in ("fine", "refused", *FAULTS)}
    print(
        json.dumps(
            {
                "attack": "changes",
                "seed": args.seed,
                "tried": args.count,
                "ways": len(WAYS),
                **counts,
                "examples": examples[:10],
            }
        )
    )
    return int(any(found[fault] for fault in FAULTS))


def judge(name: str, chance: random.Random) -> tuple[str, str]:
    height, width, steps = chance.randint(6, 40), chance.randint(6, 40), chance.randint(2, 4)
    tile = chance.randint(3, height), chance.randint(3, width)
    generator = torch.Generator().manual_seed(chance.randrange(2**31))
    image, target = (torch.rand(1, height, width, generator=generator).double() for _ in range(2))

    def ours(way: Way) -> Callable[[], torch.Tensor]:
        engine = gg.compile(way.model, way.loss, tile=tile)
        return lambda: engine.backward(image, target)

    try:
        pairs = zip(
            list(told(WAYS[name], ours, steps)), told(WAYS[name], by_pytorch(image, target), steps), strict=True
        )
        differences = [text for text in (difference(*pair) for pair in pairs) if text is not None]
    except GigagradError as error:
        as_told = name in REFUSED and isinstance(error, CaptureError) and REFUSED[name] in str(error)
        return ("refused" if as_told else "wrong"), str(error)
    except Exception as error:
        return "foreign", f"{type(error).__name__}: {error}"
    return ("wrong", differences[0]) if differences else ("fine", "")


if __name__ == "__main__":
    sys.exit(main())
