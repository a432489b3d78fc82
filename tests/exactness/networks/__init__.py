"""Random networks as random graphs, and one training step of each against plain autograd.

A network is a `Recipe`: plain data, whose `repr` is Python and can be pasted into a test. `draw_recipe` draws one from
anything that yields integers, so that Hypothesis and `random.Random` feed the same generator.

The modules, each importing only from those before it: recipe -> functions, layers, blocks, global_blocks, attention ->
options -> operators -> network -> losses -> cases -> drawing, comparing.
"""

from .cases import make_case
from .comparing import compare_forward, compare_step, conditioning, ill_conditioned
from .drawing import draw_recipe
from .recipe import Node, Recipe

__all__ = [
    "Node",
    "Recipe",
    "compare_forward",
    "compare_step",
    "conditioning",
    "draw_recipe",
    "ill_conditioned",
    "make_case",
]
