"""Predict what an optimizer will hold once it has stepped."""

from __future__ import annotations

import copy
from collections import defaultdict
from collections.abc import Iterable
from typing import Any

import torch
from torch import nn

_USUAL_COPIES = 2
"""Copies of the trainable parameters, where nothing says what there will be: Adam's two moments."""
_OTHER_KERNELS = ("foreach", "fused", "capturable")
"""Options that ask for kernels which tensors without storage do not have; the state is the same without."""


class OptimizerState:
    """The state that the optimizer of a model's parameters will hold beside what it holds already."""

    def __init__(self, model: nn.Module, optimizer: torch.optim.Optimizer | None) -> None:
        self._model, self._optimizer = model, optimizer
        self._versions: int | None = None
        """Versions of the trainable parameters when they were first looked at: any write to one counts up."""
        self._stepped = False

    def coming_bytes(self) -> int:
        """Return the bytes of it; 0 once they are part of what the process holds. An optimizer that nobody named is
        taken for Adam, until a write to the parameters shows that it has stepped.
        """
        if self._optimizer is not None:
            return coming_state_bytes(self._optimizer)
        trained = [parameter for parameter in self._model.parameters() if parameter.requires_grad]
        versions = sum(parameter._version for parameter in trained)
        if self._versions is None:
            self._versions = versions
        self._stepped = self._stepped or versions != self._versions
        return 0 if self._stepped else usual_state_bytes(trained)


def usual_state_bytes(parameters: Iterable[torch.Tensor]) -> int:
    return _USUAL_COPIES * sum(parameter.nbytes for parameter in parameters if parameter.requires_grad)


def coming_state_bytes(optimizer: torch.optim.Optimizer) -> int:
    """Return the bytes of state that `optimizer` makes in its next step, for parameters that have none yet: what a copy
    of it makes when it steps parameters of the same shapes without storage. As much as Adam's where it cannot step
    those.
    """
    groups: list[dict[str, Any]] = []
    fresh: list[torch.Tensor] = []
    for group in optimizer.param_groups:
        new = [p for p in group["params"] if p.requires_grad and not optimizer.state.get(p)]
        fresh += new
        plain = {name: False for name in _OTHER_KERNELS if name in group}
        groups.append(group | plain | {"params": [_without_storage(p) for p in new]})
    rehearsal = copy.copy(optimizer)  # its hooks do not come along
    rehearsal.param_groups, rehearsal.state = groups, defaultdict(dict)
    try:
        rehearsal.step()
    except Exception:  # anyone's own code: what it cannot do without values is its affair
        return usual_state_bytes(fresh)
    made = [value for state in rehearsal.state.values() for value in state.values()]
    return sum(value.nbytes for value in made if isinstance(value, torch.Tensor))


def _without_storage(parameter: torch.Tensor) -> torch.Tensor:
    stand_in = torch.empty_like(parameter, device="meta").requires_grad_()
    stand_in.grad = torch.empty_like(stand_in)
    return stand_in
