"""`gigagrad COMMAND ...`: run one command and turn whatever happens into an exit code and at most one line of text.

    0    done
    1    a fault of gigagrad's own; `gigagrad --traceback COMMAND ...` shows where
    2    something the user can mend: the line on standard error says what was found, what is expected and what to do
    130  interrupted, by Ctrl-C or SIGTERM

Progress and results go to standard output, so that standard error holds nothing but that line and warnings. Of several
processes that were started together one speaks: the first, or whichever failed.
"""

from __future__ import annotations

import json
import os
import signal
import sys
import time
import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path

from gigagrad.cli.parser import build_parser
from gigagrad.devices.heap import before_pytorch
from gigagrad.errors import GigagradError, RankError
from gigagrad.ranks import is_first


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line `argv` (by default the process's own) and return the exit code."""
    parsed = traceback = False
    before_pytorch(own_process=True)
    if argv is None:  # a process of ours: at a scheduler's time limit it leaves as at Ctrl-C
        signal.signal(signal.SIGTERM, signal.default_int_handler)
    try:
        args = build_parser().parse_args(argv)
        parsed, traceback = True, args.traceback
        with _warnings_in_one_line():
            args.command(args)
            sys.stdout.flush()
    except KeyboardInterrupt:
        text = "interrupted; give the same command again to go on from what is finished"
        return _complain(text if is_first() else "", 130)
    except BrokenPipeError:
        # Whoever read our output has seen enough; Python would complain once more when it flushes at the end.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 0
    except Exception as error:  # a traceback never reaches someone at the command line
        if traceback:
            raise
        text, code = _in_words(error)
        return _complain(text if parsed or is_first() else "", code)
    return 0


def _in_words(error: Exception) -> tuple[str, int]:
    """The line and the exit code for what ended a command; no line where another process says it."""
    match error:
        case RankError(told=True):
            return "", 2 if error.mendable else 1
        case GigagradError():
            return f"error: {error}", 2
        case OSError():
            where = f"{error.filename}: " if error.filename else ""
            return f"error: {where}{error.strerror or error}", 2
        case MemoryError():
            return "error: out of memory; give a smaller budget with --memory or close other programs", 2
    reported = "please report it with the output of 'gigagrad --traceback ...'"
    return f"internal error: {type(error).__name__}: {error}; {reported}", 1


def _complain(text: str, code: int) -> int:
    """Say `text`, if there is any, in one line, whatever is in it, and return the exit code."""
    # A file's name or content may stand in it, and must not steer the terminal.
    shown = "".join(letter if letter.isprintable() else "?" for letter in " ".join(text.split()))
    if shown:
        print(f"gigagrad: {shown}", file=sys.stderr)
        if code and (path := os.environ.get("TORCHELASTIC_ERROR_FILE")):
            _leave_for_torchrun(Path(path), f"gigagrad: {shown}")
    return code


def _leave_for_torchrun(path: Path, text: str) -> None:
    """What its summary is to say instead of how to get a traceback."""
    told = {"message": text, "extraInfo": {"timestamp": str(int(time.time()))}}
    with suppress(OSError):  # it has been said anyway
        path.write_text(json.dumps({"message": told}))


@contextmanager
def _warnings_in_one_line() -> Iterator[None]:
    """Our own warnings as `gigagrad: warning: ...`; those of libraries are for developers, who pass `python -W`."""
    from gigagrad.images.resolution import GuessedResolutionWarning

    def show(message: Warning | str, *rest: object, **named: object) -> None:
        _complain(f"warning: {message}", 0)

    with warnings.catch_warnings():
        if not sys.warnoptions:
            warnings.simplefilter("ignore")
            warnings.simplefilter("default", GuessedResolutionWarning)
        warnings.showwarning = show
        yield
