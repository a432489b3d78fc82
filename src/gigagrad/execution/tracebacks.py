"""Clear tracebacks, which keep the locals of every frame in them, for as long as somebody holds them."""

from __future__ import annotations

import traceback
from collections.abc import Callable, Generator
from contextlib import suppress
from functools import partial, wraps
from typing import ParamSpec, TypeVar

from gigagrad.threads import uninterrupted

_EMPTIED = {__name__.partition(".")[0], "contextlib"}
"""Modules whose frames hold what a run holds: ours, and those that enter and leave our contexts."""

Given = ParamSpec("Given")
Made = TypeVar("Made")
Item = TypeVar("Item")


def lets_go(call: Callable[Given, Made]) -> Callable[Given, Made]:
    """Wrap a call so that its exceptions keep nothing that it opened: an image, say, that Ctrl-C lets nobody have and
    close.
    """

    @wraps(call)
    def emptied(*args: Given.args, **kwargs: Given.kwargs) -> Made:
        try:
            return call(*args, **kwargs)
        except BaseException as error:
            uninterrupted(partial(empty_frames, error))
            raise

    return emptied


def stream_lets_go(
    stream: Callable[Given, Generator[Item, None, None]],
) -> Callable[Given, Generator[Item, None, None]]:
    """Wrap a generator likewise."""

    @wraps(stream)
    def emptied(*args: Given.args, **kwargs: Given.kwargs) -> Generator[Item, None, None]:
        try:
            yield from stream(*args, **kwargs)
        except GeneratorExit:
            raise
        except BaseException as error:
            uninterrupted(partial(empty_frames, error))
            raise

    return emptied


def empty_frames(error: BaseException) -> None:
    """Empty our own frames in the error's traceback, and in those of its causes, of their locals: crops of tiles, and
    views that keep whole fields. Frames that still run, and those of anybody else's code, stay as they are.
    """
    waiting: list[BaseException | None] = [error]
    seen: set[int] = set()
    while waiting:
        one = waiting.pop()
        if one is None or id(one) in seen:
            continue
        seen.add(id(one))
        waiting += [one.__cause__, one.__context__]
        for frame, _ in traceback.walk_tb(one.__traceback__):
            if frame.f_globals.get("__name__", "").partition(".")[0] in _EMPTIED:
                with suppress(RuntimeError):  # it still runs
                    frame.clear()
