"""What an optimizer will hold once it has stepped."""

from __future__ import annotations

import copy
from collections import defaultdict
from collections.abc import Iterable
from typing import Any

import torch

_USUAL_COPIES = 2
"""Of the trainable parameters, where nothing says what there will be: Adam's two moments."""
_OTHER_KERNELS = ("foreach", "fused", "capturable")
"""Options that ask for kernels which tensors without storage do not have; the state is the same without."""


def usual_state_bytes(parameters: Iterable[torch.Tensor]) -> int:
    return _USUAL_COPIES * sum(parameter.nbytes for parameter in parameters if parameter.requires_grad)


def coming_state_bytes(optimizer: torch.optim.Optimizer) -> int:
    """The bytes of state that `optimizer` makes in its next step, for parameters that have none yet: what a copy of it
    makes when it steps parameters of the same shapes without storage. As much as Adam's where it cannot step those.
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
