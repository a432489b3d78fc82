"""Checks that all ranks of a run are about to do the same: differences are found before hours of work, not after."""

from __future__ import annotations

import hashlib
import time
from collections.abc import Sequence

import torch
from torch import nn

from gigagrad.cohorts import Cohort
from gigagrad.config.fit import FitConfig
from gigagrad.errors import ConfigError
from gigagrad.ranks import Ranks
from gigagrad.ranks.ranks import named
from gigagrad.training.folder import RunFolder

_SEEN_SECONDS = 60.0
"""Until a file is seen on other machines: disks that are shared remember for some time that there was none."""


def check_same_start(
    ranks: Ranks, folder: RunFolder, step: int | None, config: FitConfig, cohort: Cohort, shapes: Sequence[object]
) -> None:
    """Raise `ConfigError` where ranks have other settings, other slides, of `shapes`, or find another run in the
    folder, after `step`; None: no run.
    """
    own = {name: repr(value) for name, value in config.to_dict().items() if name not in config.MAY_DIFFER}
    own |= {"rows of the cohort": cohort.fingerprint, "sizes of slides": _digest(repr(shapes).encode())}
    for rank, (other, theirs) in enumerate(ranks.said([step, own])):
        if other != step:
            raise ConfigError(
                f"rank {rank} finds {_run_found(other)} in {folder.path}, and rank {ranks.index} {_run_found(step)}; "
                "give an --out on a disk that all of them see"
            )
        if differing := [name for name in own if own[name] != theirs.get(name)]:
            raise ConfigError(
                f"ranks {ranks.index} and {rank} differ in {', '.join(differing)}; start all with the same command, "
                "and with the same files"
            )


def check_same_weights(ranks: Ranks, model: nn.Module) -> None:
    """Raise `ConfigError` where ranks begin with different ones."""
    if ranks.count == 1:
        return
    state = [tensor.detach().cpu().contiguous().view(-1) for tensor in model.state_dict().values()]
    first, *others = ranks.said(_digest(*(memoryview(tensor.view(torch.uint8).numpy()) for tensor in state)))
    if differing := [rank for rank, other in enumerate(others, 1) if other != first]:
        raise ConfigError(
            f"other weights than those of the first rank are those of {named(differing)}; make the model draw from "
            "PyTorch's generator alone, or give the same --weights to all"
        )


def check_seen(ranks: Ranks, folder: RunFolder) -> None:
    """Raise `ConfigError` where a rank does not see what the first one has written."""
    end = time.monotonic() + _SEEN_SECONDS
    while not folder.checkpoint.exists() and time.monotonic() < end:
        time.sleep(0.1)
    with ranks.together():
        if not folder.checkpoint.exists():
            raise ConfigError(
                f"rank {ranks.index} does not see what the first one writes into {folder.path}; give an --out on a "
                "disk that all of them see"
            )


def _digest(*parts: bytes | memoryview) -> str:
    digest = hashlib.sha256()
    for part in parts:
        digest.update(part)
    return digest.hexdigest()


def _run_found(step: int | None) -> str:
    return "no run" if step is None else f"a run after step {step}"
