"""Keep the state of PyTorch and of Python as it was, whatever happens while a model is traced.

Tracing pushes modes onto stacks and takes them off for a moment. An interrupt (Ctrl-C) between the two leaves a stack
as it is just then; some of PyTorch's own context managers fail on their way out and hide the interrupt behind an error
of theirs; and whatever is traced afterwards meets the modes that were left.
"""

from __future__ import annotations

import builtins
import gc
import logging
import math
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import _ops, overrides
from torch.utils import _python_dispatch as dispatch

_STACKS: tuple[tuple[Callable[[], list[Any]], Callable[[], Any], Callable[[Any], Any]], ...] = (
    (
        lambda: [None] * _ops._len_torch_dispatch_stack_pre_dispatch(),  # type: ignore[no-untyped-call]
        _ops._pop_mode_from_pre_dispatch,
        _ops._set_mode_pre_dispatch,
    ),
    (dispatch._get_current_dispatch_mode_stack, dispatch._pop_mode, dispatch._push_mode),
    (overrides._get_current_function_mode_stack, overrides._pop_mode, overrides._push_mode),
)
"""Three functions for each stack of modes: one lists it, one takes off the last mode, one puts a mode on. Of the first
only the length can be asked; outside of PyTorch's tracing it is empty."""
_EXCHANGED = (builtins, "max", builtins.max), (builtins, "min", builtins.min), (math, "pow", math.pow)
"""Functions of Python that export exchanges while it traces."""


@contextmanager
def state_kept() -> Iterator[None]:
    """Restore PyTorch's modes, dispatch keys and generator and Python's functions; let an interrupt out as one.

    Code that `torch.compile` has compiled runs as it was written meanwhile, and no garbage is collected: what that
    calls is nobody's forward, and there is little of it, but much to look through.
    """
    modes = [read() for read, _, _ in _STACKS]
    keys = torch._C._dispatch_tls_local_include_set(), torch._C._dispatch_tls_local_exclude_set()
    config = torch._dynamo.config.patch(error_on_nested_fx_trace=False)
    collecting = gc.isenabled()
    gc.disable()
    try:
        with torch._C._ForceDispatchKeyGuard(*keys), torch.random.fork_rng(devices=[]):
            try:
                with torch.compiler.set_stance("force_eager"), config:
                    yield
            except BaseException as error:
                for (read, pop, push), before in zip(_STACKS, modes, strict=True):
                    _restore(read, pop, push, before)
                if (interrupt := _interrupt_behind(error)) is not None and interrupt is not error:
                    raise interrupt from None
                raise
    finally:
        for holder, name, function in _EXCHANGED:
            setattr(holder, name, function)
        if collecting:
            gc.enable()


def _restore(
    read: Callable[[], list[Any]], pop: Callable[[], Any], push: Callable[[Any], Any], before: list[Any]
) -> None:
    if list(map(id, now := read())) == list(map(id, before)):
        return
    for _ in now:
        pop()
    for mode in before:
        push(mode)


def _interrupt_behind(error: BaseException | None) -> BaseException | None:
    """Return the cause that was raised first if it is no error: Ctrl-C, or the end of a process."""
    while error is not None:
        if not isinstance(error, Exception):
            return error
        error = error.__cause__ or error.__context__
    return None


@contextmanager
def quietly() -> Iterator[None]:
    """Silence torch.export: it warns about its own internals, and logs the traceback of what becomes our error."""
    logger = logging.getLogger("torch._subclasses.fake_tensor")
    level = logger.level
    logger.setLevel(logging.CRITICAL)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        logger.setLevel(level)
