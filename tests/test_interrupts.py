"""Signals in a process of our own: whoever swallows what they raise, and whatever goes on when they come."""

import ctypes
import gc
import importlib
import os
import signal
import subprocess
import sys
import threading
import time
import weakref
from contextlib import contextmanager, suppress

import pytest

from gigagrad.cli.interrupts import Interrupts

NUMBERS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


@pytest.fixture
def interrupts(monkeypatch):
    reminded, remind = threading.Event(), Interrupts._remind

    def reminding(*given):
        remind(*given)
        reminded.set()

    monkeypatch.setattr(Interrupts, "_remind", reminding)
    monkeypatch.setattr("gigagrad.cli.interrupts._AGAIN_SECONDS", 0.05)
    handlers, hook = {number: signal.getsignal(number) for number in NUMBERS}, sys.unraisablehook
    signal.signal(signal.SIGINT, signal.default_int_handler)  # whatever a library has put there
    for number in NUMBERS[1:]:
        signal.signal(number, signal.SIG_DFL)  # nohup has them ignored
    interrupts = Interrupts()
    interrupts.heed()
    yield interrupts
    interrupts.end()
    assert not interrupts.came or reminded.wait(60)  # who reminded later would strike whatever comes next
    for number, handler in handlers.items():
        signal.signal(number, handler)
    sys.unraisablehook = hook


@contextmanager
def interrupted(interrupts):
    """Expects an interrupt, and ends what reminds of it while it is being dealt with."""
    try:
        yield
    except KeyboardInterrupt:
        interrupts.end()
    else:
        pytest.fail("nothing was interrupted")


def strike(number=signal.SIGTERM):
    """What Python code that is interrupted just here does."""
    os.kill(os.getpid(), number)
    for _ in range(1000):
        pass


def by_a_library():
    with suppress(BaseException):
        strike()


def by_a_finalizer():
    class Dropped:
        def __del__(self):
            strike()

    Dropped()


def by_the_end_of_a_weak_reference():
    class Dropped:
        pass

    one = Dropped()
    reference = weakref.ref(one, lambda _: strike())
    del one
    assert reference() is None


def by_collecting_garbage():
    def collecting(*_):
        gc.callbacks.remove(collecting)
        strike()

    gc.callbacks.append(collecting)
    gc.collect()


def by_a_callback_of_c():
    ctypes.CFUNCTYPE(None)(strike)()


def by_becoming_something_else():
    try:
        strike()
    except BaseException:
        with suppress(ImportError):
            raise ImportError("the module failed to import") from None


SWALLOWED = [
    by_a_library,
    by_a_finalizer,
    by_the_end_of_a_weak_reference,
    by_collecting_garbage,
    by_a_callback_of_c,
    by_becoming_something_else,
]


@pytest.mark.parametrize("number", NUMBERS)
def test_each_signal_interrupts(interrupts, number):
    with interrupted(interrupts):
        strike(number)


@pytest.mark.parametrize("swallow", SWALLOWED)
def test_an_interrupt_that_is_swallowed_comes_again(interrupts, capsys, swallow):
    swallow()
    assert interrupts.came
    with interrupted(interrupts):
        time.sleep(20)
    assert capsys.readouterr().err == ""


@pytest.mark.parametrize(("again", "expected"), [(signal.SIGHUP, ["begun", "done"]), (signal.SIGINT, ["begun"])])
def test_what_an_interrupt_leaves_to_be_done_is_done_in_peace_unless_a_person_insists(interrupts, again, expected):
    def save(again):
        try:
            strike()
        finally:
            saved.append("begun")
            strike(again)
            time.sleep(0.35)
            with suppress(ValueError):
                raise ValueError("something else, meanwhile")
            saved.append("done")

    saved: list[str] = []
    with interrupted(interrupts):
        save(again)
    assert saved == expected


def test_what_is_being_imported_is_imported_first(interrupts, tmp_path, monkeypatch):
    monkeypatch.setattr("gigagrad.cli.interrupts._IMPORT_SECONDS", 60)
    monkeypatch.syspath_prepend(tmp_path)
    source = "import os, signal, time\nos.kill(os.getpid(), signal.SIGTERM)\ntime.sleep(0.3)\nwhole = True\n"
    (tmp_path / "imported_in_test_interrupts.py").write_text(source)
    imported = importlib.import_module("imported_in_test_interrupts")

    with interrupted(interrupts):
        time.sleep(20)
    assert imported.whole


def test_a_module_that_never_ends_is_interrupted(interrupts, tmp_path, monkeypatch):
    monkeypatch.setattr("gigagrad.cli.interrupts._IMPORT_SECONDS", 0.2)
    monkeypatch.syspath_prepend(tmp_path)
    source = "import os, signal, time\nos.kill(os.getpid(), signal.SIGTERM)\ntime.sleep(20)\n"
    (tmp_path / "endless_in_test_interrupts.py").write_text(source)
    with interrupted(interrupts):
        importlib.import_module("endless_in_test_interrupts")


def run(program, *, ignored=None):
    def listen():  # whatever a shell in the background has ignored
        for number in NUMBERS:
            signal.signal(number, signal.SIG_IGN if number == ignored else signal.SIG_DFL)

    begun = "import os, signal, sys\nfrom gigagrad.cli.interrupts import Interrupts\n"
    return subprocess.run(
        [sys.executable, "-c", begun + program],
        capture_output=True,
        text=True,
        timeout=120,
        preexec_fn=listen,
    )


@pytest.mark.parametrize("rank", ["0", "1"])
def test_before_any_work_an_import_ends_at_once_and_one_rank_says_so(tmp_path, rank):
    (tmp_path / "slow.py").write_text("import os, signal, time\nos.kill(os.getpid(), signal.SIGHUP)\ntime.sleep(20)\n")
    program = f"os.environ['RANK'] = '{rank}'; sys.path.insert(0, {str(tmp_path)!r}); Interrupts().heed(); import slow"
    ended = run(program)
    assert ended.returncode == 130
    line = "gigagrad: interrupted; give the same command again to go on from what is finished\n"
    assert ended.stderr == (line if rank == "0" else "")


@pytest.mark.parametrize("number", NUMBERS)
def test_a_signal_that_was_ignored_before_stays_so(number):
    """As nohup has it, and shells for what they run in the background."""
    ended = run(f"Interrupts().heed(); os.kill(os.getpid(), {int(number)})", ignored=number)
    assert (ended.returncode, ended.stderr) == (0, "")


def test_when_all_is_done_a_scheduler_s_signal_changes_nothing_and_a_person_s_ends_what_is_left():
    program = "one = Interrupts(); one.heed(); one.end(); os.kill(os.getpid(), signal.{}); print('there')"
    for number, expected in (("SIGTERM", (0, "there\n")), ("SIGHUP", (0, "there\n")), ("SIGINT", (130, ""))):
        ended = run(program.format(number))
        assert (ended.returncode, ended.stdout, ended.stderr) == (*expected, "")
