"""What people write out of habit gives PyTorch's numbers, or is refused by a sentence that says where and what instead.

`bench/attack_cases.py` runs all of `HABITS`; here are all that are refused and some of those that are not, which take a
second each.
"""

import re

import pytest
import torch
from torch import nn

import gigagrad as gg
from gigagrad.errors import GigagradError
from tests.exactness.habits import HABITS, Habit, image

pytestmark = pytest.mark.filterwarnings("ignore::UserWarning", "ignore::DeprecationWarning", "ignore::FutureWarning")

_NO_VALUES = "there are no values yet"
_SIZE = "how large the result is depends on values"
_NUMPY = "a value of NumPy, a text or a file"
_SCRIPT = "TorchScript"
REFUSED = {
    "vmap with in dims": "torch.vmap that moves axes",
    "vmap of an ensemble": "torch.vmap that moves axes",
    "func grad": "differentiates inside of itself",
    "func grad of the field": "differentiates inside of itself",
    "func grad and value": "differentiates inside of itself",
    "func vjp": "differentiates inside of itself",
    "func jacrev": "differentiates inside of itself",
    "func jacfwd": "differentiates inside of itself",
    "func hessian": "differentiates inside of itself",
    "hook": "hook on a gradient",
    "script function": _SCRIPT,
    "script function with numbers": _SCRIPT,
    "script function under no grad": _SCRIPT,
    "script function of a parameter": _SCRIPT,
    "loss: scripted": _SCRIPT,
    "script submodule": _SCRIPT,
    "script submodule with parameters": _SCRIPT,
    "traced submodule": _SCRIPT,
    "scripted model": _SCRIPT,
    "traced model": _SCRIPT,
    "frozen model": _SCRIPT,
    "scripted loss module": _SCRIPT,
    "scripted network in the loss": _SCRIPT,
    "frozen scripted network in the loss": "out of other memory",
    "exported model of another size": "size with which it was exported",
    "exported program": "ExportedProgram",
    "quantised layer": "quantised layer",
    "dynamically quantised layer": "quantised layer",
    "branch on a mean": _NO_VALUES,
    "branch on any": _NO_VALUES,
    "branch on all": _NO_VALUES,
    "branch on allclose": _NO_VALUES,
    "branch on equal": _NO_VALUES,
    "branch on a parameter": _NO_VALUES,
    "branch on nan": _NO_VALUES,
    "loop while": _NO_VALUES,
    "loop a computed number of times": _NO_VALUES,
    "item": _NO_VALUES,
    "item of a parameter": _NO_VALUES,
    "to float": _NO_VALUES,
    "to int": _NO_VALUES,
    "to list": _NO_VALUES,
    "to numpy": _NUMPY,
    "to cpu and numpy": _NUMPY,
    "numpy function": _NUMPY,
    "numpy asarray": _NUMPY,
    "from numpy": "out of other memory",
    "from numpy in two axes": "out of other memory",
    "chosen by mask": _SIZE,
    "masked select": _SIZE,
    "assigned by mask": _SIZE,
    "nonzero": _SIZE,
    "argwhere": _SIZE,
    "where with one argument": _SIZE,
    "unique": _SIZE,
    "bincount": _SIZE,
    "repeat interleave by numbers": _SIZE,
    "string of a value": _NO_VALUES,
    "formatted": _NUMPY,
    "loss: branch on the target": _NO_VALUES,
    "loss: returns early": _NO_VALUES,
    "loss: only where labelled": _SIZE,
    "loss: gaussian nll": "gaussian_nll_loss looks whether",
    "loss: one hot of any number": "num_classes",
    "loss: numpy of the target": _NUMPY,
    "loss: python number": _NO_VALUES,
    "loss: a tuple": "must return",
    "loss: nothing": "must return",
    "loss: not reduced": "must return",
    "loss: gaussian nll module": "required positional argument",
    "loss: ctc": "CTC is",
    "loss: adaptive max pool of ids": "not implemented for",
    "loss: normal distribution": "validate_args=False",
    "loss: categorical distribution": "validate_args=False",
    "cond": "that take functions",
    "while loop": "take functions",
    "spectrum in place": "complex numbers",
    "spectrum scaled in place": "complex numbers",
    "seed": "sets PyTorch's generator",
    "seed in a fork": "sets PyTorch's generator",
    "seed of the generator": "sets PyTorch's generator",
    "state of the generator": "sets PyTorch's generator",
    "seed that is none": "sets PyTorch's generator",
    "a generator as an attribute": "moves on",
    "a new parameter in forward": "for its next call",
    "features of the last call": "for its next call",
    "outputs in a list": "for its next call",
    "a mean of all calls": "for its next call",
    "loss: wants a third argument": "required positional argument",
    "cross entropy of floats": "target arrives as",
    "binary cross entropy of ids": "target arrives as",
    **dict.fromkeys(
        ("guarded item", "asserted value by torch", "range of a tensor", "split by a tensor"), "takes (a )?numbers?"
    ),
    **dict.fromkeys(
        ("guarded branch", "assert close", "largest of tensors", "sorted tensors"), "branches on a computed"
    ),
    **dict.fromkeys(("largest of a tensor and a number", "square root by math", "in a list"), _NO_VALUES),
    **dict.fromkeys(("index by a tensor", "is nonzero"), _NO_VALUES),
    **dict.fromkeys(("guarded numpy", "numpy array times tensor", "saved to a file", "pickled"), _NUMPY),
    **dict.fromkeys(("sparse product", "to sparse", "fake quantised"), "no rule for what shape"),
    **dict.fromkeys(("from buffer", "from dlpack"), "something else each time it is called, at"),
    **dict.fromkeys(("buffer pointer", "deep copied", "deep copied module"), "where a tensor lies in memory"),
    **dict.fromkeys(("scripted late", "traced late"), "TorchScript|torch.jit"),
    "unique consecutive": _SIZE,
    "nested tensors": "nested tensor",
    "lazy layer": "a lazy layer",
}
"""What the refusal of each says is at fault."""
_TRIED = (
    *("vmap over channels", "func jvp", "forward mode", "fx submodule", "exported model", "data parallel"),
    *("compiled submodule", "compiled function in forward", "loss: max pool of ids", "a Python module as an attribute"),
    *("spectral norm in a loss module", "loss module with parameters", "CrossEntropyLoss of (H, W)"),
    *("CrossEntropyLoss of torch.uint8", "own, with ignore_index of (1, H, W)", "F.nll_loss of (1, 1, H, W)"),
)


def _named(habit: Habit) -> dict[str, torch.Tensor]:
    modules = [part for part in (habit.model, *habit.others) if isinstance(part, nn.Module)]
    return {f"{index} {name}": p for index, module in enumerate(modules) for name, p in module.named_parameters()}


def _skip_beside_own_device(name: str) -> None:
    """PyTorch asks the tests' own device (tests/devices/apart.py), once there, for what real accelerators have."""
    if name in ("data parallel", "seed in a fork") and hasattr(torch, "apart"):
        pytest.skip("the tests' own device is registered in this process")


@pytest.mark.parametrize("name", _TRIED)
def test_a_habit_gives_what_pytorch_gives(name: str) -> None:
    _skip_beside_own_device(name)
    plain, ours = HABITS[name](), HABITS[name]()
    target = plain.target[None] if plain.as_plain is None else plain.as_plain
    expected = plain.loss(plain.model(image()[None]), target)
    expected.backward()
    found = gg.compile(ours.model, ours.loss, tile=(13, 17), progress=False).backward(image(), ours.target)
    torch.testing.assert_close(found, expected.detach(), rtol=1e-9, atol=0)
    wanted = _named(plain)
    floor = 1e-10 * max(float(p.grad.norm()) for p in wanted.values() if p.grad is not None)
    for path, parameter in _named(ours).items():
        assert (parameter.grad is None) == (wanted[path].grad is None), path
        if parameter.grad is not None:
            torch.testing.assert_close(parameter.grad, wanted[path].grad, rtol=1e-9, atol=floor, msg=path)


@pytest.mark.parametrize("name", REFUSED)
def test_a_refusal_says_where_and_what_to_write(name: str) -> None:
    _skip_beside_own_device(name)
    habit = HABITS[name]()
    with pytest.raises(GigagradError, match=REFUSED[name]) as caught:
        gg.compile(habit.model, habit.loss, tile=(13, 17), progress=False).backward(image(), habit.target)
    told = str(caught.value)
    assert re.search(
        r"habits\.py:\d+|'(model|loss)[.\w]*'|the (model|loss) is|the loss must|a loss is|a lazy layer|program", told
    ), told
    assert "; " in told, told
    assert "\n" not in told, told
    assert all(p.grad is None for p in _named(habit).values())


def test_no_habit_is_left_out() -> None:
    """At least a hundred are tried, and each that is refused is known here."""
    assert len(HABITS) > 150
    assert set(REFUSED) <= set(HABITS)
    assert set(_TRIED) <= set(HABITS) - set(REFUSED)
