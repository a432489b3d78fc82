"""Ctrl-C, SIGTERM and SIGHUP in a process of our own: each ends the command, whoever swallows what it raises.

A signal becomes an exception in the main thread between any two instructions of Python, and not everybody passes it on:
a finalizer's is printed and dropped, an import may make an ImportError of it, a library may catch whatever comes. So an
interrupt is raised again until it is being dealt with: until `sys.exc_info` leads to it.

While modules are imported, nothing is raised. Before a command begins with its work there is nothing to clean up, and
the process ends at once; later, the import comes to its end first.
"""

from __future__ import annotations

import _thread
import os
import signal
import sys
import time
from types import FrameType
from typing import Final

INTERRUPTED: Final = "interrupted; give the same command again to go on from what is finished"
EXIT_CODE: Final = 130
_NAMES: Final = "SIGINT", "SIGTERM", "SIGHUP"
_AGAIN_SECONDS: Final = 0.1
_IMPORT_SECONDS: Final = 2.0
"""An import that takes longer is interrupted: a module of the user's may do anything."""
_IMPORTS: Final = "importlib._bootstrap"
_BEFORE_WORK: Final = "__main__", "runpy", "contextlib", "pkgutil", "importlib", "gigagrad.cli"
"""Modules whose functions have only begun to look for what is to be done."""


def is_first() -> bool:
    """Return whether this process speaks for those that were started together: rank 0, or the only one."""
    return os.environ.get("RANK", "0") == "0"


class Interrupts:
    """From `heed` to `end`, signals interrupt the process."""

    def __init__(self) -> None:
        self.came = self.over = False
        self._since = 0.0
        self._raised: BaseException | None = None
        self._reminds = False

    def heed(self) -> None:
        """Take the signals; those that are ignored (nohup, background jobs of a shell) stay so."""
        for name in _NAMES:
            number = getattr(signal, name, None)
            if number is not None and signal.getsignal(number) is not signal.SIG_IGN:
                signal.signal(number, self._take)
        say = sys.unraisablehook
        sys.unraisablehook = lambda told: None if issubclass(told.exc_type, KeyboardInterrupt) else say(told)

    def end(self) -> None:
        """Ignore signals from now on. Python takes its time to end, and what was done is done."""
        self.over = True
        for name in _NAMES[1:]:
            number = getattr(signal, name, None)
            if not self.came and number is not None and signal.getsignal(number) == self._take:
                signal.signal(number, signal.SIG_IGN)

    def _take(self, number: int, frame: FrameType | None) -> None:
        """Raise KeyboardInterrupt. A person's second Ctrl-C also ends what the first one left to do; a scheduler, and
        torchrun beside the terminal, say the same thing several times.
        """
        insists, self._reminds = number == signal.SIGINT and not self._reminds, False
        if self.over:
            if insists:
                os._exit(EXIT_CODE)
            return
        if self._is_dealt_with() and not insists:
            return
        if not self.came:
            self.came, self._since = True, time.monotonic()
            _thread.start_new_thread(self._remind, (number, _thread.get_ident()))
        modules = _modules(frame)
        if _IMPORTS in modules:
            before = modules[: modules.index(_IMPORTS)]
            if all(module.startswith(_BEFORE_WORK) for module in before):
                _leave()
            if time.monotonic() - self._since < _IMPORT_SECONDS:
                return
        self._raised = KeyboardInterrupt()
        raise self._raised

    def _is_dealt_with(self) -> bool:
        """Return whether the main thread is handling the interrupt just now: `sys.exc_info` leads to it."""
        error = sys.exc_info()[1]
        while error is not None and error is not self._raised:
            error = error.__context__
        return error is not None

    def _remind(self, number: int, main: int) -> None:
        time.sleep(_AGAIN_SECONDS)
        while not self.over:
            self._reminds = True
            if hasattr(signal, "pthread_kill"):  # which ends waiting in the system, too
                signal.pthread_kill(main, number)
            else:
                _thread.interrupt_main(signal.Signals(number))
            time.sleep(_AGAIN_SECONDS)


def _modules(frame: FrameType | None) -> list[str]:
    """Return those of the functions that are being called, the outermost first."""
    found: list[str] = []
    while frame is not None:
        imports = _IMPORTS in frame.f_code.co_filename
        found.append(_IMPORTS if imports else frame.f_globals.get("__name__", ""))
        frame = frame.f_back
    return found[::-1]


def _leave() -> None:
    """End the process as it is: what is being imported may be in any state."""
    if is_first():
        os.write(2, f"gigagrad: {INTERRUPTED}\n".encode())
    os._exit(EXIT_CODE)
