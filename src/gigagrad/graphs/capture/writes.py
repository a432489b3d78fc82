"""Put into a traced graph what in-place writes mean to autograd: it has neither grad modes nor shared memory.

PyTorch changes values and leaves the graph of gradients alone where a tensor is written under `no_grad`, through a
`detach()`ed alias or through `.data`. An exported graph knows values only, so each such write becomes a new value whose
gradient goes to the tensor as it was before: `with_value(tracked, value)`.

A first run on fake tensors tells which arguments of which call are written (`Writes.learned`), a second one is traced
by it. In both autograd itself, and memory that tensors share, are PyTorch's own.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.nn.functional as F
from torch.utils._pytree import tree_leaves, tree_map_only

from gigagrad.errors import CaptureError
from gigagrad.graphs.capture.constants import tensors_in
from gigagrad.graphs.capture.stand_ins import Checkpoints

_LIBRARY: Any = torch.library.Library("gigagrad", "DEF")  # type: ignore[no-untyped-call]
_LIBRARY.define("with_value(Tensor tracked, Tensor value) -> Tensor")
_LIBRARY.impl("with_value", lambda tracked, value: value.clone(), "CompositeExplicitAutograd")
torch.library.register_fake("gigagrad::with_value", lambda tracked, value: torch.empty_like(value), lib=_LIBRARY)
torch.library.register_autograd("gigagrad::with_value", lambda ctx, gradient: (gradient, None), lib=_LIBRARY)
_with_value: Callable[[torch.Tensor, torch.Tensor], torch.Tensor] = torch.ops.gigagrad.with_value

_GET_DATA, _SET_DATA = torch.Tensor.data.__get__, torch.Tensor.data.__set__  # type: ignore[attr-defined]
_DETACHING = frozenset({torch.Tensor.detach, torch.Tensor.detach_, torch.detach, torch.detach_, _GET_DATA})
_ASKS = (torch.Tensor.requires_grad_, torch.Tensor.requires_grad.__set__)  # type: ignore[attr-defined]
_WRITING_STATISTICS = frozenset({F.batch_norm, torch.batch_norm})  # their schemas do not say so
_RESHAPING: dict[Any, Any] = {
    getattr(torch.Tensor, f"{name}_"): getattr(torch.Tensor, name)
    for name in ("squeeze", "unsqueeze", "transpose", "t", "swapaxes", "swapdims")
}
_OWN_GRADIENTS = frozenset({torch.autograd.grad, torch.autograd.backward, torch.Tensor.backward})


Call = tuple[Any, str, int]
"""A function of PyTorch, the user's line that leads to it, and how often both have come: export's own calls differ."""


@dataclass(slots=True)
class Learned:
    """Findings of a run on fake tensors that the next one needs."""

    written: dict[Call, tuple[int, ...]] = field(default_factory=dict)
    """Which of its tensors a call of PyTorch writes into; calls that write nothing are left out."""
    apart: set[Call] = field(default_factory=set)
    """The calls whose detached result gets a gradient of its own later, by an in-place write."""
    runs_again: bool = False
    """True if checkpointed functions were run again for what they write."""
    irregular: bool = False
    """True if anything is written that autograd does not see."""


class Writes:
    """Run calls of PyTorch; an earlier run tells which of them write, so that a trace of them has their gradients."""

    def __init__(self, known: Learned | None, asking: dict[int, bool], buffers: set[int]) -> None:
        """`asking`: by id of every parameter, whether it asks for a gradient. `buffers`: ids of the model's."""
        self.learned = Learned()
        self._known = known
        self._asking = asking
        self._buffers = buffers
        self.checkpoints = Checkpoints()
        self._failed = False
        self._calls = Counter[tuple[Any, str]]()
        self.line = ""
        """The user's line that makes the next call."""
        self._instead: dict[int, torch.Tensor] = {}
        """Tensors by the ids of those whose memory was exchanged, or that were detached in place, as they are now."""
        self._alias_of: dict[int, torch.Tensor] = {}
        """Views of tensors that autograd knows, by the ids of the same views of aliases that it knows nothing of."""
        self._family: dict[int, Call] = {}
        """The calls that made such aliases, or that of which they are views, by the ids of the aliases."""
        self._apart: set[int] = set()
        """Ids of aliases in memory of their own."""
        self._made_of: dict[Call, tuple[int, int]] = {}
        """The memory that an alias shares, and how many writes there were before, by the call that made it."""
        self._strided: set[int] = set()
        """Ids of views that `as_strided` made."""
        self._viewed: set[int] = set()
        """Memory of which there are views."""
        self._written: list[tuple[int, Call | None, str]] = []
        """Every write so far: into which memory, through which alias, where."""
        self.exchanged: dict[int, torch.Tensor] = {}
        """Tensors by the ids of those that have become them by `.data = `."""
        self._given_away: dict[int, str] = {}
        """Memory that came to a tensor by `.data = `, and where."""
        self._kept: list[Any] = []  # no other tensor gets an id that is in use here

    def current(self, value: Any) -> Any:
        """Return a tensor as it is now, where it is another than the object that stands for it; in nests too."""
        return _replaced(value, self._instead)

    def __call__(self, func: Any, args: Any, kwargs: Any) -> Any:
        """Return the result of `func(*args, **kwargs)`."""
        if self._failed:  # what code does on its way out of an error
            return func(*args, **kwargs)
        try:
            with torch.no_grad() if getattr(func, "__module__", "") == "torch.nn.init" else nullcontext():
                return self._call(func, args, kwargs)
        except CaptureError:
            self._failed = True
            raise

    def _call(self, func: Any, args: Any, kwargs: Any) -> Any:
        if func in _OWN_GRADIENTS:
            raise own_gradient_error(self.line)
        if func in _ASKS:
            return self._ask(func, args, kwargs)
        given, (args, kwargs) = tree_leaves((args, kwargs)), self.current((args, kwargs))
        number, leaves = self._call_of(func), tensors_in((args, kwargs))
        versions, tracked = [_version(leaf) for leaf in leaves], [leaf.requires_grad for leaf in leaves]
        written = self._known.written.get(number, ()) if self._known is not None else ()
        if func == _SET_DATA:
            result = None
            self._exchange(given[0], leaves, args[1])
        elif func in (torch.Tensor.detach_, torch.detach_):
            result = self._detach_in_place(given[0], leaves[0])
        elif func == _GET_DATA:
            result = leaves[0].detach()
        elif func in _RESHAPING:
            result = self._reshape_in_place(func, given[0], args, kwargs)
        elif self._known is None:
            result = func(*args, **kwargs)
            written = _written(leaves, versions, _named_as_written(func, args, kwargs))
        elif written:
            result = self._traced_write(func, args, kwargs, [leaves[i] for i in written])
        else:
            result = self._traced(func, args, kwargs)
        if getattr(func, "__name__", "") == "as_strided":
            self._strided.add(id(result))
        if written:
            self.learned.written[number] = written
        into = [leaves[index] for index in written] or (leaves if func in _WRITING_STATISTICS else [])
        if not self._buffers.isdisjoint(map(id, into)):
            self.checkpoints.note_write()
        for index in written:
            self._note_write(leaves[index], tracked[index])
        if func != _SET_DATA:
            result = self._note_aliases(number, func, (args, kwargs), leaves, result)
        self._kept.append((given, leaves, result))
        return given[0] if func in (torch.Tensor.detach_, torch.detach_) else result

    def finish(self) -> None:
        """Complete what was learned. Raises CaptureError for a write that cannot be followed."""
        self.learned.runs_again = self.checkpoints.ran_again
        for number in self.learned.apart:
            memory, before = self._made_of[number]
            for where, family, line in self._written[before:]:
                if where == memory and family != number:
                    raise CaptureError(
                        f"a tensor is written in place{at(line)} that shares its memory with a detached one which is "
                        "written, too, and gets a gradient of its own; detach a copy: x.detach().clone()"
                    )

    def _ask(self, func: Any, args: Any, kwargs: Any) -> Any:
        """Run `requires_grad_`: a parameter that is frozen for a while is used without its gradient."""
        tensor, result = args[0], func(*args, **kwargs)
        asked = self._asking.get(id(tensor))
        if asked is False and tensor.requires_grad:
            raise CaptureError(
                f"forward makes a parameter ask for a gradient{at(self.line)} that did not before; call "
                "requires_grad_() outside of forward"
            )
        if asked and not tensor.requires_grad:
            self._instead[id(tensor)] = tensor.detach()
        elif asked:
            self._instead.pop(id(tensor), None)
        return result

    def _call_of(self, func: Any) -> Call:
        self._calls[func, self.line] += 1
        return func, self.line, self._calls[func, self.line]

    def _traced(self, func: Any, args: Any, kwargs: Any) -> Any:
        """Run a call without gradients where autograd would make none: a graph has no grad mode."""
        if torch.is_grad_enabled():
            return func(*args, **kwargs)
        cut: dict[int, torch.Tensor] = {}

        def detached(tensor: torch.Tensor) -> torch.Tensor:
            known = id(tensor) in self._alias_of or id(tensor) in self._buffers
            if known or not (tensor.is_floating_point() or tensor.is_complex()):
                return tensor
            return cut.setdefault(id(tensor), tensor.detach())

        cut_args, cut_kwargs = tree_map_only(torch.Tensor, detached, (args, kwargs))
        whole = {id(cut[id(leaf)]): leaf for leaf in tensors_in((args, kwargs)) if id(leaf) in cut}
        return _replaced(func(*cut_args, **cut_kwargs), whole)

    def _traced_write(self, func: Any, args: Any, kwargs: Any, written: list[torch.Tensor]) -> Any:
        """Run an in-place write as it is where autograd follows it, else on copies whose values are then taken over."""
        grad = torch.is_grad_enabled()
        unseen = [w for w in written if not grad or (id(w) in self._alias_of and id(w) not in self._apart)]
        copies = {id(w): w.detach().clone() for w in unseen}
        args, kwargs = _replaced((args, kwargs), copies)
        result = func(*args, **kwargs) if grad else self._traced(func, args, kwargs)
        if unseen or any(id(w) in self._apart for w in written):
            with torch.no_grad():
                self._take_over({id(w): w for w in unseen}, copies, written)
        return _replaced(result, {id(copies[id(w)]): w for w in unseen})

    def _take_over(
        self, unseen: dict[int, torch.Tensor], copies: dict[int, torch.Tensor], written: list[torch.Tensor]
    ) -> None:
        """Give the tensors that autograd knows the values of the copies, and their own gradients."""
        for w in unseen.values():
            seen = w if id(w) in self._apart else self._alias_of.get(id(w), w)
            if copies[id(w)].shape != seen.shape:
                raise CaptureError(
                    f"a tensor's shape is changed in place{at(self.line)} where autograd does not see it; make "
                    "a new tensor: y = y.squeeze()"
                )
            seen.copy_(_with_value(seen, copies[id(w)]))
        for w in written:
            if id(w) in self._apart:
                seen = self._alias_of[id(w)]
                seen.copy_(_with_value(seen, w.detach()))

    def _exchange(self, tensor: torch.Tensor, leaves: list[torch.Tensor], value: Any) -> None:
        """Run `tensor.data = value`: other values in other memory, the same gradient."""
        now, where = leaves[0], at(self.line)
        if not isinstance(value, torch.Tensor) or (value.shape, value.dtype) != (now.shape, now.dtype):
            raise CaptureError(f"`.data` is set to another shape or dtype{where}; make a new tensor instead")
        with torch.enable_grad():
            made: torch.Tensor = _with_value(now, value.detach())
            made = made if now.requires_grad else made.detach()
        self._instead[id(tensor)] = self.exchanged[id(tensor)] = made
        self._given_away.update({_memory(value): where, _memory(made): where})

    def _detach_in_place(self, tensor: torch.Tensor, now: torch.Tensor) -> torch.Tensor:
        if id(tensor) in self._instead:
            return now if not now.requires_grad else now.detach()
        if now._is_view() or _memory(now) in self._viewed:
            raise CaptureError(f"a tensor that has views is detached in place{at(self.line)}; use detach()")
        self._instead[id(tensor)] = now.detach()
        return self._instead[id(tensor)]

    def _reshape_in_place(self, func: Any, tensor: torch.Tensor, args: Any, kwargs: Any) -> Any:
        """Run `unsqueeze_` or its kin, which write no value: from now on another view stands for the tensor."""
        if self._known is None:
            return func(*args, **kwargs)
        with torch.enable_grad() if args[0].requires_grad else nullcontext():
            self._instead[id(tensor)] = _RESHAPING[func](*args, **kwargs)
        return tensor

    def _note_write(self, tensor: torch.Tensor, tracked: bool) -> None:
        family, memory, line = self._family.get(id(tensor)), _memory(tensor), self.line
        if id(tensor) in self._strided:
            raise CaptureError(
                f"a tensor is written in place through as_strided{at(line)}, which reaches into memory by numbers; "
                "write through slices, or by places: y[..., rows, columns] = values"
            )
        if memory in self._given_away:
            raise CaptureError(
                f"a tensor is written in place{at(line)} whose memory was given to another by `.data = `"
                f"{self._given_away[memory]}; write into a clone"
            )
        grad = torch.is_grad_enabled()
        if grad and tensor.requires_grad and tensor.is_leaf:
            raise CaptureError(
                f"a parameter is written in place{at(line)} inside of a function that computes gradients (max_norm of "
                "an embedding?); write it under torch.no_grad() before"
            )
        if grad and tensor.requires_grad and not tracked and family is not None:
            self.learned.apart.add(family)
        self.learned.irregular |= not grad or family is not None
        self._written.append((memory, family, line))

    def _note_aliases(self, number: Call, func: Any, given: Any, leaves: list[torch.Tensor], result: Any) -> Any:
        """Note results that share memory with an argument behind autograd's back. Returns the result to go on with."""
        if self._known is not None and not self._known.irregular:
            return result
        detaching = func in _DETACHING
        for position, made in enumerate(tree_leaves(result)):
            if not isinstance(made, torch.Tensor) or func in _RESHAPING or any(made is leaf for leaf in leaves):
                continue
            memory = _memory(made)
            source = next((leaf for leaf in leaves if memory and _memory(leaf) == memory), None)
            if source is not None:
                self._viewed.add(memory)
            if source is None or (not detaching and torch.is_grad_enabled() and id(source) not in self._family):
                continue
            if detaching or not torch.is_grad_enabled():
                self._family[id(made)] = number
                self._made_of[number] = memory, len(self._written)
            else:
                self._family[id(made)] = self._family[id(source)]
            if self._known is None:
                continue
            if number in self._known.apart and detaching:
                copy = made.detach().clone()
                result = _replaced(result, {id(made): copy})
                self._instead.update({key: copy for key, value in self._instead.items() if value is made})
                self._family[id(copy)] = number
                self._apart.add(id(copy))
                made = copy
            elif id(source) in self._apart:
                self._apart.add(id(made))
            self._alias_of[id(made)] = self._seen_view(func, given, source, position, detaching=detaching)
        return result

    def _seen_view(
        self, func: Any, given: Any, source: torch.Tensor, position: int, *, detaching: bool
    ) -> torch.Tensor:
        """Return the view that autograd would know, had the alias not been made behind its back."""
        seen = self._alias_of.get(id(source), source)
        if detaching:
            return seen
        with torch.no_grad():  # the graph has no grad mode, and PyTorch refuses to write into some views in the other
            args, kwargs = _replaced(given, {id(source): seen})
            view = tree_leaves(func(*args, **kwargs))[position]
        assert isinstance(view, torch.Tensor)
        return view


def own_gradient_error(line: str) -> CaptureError:
    return CaptureError(
        f"the model or the loss computes gradients itself{at(line)} (torch.autograd.grad or backward), which would "
        "have to be differentiated through the whole image; gigagrad computes the gradient of the loss: call "
        "engine.backward for each loss, and combine the gradients afterwards"
    )


def _written(leaves: list[torch.Tensor], versions: list[int], named: list[torch.Tensor]) -> tuple[int, ...]:
    """Return the tensors that a call wrote. Aliases count versions together: the one that is named, or the first."""
    ids = {id(leaf) for leaf in named}
    written = [i for i, leaf in enumerate(leaves) if id(leaf) in ids]
    known = {_memory(leaves[i]) for i in written}
    for i, leaf in enumerate(leaves):
        if _version(leaf) != versions[i] and _memory(leaf) not in known:
            known.add(_memory(leaf))
            written.append(i)
    return tuple(sorted(written))


def _named_as_written(func: Any, args: Any, kwargs: Any) -> list[torch.Tensor]:
    """Return the tensors that a call writes by its name: lists, and all in inference mode, count no versions."""
    name = getattr(func, "__name__", "")
    in_place = name.endswith("_") and not name.endswith("__") and name not in ("requires_grad_", "detach_")
    return tensors_in(([*args[:1]] if in_place else [], kwargs.get("out")))


def at(line: str) -> str:
    """Say where, if that is known."""
    return f" at {line}" if line else ""


def _replaced(values: Any, by_id: dict[int, torch.Tensor]) -> Any:
    if not by_id:
        return values
    return tree_map_only(torch.Tensor, lambda tensor: by_id.get(id(tensor), tensor), values)


def _version(tensor: torch.Tensor) -> int:
    return 0 if tensor.is_inference() else tensor._version


def _memory(tensor: torch.Tensor) -> int:
    """Identify the memory that a tensor lies in; 0 for one that has none."""
    try:
        memory: int = tensor.untyped_storage()._cdata
        return memory
    except (NotImplementedError, RuntimeError):
        return 0
