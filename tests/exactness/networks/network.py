"""The network of a recipe: the graph of its nodes, grown one by one."""

from __future__ import annotations

import copy
from typing import Any

import torch
from torch import Tensor, nn

from .operators import OPERATORS
from .recipe import Node, Shapes


class Network(nn.Module):
    """The graph of a recipe, grown node by node on one image so that every module knows its channels."""

    def __init__(self, image: Tensor, seed: int) -> None:
        super().__init__()
        self.values = [image[None]]
        self.seed = seed
        self.nodes: list[Node] = []
        self.outputs: tuple[int, ...] = ()
        self.named = False
        self.parts = nn.ModuleList()

    def grow(self, node: Node) -> Tensor:
        """Add a node and return what it gives for the image. Raises whatever PyTorch does if it cannot run."""
        operands = [self.values[i] for i in node.inputs]
        if node.op == "again":
            part = self.parts[node.options["node"] - 1]
        else:
            with torch.random.fork_rng(devices=[]):
                torch.manual_seed(1000 * self.seed + len(self.nodes))
                part = self._made(node, [tuple(v.shape[1:]) for v in operands])  # type: ignore[misc]
        with torch.no_grad():
            value = copy.deepcopy(part)(*operands)
        self.parts.append(part)
        self.nodes.append(node)
        self.values.append(value)
        return value

    def shrink(self) -> None:
        """Undo the last `grow`."""
        self.values.pop()
        self.nodes.pop()
        del self.parts[-1]

    def finish(self, outputs: tuple[int, ...], *, named: bool) -> None:
        self.outputs, self.named = outputs, named
        self.values = self.values[:1]

    def forward(self, image: Tensor) -> Any:
        values = [image]
        for node, part in zip(self.nodes, self.parts, strict=True):
            values.append(part(*(values[i] for i in node.inputs)))
        outputs = [values[i] for i in self.outputs]
        if self.named:
            return {"out": outputs[0], "aux": outputs[-1]}
        return outputs[0] if len(outputs) == 1 else tuple(outputs)

    def _made(self, node: Node, shapes: Shapes) -> nn.Module:
        part = OPERATORS[node.op].make(shapes, **node.options).double()
        for name, parameter in part.named_parameters():
            _stir(name, parameter.data)
        for module in part.modules():
            if isinstance(module, nn.BatchNorm2d | nn.InstanceNorm2d) and module.running_mean is not None:
                module.running_mean.normal_()
                module.running_var.uniform_(0.5, 2)
                module.num_batches_tracked.fill_(3)
        return part.train()


def _stir(name: str, parameter: Tensor) -> None:
    """Values of a useful size, away from the 0 and 1 of a fresh network, where mistakes would hide."""
    if parameter.ndim < 2:
        parameter.uniform_(0.5, 1.5) if name.endswith("weight") else parameter.normal_(0, 0.3)
    elif "original0" in name:
        parameter.uniform_(0.5, 1.5)
    else:
        parameter.normal_(0, 1.2 / (parameter.numel() / parameter.shape[0]) ** 0.5)
