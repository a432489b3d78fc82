"""Rewrites of ATen operators into operators with a row, reductions and global arithmetic, by family.

`STRUCTURE` holds for an operator wherever it stands, `ON_FIELDS` only where it reads a field: on values without spatial
axes the operator is arithmetic like any other.
"""

from gigagrad.graphs.rewrites import norms, random, reductions, structure
from gigagrad.graphs.rewrites.common import Rewrite

STRUCTURE: dict[str, Rewrite] = structure.REWRITES
ON_FIELDS: dict[str, Rewrite] = {**reductions.REWRITES, **norms.REWRITES, **random.REWRITES}

__all__ = ["ON_FIELDS", "STRUCTURE", "Rewrite"]
