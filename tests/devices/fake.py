"""A processor that holds as much memory as a test says."""

import sys

from gigagrad.devices.cpu import Cpu, Residue

MIB = 2**20


class FakeCpu(Cpu):
    """Has 64 GiB free. `held` bytes are held, and `left` of them once freed memory is given back; `trimmed` counts how
    often it was.
    """

    def __init__(self, held: int = 400 * MIB, left: int | None = None) -> None:
        super().__init__("cpu")
        self.held, self.left, self.trimmed = held, left, 0
        self.residue = Residue()  # type: ignore[misc]
        self.tells = True
        """Whether the C library tells what is freed."""

    def held_bytes(self) -> int:
        return self.held

    def used_bytes(self, enough: int = 0) -> int | None:
        return self.held if self.tells else None

    def free_bytes(self, enough: int = sys.maxsize) -> int:
        return 64 * 2**30

    def trim(self) -> None:
        self.held = self.held if self.left is None else self.left
        self.trimmed += 1  # last: others wait for it

    def give_back(self, nbytes: int) -> None:
        self.trim()
