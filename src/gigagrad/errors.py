"""Say what can go wrong on a user's side. Every class is a `ValueError`, and every message says got, expected and
remedy.

Broken invariants of our own are assertions instead; they are never dressed up as one of these.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from difflib import get_close_matches
from typing import Final

from gigagrad.units import format_bytes


class GigagradError(ValueError):
    """Base of every error a user can mend. The command line prints its text as one line and exits with code 2."""


class ImageError(GigagradError):
    """An image or mask cannot be opened, read or used as asked (missing, truncated, corrupt, wrong size, no mpp)."""


class WriteError(GigagradError):
    """An output file cannot be written (disk full, read-only folder, the file exists). Nothing half-written remains."""


class StoreError(GigagradError):
    """A saved activation cannot be written to scratch, or read back as it was written."""


class ConfigError(GigagradError):
    """A setting, a cohort file or a command-line value is not usable."""


class ModelError(GigagradError):
    """A model's name is unknown or the package that ships it is missing."""


class CaptureError(GigagradError):
    """`torch.export` refuses the model or the loss; the message quotes its reason."""


class TargetError(GigagradError):
    """The target holds values, a size or a dtype that the loss cannot take."""


class RankError(GigagradError):
    """Another rank failed, or is silent. `reported`: somebody else says so; `mendable`: the user can do something."""

    def __init__(self, message: str, *, reported: bool = False, mendable: bool = True) -> None:
        self.reported, self.mendable = reported, mendable
        super().__init__(message)


class OperatorError(GigagradError):
    """An operator refuses the values or dtypes that it meets in a run; the message quotes PyTorch's reason.

    Attributes: `operator` (ATen name), `module_path` (dotted path inside the user's model, `""` when the operator
    stands in the loss), `source` (`file:line` in the user's code, `""` if unknown).
    """

    complaint = "refuses what it is given"

    def __init__(self, operator: str, module_path: str, source: str, reason: str, elsewhere: str = "the loss") -> None:
        """Name the operator; `elsewhere`: where it stands if no module is named."""
        self.operator = operator
        self.module_path = module_path
        self.source = source
        where = f"module '{module_path}'" if module_path else elsewhere
        at = f" at {source}" if source else ""
        if "not implemented for 'UInt" in reason:
            reason += "; write .to(torch.int64) before it, since PyTorch computes with no unsigned integers but bytes"
        super().__init__(f"operator {operator} in {where}{at} {self.complaint}: {reason}")


class UnsupportedOperatorError(OperatorError):
    """The graph contains an operator that has no row in the operator table yet."""

    complaint = "cannot run tile by tile"


class BudgetError(GigagradError):
    """The job does not fit in the budget. Raised while planning, before anything runs.

    Attributes: `budget_bytes`, `needed_bytes` (of the leanest plan found), `smallest_bytes` (a budget that works), all
    of memory. Where something else is short, `remedy` says what to do about it.
    """

    def __init__(
        self, message: str, *, budget_bytes: int, needed_bytes: int, smallest_bytes: int, remedy: str = ""
    ) -> None:
        self._message, self.remedy = message, remedy
        self.budget_bytes = budget_bytes
        self.needed_bytes = needed_bytes
        self.smallest_bytes = smallest_bytes
        budgets = (
            f": needs {format_bytes(needed_bytes)}, the budget is {format_bytes(budget_bytes)}; "
            f"the smallest budget that works is {format_bytes(smallest_bytes)}"
        )
        super().__init__(f"{message}; {remedy}" if remedy else message + budgets)

    def with_smallest(self, smallest_bytes: int) -> BudgetError:
        """Return this error with a smallest budget that is known better."""
        return BudgetError(
            self._message,
            budget_bytes=self.budget_bytes,
            needed_bytes=self.needed_bytes,
            smallest_bytes=smallest_bytes,
            remedy=self.remedy,
        )


_ELSEWHERE: Final = {
    "binary_cross_entropy": "bce",
    "cohort": "slides",
    "cross_entropy": "ce",
    "crossentropy": "ce",
    "csv": "slides",
    "gpu": "device",
    "l2": "mse",
    "lr": "learning_rate",
    "output": "out",
}
"""Our flags, settings and losses by what other programs call them, in lower case and without dashes."""


def did_you_mean(wrong: str, known: Iterable[str]) -> str:
    """Write the end of a message about an unknown name: `, did you mean 'this'?`, or nothing.

    The known name that other programs call so, or else the one that is spelt most like it.
    """
    spellings = {word.lower(): word for word in known}
    ours = _ELSEWHERE.get(_plain(wrong))
    meant = [word for word in spellings if _plain(word) == ours] or get_close_matches(wrong.lower(), spellings, n=1)
    return f", did you mean {spellings[meant[0]]!r}?" if meant else ""


def _plain(name: str) -> str:
    return name.strip("-").replace("-", "_").lower()


@contextmanager
def extra(name: str) -> Iterator[None]:
    """Guard imports of what `pip install 'gigagrad[NAME]'` brings. Raises `ConfigError` with that command."""
    try:
        yield
    except ModuleNotFoundError as error:
        command = f"pip install 'gigagrad[{name}]'"
        raise ConfigError(f"{error.name} is not installed; install it with: {command}") from error
