"""Ways to change a model, a loss or Python around them between two calls: each counts in the next call.

    python bench/attack_changes.py [--count 1000] [--seed 0] [--only NUMBER]

The ways are those of tests/exactness/changes.py, and every kind of setting of tests/exactness/settings.py in every
place that can hold it, in an order that mixes them, each time with another size, tile and number of calls.
After every call the loss, the gradients, the state of Python and the next random number must be those of PyTorch.
Progress on stderr; one JSON line last.
"""

from __future__ import annotations

import random
import sys
import warnings
from collections.abc import Callable
from functools import partial
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import torch

import gigagrad as gg
from bench.attack_worker import Judge, Verdict, Worker, campaign, options, report
from gigagrad.errors import CaptureError, GigagradError
from tests.exactness.changes import REFUSED, WAYS, Way, by_pytorch, difference, told
from tests.exactness.settings import REFUSED_SETTINGS, SETTINGS

SECONDS = 120.0
ALL = {**WAYS, **SETTINGS}
NAMES = random.Random(40).sample(list(ALL), len(ALL))
TO_REFUSE = {**REFUSED, **REFUSED_SETTINGS}


def judge(seed: int, number: int) -> Verdict:
    name, chance = NAMES[number % len(NAMES)], random.Random(f"{seed} {number}")
    verdict, detail = attempt(name, chance)
    return verdict, f"{name}: {detail}"


def attempt(name: str, chance: random.Random) -> Verdict:
    height, width, steps = chance.randint(6, 40), chance.randint(6, 40), chance.randint(2, 4)
    tile = chance.randint(3, height), chance.randint(3, width)
    generator = torch.Generator().manual_seed(chance.randrange(2**31))
    image, target = (torch.rand(1, height, width, generator=generator).double() for _ in range(2))

    def ours(way: Way) -> Callable[[], torch.Tensor]:
        engine = gg.compile(way.model, way.loss, tile=tile)
        return lambda: engine.backward(image, target)

    try:
        pairs = zip(list(told(ALL[name], ours, steps)), told(ALL[name], by_pytorch(image, target), steps), strict=True)
        differences = [text for text in (difference(*pair) for pair in pairs) if text is not None]
    except GigagradError as error:
        as_told = name in TO_REFUSE and isinstance(error, CaptureError) and TO_REFUSE[name] in str(error)
        return ("refused" if as_told else "wrong"), str(error)
    except Exception as error:
        return "foreign", f"{type(error).__name__}: {error}"
    return ("wrong", differences[0]) if differences else ("fine", "")


def set_up(seed: int, _: int = 0) -> Judge:
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    return partial(judge, seed)


def main() -> int:
    chosen = options(__doc__, len(ALL)).parse_args()
    if chosen.only is not None:
        print(*set_up(chosen.seed)(chosen.only))
        return 0
    found = campaign(chosen, [Worker(partial(set_up, chosen.seed), SECONDS)])
    return report("changes", chosen, {"ways": len(ALL), **found})


if __name__ == "__main__":
    sys.exit(main())
