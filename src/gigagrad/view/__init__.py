"""Show slides, masks, predictions and runs in a web page that this process serves, to this machine alone."""

from gigagrad.view.frame import Frame
from gigagrad.view.serving import view

__all__ = ["Frame", "view"]
