"""Make up H&E slides of any size with exact tissue masks, for demos, tests and benchmarks without patients' data."""

from gigagrad.images.synthetic.make import make_cohort, make_slide
from gigagrad.images.synthetic.textures import Textures, make_textures

__all__ = ["Textures", "make_cohort", "make_slide", "make_textures"]
