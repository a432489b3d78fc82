"""One model of the zoo, in a process of its own. `bench/zoo.py` starts it and says what it measures.

Prints the record as it stands at every phase; the last line is what is known when the process dies.
"""

from __future__ import annotations

import argparse
import copy
import ctypes
import json
import re
import resource
import sys
import time
import warnings
from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from math import inf, isnan
from pathlib import Path
from statistics import median
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm
from torch.utils import _pytree as pytree

import gigagrad as gg

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from bench.zoo_models import Subject, subjects
from tests.exactness.comparison import order_cotangents
from tests.exactness.steering import has_several_tiles

TOLERANCE = {"float64": 1e-9, "float32": 1e-4}
FLOOR = 1e-4
LARGE = (384, 512)
"""Image of the measurements, for models that take any size."""
COMPARED_CUTS = (12, 48)
MEASURED_CUTS = (4, 16, 64)
"""A tile's side is the image's divided by the first of these; by a later one, where fields are so coarse that a tile of
the first would cover them."""

Report = Callable[[str], None]


def loss(output: Any, target: Tensor) -> Tensor:
    """Of whatever a model returns: cross-entropy of logits with a label, BCE with a mask, else the mean square."""
    terms = []
    for y in pytree.tree_leaves(output):
        if not (isinstance(y, Tensor) and y.is_floating_point()):
            continue
        if target.ndim == 1 and y.ndim == 2:
            terms.append(F.cross_entropy(y, target))
        elif target.ndim == y.ndim and y.shape[-2:] == target.shape[-2:]:
            terms.append(F.binary_cross_entropy_with_logits(y, target.to(y.dtype).expand_as(y)))
        else:
            terms.append(y.square().mean())
    return sum(terms[1:], terms[0])


def plain_step(model: nn.Module, image: Tensor, target: Tensor) -> Tensor:
    """Plain autograd on the whole image, protected from a fault of its own."""
    order_cotangents(model)
    value = loss(model(image[None]), target[None] if target.ndim == 3 else target)
    value.backward()
    return value.detach()


def silence(model: nn.Module) -> None:
    """Switch off what is random: every float named after dropout, and the probability of layers that drop."""
    for module in model.modules():
        drops = any(word in type(module).__name__.lower() for word in ("drop", "stochastic"))
        for key, value in vars(module).items():
            if isinstance(value, float) and ("drop" in key or (drops and key in ("p", "prob"))):
                setattr(module, key, 0.0)


def wake(model: nn.Module) -> None:
    for parameter in model.parameters():
        if parameter.is_floating_point() and parameter.min() == parameter.max():
            parameter.data += 0.1 * torch.randn_like(parameter)


def freeze_where_single(model: nn.Module) -> None:
    """From the next forward on, a BatchNorm that sees one value per channel is in evaluation mode."""

    def before(module: nn.Module, inputs: tuple[Tensor, ...]) -> None:
        if inputs[0].numel() == inputs[0].shape[1]:
            module.eval()

    for module in model.modules():
        if isinstance(module, _BatchNorm):
            module.register_forward_pre_hook(before)


def precision(value: Tensor) -> str:
    """float32 where anything on a path from the loss to a parameter was computed in it, or in less."""
    seen, due = set(), [value.grad_fn]
    while due:
        node = due.pop()
        if node is None or node in seen:
            continue
        if any(made is not None and made.dtype.itemsize < 8 for made in node._input_metadata):
            return "float32"
        seen.add(node)
        due += [before for before, _ in node.next_functions]
    return "float64"


def make_inputs(subject: Subject, size: tuple[int, int], dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    torch.manual_seed(1)
    image = torch.rand(3, *size, dtype=dtype)
    return image, torch.rand(1, *size, dtype=dtype).round() if subject.dense else torch.tensor([1])


def build(subject: Subject, dtype: torch.dtype, frozen: Iterable[str] = ()) -> nn.Module:
    torch.manual_seed(0)
    model = subject.build().to(dtype).train()
    silence(model)
    wake(model)
    for name in frozen:
        model.get_submodule(name).eval()
    return model


def settle(subject: Subject) -> dict[str, Any]:
    """The first precision and size at which plain PyTorch trains the model, and which norms it had to freeze."""
    failure: Exception | None = None
    for dtype in (torch.float64, torch.float32):
        for size in subject.sizes:
            model = build(subject, dtype)
            freeze_where_single(model)
            try:
                image, target = make_inputs(subject, size, dtype)
                value = loss(model(image[None]), target[None] if subject.dense else target)
            except Exception as error:
                failure = error
                continue
            norms = {name: m for name, m in model.named_modules() if isinstance(m, _BatchNorm)}
            frozen = [name for name, norm in norms.items() if not norm.training]
            return {"size": size, "dtype": str(dtype)[6:], "computes_in": precision(value), "frozen": frozen}
    assert failure is not None
    raise failure


@dataclass(frozen=True)
class Step:
    """What one step did: the loss, the gradients, and what was added to the buffers that changed; all in float64."""

    loss: Tensor
    gradients: dict[str, Tensor]
    moved: dict[str, Tensor]

    @classmethod
    def of(cls, model: nn.Module, before: nn.Module, value: Tensor) -> Step:
        old = dict(before.named_buffers())
        moves = {name: buffer.double() - old[name].double() for name, buffer in model.named_buffers()}
        gradients = {name: p.grad.double() for name, p in model.named_parameters() if p.grad is not None}
        return cls(value.double(), gradients, {name: move for name, move in moves.items() if move.any()})

    def errors_of(self, other: Step) -> dict[str, Any]:
        """Of another step, this one being right."""
        gradient, parameter = worst(tensor_errors(self.gradients, other.gradients))
        move, buffer = worst(tensor_errors(self.moved, other.moved))
        return {
            "loss_error": (other.loss - self.loss).abs().item() / self.loss.abs().item(),
            "gradient_error": gradient,
            "worst_parameter": parameter,
            "buffer_error": move,
            "worst_buffer": buffer,
        }


def tensor_errors(expected: dict[str, Tensor], got: dict[str, Tensor]) -> dict[str, float]:
    floor = FLOOR * max((tensor.abs().max().item() for tensor in expected.values()), default=0.0)
    errors = {}
    for name in expected.keys() | got.keys():
        nothing = torch.zeros(())
        reference = expected.get(name, nothing)
        difference = (got.get(name, nothing) - reference).abs().max().item()
        size = max(reference.abs().max().item(), floor)
        errors[name] = difference / size if size else (inf if difference else 0.0)
    return {name: inf if isnan(error) else error for name, error in errors.items()}


def worst(errors: dict[str, float]) -> tuple[float, str]:
    return max(((error, name) for name, error in errors.items()), default=(0.0, ""))


def worst_of(errors: dict[str, Any]) -> float:
    return max(errors[f"{kind}_error"] for kind in ("loss", "gradient", "buffer"))


def engine_with_tiles(model: nn.Module, image: Tensor, target: Tensor, cuts: Iterable[int]) -> gg.Engine:
    """An engine that has planned this image, with several tiles in at least one segment where that is possible."""
    for cut in cuts:
        engine = gg.compile(model, loss, tile=(image.shape[1] // cut, image.shape[2] // cut))
        if has_several_tiles(engine, image, target):
            break
    return engine


def compare(subject: Subject, record: dict[str, Any], report: Report) -> None:
    report("plain PyTorch")
    record |= settle(subject)
    dtype = getattr(torch, record["dtype"])
    before = build(subject, dtype, record["frozen"])
    record["parameters"] = sum(parameter.numel() for parameter in before.parameters())
    image, target = make_inputs(subject, record["size"], dtype)
    model = copy.deepcopy(before)
    right = Step.of(model, before, plain_step(model, image, target))
    record["rounding"] = worst_of(right.errors_of(nudged_step(before, image, target)))
    report("capture")
    model, start = copy.deepcopy(before), time.perf_counter()
    engine = engine_with_tiles(model, image, target, COMPARED_CUTS)
    plan = engine.plan(image, target)
    record |= {"captured": True, "plan_seconds": round(time.perf_counter() - start, 1)}
    record["tiles"] = plan.tile_count
    record["whole_field"] = Counter(field.operator for field in plan.whole_field)
    kept = sum(nbytes for name, nbytes in plan.memory_parts() if "kept" in name)
    record["kept_bytes_per_px"] = round(kept / image[0].numel(), 1)
    report("run")
    errors = right.errors_of(Step.of(model, before, engine.backward(image, target)))
    bound = max(TOLERANCE[record["computes_in"]], 10 * record["rounding"])
    record |= errors | {"exact": worst_of(errors) <= bound}
    if dtype == torch.float64:
        report("float32 step")
        record |= single_precision(right, before.float(), image.float(), target)
    report("done")


def nudged_step(before: nn.Module, image: Tensor, target: Tensor) -> Step:
    """By plain autograd, with another last bit in the image and in every parameter."""
    last_bit = torch.finfo(image.dtype).eps / 2
    model = copy.deepcopy(before)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(parameter * last_bit * torch.randn_like(parameter).sign())
    nudge = image * last_bit * torch.randn_like(image).sign()
    return Step.of(model, before, plain_step(model, image + nudge, target))


def single_precision(right: Step, before: nn.Module, image: Tensor, target: Tensor) -> dict[str, Any]:
    """How far float32 is from the step in float64, by plain autograd and by gigagrad."""
    plain, tiled = copy.deepcopy(before), copy.deepcopy(before)
    target = target.float() if target.is_floating_point() else target
    expected = Step.of(plain, before, plain_step(plain, image, target))
    engine = engine_with_tiles(tiled, image, target, COMPARED_CUTS)
    got = Step.of(tiled, before, engine.backward(image, target))
    errors = []
    for step in (expected, got):
        gradients = tensor_errors(right.gradients, step.gradients).values()
        errors.append(max(right.errors_of(step)["loss_error"], median(gradients or [0.0])))
    return {"plain_float32_error": errors[0], "float32_error": errors[1]}


def measure(subject: Subject, record: dict[str, Any], report: Report, *, engine: bool) -> None:
    """Seconds of one step in float32, and its peak memory above what the process held before."""
    size = LARGE if tuple(record["size"]) == subject.sizes[0] and len(subject.sizes) > 1 else tuple(record["size"])
    model = build(subject, torch.float32, record["frozen"])
    image, target = make_inputs(subject, size, torch.float32)
    report("capture")
    if engine:
        runner = engine_with_tiles(model, image, target, MEASURED_CUTS)
    report("run")
    ctypes.CDLL(None).malloc_trim(0)
    Path("/proc/self/clear_refs").write_text("5")  # VmHWM starts again from here
    base, start = status_bytes("VmRSS"), time.perf_counter()
    runner.backward(image, target) if engine else plain_step(model, image, target)
    seconds = time.perf_counter() - start
    record["measured"] = {"size": size, "seconds": seconds, "peak_bytes": status_bytes("VmHWM") - base}
    report("done")


def status_bytes(name: str) -> int:
    """Reads what Linux tells of this process: resident memory now (`VmRSS`), or the most of it (`VmHWM`)."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith(f"{name}:"))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("task", choices=("compare", "plain", "engine"))
    parser.add_argument("name")
    parser.add_argument("--given", type=json.loads, default={}, help="the record of compare, for the others")
    parser.add_argument("--memory", type=int, required=True, help="bytes this process may allocate")
    args = parser.parse_args()
    resource.setrlimit(resource.RLIMIT_DATA, (args.memory, args.memory))
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    record = args.given or {"model": args.name, "captured": False, "exact": False}

    def report(phase: str) -> None:
        record["phase"] = phase
        print(json.dumps(record), flush=True)

    report("build")
    try:
        subject = next(s for s in subjects(args.name.split("/")[0]) if s.name == args.name)
        if args.task == "compare":
            compare(subject, record, report)
        else:
            measure(subject, record, report, engine=args.task == "engine")
    except Exception as error:
        lines = str(error).strip().splitlines() or [""]
        line = re.sub(r"\S*/(site-packages|src)/", "", lines[0])  # the same on every machine
        record["error"] = {"phase": record["phase"], "class": type(error).__name__, "line": line[:300]}
        print(json.dumps(record), flush=True)


if __name__ == "__main__":
    main()
