"""Generated (network, loss, placement) cases in float64: each gives PyTorch's loss and gradients, or one clear refusal.

    python bench/attack_cases.py [--count 500] [--seed 0] [--only NUMBER]

Of every five cases two are random networks of tests/exactness/networks in training mode with one of its 20 losses, one
is of tests/exactness/generated.py, and two are of bench/attack_odd_cases.py: what these do not draw. Each is placed at
random: in tiles, in tiles with every kept field in files, whole, or in the smallest budget that a refusal names, with
and without scratch. Loss, gradients (of parameters, of the image, of whatever loss and model close over) and buffers
are compared with plain autograd on the whole image to 1e-9; a number that is missing or infinite must be so on both
sides. Where plain autograd's own answer moves as far when the image moves by one part in 10**14, a case counts as
`ill_conditioned`, not as wrong. Refusals must leave every `.grad` and buffer as it was, and files must be gone
(`leaked`). Cases run in a process of their own, with 300 s each. Progress on stderr; one JSON line last. `--only`
runs one case here and shows what it raised.
"""

from __future__ import annotations

import math
import random
import sys
import tempfile
import traceback
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import torch
from torch import Tensor, nn

import gigagrad as gg
from bench.attack_odd_cases import ODD, Case, make_odd
from bench.attack_worker import Judge, Verdict, Worker, campaign, options, report
from gigagrad.errors import BudgetError, GigagradError
from tests.exactness import generated
from tests.exactness.comparison import order_cotangents
from tests.exactness.networks import Recipe, draw_recipe, make_case
from tests.exactness.steering import with_fields_in

TOLERANCE = 1e-9
SECONDS = 300.0
PLACEMENTS = ("tiles", "tiles", "files", "files", "whole", "budget", "budget and scratch")
_ROOM_BYTES = 24 * 2**20
"""Beside the smallest budget: the process itself grows between two plans."""


@dataclass(frozen=True)
class Subject:
    """A case that can be made again and again, and tiles of a sensible number for it."""

    name: str
    make: Callable[[], Case]
    tile: tuple[int, int]


@dataclass(frozen=True)
class Answer:
    """What a step left behind: the loss, and gradients, and buffers and parameters, by name."""

    loss: Tensor
    gradients: dict[str, Tensor]
    buffers: dict[str, Tensor]


def draw(seed: int, number: int) -> Subject:
    """The subject of that number."""
    rng = random.Random(f"{seed}/{number}")
    tile = rng.randint(3, 24), rng.randint(3, 24)
    kind = number % 5
    if kind in (0, 2):
        recipe = None
        while recipe is None:
            recipe = draw_recipe(rng.randint)
        return Subject(f"network {recipe!r}", lambda: _of_recipe(recipe), recipe.tile)
    if kind == 1:
        which = rng.randrange(10**6)
        found = generated.make_case(which)
        return Subject(f"generated {which}", lambda: _of_generated(which), found.tile)
    name, which = rng.choice(sorted(ODD)), rng.randrange(10**6)
    return Subject(f"odd {name!r} {which}", lambda: make_odd(name, which), tile)


def _of_recipe(recipe: Recipe) -> Case:
    made = make_case(recipe)
    others = {f"loss {name}": p for name, p in made.loss.named_parameters()} if isinstance(made.loss, nn.Module) else {}
    return Case(made.model, made.loss, (made.image,), made.target, dict(others))


def _of_generated(which: int) -> Case:
    made = generated.make_case(which)
    return Case(made.model, made.loss, (made.image,), made.target)


def plain(case: Case) -> Answer:
    """By plain autograd on the whole image, kept from its own mistakes (decision 8)."""
    order_cotangents(case.model)
    target = case.target[None] if case.target.ndim == 3 else case.target
    value = case.loss(case.model(*(image[None] for image in case.images)), target)
    if value.requires_grad:
        value.backward()
    return _answer(case, value)


def tiled(case: Case, subject: Subject, placement: str, scratch: Path) -> Answer:
    """By gigagrad, placed as told."""
    arguments = arrange(case, subject, placement, scratch)
    state = arguments.pop("state", None)
    engine = gg.compile(case.model, case.loss, **arguments)
    if state is not None:
        engine.load_state_dict(state)
    return _answer(case, engine.backward(_given(case), case.target))


def arrange(case: Case, subject: Subject, placement: str, scratch: Path) -> dict[str, Any]:
    """The arguments of `compile` that place a case so; for "files" the engine's state too."""
    arguments: dict[str, Any] = {"seed": 5} if case.seeded else {}
    if placement == "whole":
        return arguments
    if placement in ("tiles", "files"):
        arguments["tile"] = subject.tile
    if placement in ("files", "budget and scratch"):
        arguments["scratch"] = scratch
    if placement == "files":
        engine = gg.compile(case.model, case.loss, **arguments)
        arguments["state"] = with_fields_in(engine, _given(case), case.target, "disk").state_dict()
    if placement.startswith("budget"):
        try:
            gg.compile(case.model, case.loss, memory=1, **arguments).plan(_given(case), case.target)
        except BudgetError as error:
            arguments["memory"] = error.smallest_bytes + _ROOM_BYTES
    return arguments


def _given(case: Case) -> Any:
    return case.images if len(case.images) > 1 else case.images[0]


def _answer(case: Case, value: Tensor) -> Answer:
    named = {**dict(case.model.named_parameters()), **case.others}
    return Answer(
        value.detach().clone(),
        {name: p.grad.clone() for name, p in named.items() if p.grad is not None},
        {name: held.detach().clone() for name, held in (*case.model.named_buffers(), *case.model.named_parameters())},
    )


def differences(found: Answer, wanted: Answer) -> tuple[float, str]:
    """The largest relative error and where it is; infinite where other numbers are missing or infinite."""
    norms = [_finite(g).norm().item() for g in wanted.gradients.values()]
    # Of a gradient that is zero but for rounding, the rounding of the whole gradient and of the loss is the scale.
    floor = max(1e-4 * math.hypot(*norms), 1e-5 * _finite(wanted.loss).abs().item())
    errors = [(_error(found.loss, wanted.loss, 1e-300), "loss")]
    for part, least in (("gradients", floor), ("buffers", 1e-4)):
        ours, theirs = getattr(found, part), getattr(wanted, part)
        for name in sorted(ours.keys() | theirs.keys()):
            zero = torch.zeros_like(ours.get(name, theirs.get(name)))
            errors.append((_error(ours.get(name, zero), theirs.get(name, zero), least), f"{part[:-1]} of {name}"))
    return max(errors)


def _finite(value: Tensor) -> Tensor:
    return value.double().nan_to_num(0, 0, 0)


def _error(a: Tensor, b: Tensor, floor: float) -> float:
    """The relative error, as it would be if `b` were float64: what is rounded to less is off by more."""
    if a.shape != b.shape or a.dtype != b.dtype:
        return math.inf
    coarse = torch.finfo(b.dtype).eps / torch.finfo(torch.float64).eps if b.is_floating_point() else 1.0
    a, b = a.double(), b.double()
    bad_a, bad_b = (torch.where(x.isfinite(), torch.zeros_like(x), x) for x in (a, b))
    if not torch.equal(bad_a.nan_to_num(9, 2, 1), bad_b.nan_to_num(9, 2, 1)):
        return math.inf
    return (_finite(a) - _finite(b)).norm().item() / max(_finite(b).norm().item(), floor, 1e-300) / coarse


def attempt(subject: Subject, placement: str) -> Verdict:
    """The verdict on one case and what to say about it."""
    case = subject.make()
    before = _answer(case, torch.zeros(()))
    reference, reason = _reference(subject)
    with tempfile.TemporaryDirectory() as folder:
        scratch = Path(folder)
        try:
            found = tiled(case, subject, placement, scratch)
        except GigagradError as error:
            if differences(_answer(case, torch.zeros(())), before)[0]:
                return "wrong", f"a refusal left gradients or buffers changed: {error}"
            return ("leaked" if list(scratch.iterdir()) else "refused"), f"{type(error).__name__}: {error}"
        if list(scratch.iterdir()):
            return "leaked", f"files: {[path.name for path in scratch.iterdir()]}"
    if reference is None:
        return "fine", f"plain PyTorch refuses: {reason}"
    off, where = differences(found, reference)
    if off <= TOLERANCE:
        return "fine", ""
    if math.isfinite(off) and off <= 100 * _conditioning(subject, reference):
        return "ill_conditioned", f"{where} is off by {off:.2g}"
    return "wrong", f"{where} is off by {off:.2g}"


def _reference(subject: Subject) -> tuple[Answer | None, str]:
    """What PyTorch gives; of a case with random numbers what the engine gives in one tile. None and why, else."""
    case = subject.make()
    try:
        if case.seeded:
            return _answer(case, gg.compile(case.model, case.loss, seed=5).backward(_given(case), case.target)), ""
        return plain(case), ""
    except (RuntimeError, ValueError, IndexError, TypeError, AttributeError, AssertionError) as error:
        return None, f"{type(error).__name__}: {error}"


def _conditioning(subject: Subject, reference: Answer) -> float:
    """How far plain autograd's own answer moves when the image moves by one part in 10**14."""
    case = subject.make()
    if case.seeded:
        return 0.0
    noise = torch.Generator().manual_seed(1)
    moved = {id(image): _moved(image, noise) for image in case.images}
    case.images = tuple(moved[id(image)] for image in case.images)
    case.others = {name: moved.get(id(other), other) for name, other in case.others.items()}
    error = differences(plain(case), reference)[0]
    return error if math.isfinite(error) else 0.0


def _moved(image: Tensor, noise: torch.Generator) -> Tensor:
    if not image.is_floating_point():
        return image
    factor = 1 + 1e-14 * torch.randn(image.shape, dtype=image.dtype, generator=noise)
    return (image.detach() * factor).requires_grad_(image.requires_grad)


def judge(seed: int, number: int) -> Verdict:
    """`attempt` of a number, whatever it raises."""
    subject, placement = draw(seed, number), _placement(seed, number)
    try:
        verdict, text = attempt(subject, placement)
    except Exception as error:
        verdict, text = "foreign", f"{type(error).__name__}: {' '.join(str(error).split())[:300]}"
    return verdict, f"{placement}, {subject.name[:160]}: {text}"


def _placement(seed: int, number: int) -> str:
    return random.Random(f"place {seed}/{number}").choice(PLACEMENTS)


def set_up(seed: int, _: int = 0) -> Judge:
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    return partial(judge, seed)


def main() -> int:
    chosen = options(__doc__, 500).parse_args()
    if chosen.only is not None:
        set_up(chosen.seed)
        subject, placement = draw(chosen.seed, chosen.only), _placement(chosen.seed, chosen.only)
        print(f"{placement}, {subject.name}")
        try:
            print(*attempt(subject, placement))
        except Exception:
            traceback.print_exc()
        return 0
    return report("cases", chosen, campaign(chosen, [Worker(partial(set_up, chosen.seed), SECONDS)]))


if __name__ == "__main__":
    sys.exit(main())
