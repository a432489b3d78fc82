"""PyTorch's own state while a model is traced, as it was before whatever happens.

Tracing pushes modes onto stacks and takes them off for a moment. An interrupt (Ctrl-C) between the two leaves a stack
as it is just then; some of PyTorch's own context managers fail on their way out and hide the interrupt behind an error
of theirs; and whatever is traced afterwards meets the modes that were left.
"""

from __future__ import annotations

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
"""Of each stack of modes: what is on it, how to take off the last one, how to put one on. Of the first only how many
there are can be asked; outside of PyTorch's tracing there are none."""


@contextmanager
def torch_state_kept() -> Iterator[None]:
    """Modes, dispatch keys and the generator of random numbers as they were, and an interrupt comes out as one."""
    modes = [read() for read, _, _ in _STACKS]
    keys = torch._C._dispatch_tls_local_include_set(), torch._C._dispatch_tls_local_exclude_set()
    with torch._C._ForceDispatchKeyGuard(*keys), torch.random.fork_rng(devices=[]):
        try:
            yield
        except BaseException as error:
            for (read, pop, push), before in zip(_STACKS, modes, strict=True):
                _restore(read, pop, push, before)
            if (interrupt := _interrupt_behind(error)) is not None and interrupt is not error:
                raise interrupt from None
            raise


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
    """What is no error and was raised first of all: Ctrl-C, the end of a process."""
    while error is not None:
        if not isinstance(error, Exception):
            return error
        error = error.__cause__ or error.__context__
    return None
