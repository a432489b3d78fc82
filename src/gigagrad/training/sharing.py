"""Slides of a step, and the optimizer's state, shared among ranks, such that no bit depends on how many there are; and
checks that all are about to do the same: differences are found before hours of work, not after.

Each slide's gradient is complete before it meets another one's, and they meet in a binary tree over the slides' places
in the step, as one process has it, too: in the parameters' dtypes, and no library adds for us. Every group adds up a
share of all gradients. What runs leave in buffers is left again in the order of slides.

Of each parameter one rank has the optimizer's state, steps it, and gives the result to the others (Rajbhandari et al.,
ZeRO, SC 2020, stage 1). A step of one parameter must not depend on another's, which is so for the optimizers of PyTorch
but LBFGS. Files are those of `torch.distributed.checkpoint` with safetensors, one for each rank and none of them
pickled; any number of ranks reads them.
"""

from __future__ import annotations

import hashlib
import os
import shutil
import tempfile
import time
import warnings
from collections.abc import Callable, Iterable, Mapping, Sequence
from itertools import groupby
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from gigagrad.cohorts import Cohort
from gigagrad.config.fit import FitConfig
from gigagrad.errors import ConfigError
from gigagrad.execution.comm import gathered
from gigagrad.execution.engine import Engine
from gigagrad.files import write_error
from gigagrad.plans import Plan
from gigagrad.plans.partition import share_of
from gigagrad.ranks import Ranks
from gigagrad.ranks.ranks import as_bytes, copy_into, named, packed, unpacked
from gigagrad.training.folder import RunFolder

Gradients = list[Tensor | None]
"""A gradient of each parameter; None where none reaches it."""

_Node = tuple[int, int]
"""Level and place."""
_NOTHING = torch.empty(0, dtype=torch.uint8)


def assign(pixels: Sequence[int], groups: int) -> list[int]:
    """Assign each slide to a group: the longest first, each to the group with the least so far (Graham, 1969). Of
    slides of one size a group gets neighbours, whose gradients it adds up by itself.
    """
    loads, owners = [0] * groups, [0] * len(pixels)
    for size, alike in groupby(sorted(range(len(pixels)), key=lambda slide: -pixels[slide]), pixels.__getitem__):
        slides, takers = [*alike], list[int]()
        for _ in slides:
            takers.append(loads.index(min(loads)))
            loads[takers[-1]] += size
        for slide, taker in zip(slides, sorted(takers), strict=True):
            owners[slide] = taker
    return owners


class GradientTree:
    """The sum of the gradients of `count` slides. Those that others have are missing here, until `total`.

    Node k of level l is the sum of slides k * 2**l to (k + 1) * 2**l - 1, as far as there are any.
    """

    def __init__(self, parameters: Iterable[Tensor], count: int) -> None:
        self._parameters, self._count = list(parameters), count
        self._depth = (count - 1).bit_length()
        self._held: dict[_Node, Gradients] = {}

    def add(self, slide: int, gradients: Gradients) -> None:
        """Add the gradient of a slide, joined with what is here as far as the tree joins it."""
        self._put(0, slide, gradients)

    def total(self, ranks: Ranks) -> Gradients:
        """Return the sum over all slides to all ranks, which ask at once: each adds up its share of every parameter."""
        if ranks.count == 1:
            return self._held.pop((self._depth, 0))
        there = [[node, [i for i, one in enumerate(sums) if one is not None]] for node, sums in self._held.items()]
        told = ranks.all_gather_object(there)
        came = ranks.all_to_all({rank: self._shares(rank, ranks.count) for rank in ranks.others})
        came[ranks.index] = self._shares(ranks.index, ranks.count)
        self._held.clear()
        shares = [share_of(parameter.numel(), ranks.index, ranks.count) for parameter in self._parameters]
        flat = [((s.stop - s.start,), one.dtype) for s, one in zip(shares, self._parameters, strict=True)]
        for rank, nodes in enumerate(told):
            values = unpacked(came.get(rank, _NOTHING), (flat[i] for _, reached in nodes for i in reached))
            for (level, place), reached in nodes:
                gradients: Gradients = [None] * len(self._parameters)
                for i in reached:
                    gradients[i] = next(values)
                self._put(level, place, gradients)
        total = dict(enumerate(self._held.pop((self._depth, 0))))
        shapes = {i: (tuple(parameter.shape), parameter.dtype) for i, parameter in enumerate(self._parameters)}
        own = {i: one for i, one in total.items() if one is not None}
        found: Gradients = [None] * len(shapes)
        wholes = gathered(ranks, own, {i: shapes[i] for i in own}, torch.device("cpu"))
        for i, whole in wholes.items():  # laid out as the parameter is, as one process has it
            found[i] = torch.empty_like(self._parameters[i], requires_grad=False).copy_(whole)
        return found

    def _shares(self, rank: int, ranks: int) -> Tensor:
        """Pack a rank's share of all sums that are here."""
        every = [one.reshape(-1) for gradients in self._held.values() for one in gradients if one is not None]
        return packed(one[share_of(len(one), rank, ranks)] for one in every)

    def _put(self, level: int, place: int, gradients: Gradients) -> None:
        while level < self._depth:
            sibling = place ^ 1
            if sibling << level < self._count:
                other = self._held.pop((level, sibling), None)
                if other is None:
                    break
                gradients = [_sum(one, two) for one, two in zip(other, gradients, strict=True)]
            level, place = level + 1, place >> 1
        self._held[level, place] = gradients


def leave_in_order(
    model: nn.Module, left: Mapping[int, Callable[[], None]], owners: Sequence[int], ranks: Ranks
) -> None:
    """Leave in the buffers what the runs of a step's slides leave there, one after the other: `left` by the slides of
    this rank, the buffers being as before the step on every rank.
    """
    for slide, owner in enumerate(owners):
        if owner == ranks.index:
            left[slide]()
        last = slide + 1 == len(owners)
        takers = ranks.others if last else {owners[slide + 1]} - {owner}
        if not takers:
            continue
        sent = {}
        if owner == ranks.index:
            message = packed(model.buffers())
            sent = {taker: message for taker in takers if taker != owner}
        for message in ranks.all_to_all(sent).values():
            copy_into(model.buffers(), message)


def plan_alike(engine: Engine, plan: Callable[[], Plan], ranks: Ranks) -> Plan:
    """Return what `plan` makes by the engine, with the choices of the first rank on all."""
    made = plan() if ranks.index == 0 else None
    state = ranks.all_gather_object(None if made is None else engine.state_dict())[0]
    if made is None:
        engine.load_state_dict(state)
        made = plan()
    return made


def _sum(one: Tensor | None, two: Tensor | None) -> Tensor | None:
    if one is None or two is None:
        return two if one is None else one
    return one.add_(two)


_SEEN_SECONDS = 60.0
"""Until a file is seen on other machines: disks that are shared remember for some time that there was none."""


def check_same_start(
    ranks: Ranks, folder: RunFolder, step: int | None, config: FitConfig, cohort: Cohort, shapes: Sequence[object]
) -> None:
    """Raise `ConfigError` where ranks have other settings, other slides, of `shapes`, or find another run in the
    folder, after `step`; None: no run.
    """
    own = {name: repr(value) for name, value in config.to_dict().items() if name not in config.MAY_DIFFER}
    sizes = hashlib.sha256(repr(shapes).encode()).hexdigest()
    own |= {"rows of the cohort": cohort.fingerprint, "sizes of slides": sizes}
    for rank, (other, theirs) in enumerate(ranks.all_gather_object([step, own])):
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
    digest = hashlib.sha256()
    for tensor in model.state_dict().values():
        digest.update(as_bytes(tensor).numpy())
    first, *others = ranks.all_gather_object(digest.hexdigest())
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
    with ranks.error_scope():
        if not folder.checkpoint.exists():
            raise ConfigError(
                f"rank {ranks.index} does not see what the first one writes into {folder.path}; give an --out on a "
                "disk that all of them see"
            )


def _run_found(step: int | None) -> str:
    return "no run" if step is None else f"a run after step {step}"


SHARDED = "tensors in shards"
"""In the place of an optimizer's state: how many tensors there are in all."""
GROUPS = "groups"
"""Beside it: what the optimizer keeps of each group of parameters."""

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
        with self._ranks.error_scope():
            if self._ranks.index == 0:
                shutil.rmtree(folder, ignore_errors=True)
                try:
                    folder.mkdir(parents=True)
                except OSError as error:
                    raise write_error(folder, error) from error
        with self._ranks.error_scope():
            tensors = _tensors(optimizer, self.own)
            if tensors:
                _write(tensors, folder / f"rank-{self._ranks.index + 1}-of-{self._ranks.count}.safetensors")
            return sum(self._ranks.all_gather_object(len(tensors)))


def settings_of_groups(optimizer: _Optimizer) -> list[dict[str, Any]]:
    """Return what an optimizer keeps of each group of parameters, the number of its steps for one."""
    return [{key: value for key, value in group.items() if key != "params"} for group in optimizer.param_groups]


def load_groups(optimizer: _Optimizer, groups: Iterable[Mapping[str, Any]]) -> None:
    """Give an optimizer what `settings_of_groups` has told of one with as many groups. Raises `ValueError`."""
    for group, settings in zip(optimizer.param_groups, groups, strict=True):
        group.update(settings)


def load_shards(optimizer: _Optimizer, model: nn.Module, folder: Path, count: int) -> None:
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
    from torch.distributed.checkpoint.api import CheckpointException
    from torch.distributed.checkpoint.hf_storage import HuggingFaceStorageWriter
    from torch.distributed.checkpoint.state_dict_saver import save

    try:
        # By each rank alone, of which the library warns: its collective would wait for ever for one that is stopped.
        with (
            tempfile.TemporaryDirectory(prefix=".", dir=path.parent) as made,
            warnings.catch_warnings(action="ignore", category=UserWarning),
        ):
            writer = HuggingFaceStorageWriter(made, save_distributed=True)
            # All is on the CPU; for more it asks any device that there is for a stream.
            writer.per_thread_copy_ahead = 0
            try:
                save(dict(tensors), storage_writer=writer, no_dist=True)
            except CheckpointException as error:  # no `Exception`, and around interrupts too
                ((raised, _),) = error.failures.values()
                raise raised from None
            (written,) = Path(made).iterdir()
            os.replace(written, path)
    except OSError as error:
        raise write_error(path, error) from error
