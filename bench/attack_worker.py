"""What the attacks share: cases by number in processes that may die or hang, and the line that says how they ended."""

from __future__ import annotations

import argparse
import faulthandler
import json
import multiprocessing
import signal
import sys
import time
from collections import Counter
from collections.abc import Callable
from multiprocessing.connection import Connection, wait
from typing import Any

Verdict = tuple[str, str]
"""How a case ended (`fine`, `refused`, one of FAULTS) and what there is to say about it."""
Judge = Callable[[int], Verdict]
Found = dict[str, Any]
"""Counts by verdict, and examples of faults."""
FAULTS = ("wrong", "leaked", "crashed", "hung", "foreign")
_SHOWN = 10
"""Examples of each kind of ending on stderr, and of faults in the JSON line."""


class Worker:
    """A process that runs cases. `set_up(number)` is called in it first and returns what judges one case.

    One that dies or takes longer than `seconds` is replaced, and so is its verdict.
    """

    def __init__(
        self, set_up: Callable[[int], Judge], seconds: float, *, number: int = 0, start: str = "spawn"
    ) -> None:
        self._made_of, self._seconds, self._context = (set_up, number, seconds), seconds, start
        self.start()

    def start(self) -> None:
        context: Any = multiprocessing.get_context(self._context)
        self.pipe, theirs = context.Pipe()
        self._process = context.Process(target=_work, args=(theirs, *self._made_of), daemon=True)
        self._process.start()
        theirs.close()
        self.pipe.recv()

    def give(self, case: int) -> None:
        self.case, self._since = case, time.monotonic()
        self.pipe.send(case)

    def answer(self) -> Verdict | None:
        """How the case ended, None while it runs."""
        if self.pipe.poll():
            try:
                found: Verdict = self.pipe.recv()
                return found
            except EOFError:
                self._process.join()
                code = self._process.exitcode or 0
                verdict = "crashed", signal.Signals(-code).name if code < 0 else f"exit code {code}"
        elif time.monotonic() - self._since > self._seconds:
            verdict = "hung", f"no answer within {self._seconds:g} s"
        else:
            return None
        self.close()
        self.start()
        return verdict

    def close(self) -> None:
        self._process.kill()
        self._process.join()


def _work(pipe: Connection, set_up: Callable[[int], Judge], number: int, seconds: float) -> None:
    judge = set_up(number)
    pipe.send("ready")
    while True:
        case = pipe.recv()
        faulthandler.dump_traceback_later(0.9 * seconds)  # where it hangs
        pipe.send(judge(case))
        faulthandler.cancel_dump_traceback_later()


def campaign(chosen: argparse.Namespace, crew: list[Worker], before: Callable[[int], None] | None = None) -> Found:
    """Give `chosen.count` cases to whoever is free: counts by verdict, and examples of faults with how to repeat them.

    `before` is called in this process with the number of a case, before the case.
    """
    counts: Counter[str] = Counter()
    examples: list[str] = []
    began, cases = time.monotonic(), iter(range(chosen.count))
    busy: list[Worker] = []

    def give_next(worker: Worker) -> None:
        if (case := next(cases, None)) is not None:
            if before is not None:
                before(case)
            worker.give(case)
            busy.append(worker)

    for worker in crew:
        give_next(worker)
    while busy:
        wait([worker.pipe for worker in busy], timeout=0.2)
        for worker in list(busy):
            if (verdict := worker.answer()) is None:
                continue
            kind, said = verdict
            counts[kind] += 1
            line = f"--seed {chosen.seed} --only {worker.case}: {kind}: {said[:300]}"
            if kind in FAULTS:
                examples.append(line)
            if kind in FAULTS or (kind != "fine" and counts[kind] <= _SHOWN):
                print(line, file=sys.stderr)
            if counts.total() % max(1, chosen.count // 50) == 0:
                rate = counts.total() / (time.monotonic() - began)
                print(f"{counts.total()} of {chosen.count}: {dict(counts)}, {rate:.2g} a second", file=sys.stderr)
            busy.remove(worker)
            give_next(worker)
    for worker in crew:
        worker.close()
    return {
        **{kind: counts[kind] for kind in dict.fromkeys(("fine", "refused", *FAULTS, *counts))},
        "examples": examples[:_SHOWN],
    }


def options(description: str | None, count: int) -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--count", type=int, default=count)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--only", type=int, metavar="NUMBER", help="this case alone, in this process")
    return parser


def report(attack: str, chosen: argparse.Namespace, found: Found) -> int:
    """Print the JSON line. Returns the exit code: whether anything was at fault."""
    print(json.dumps({"attack": attack, "seed": chosen.seed, "tried": chosen.count, **found}))
    return int(any(found[fault] for fault in FAULTS))
