"""One command: parse, call, and a line of text for whatever ends it."""

from __future__ import annotations

import json
import logging
import os
import sys
import time
import warnings
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path

from gigagrad.cli.flags import build_parser
from gigagrad.cli.interrupts import EXIT_CODE, INTERRUPTED, Interrupts, is_first
from gigagrad.devices.heap import before_pytorch
from gigagrad.errors import ConfigError, GigagradError, RankError, WriteError
from gigagrad.files import DISK_FULL


def run(argv: Sequence[str] | None, interrupts: Interrupts) -> int:
    """Run a command line and return the exit code."""
    parsed = traceback = False
    before_pytorch(own_process=True)
    try:
        _check_folder()
        args = build_parser(argv).parse_args(argv)
        parsed, traceback = True, args.traceback
        with _warnings_in_one_line():
            args.command(args)
            sys.stdout.flush()
    except KeyboardInterrupt:
        interrupts.end()
        return _complain(INTERRUPTED if is_first() else "", EXIT_CODE)
    except BrokenPipeError:
        interrupts.end()
        _drop_output()  # whoever read it has seen enough
        return 0
    except Exception as error:  # a traceback never reaches someone at the command line
        if traceback:
            raise
        text, code = _in_words(error)
        if interrupts.came and not isinstance(error, WriteError):  # what somebody has made of the interrupt
            text, code = INTERRUPTED, EXIT_CODE
        interrupts.end()
        return _complain(text if parsed or is_first() else "", code)
    interrupts.end()
    return 0


def _check_folder() -> None:
    """Raise `ConfigError` where the current folder is gone: libraries would end the process over it."""
    try:
        os.getcwd()
    except OSError as error:
        raise ConfigError("the current folder does not exist any more; change to one that does") from error


def settle_streams() -> None:
    """Let what cannot be spelt be written as its code, and give what was closed before we began nowhere to go: the next
    file that is opened would take its place.
    """
    for number in range(3):
        try:
            os.fstat(number)
        except OSError:
            os.open(os.devnull, os.O_RDWR)  # which takes the lowest number
    for name in ("stdout", "stderr"):
        stream = getattr(sys, name) or open(os.devnull, "w")  # noqa: SIM115  # for as long as the process lives
        stream.reconfigure(errors="backslashreplace")
        setattr(sys, name, stream)


def _in_words(error: Exception) -> tuple[str, int]:
    """Return the line and the exit code for what ended a command; no line where another process says it."""
    match error:
        case RankError(reported=True):
            return "", 2 if error.mendable else 1
        case GigagradError():
            return f"error: {error}", 2
        case OSError():
            full, where = error.errno in DISK_FULL, error.filename
            if full and not where and _output_is_full():
                where = "standard output"
            remedy = "; free some space or write elsewhere" if full else ""
            return f"error: {f'{where}: ' if where else ''}{error.strerror or error}{remedy}", 2
        case MemoryError():
            return "error: out of memory; give a smaller budget with --memory or close other programs", 2
    reported = "please report it with the output of 'gigagrad --traceback ...'"
    return f"internal error: {type(error).__name__}: {error}; {reported}", 1


def _output_is_full() -> bool:
    """Return whether standard output is full; the system's error names no file."""
    try:
        print(flush=True)
    except OSError:
        _drop_output()
        return True
    return False


def _drop_output() -> None:
    """Write nothing more: Python would complain once more when it flushes at the end."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def _complain(text: str, code: int) -> int:
    """Say `text`, if there is any, in one line, whatever is in it, and return the exit code."""
    # A file's name or content may stand in it, and must not steer the terminal.
    shown = "".join(letter if letter.isprintable() else "?" for letter in " ".join(text.split()))
    if shown:
        with suppress(OSError):  # the exit code says it, too
            print(f"gigagrad: {shown}", file=sys.stderr)
        if code and (path := os.environ.get("TORCHELASTIC_ERROR_FILE")):
            _leave_for_torchrun(Path(path), f"gigagrad: {shown}")
    return code


def _leave_for_torchrun(path: Path, text: str) -> None:
    """Give torchrun the words for its summary, which would else explain how to get a traceback."""
    told = {"message": text, "extraInfo": {"timestamp": str(int(time.time()))}}
    with suppress(OSError):  # it has been said anyway
        path.write_text(json.dumps({"message": told}))


@contextmanager
def _warnings_in_one_line() -> Iterator[None]:
    """Print our own warnings as `gigagrad: warning: ...`; what libraries warn of, in either way, is for developers,
    who pass `python -W`.
    """
    from gigagrad.images.georeference import GuessedResolutionWarning, NonSquarePixelsWarning

    def show(message: Warning | str, *rest: object, **named: object) -> None:
        _complain(f"warning: {message}", 0)

    with warnings.catch_warnings(), ExitStack() as stack:
        if not sys.warnoptions:
            if (log := logging.lastResort) is not None:
                stack.callback(log.setLevel, log.level)
                log.setLevel(logging.CRITICAL)
            warnings.simplefilter("ignore")
            for kind in (GuessedResolutionWarning, NonSquarePixelsWarning):
                warnings.simplefilter("default", kind)
        warnings.showwarning = show
        yield
