"""Tell numbers that follow from the number of patches apart from what is the same for every bag.

Of two records of one program, at two numbers of patches, the *form* is the same, and each number is on a line: shapes,
strides, and arguments. What the lines say at a third number of patches is a claim, to be compared with a record.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from hashlib import sha256
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch._subclasses.fake_tensor import FakeTensor
from torch.utils._python_dispatch import _disable_current_modes

_MOST_VALUES = 2**16
"""Values of a tensor from outside that are looked at."""


@dataclass(frozen=True, slots=True, eq=False)
class Record:
    """The form of what was recorded, hashed, and its numbers in order."""

    form: bytes
    numbers: NDArray[np.int64]

    def is_same_as(self, other: Record) -> bool:
        return self.form == other.form and np.array_equal(self.numbers, other.numbers)


class Recorder:
    """Writes down values one after the other. Of tensors `of_tensor` says what else there is than dtype, shape and
    strides; raises ValueError where nobody can.
    """

    def __init__(self, of_tensor: Callable[[torch.Tensor], object]) -> None:
        self._of_tensor = of_tensor
        self._form, self._numbers = sha256(), list[int]()
        self._complete = True

    def note(self, *values: Any) -> None:
        """Write down values: nests of tensors, numbers and settings of PyTorch."""
        if not self._complete:
            return
        try:
            self._form.update(repr(tuple(map(self._formed, values))).encode())
        except ValueError:
            self._complete = False

    def record(self) -> Record | None:
        """Return the record; None where it could not say what something is."""
        return Record(self._form.digest(), np.array(self._numbers, dtype=np.int64)) if self._complete else None

    def _formed(self, value: Any) -> Any:
        kind = type(value)
        if is_number(value):
            self._numbers.append(int(value))
            return kind.__name__
        if value is None or kind in _SETTINGS:
            return kind.__name__, repr(value)
        if isinstance(value, list | tuple):
            return "list", tuple(map(self._formed, value))
        if isinstance(value, dict):
            return "dict", tuple((name, self._formed(one)) for name, one in value.items())
        if isinstance(value, torch.Tensor):
            self._numbers += map(int, (*value.shape, *value.stride(), value.storage_offset()))
            return "tensor", value.ndim, str(value.dtype), str(value.device), self._of_tensor(value)
        raise ValueError(kind)


def is_number(value: Any) -> bool:
    """Tell whether a value is a number that may follow from a size: an integer, or a float that holds one."""
    return type(value) is int or (type(value) is float and value.is_integer() and 0 < abs(value) < 2**53)


_SETTINGS = frozenset({bool, float, complex, str, bytes, torch.dtype, torch.device, torch.layout, torch.memory_format})


class CallRecorder(Recorder):
    """Writes down the operators that run: what they are given and make, and which of it is one tensor. `named` are the
    tensors that are there before: parameters, buffers and inputs, always in the same order.
    """

    def __init__(self, named: list[torch.Tensor]) -> None:
        super().__init__(self._place)
        self._places: dict[int, int] = {}
        self._known = 0
        for tensor in named:
            self.made(tensor)

    def made(self, tensor: torch.Tensor) -> None:
        """Give new memory a number."""
        self._places[tensor.untyped_storage()._cdata] = self._known
        self._known += 1

    def freed(self, storage: int) -> None:
        self._places.pop(storage, None)

    def _place(self, tensor: torch.Tensor) -> object:
        values = tensor.constant if isinstance(tensor, FakeTensor) else tensor
        if values is not None:
            return _bytes(values)
        place = self._places.get(tensor.untyped_storage()._cdata)
        if place is None:
            raise ValueError("a tensor that no operator made")
        return place


def _bytes(tensor: torch.Tensor) -> bytes:
    if tensor.numel() > _MOST_VALUES:
        raise ValueError("a large tensor from outside")
    with torch._C.DisableTorchFunction(), torch.no_grad(), _disable_current_modes():
        return tensor.detach().cpu().contiguous().flatten().view(torch.uint8).numpy().tobytes()


@dataclass(frozen=True, slots=True, eq=False)
class Lines:
    """Records of some things as functions of the number of patches."""

    size: int
    records: Mapping[Any, Record]
    slopes: Mapping[Any, NDArray[np.int64]]

    @classmethod
    def through(
        cls, one: Mapping[Any, Record | None], size: int, two: Mapping[Any, Record | None], other: int
    ) -> Lines | None:
        """Return the lines through the records at two sizes; None where there are none, where they differ in form, or a
        number would be on no line of whole numbers.
        """
        records, slopes = dict[Any, Record](), dict[Any, NDArray[np.int64]]()
        for name, first in one.items():
            second = two.get(name)
            if (
                first is None
                or second is None
                or (first.form, first.numbers.size) != (second.form, second.numbers.size)
            ):
                return None
            slopes[name], rest = np.divmod(second.numbers - first.numbers, other - size)
            if rest.any():
                return None
            records[name] = first
        return cls(size, records, slopes)

    def at(self, name: Any, size: int) -> Record:
        """Return what the lines say at another size."""
        first = self.records[name]
        return Record(first.form, first.numbers + self.slopes[name] * (size - self.size))
