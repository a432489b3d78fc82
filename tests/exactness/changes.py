"""Ways to change a model or a loss between two calls, as people do: each must count in the next call.

A way makes a fresh model with its loss, and a function that changes something about them; `WAYS` has them by name.
Made twice, one of the two can be run by PyTorch itself.
"""

from __future__ import annotations

import collections
import copy
import dataclasses
import enum
import functools
import itertools
import random
import types
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn


@dataclass
class Way:
    """`change(step)` is called after the call number `step`, from 0."""

    model: nn.Module
    loss: Callable[[Any, Any], Tensor]
    change: Callable[[int], Any] = lambda step: None
    state: Callable[[], Any] = lambda: None
    """Python state that must be the same after each call as after PyTorch's."""


Told = tuple[Tensor, dict[str, Tensor], Any, float]
"""After a call: the loss, the gradients, Python's state, and the next number that `random` gives."""

WAYS: dict[str, Callable[[], Way]] = {}
REFUSED = {"an_iterator_of_weights": "moves on"}
"""Ways that are refused, and what the refusal says."""


def told(make: Callable[[], Way], call: Callable[[Way], Callable[[], Tensor]], steps: int) -> Iterator[Told]:
    """What is found after each of so many calls of what `call` makes of a fresh way."""
    random.seed(11)
    np.random.seed(12)
    torch.set_default_dtype(torch.float32)
    made = make()
    step = call(made)
    for index in range(steps):
        made.model.zero_grad()
        value = step().detach().clone()
        gradients = {name: p.grad.clone() for name, p in made.model.named_parameters() if p.grad is not None}
        yield value, gradients, copy.deepcopy(made.state()), random.random()
        made.change(index)
    torch.set_default_dtype(torch.float32)


def by_pytorch(image: Tensor, target: Tensor) -> Callable[[Way], Callable[[], Tensor]]:
    def call(made: Way) -> Callable[[], Tensor]:
        def step() -> Tensor:
            value = made.loss(made.model(image[None]), target[None])
            value.backward()
            return value

        return step

    return call


def difference(mine: Told, theirs: Told) -> str | None:
    """What is not as PyTorch has it, None if nothing."""
    if not torch.allclose(mine[0], theirs[0].to(mine[0].dtype), rtol=1e-12, atol=0):
        return f"loss {mine[0].item()!r}, not {theirs[0].item()!r}"
    if mine[1].keys() != theirs[1].keys():
        return f"gradients of {sorted(mine[1])}, not of {sorted(theirs[1])}"
    for name, gradient in mine[1].items():
        if not torch.allclose(gradient, theirs[1][name], rtol=1e-10, atol=1e-13):
            return f"the gradient of {name}"
    return None if mine[2:] == theirs[2:] else f"state {mine[2:]}, not {theirs[2:]}"


def way(make: Callable[[], Way]) -> Callable[[], Way]:
    WAYS[make.__name__] = make
    return make


class Reader(nn.Module):
    """A convolution, scaled by what `read` makes of the module."""

    def __init__(self, read: Callable[[Any], Any] = lambda self: 1.0, **attributes: Any) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.conv = nn.Conv2d(1, 2, 3, padding=1).double()
        self.read = read
        for name, value in attributes.items():
            setattr(self, name, value)

    def forward(self, x: Tensor) -> Tensor:
        return self.conv(x) * self.read(self)


def mse(output: Tensor, target: Tensor) -> Tensor:
    return ((output - target) ** 2).mean()


def reader(read: Callable[[Any], Any], change: Callable[[Any, int], Any], **attributes: Any) -> Way:
    model = Reader(read, **attributes)
    return Way(model, mse, lambda step: change(model, step))


def later(values: list[Any]) -> Callable[[int], Any]:
    return lambda step: values[min(step, len(values) - 1)]


def attribute(*values: Any, read: Callable[[Any], Any] = lambda self: float(self.a)) -> Callable[[], Way]:
    """An attribute that takes these values in turn."""
    return lambda: reader(read, lambda m, step: setattr(m, "a", later(list(values[1:]))(step)), a=values[0])


class Colour(enum.Enum):
    RED = 2.0
    BLUE = 3.0


def typed(self: Any) -> float:
    return {int: 1.0, float: 2.0, bool: 3.0}[type(self.a)]


WAYS |= {
    "an int that hashes alike": attribute(-1, -2),
    "types that compare equal": attribute(1, 1.0, True, read=typed),
    "zeros of both signs": attribute(0.0, -0.0, read=lambda self: 1.0 if str(self.a) == "0.0" else 2.0),
    "text": attribute("one", "two", read=lambda self: {"one": 1.0, "two": 2.0}[self.a]),
    "bytes": attribute(b"a", b"b", read=lambda self: float(self.a[0])),
    "none": attribute(None, 2.0, read=lambda self: 1.0 if self.a is None else self.a),
    "a complex number": attribute(1 + 2j, 1 - 2j, read=lambda self: self.a.imag + 3),
    "an enum": attribute(Colour.RED, Colour.BLUE, read=lambda self: self.a.value),
    "a NumPy scalar": attribute(np.float64(1.5), np.float64(2.5)),
    "a dtype": attribute(torch.float64, torch.float32, read=lambda self: torch.ones((), dtype=self.a) / 3),
    "a tuple in a tuple": attribute(((1.0,), 2), ((3.0,), 2), read=lambda self: self.a[0][0]),
    "a slice": attribute(slice(0, 1), slice(0, 3), read=lambda self: len(range(9)[self.a])),
    "a callable": attribute(lambda: 1.0, lambda: 2.0, read=lambda self: self.a()),
    "a partial": attribute(
        functools.partial(min, 3.0, 5.0), functools.partial(min, 2.0, 5.0), read=lambda self: self.a()
    ),
}


def mutated(
    make: Callable[[], Any], mutate: Callable[[Any, int], Any], read: Callable[[Any], Any]
) -> Callable[[], Way]:
    """An object that stays, and changes inside."""
    return lambda: reader(lambda self: read(self.a), lambda m, step: mutate(m.a, step), a=make())


class Holder:
    def __init__(self, value: float) -> None:
        self.value = value

    def __call__(self) -> float:
        return self.value

    def weight(self, output: Tensor, target: Tensor) -> Tensor:
        return mse(output, target) * self.value


class Slotted:
    __slots__ = ("value",)

    def __init__(self) -> None:
        self.value = 1.0


@dataclasses.dataclass
class Settings:
    value: float = 1.0


def bound_keyword(value: float = 1.0) -> float:
    return value


WAYS |= {
    "a dict's entry": mutated(lambda: {"k": 1.0}, lambda a, s: a.update(k=2.0 + s), lambda a: a["k"]),
    "a dict's entry that joins": mutated(
        lambda: {"k": 1.0}, lambda a, s: a.update({s: 2.0}), lambda a: sum(a.values())
    ),
    "a list's item": mutated(lambda: [1.0], lambda a, s: a.__setitem__(0, 2.0 + s), lambda a: a[0]),
    "a list's length": mutated(lambda: [1.0], lambda a, s: a.append(2.0), sum),
    "a list in a list": mutated(lambda: [[1.0]], lambda a, s: a[0].append(2.0), lambda a: sum(a[0])),
    "a list in a tuple": mutated(lambda: ([1.0],), lambda a, s: a[0].append(2.0), lambda a: sum(a[0])),
    "a dict in a list": mutated(lambda: [{"k": 1.0}], lambda a, s: a[0].update(k=5.0), lambda a: a[0]["k"]),
    "a set": mutated(lambda: {1.0}, lambda a, s: a.add(2.0 + s), sum),
    "a deque": mutated(lambda: collections.deque([1.0]), lambda a, s: a.append(2.0), sum),
    "a default dict": mutated(
        lambda: collections.defaultdict(float, k=1.0), lambda a, s: a.update(k=3.0), lambda a: a["k"]
    ),
    "an object's attribute": mutated(lambda: Holder(1.0), lambda a, s: setattr(a, "value", 2.0 + s), lambda a: a.value),
    "a slot": mutated(Slotted, lambda a, s: setattr(a, "value", 2.0 + s), lambda a: a.value),
    "a dataclass": mutated(Settings, lambda a, s: setattr(a, "value", 2.0 + s), lambda a: a.value),
    "a namespace": mutated(lambda: types.SimpleNamespace(k=1.0), lambda a, s: setattr(a, "k", 2.0 + s), lambda a: a.k),
    "a callable with state": mutated(lambda: Holder(1.0), lambda a, s: setattr(a, "value", 4.0), lambda a: a()),
    "a partial's keywords": mutated(
        lambda: functools.partial(bound_keyword, value=1.0), lambda a, s: a.keywords.update(value=3.0), lambda a: a()
    ),
    "a NumPy array": mutated(lambda: np.ones(3), lambda a, s: a.__setitem__(1, 4.0 + s), lambda a: float(a.sum())),
    "a plain tensor in place": mutated(lambda: torch.ones(2, 1, 1).double(), lambda a, s: a.mul_(2.0), lambda a: a),
    "a plain tensor by its data": mutated(
        lambda: torch.ones(2, 1, 1).double(), lambda a, s: a.data.mul_(2.0), lambda a: a
    ),
    "a plain tensor through NumPy": mutated(
        lambda: torch.ones(2, 1, 1).double(), lambda a, s: a.numpy().__imul__(2.0), lambda a: a
    ),
    "a tensor in a list": mutated(
        lambda: [torch.ones(1).double()], lambda a, s: a.__setitem__(0, torch.ones(1).double() * 3), lambda a: a[0]
    ),
    "an attribute by a made-up name": lambda: reader(
        lambda self: getattr(self, "scale_" + str(1)), lambda m, s: setattr(m, "scale_1", 3.0 + s), scale_1=1.0
    ),
    "a plain tensor replaced": attribute(torch.ones(1).double(), torch.ones(1).double() * 2, read=lambda self: self.a),
}


@way
def a_class_attribute() -> Way:
    class Scaled(Reader):
        scale = 1.0

    model = Scaled(lambda self: self.scale)
    return Way(model, mse, lambda step: setattr(Scaled, "scale", 2.0 + step))


@way
def a_class_attribute_of_a_base() -> Way:
    class Base(Reader):
        scale = 1.0

    class Scaled(Base):
        pass

    return Way(Scaled(lambda self: self.scale), mse, lambda step: setattr(Scaled, "scale", 2.0 + step))


@way
def a_method_of_the_class() -> Way:
    class Scaled(Reader):
        def factor(self) -> float:
            return 1.0

    return Way(Scaled(lambda self: self.factor()), mse, lambda step: setattr(Scaled, "factor", lambda self: 3.0))


@way
def a_method_of_a_librarys_class() -> Way:
    class Shrunk(Reader):
        def __init__(self) -> None:
            super().__init__()
            self.shrink = nn.Softshrink(0.1)

        def forward(self, x: Tensor) -> Tensor:
            return self.shrink(self.conv(x))

    plain = nn.Softshrink.forward

    def change(step: int) -> None:
        nn.Softshrink.forward = plain if step else lambda self, x: 2 * x  # type: ignore[method-assign, assignment]

    return Way(Shrunk(), mse, change)


@way
def the_forward_of_the_class() -> Way:
    class Scaled(Reader):
        pass

    return Way(Scaled(), mse, lambda step: setattr(Scaled, "forward", lambda self, x: self.conv(x) * 2))


@way
def the_forward_of_the_object() -> Way:
    model = Reader()
    return Way(model, mse, lambda step: setattr(model, "forward", lambda x: model.conv(x) * (2.0 + step)))


def with_globals(function: Any, **names: Any) -> Any:
    """The function with globals of its own."""
    space = {**function.__globals__, **names}
    return types.FunctionType(function.__code__, space, function.__name__, function.__defaults__, function.__closure__)


SCALE = 1.0


def scaled_by_a_global(output: Tensor, target: Tensor) -> Tensor:
    return ((output - target) ** 2).mean() * SCALE


def scaled_by_a_builtin(output: Tensor, target: Tensor) -> Tensor:
    return mse(output, target) * abs(-2.0)


def counted_in_a_global(output: Tensor, target: Tensor) -> Tensor:
    global SCALE
    SCALE += 1.0
    return ((output - target) ** 2).mean() * SCALE


@way
def a_global() -> Way:
    loss = with_globals(scaled_by_a_global, SCALE=1.0)
    return Way(Reader(), loss, lambda step: loss.__globals__.update(SCALE=2.0 + step))


@way
def a_global_that_hides_a_builtin() -> Way:
    loss = with_globals(scaled_by_a_builtin)
    return Way(Reader(), loss, lambda step: loss.__globals__.update(abs=lambda value: 3.0 + step))


@way
def a_property_that_reads_a_closure() -> Way:
    def made(start: float) -> tuple[property, Callable[[float], None]]:
        factor = start

        def change(value: float) -> None:
            nonlocal factor
            factor = value

        return property(lambda self: factor), change

    factor, change = made(1.0)

    class Scaled(Reader):
        def forward(self, x: Tensor) -> Tensor:
            return self.conv(x) * self.factor

    Scaled.factor = factor  # type: ignore[attr-defined]
    return Way(Scaled(), mse, lambda step: change(2.0 + step))


@way
def a_global_that_the_loss_counts() -> Way:
    loss = with_globals(counted_in_a_global, SCALE=1.0)
    return Way(Reader(), loss, state=lambda: loss.__globals__["SCALE"])


@way
def a_closure() -> Way:
    beta = 1.0

    def loss(output: Tensor, target: Tensor) -> Tensor:
        return mse(output, target) * beta

    def change(step: int) -> None:
        nonlocal beta
        beta = 2.0 + step

    return Way(Reader(), loss, change)


@way
def a_nonlocal_that_the_loss_anneals() -> Way:
    beta = 1.0

    def loss(output: Tensor, target: Tensor) -> Tensor:
        nonlocal beta
        beta *= 0.5
        return mse(output, target) * beta

    return Way(Reader(), loss, state=lambda: beta)


@way
def a_loss_with_a_changed_default() -> Way:
    def loss(output: Tensor, target: Tensor, scale: float = 1.0) -> Tensor:
        return mse(output, target) * scale

    return Way(Reader(), loss, lambda step: setattr(loss, "__defaults__", (2.0 + step,)))


@way
def a_loss_that_is_an_object() -> Way:
    class Weighted(Holder):
        def __call__(self, output: Tensor, target: Tensor) -> Tensor:  # type: ignore[override]
            return self.weight(output, target)

    loss = Weighted(1.0)
    return Way(Reader(), loss, lambda step: setattr(loss, "value", 2.0 + step))


@way
def a_loss_that_is_a_bound_method() -> Way:
    holder = Holder(1.0)
    return Way(Reader(), holder.weight, lambda step: setattr(holder, "value", 2.0 + step))


@way
def a_function_that_the_loss_calls() -> Way:
    inner = [lambda error: error.mean()]
    return Way(
        Reader(), lambda o, t: inner[0]((o - t) ** 2), lambda step: inner.__setitem__(0, lambda error: error.sum() / 7)
    )


def cut(output: Tensor, target: Tensor) -> Tensor:
    return mse(output, target[..., : output.shape[-2], : output.shape[-1]])


def hooked(change: Callable[[nn.Module, int], Any]) -> Callable[[], Way]:
    def make() -> Way:
        model = Reader()
        return Way(model, cut, lambda step: change(model, step))

    return make


@way
def a_forward_hook_that_goes() -> Way:
    model = Reader()
    handle = model.conv.register_forward_hook(lambda module, inputs, output: output * 2)
    return Way(model, mse, lambda step: handle.remove())


@way
def a_forward_hook_with_another_closure() -> Way:
    model, scale = Reader(), 1.0
    model.conv.register_forward_hook(lambda module, inputs, output: output * scale)

    def change(step: int) -> None:
        nonlocal scale
        scale = 2.0 + step

    return Way(model, mse, change)


WAYS |= {
    "a forward hook that comes": hooked(lambda m, s: m.conv.register_forward_hook(lambda mod, i, o: o * (2.0 + s))),
    "a forward pre-hook that comes": hooked(
        lambda m, s: m.conv.register_forward_pre_hook(lambda mod, inputs: (inputs[0] * (2.0 + s),))
    ),
    "a module replaced": hooked(lambda m, s: setattr(m, "conv", nn.Conv2d(1, 2, 1, bias=False).double())),
    "a parameter replaced": hooked(
        lambda m, s: setattr(m.conv, "weight", nn.Parameter(torch.ones(2, 1, 3, 3).double() * (1 + s)))
    ),
    "a parameter in place": hooked(lambda m, s: m.conv.weight.data.mul_(1.5)),  # type: ignore[operator]
    "a frozen parameter": hooked(lambda m, s: m.conv.bias.requires_grad_(s % 2 == 1)),
    "a padding": hooked(
        lambda m, s: m.conv.__dict__.update(padding=(0, 0) if s == 0 else (2, 2), dilation=(1, 1) if s == 0 else (2, 2))
    ),
    "a parametrization": hooked(lambda m, s: s or nn.utils.parametrizations.weight_norm(m.conv, dim=0)),  # type: ignore[arg-type]
}


@way
def a_counter_in_forward() -> Way:
    class Counting(Reader):
        calls = 0

        def forward(self, x: Tensor) -> Tensor:
            self.calls += 1
            return super().forward(x) * self.calls

    model = Counting()
    return Way(model, mse, state=lambda: model.calls)


@way
def a_counter_that_only_counts() -> Way:
    class Counting(Reader):
        calls = 0

        def forward(self, x: Tensor) -> Tensor:
            self.calls += 1
            return super().forward(x)

    model = Counting()
    return Way(model, mse, state=lambda: model.calls)


@way
def a_list_that_forward_appends_to() -> Way:
    class Noting(Reader):
        def forward(self, x: Tensor) -> Tensor:
            self.sizes.append(tuple(x.shape))  # type: ignore[operator]
            return super().forward(x) * len(self.sizes)  # type: ignore[arg-type]

    model = Noting(sizes=[])
    return Way(model, mse, state=lambda: list(model.sizes))  # type: ignore[arg-type]


@way
def a_flag_set_by_the_first_call() -> Way:
    class Once(Reader):
        def forward(self, x: Tensor) -> Tensor:
            scale, self.started = (1.0 if self.started else 3.0), True  # type: ignore[has-type]
            return super().forward(x) * scale

    model = Once(started=False)
    return Way(model, mse, state=lambda: model.started)


@way
def a_switch_that_forward_throws() -> Way:
    class Switching(Reader):
        def forward(self, x: Tensor) -> Tensor:
            self.on = not self.on  # type: ignore[has-type]
            return super().forward(x) * (2.0 if self.on else 5.0)

    model = Switching(on=False)
    return Way(model, mse, lambda step: None, state=lambda: model.on)


@way
def random_numbers_of_python() -> Way:
    random.seed(3)
    return reader(lambda self: 1.0 + random.random(), lambda m, step: None)


@way
def random_numbers_of_numpy() -> Way:
    np.random.seed(3)
    return reader(lambda self: 1.0 + float(np.random.rand()), lambda m, step: None)


@way
def a_generator_of_the_models_own() -> Way:
    return reader(
        lambda self: 1.0 + self.a.random() + float(self.b.random()),
        lambda m, step: None,
        a=random.Random(5),
        b=np.random.default_rng(6),
    )


@way
def a_plain_tensor_that_forward_changes() -> Way:
    model = Reader(lambda self: self.a.add_(1.0), a=torch.zeros(1).double())
    return Way(model, mse, state=lambda: model.a.clone())  # type: ignore[operator]


@way
def an_array_that_forward_changes() -> Way:
    def read(self: Any) -> float:
        self.a[0] += 1
        return float(self.a[0])

    model = Reader(read, a=np.zeros(2))
    return Way(model, mse, state=lambda: model.a.tolist())  # type: ignore[operator]


@way
def a_default_dtype() -> Way:
    def change(step: int) -> None:
        torch.set_default_dtype(torch.float64 if step == 0 else torch.float32)

    return Way(Reader(lambda self: torch.ones(()) / 3), mse, change)


def two_convolutions(change: Callable[[nn.Conv2d, nn.Conv2d, int], Any]) -> Way:
    """One after the other, with weights of the same shape."""
    torch.manual_seed(0)
    model = nn.Sequential(*(nn.Conv2d(1, 1, 3, padding=1).double() for _ in range(2)))
    first, second = model[0], model[1]
    assert isinstance(first, nn.Conv2d)
    assert isinstance(second, nn.Conv2d)
    change(first, second, -1)
    return Way(model, mse, functools.partial(change, first, second))


@way
def weights_that_become_tied() -> Way:
    def change(first: nn.Conv2d, second: nn.Conv2d, step: int) -> None:
        if step == 0:
            second.weight = first.weight

    return two_convolutions(change)


@way
def weights_that_are_tied_no_more() -> Way:
    def change(first: nn.Conv2d, second: nn.Conv2d, step: int) -> None:
        if step == 0:
            second.weight = nn.Parameter(first.weight.detach().clone())
        elif step < 0:
            second.weight = first.weight

    return two_convolutions(change)


@way
def a_penalty_on_the_models_parameters() -> Way:
    model, scale = Reader(), [0.1]
    return Way(
        model,
        lambda o, t: mse(o, t) + scale[0] * sum(p.pow(2).sum() for p in model.parameters()),
        lambda step: scale.__setitem__(0, 0.2 + step),
    )


@way
def a_penalty_on_a_joined_vector() -> Way:
    model = Reader()
    return Way(
        model,
        lambda o, t: mse(o, t) + torch.cat([p.flatten() for p in model.parameters()]).norm(),
        lambda step: model.conv.weight.data.mul_(2),
    )


@way
def a_network_that_the_loss_closes_over() -> Way:
    torch.manual_seed(1)
    judge = nn.Conv2d(2, 1, 3, padding=1).double()
    model = Reader()
    return Way(model, lambda o, t: mse(judge(o), t), lambda step: judge.weight.data.mul_(2))


@way
def a_setting_of_a_network_that_the_loss_closes_over() -> Way:
    judge = nn.LeakyReLU(0.1)
    return Way(Reader(), lambda o, t: mse(judge(o), t), lambda step: setattr(judge, "negative_slope", 0.3 + step))


@way
def a_module_of_the_model_in_the_loss() -> Way:
    model = Reader()
    return Way(model, lambda o, t: mse(model.conv(o[:, :1]), t), lambda step: model.conv.weight.data.mul_(2))


@way
def a_dispatch_table() -> Way:
    table: dict[str, Any] = {"act": F.relu}
    return Way(Reader(), lambda o, t: mse(table["act"](o), t), lambda step: table.update(act=torch.tanh))


@way
def an_iterator_of_weights() -> Way:
    """Refused: what an iterator has given cannot be given again."""
    weights = itertools.count(1)
    return Way(Reader(), lambda o, t: mse(o, t) * next(weights))
