"""Rewrites of ATen operators into operators with a row, reductions and global arithmetic, by family.

Importing this package fills `STRUCTURE` and `ON_FIELDS`.
"""

from gigagrad.graphs.rewrites import norms, random, reductions, structure
from gigagrad.graphs.rewrites.common import ON_FIELDS, STRUCTURE, Rewrite

__all__ = ["ON_FIELDS", "STRUCTURE", "Rewrite", "norms", "random", "reductions", "structure"]
