"""`gigagrad COMMAND ...`: run one command and turn whatever happens into an exit code and at most one line of text.

Everything that a command does is done elsewhere and can be called from Python.

    0    done
    1    a fault of gigagrad's own; `gigagrad --traceback COMMAND ...` shows where
    2    something the user can mend: the line on standard error says what was found, what is expected and what to do
    130  interrupted, by Ctrl-C, SIGTERM or SIGHUP

Progress and results go to standard output, so that standard error holds nothing but that line and warnings. Of several
processes that were started together one speaks: the first, or whichever failed.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from gigagrad.cli.interrupts import EXIT_CODE, Interrupts

if TYPE_CHECKING:
    from collections.abc import Sequence

__all__ = ["main"]


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line `argv` (by default the process's own) and return the exit code."""
    interrupts = Interrupts()
    try:
        if argv is None:  # a process of ours: at a scheduler's time limit, or with its terminal, it leaves as at Ctrl-C
            interrupts.heed()
        from gigagrad.cli.running import run, settle_streams  # takes long enough to be interrupted

        if argv is None:
            settle_streams()
        return run(argv, interrupts)
    except KeyboardInterrupt:  # beside the command
        interrupts.end()
        return EXIT_CODE
