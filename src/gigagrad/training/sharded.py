"""Optimizer state shared out to ranks: of each parameter one rank has it, steps it, and gives the result to the others
(Rajbhandari et al., ZeRO, SC 2020, stage 1). Parameters and gradients are whole everywhere.

A step of one parameter must not depend on another's, which is so for the optimizers of PyTorch but LBFGS. Then no bit
depends on who has what. Files are those of `torch.distributed.checkpoint` with safetensors, one for each rank and none
of them pickled; any number of ranks reads them.
"""

from __future__ import annotations

import os
import shutil
import tempfile
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import torch
from torch import Tensor, nn

from gigagrad.errors import ConfigError
from gigagrad.files import write_error
from gigagrad.ranks import Ranks
from gigagrad.ranks.messages import copy_into, packed
from gigagrad.training.sharing import assign

SHARDED = "tensors in shards"
"""In the place of an optimizer's state: how many tensors there are in all."""

_Optimizer = torch.optim.Optimizer


class Shards:
    """The trained parameters of a model, shared out to ranks: `own`, by name, are this rank's."""

    def __init__(self, model: nn.Module, ranks: Ranks) -> None:
        self._ranks = ranks
        trained = {name: parameter for name, parameter in model.named_parameters() if parameter.requires_grad}
        owners = assign([parameter.numel() for parameter in trained.values()], ranks.count)
        self._shards: list[dict[str, nn.Parameter]] = [{} for _ in range(ranks.count)]
        for owner, (name, parameter) in zip(owners, trained.items(), strict=True):
            self._shards[owner][name] = parameter
        self.own = self._shards[ranks.index]

    def spread(self) -> None:
        """Give every rank what each has stepped. Raises `RankError`."""
        message, others = packed(self.own.values()), self._ranks.others
        sizes = {rank: sum(parameter.nbytes for parameter in self._shards[rank].values()) for rank in others}
        messages = self._ranks.exchange(dict.fromkeys(others, message), sizes)
        for rank, came in messages.items():
            copy_into(self._shards[rank].values(), came)

    def save(self, optimizer: _Optimizer, folder: Path) -> int:
        """Write every rank's state into a folder, in the place of what may be there; returns how many tensors it has in
        all. Raises `WriteError`, and `ConfigError` for state that is no tensor.
        """
        with self._ranks.together():
            if self._ranks.index == 0:
                shutil.rmtree(folder, ignore_errors=True)
                try:
                    folder.mkdir(parents=True)
                except OSError as error:
                    raise write_error(folder, error) from error
        with self._ranks.together():
            tensors = _tensors(optimizer, self.own)
            if tensors:
                _write(tensors, folder / f"rank-{self._ranks.index + 1}-of-{self._ranks.count}.safetensors")
            return sum(self._ranks.said(len(tensors)))


def load(optimizer: _Optimizer, model: nn.Module, folder: Path, count: int) -> None:
    """Give an optimizer the state that it needs of a folder of `Shards.save`, by whichever ranks, with so many tensors.
    Raises for one that lacks any, or is damaged.
    """
    if not count:
        return
    from safetensors import safe_open

    names = {parameter: name for name, parameter in model.named_parameters()}
    own = [names[parameter] for group in optimizer.param_groups for parameter in group["params"]]
    places = {name: number for number, name in enumerate(own)}
    state: dict[int, dict[str, Tensor]] = {}
    found = 0
    for path in sorted(folder.glob("*.safetensors")):
        with safe_open(path, "pt") as tensors:
            for key in tensors.keys():  # noqa: SIM118 - it is no mapping
                name, _, what = key.rpartition(".")
                found += 1
                if name in places:
                    state.setdefault(places[name], {})[what] = tensors.get_tensor(key)
    if found != count:
        raise ValueError(f"{folder} has {found} tensors of the optimizer's state, not {count}")
    optimizer.load_state_dict({"state": state, "param_groups": optimizer.state_dict()["param_groups"]})


def _tensors(optimizer: _Optimizer, own: dict[str, nn.Parameter]) -> dict[str, Tensor]:
    found = {}
    for name, parameter in own.items():
        for what, value in optimizer.state.get(parameter, {}).items():
            if isinstance(value, Tensor):
                found[f"{name}.{what}"] = value.detach().cpu().contiguous()
            elif value is not None:
                told = f"{type(optimizer).__name__} keeps a {type(value).__name__} for each parameter ({what!r})"
                raise ConfigError(f"{told}, and only tensors are saved by several ranks; leave out shard_optimizer")
    return found


def _write(tensors: dict[str, Tensor], path: Path) -> None:
    from torch.distributed.checkpoint.hf_storage import HuggingFaceStorageWriter
    from torch.distributed.checkpoint.state_dict_saver import save

    try:
        # By each rank alone: a collective of the library's would wait for ever for one that is stopped.
        with tempfile.TemporaryDirectory(prefix=".", dir=path.parent) as made, _plainly():
            writer = HuggingFaceStorageWriter(made, save_distributed=True)
            # All is on the CPU; for more it asks any device that there is for a stream.
            writer.per_thread_copy_ahead = 0
            save(dict(tensors), storage_writer=writer, no_dist=True)
            (written,) = Path(made).iterdir()
            os.replace(written, path)
    except OSError as error:
        raise write_error(path, error) from error


@contextmanager
def _plainly() -> Iterator[None]:
    """Silence the library's remark that nothing is distributed; and raise what it wraps, interrupts too, in
    something that is no `Exception`, as it was raised.
    """
    from torch.distributed.checkpoint.api import CheckpointException

    with warnings.catch_warnings(action="ignore", category=UserWarning):
        try:
            yield
        except CheckpointException as error:
            ((raised, _),) = error.failures.values()
            raise raised from None
