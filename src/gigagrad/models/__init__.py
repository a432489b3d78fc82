"""The networks the project ships, and the way from a model's name to a module. Imports no optional package."""

from gigagrad.models.networks import MultiStainNet, Normalise, PaperUNet, Preprocess
from gigagrad.models.registry import resolve, resolve_encoder
from gigagrad.models.saved import load, load_model, load_weights_into, save_model

__all__ = [
    "MultiStainNet",
    "Normalise",
    "PaperUNet",
    "Preprocess",
    "load",
    "load_model",
    "load_weights_into",
    "resolve",
    "resolve_encoder",
    "save_model",
]
