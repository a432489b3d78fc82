"""Try a model out before it is traced: on a copy with fake tensors, twice, while everything it can see is watched.

The dry run finds out what a graph alone cannot say: which code is executed and so what could change the graph
(`Guard`), which tensors are read from outside the model, and what Python state a forward leaves behind (`Effects`).
What nobody could give the user faithfully is refused by name: hooks on gradients, a backward of one's own, state that
runs away.
"""

from __future__ import annotations

import dis
import random
import re
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import zip_longest
from types import FrameType
from typing import Any

import numpy as np
import torch
from torch._C._functorch import TransformType, get_interpreter_stack, is_functorch_wrapped_tensor
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.autograd.graph import Node as GradientNode
from torch.nn.modules import module as modules

from gigagrad.errors import CaptureError
from gigagrad.graphs.capture.constants import tensors_in
from gigagrad.graphs.capture.loss_module import CLOSED, HOOKS, FakeCopy, LossModule, hook_error, is_user_code, user_line
from gigagrad.graphs.capture.slots import (
    MISSING,
    CacheSlot,
    Contents,
    ContextSlot,
    RandomSlot,
    Slot,
    are_identical,
    is_plain,
    same,
)
from gigagrad.graphs.capture.stand_ins import Calling, plain_types
from gigagrad.graphs.capture.traversal import KEY, ExecutedCode, Traversal
from gigagrad.graphs.capture.writes import Learned, own_gradient_error

_REGISTERED = "GeneratedBackwardFor_"  # how PyTorch names the backward of an operator registered with it
_SHARED_GENERATORS: Mapping[str, Any] = {
    "random": random.random.__self__,  # type: ignore[attr-defined]
    "numpy.random": np.random.random_sample.__self__,  # type: ignore[attr-defined]
}
_GLOBAL_HOOKS = ("_global_forward_pre_hooks", "_global_forward_hooks")
_GRADIENT_HOOKS = ("_backward_hooks", "_backward_pre_hooks")
_NODE_HOOKS = frozenset({"register_hook", "register_prehook"})
_SEEDING = frozenset({"manual_seed", "seed", "set_state", "set_offset"})
_SHAPE_ONLY = frozenset({"zeros_like", "ones_like", "empty_like", "full_like", "new_zeros", "new_ones", "new_full"})
"""Functions whose result depends on no value of the tensors they are given."""


def roots_of(model: Any, loss: Any, generators: Mapping[str, Any] = _SHARED_GENERATORS) -> dict[str, Any]:
    """Name the objects at which traversals start."""
    return {"model": model, "loss": loss, **generators, **{name: getattr(modules, name) for name in _GLOBAL_HOOKS}}


@dataclass(frozen=True, slots=True)
class Change:
    """An entry of a slot that a run changed."""

    slot: Slot
    key: Any
    before: Any
    after: Any

    @property
    def name(self) -> str:
        return self.slot.described(self.key)


class Effects:
    """Changes that one forward leaves in Python: counters, sizes seen, numbers drawn. `apply` them once a run."""

    def __init__(self, changes: list[Change], slots: Mapping[Any, Slot], *, steady: bool) -> None:
        self._changes = [(slots.get(_key(change.slot), change.slot), change) for change in changes]
        self.steady = steady
        """True if a second forward would leave things as they are then, and its graph is the same."""

    def __bool__(self) -> bool:
        return bool(self._changes)

    def apply(self) -> None:
        for slot, change in self._changes:
            contents = dict(zip(*slot.read(), strict=True))
            contents.pop(change.key, None) if change.after is MISSING else contents.update({change.key: change.after})
            slot.put((tuple(contents), tuple(contents.values())))


@dataclass(frozen=True, slots=True)
class DryRun:
    """Findings of two runs on fake tensors. `generators` are those shared by all code that were drawn from."""

    snapshot: Snapshot
    executed: ExecutedCode
    closed: tuple[torch.Tensor, ...]
    effects: Effects
    generators: Mapping[str, Any]
    writes: Learned
    frozen: tuple[str, ...]
    """Names of the parameters that a forward leaves frozen: autograd adds nothing to their gradients any more."""
    left_out: tuple[str, ...]
    """Names of attributes that a forward stores and nobody will find there: tensors, for one."""
    asked: Mapping[str, torch.Tensor]
    """Values of the buffers that code asked for numbers."""

    @contextmanager
    def undone(self) -> Iterator[None]:
        """Undo afterwards what another run of a copy changes outside of the copy."""
        try:
            with plain_types(self.executed.users()):
                yield
        finally:
            self.snapshot.restore()

    @contextmanager
    def again(self, copy: FakeCopy) -> Iterator[Again]:
        """Watch a later run of a copy, and undo afterwards what it changes outside of the copy."""
        traversal = Traversal(roots_of(copy.module.model, copy.module.loss))
        traversal.visit_executed(self.executed)
        watched = Again(self.executed, Snapshot(traversal), copy)
        try:
            with plain_types(self.executed.users()):
                yield watched
            watched.left_nothing = not any(watched.changes())
        finally:
            watched.snapshot.restore()


class Again:
    """A forward after the dry run, which is watched. Of its copy it is known afterwards whether it `left_nothing`."""

    def __init__(self, executed: ExecutedCode, snapshot: Snapshot, copy: FakeCopy) -> None:
        self.snapshot, self.same_code, self.left_nothing = snapshot, False, False
        self._executed, self._copy = executed, copy

    @contextmanager
    def watched(self) -> Iterator[None]:
        """Watch the block, all code but that of PyTorch's own functions. Raises `CaptureError` as a dry run does."""
        executed = ExecutedCode()

        def call(func: Any, args: Any, kwargs: Any) -> Any:
            if func in HOOKS:
                raise hook_error(user_line(sys._getframe(2)))
            sys.setprofile(None)
            try:
                return func(*args, **kwargs)
            finally:
                sys.setprofile(see)

        def see(frame: FrameType, event: str, argument: Any) -> None:
            if event == "call":
                executed.add(frame)
            elif event == "c_call":
                _refuse_call(frame, argument)
                executed.add_call(argument, frame)

        with _profiler(see), Calling(call), _buffers_kept(self._copy.module):
            yield
        others = {(id(code), id(space)) for code, space in executed.users()} - self._executed.globals.keys()
        self.same_code = not others and executed.unfollowed is None

    def changes(self) -> Iterator[Change]:
        return (c for c in self.snapshot.changes() if not self._copy.stands_for(c.after, c.before))


class Snapshot:
    """The contents of every slot of a traversal, slots that join later included: tells changes, and undoes them."""

    def __init__(self, traversal: Traversal) -> None:
        self.traversal = traversal
        self._then: list[Contents] = []
        self.extend()

    def extend(self) -> None:
        """Take in the slots that the traversal has found since."""
        self._then.extend(slot.read() for slot in self.traversal.slots[len(self._then) :])

    def changes(self) -> list[Change]:
        return [
            change
            for slot, then in zip(self.traversal.slots, self._then, strict=True)
            for change in _changes(slot, then, slot.read())
        ]

    def restore(self) -> None:
        # What a traversal had found when it was interrupted was not read yet.
        for slot, then in zip(self.traversal.slots, self._then, strict=False):
            if slot.restorable and next(_changes(slot, then, slot.read()), None) is not None:
                slot.put(then)


def _changes(slot: Slot, then: Contents, now: Contents) -> Iterator[Change]:
    if are_identical(then, now):
        return
    before, after = (dict(zip(*contents, strict=True)) for contents in (then, now))
    for key in {**before, **after}:
        old, new = before.get(key, MISSING), after.get(key, MISSING)
        if not same(old, new):
            yield Change(slot, key, old, new)


def _key(slot: Slot) -> Any:
    return type(slot), slot.path, slot.attributes


class _Trace:
    """The calls of one run: functions, arguments that are no tensors, and which tensors go where."""

    def __init__(self, inputs: Any, loss_module: LossModule, before: Iterable[torch.Tensor] = ()) -> None:
        """`before` are tensors that an earlier run made."""
        self.calls: list[tuple[Any, ...]] = []
        """The user's line, the function, the names of arguments and the arguments, of each call."""
        self.kept: list[torch.Tensor] = []
        self._made: dict[int, int] = {}
        self._from_pixels = set(map(id, tensors_in(inputs)))
        self._loss_module = loss_module
        self._known = {id(tensor) for tensor in before} | self._from_pixels

    def __call__(self, func: Any, args: Any, kwargs: Any, result: Any) -> None:
        given = [*args, *kwargs.values()]
        self.calls.append((user_line(sys._getframe(2)), func, tuple(kwargs), *map(self._token, given)))
        depends = getattr(func, "__name__", "") not in _SHAPE_ONLY and any(map(self.depends_on_pixels, given))
        for made in result if isinstance(result, tuple | list) else (result,):
            if isinstance(made, torch.Tensor):
                self._keep(made)
                if depends:
                    self._from_pixels.add(id(made))

    def depends_on_pixels(self, value: Any) -> bool:
        if type(value) in (list, tuple):
            return any(map(self.depends_on_pixels, value))
        return isinstance(value, torch.Tensor) and id(value) in self._from_pixels

    def _keep(self, tensor: torch.Tensor) -> None:
        self.kept.append(tensor)  # so that no other object gets its id
        self._made.setdefault(id(tensor), len(self.kept))

    def _token(self, value: Any) -> Any:
        if isinstance(value, torch.Tensor):
            if id(value) not in self._made and not self._is_known(value):
                self._take_unseen(value)
            return "made", self._made[id(value)] if id(value) in self._made else ("outside", id(value))
        if type(value) in (list, tuple):
            return type(value), tuple(map(self._token, value))
        return (type(value), value) if is_plain(value) else type(value)

    def _is_known(self, tensor: torch.Tensor) -> bool:
        """Tell whether it was there before the run, or is the loss module's: those adopted on the way are, too."""
        if id(tensor) not in self._known:
            self._known.update(map(id, self._loss_module.tensors()))
        return id(tensor) in self._known

    def _take_unseen(self, tensor: torch.Tensor) -> None:
        """Note a tensor that no call has returned. Raises CaptureError for one whose making cannot be followed."""
        line = user_line(sys._getframe(1))
        if torch._C._get_dispatch_mode(torch._C._TorchDispatchModeKey.FAKE) is None:
            raise CaptureError(  # it is let see what a fake tensor does itself
                f"the model or the loss makes a tensor at {line} where PyTorch's tracing cannot follow: in "
                "TorchScript, as a nested tensor, or in a torch.vmap that moves axes; call the Python function without "
                "torch.jit.script, pad what is nested, and write the vmap with broadcasting or torch.einsum"
            )
        transforms = [one.key() for one in get_interpreter_stack() or ()]
        if TransformType.Grad in transforms or (TransformType.Jvp in transforms and len(transforms) > 1):
            raise CaptureError(
                f"the model or the loss differentiates inside of itself at {line}, by a transform of torch.func, which "
                "cannot be captured; write the derivative out with PyTorch's operators, or use torch.func.jvp"
            )
        if isinstance(tensor, FakeTensor) or is_functorch_wrapped_tensor(tensor):
            self._keep(tensor)
            self._from_pixels.add(id(tensor))

    def parts_from(self, other: _Trace) -> str | None:
        """Return the user's line of the first call that is another one in the two; None where all are alike."""
        for one, two in zip_longest(self.calls, other.calls, fillvalue=()):
            if one[1:2] != two[1:2] or not same(one[2:], two[2:]):
                return str((one or two)[0])
        return None


def run_dry(loss_module: LossModule, mode: FakeTensorMode, inputs: Any, outside: list[torch.Tensor]) -> DryRun:
    """Run a copy of the loss module twice on fake inputs. Whatever the runs change in Python is as before afterwards.

    Raises `CaptureError` for what cannot be captured faithfully, and whatever the model or the loss raises.
    """
    _refuse_gradient_hooks(loss_module)
    copy = FakeCopy(loss_module, mode, outside, ())
    copy.adopting = True
    snapshot = Snapshot(Traversal(roots_of(copy.module.model, copy.module.loss)))
    executed = ExecutedCode()
    asking = {name: parameter.requires_grad for name, parameter in copy.module.named_parameters()}
    try:
        first = _Trace(inputs, copy.module)
        copy.trace = first
        with mode, _profiled(executed, snapshot), _buffers_kept(copy.module):
            output = copy.module(*inputs)
        if copy.stopped is not None:  # the model or the loss caught it and went on another way
            raise copy.stopped
        writes = copy.writes.learned
        asks = {name: parameter.requires_grad for name, parameter in copy.module.named_parameters()}
        frozen = tuple(name for name, asked in asking.items() if asked and not asks.get(name, True))
        _refuse_own_gradients(output)
        _refuse_keys(snapshot.traversal, copy, executed)
        changes = [change for change in snapshot.changes() if not copy.stands_for(change.after, change.before)]
        later = Snapshot(snapshot.traversal)
        second: _Trace | None = _Trace(inputs, copy.module, first.kept)
        copy.trace = second
        try:
            with mode, _buffers_kept(copy.module), plain_types(executed.users()):
                copy.module(*inputs)
        except Exception:  # a model may be meant to run once; whether that matters is seen from what it left behind
            second = None
        again = {(_key(change.slot), change.key) for change in later.changes()}
    finally:
        snapshot.restore()
    executed.any_name = executed.any_name or snapshot.traversal.any_name
    differs = "" if second is None else first.parts_from(second)
    alike = differs is None
    carried, left_out = _sorted_out(changes, again, first, executed, differs)
    drawn_from = {id(change.slot.holder) for change in changes if type(change.slot) is RandomSlot}
    return DryRun(
        snapshot,
        executed,
        tuple(copy.closed),
        Effects(carried, _slots(loss_module, executed) if carried else {}, steady=alike and not again),
        {name: made for name, made in _SHARED_GENERATORS.items() if id(made) in drawn_from},
        writes,
        frozen,
        tuple(change.name for change in left_out if type(change.slot) is not CacheSlot),
        copy.asked,
    )


def _sorted_out(
    changes: list[Change], again: set[Any], first: _Trace, executed: ExecutedCode, differs: str | None
) -> tuple[list[Change], list[Change]]:
    """Split changes into those that can be repeated where the model really lives, and others that do not matter.

    What cannot be repeated matters where the second run differed from the first: then it may depend on it. Not on what
    a first run makes and later ones find (a cache), unless that was made of pixels. `differs`: where the two runs part,
    "" for a second run that failed; None where they are alike.
    """
    carried = [c for c in changes if c.slot.restorable and (c.after is MISSING or is_plain(c.after))]
    left_out = [c for c in changes if c not in carried]
    # A context variable that was not set cannot be unset; the second run says whether that matters.
    stuck = next((c for c in left_out if not c.slot.restorable and type(c.slot) is not ContextSlot), None)
    if stuck is not None:
        raise CaptureError(
            f"forward moves on {_tidy(stuck.name)} ({type(stuck.slot.holder).__name__}), which cannot be set back or "
            "repeated; let forward count in a number or draw from a generator that is an attribute of the model"
        )
    if differs is None:
        return carried, left_out
    for change in left_out:
        made_of_pixels = any(first.depends_on_pixels(tensor) for _, tensor in Traversal({"": change.after}).tensors)
        if made_of_pixels or (_key(change.slot), change.key) in again:
            raise CaptureError(
                f"forward keeps {_tidy(change.name)}{_stored_at(executed, change.name)} for its next call, which "
                "cannot be followed while tiles are computed; keep it in a buffer (register_buffer) of the model, or "
                "of a loss that is an nn.Module"
            )
    if not changes:
        raise CaptureError(
            f"the model or the loss does something else each time it is called{differs and f', at {differs}'}, for a "
            "reason that cannot be seen (a clock, a generator of its own, a cache outside, memory that is new each "
            "time); draw with torch, random or numpy.random, keep state in buffers or attributes"
        )
    return carried, left_out


def _stored_at(executed: ExecutedCode, path: str) -> str:
    """Return ` at file:line` of executed code that writes into a slot of this path, as far as its text shows."""
    names = re.findall(r"[^\W\d]\w*", path)
    stores = ("STORE_ATTR", "STORE_GLOBAL", "STORE_DEREF")
    told = [
        (instruction.opname not in stores, -names.index(instruction.argval), f"{code.co_filename}:{positions.lineno}")
        for code, _ in executed.globals.values()
        if is_user_code(code.co_filename)
        for instruction in dis.get_instructions(code)
        if instruction.argval in names and (positions := instruction.positions) is not None
    ]
    return f" at {min(told)[2]}" if told else ""


def _tidy(name: str) -> str:
    for holder in ("_modules", "_buffers", "_parameters"):
        name = name.replace(f".{holder}[", ".[")
    return "'" + name.replace(".['", ".").replace("']", "") + "'"


def _slots(loss_module: LossModule, executed: ExecutedCode) -> dict[Any, Slot]:
    """Return the slots of the loss module itself, by the keys of its copies' slots."""
    traversal = Traversal(roots_of(loss_module.model, loss_module.loss))
    traversal.visit_executed(executed)
    return {_key(slot): slot for slot in traversal.slots}


@contextmanager
def _profiled(executed: ExecutedCode, snapshot: Snapshot) -> Iterator[None]:
    """Note the code that is executed, and extend the snapshot by its globals before it runs for the first time.

    A profiler of the user's goes on, or pauses.
    """
    importing: list[FrameType] = []  # modules that are loaded meanwhile run code that is nobody's forward

    def see(frame: FrameType, event: str, argument: Any) -> None:
        if callable(before):
            before(frame, event, argument)
        if event == "call":
            if frame.f_code.co_name == "forward" and "_higher_order_ops" in frame.f_code.co_filename:
                raise CaptureError(
                    f"torch.cond and other operators that take functions are not captured, as at {user_line(frame)}; "
                    "compute both sides and choose with torch.where(condition, a, b), or loop a fixed number of times"
                )
            if frame.f_code.co_name == "<module>":
                importing.append(frame)
            elif not importing and executed.add(frame):
                with plain.paused():
                    snapshot.traversal.visit_globals(frame.f_code, frame.f_globals)
                    snapshot.extend()
                plain.add(frame.f_code, frame.f_globals)
        elif event == "return" and importing and importing[-1] is frame:
            importing.pop()
        elif event == "c_call":
            _refuse_call(frame, argument)
            if not importing:
                executed.add_call(argument, frame)

    before: Any = sys.getprofile()
    with plain_types() as plain, _profiler(see):
        yield


@contextmanager
def _profiler(see: Callable[[FrameType, str, Any], None]) -> Iterator[None]:
    """Have Python tell a function of calls; a profiler of the user's pauses, unless the function tells it."""
    before: Any = sys.getprofile()
    sys.setprofile(see)
    try:
        yield
    finally:
        if before is None or callable(before):
            sys.setprofile(before)
        else:  # cProfile, before Python 3.12
            before.enable()


def _refuse_call(frame: FrameType, function: Any) -> None:
    """Refuse calls of functions written in C that a graph cannot hold. Raises CaptureError."""
    name = function.__name__
    if name == "run_backward":
        raise own_gradient_error(user_line(frame))
    if name in _NODE_HOOKS and isinstance(function.__self__, GradientNode):
        raise hook_error(user_line(frame))
    if name in _SEEDING and function.__self__ is torch.default_generator:
        raise CaptureError(
            f"the model or the loss sets PyTorch's generator at {user_line(frame)}, which would count while the "
            "graph is made and not in its runs; seed before the engine is called or by gg.compile(seed=...), and "
            "keep numbers that are to be the same in every call in a buffer (register_buffer)"
        )


@contextmanager
def _buffers_kept(module: torch.nn.Module) -> Iterator[None]:
    """Put the buffers back that were replaced: the graph has their new values as updates."""
    held = [(part._buffers, dict(part._buffers)) for name, part in module.named_modules() if name != CLOSED]
    try:
        yield
    finally:
        for buffers, before in held:
            buffers.clear()
            buffers.update(before)


def _refuse_gradient_hooks(loss_module: LossModule) -> None:
    for name, part in loss_module.named_modules():
        if any(getattr(part, hooks) for hooks in _GRADIENT_HOOKS):
            raise CaptureError(
                f"'{name.removeprefix('model.')}' has a backward hook, which would see tiles, not the image; remove it "
                "(gradients of parameters can be changed by hooks on the parameters, or after backward)"
            )


def _missing(node: Any) -> str:
    try:
        node(None)
    except RuntimeError as error:
        return str(error).removesuffix(" is not implemented")
    return "derivative of an operator"


def _refuse_keys(traversal: Traversal, copy: FakeCopy, executed: ExecutedCode) -> None:
    """Refuse dictionaries whose keys are parameters or buffers: export puts others in their places."""
    own = {id(tensor) for tensor in copy.module.tensors()}
    for where, tensor in traversal.tensors:
        held = where.removesuffix(KEY)
        known = id(tensor) in own or copy.is_original(tensor)
        if held != where and known and executed.reads(held.rpartition(".")[2].partition("[")[0]):
            raise CaptureError(
                f"{_tidy(held)} is a dictionary whose keys are parameters or buffers of the model, and a copy of the "
                "model is traced; let its keys be names"
            )


def _refuse_own_gradients(output: Any) -> None:
    """Refuse an `autograd.Function`: tracing follows its forward and never learns of its backward.

    Operators registered with PyTorch (`torch.library.custom_op`) stay operators, whose backward goes with them.
    """
    stack = [tensor.grad_fn for tensor in tensors_in(output)]
    seen = set()
    while stack:
        node = stack.pop()
        if node is None or node in seen:
            continue
        seen.add(node)
        name = type(node).__name__.removesuffix("Backward")
        if name == "NotImplemented":
            raise CaptureError(f"PyTorch has no {_missing(node)}; let it read what is detached, y.detach()")
        if isinstance(node, torch.autograd.function.BackwardCFunction) and not name.startswith(_REGISTERED):
            raise CaptureError(
                f"the model or the loss uses the autograd.Function '{name}', whose own backward cannot be captured; "
                "write it with PyTorch's operators (a straight-through estimator is x + (y - x).detach())"
            )
        stack.extend(follower for follower, _ in node.next_functions)
