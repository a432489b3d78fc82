"""Predict whole images without seams, export what other tools read, and score it."""

from gigagrad.config.predict import PredictConfig
from gigagrad.prediction.outputs import SlideResult
from gigagrad.prediction.predict import predict
from gigagrad.prediction.scores import Confusion, Evaluation, Score, evaluate, mean_sd, score_masks
from gigagrad.prediction.slide_scores import SlideEvaluation

__all__ = [
    "Confusion",
    "Evaluation",
    "PredictConfig",
    "Score",
    "SlideEvaluation",
    "SlideResult",
    "evaluate",
    "mean_sd",
    "predict",
    "score_masks",
]
