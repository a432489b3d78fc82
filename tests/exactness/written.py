"""Random networks that write in place: under `no_grad`, through detached aliases and views, into weights and buffers.

A network is a list of statements over a few named tensors; what PyTorch itself refuses is no case.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

CHANNELS = 3
Tensors = dict[str, Tensor]
Statement = Callable[["Written", Tensors], None]


class Written(nn.Module):
    """Runs statements between a first and a last convolution."""

    def __init__(self, lines: list[tuple[str, Statement]]) -> None:
        super().__init__()
        self.first, self.side = (nn.Conv2d(2, CHANNELS, 3, padding=1) for _ in range(2))
        self.last = nn.Conv2d(CHANNELS, 1, 3, padding=1)
        self.scale = nn.Parameter(torch.rand(CHANNELS, 1, 1) + 0.5)
        self.mean: Tensor
        self.register_buffer("mean", torch.zeros(CHANNELS))
        self.lines = [statement for _, statement in lines]
        self.text = "\n".join(text for text, _ in lines)

    def forward(self, x: Tensor) -> Tensor:
        tensors = {"a": self.first(x) * 1.0, "b": self.side(x) * 1.0}
        for statement in self.lines:
            statement(self, tensors)
        total = torch.stack([tensors[name] for name in sorted(tensors) if tensors[name].shape == tensors["a"].shape])
        return self.last(total.sum(0)) * self.scale.mean() + self.mean.sum()


VIEWS: dict[str, Callable[[Tensor], Tensor]] = {
    "[:, :2]": lambda t: t[:, :2],
    "[:, 1]": lambda t: t[:, 1] if t.ndim == 4 else t[1:],
    "transpose": lambda t: t.transpose(-1, -2),
    "detach()": lambda t: t.detach(),
    "data": lambda t: t.data,
    "view_as": lambda t: t.view_as(t),
    "unsqueeze": lambda t: t.unsqueeze(0),
    "clone()": lambda t: t.clone(),
    "* 1.5": lambda t: t * 1.5,
    "detach().clone()": lambda t: t.detach().clone(),
    "chunk": lambda t: t.chunk(2, 1)[0] if t.ndim == 4 else t,
}
WRITES: dict[str, Callable[[Tensor, Tensor], Any]] = {
    "mul_(0.5)": lambda t, s: t.mul_(0.5),
    "clamp_": lambda t, s: t.clamp_(-0.2, 0.2),
    "round_": lambda t, s: t.mul_(4).round_().div_(4),
    "relu_": lambda t, s: F.relu(t, inplace=True),
    "masked_fill_": lambda t, s: t.masked_fill_(t.detach() > 0.3, 0.1),
    "t[t > 0] = 0": lambda t, s: t.__setitem__(t.detach() > 0.4, 0.4),
    "t[...] = s": lambda t, s: t.__setitem__(..., s),
    "t[..., ::2] = 1": lambda t, s: t.__setitem__((..., slice(None, None, 2)), 1.0),
    "add_(s)": lambda t, s: t.add_(s),
    "copy_(s)": lambda t, s: t.copy_(s),
    "mul(s, out=t)": lambda t, s: torch.mul(t.detach(), s.detach(), out=t),
    "fill_": lambda t, s: t.fill_(0.3),
    "lerp_": lambda t, s: t.lerp_(s, 0.25),
    "sub_(mean)": lambda t, s: t.sub_(t.mean()),
    "+= s": lambda t, s: t.__iadd__(s),
    "_foreach_mul_": lambda t, s: torch._foreach_mul_([t], 0.75),
}
WEIGHTS: dict[str, Callable[[Written], Any]] = {
    "max norm": lambda m: m.side.weight.copy_(torch.renorm(m.side.weight, 2, 0, 0.3)),
    "centred": lambda m: m.first.weight.sub_(m.first.weight.mean()),
    "bias.zero_": lambda m: m.side.bias.zero_(),
    "data.clamp_": lambda m: m.scale.data.clamp_(0.7, 1.1),
    "detach().mul_": lambda m: m.last.weight.detach().mul_(0.9),
    "data =": lambda m: setattr(m.side.weight, "data", m.side.weight.data.clamp(-0.1, 0.1)),
    "quantised and put back": lambda m: _quantised(m),
    "ema": lambda m: m.mean.mul_(0.9).add_(m.first.weight.detach().mean(), alpha=0.1),
    "momentum encoder": lambda m: m.side.weight.data.mul_(0.5).add_(m.first.weight.data, alpha=0.5),
}


def _quantised(module: Written) -> None:
    held = module.last.weight.data
    module.last.weight.data = (held * 8).round() / 8
    module.last.weight.data = held


def _mode(chance: random.Random) -> tuple[str, Callable[[], AbstractContextManager[Any]]]:
    kinds: list[tuple[str, Callable[[], AbstractContextManager[Any]]]] = [("", nullcontext)]
    kinds += [("no_grad: ", torch.no_grad), ("set_grad_enabled(False): ", lambda: torch.set_grad_enabled(False))]
    return chance.choice([*kinds, kinds[1]])


def draw(seed: int) -> Written:
    """The network of that number."""
    chance = random.Random(f"written {seed}")
    names, lines = ["a", "b"], list[tuple[str, Statement]]()
    for _ in range(chance.randint(2, 6)):
        (said, mode), target, source = _mode(chance), chance.choice(names), chance.choice(names)
        kind = chance.random()
        if kind < 0.4:
            new, (what, view) = f"v{len(names)}", chance.choice(list(VIEWS.items()))
            names.append(new)
            lines.append((f"{said}{new} = {target} {what}", _viewed(mode, new, target, view)))
        elif kind < 0.85:
            what, write = chance.choice(list(WRITES.items()))
            lines.append((f"{said}{target} {what}, s = {source}", _wrote(mode, target, source, write)))
        elif kind < 0.9:
            lines.append((f"{target}.detach_()", _detached(target)))
        else:
            what, change = chance.choice(list(WEIGHTS.items()))
            lines.append((f"no_grad: {what}", _weighed(change)))
    torch.manual_seed(seed)
    return Written(lines)


def _viewed(mode: Any, new: str, target: str, view: Callable[[Tensor], Tensor]) -> Statement:
    def statement(module: Written, tensors: Tensors) -> None:
        with mode():
            tensors[new] = view(tensors[target])

    return statement


def _wrote(mode: Any, target: str, source: str, write: Callable[[Tensor, Tensor], Any]) -> Statement:
    def statement(module: Written, tensors: Tensors) -> None:
        with mode():
            into = tensors[target]
            write(into, tensors[source] if tensors[source].shape == into.shape else into.detach() * 0.5 + 0.1)

    return statement


def _detached(target: str) -> Statement:
    def statement(module: Written, tensors: Tensors) -> None:
        tensors[target].detach_()

    return statement


def _weighed(change: Callable[[Written], Any]) -> Statement:
    def statement(module: Written, tensors: Tensors) -> None:
        with torch.no_grad():
            change(module)

    return statement
