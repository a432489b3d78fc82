"""Show slides, masks, predictions and runs in a web page that this process serves, to this machine alone."""

from gigagrad.view.serving import Frame, view

__all__ = ["Frame", "view"]
