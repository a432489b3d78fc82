"""What a traceback keeps: the locals of every frame in it, for as long as somebody holds it."""

from __future__ import annotations

import traceback
from contextlib import suppress

_OURS = __name__.partition(".")[0]


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
            if frame.f_globals.get("__name__", "").partition(".")[0] == _OURS:
                with suppress(RuntimeError):  # it still runs
                    frame.clear()
