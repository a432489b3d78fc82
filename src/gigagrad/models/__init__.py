"""The networks the project ships, and the way from a model's name to a module. Imports no optional package."""

from gigagrad.models.multi_stain import MultiStainNet
from gigagrad.models.paper import PaperUNet
from gigagrad.models.preprocess import Normalise, Preprocess
from gigagrad.models.registry import resolve
from gigagrad.models.saved import load_model, save_model

__all__ = ["MultiStainNet", "Normalise", "PaperUNet", "Preprocess", "load_model", "resolve", "save_model"]
