"""Predict whole images without seams, export what other tools read, and score it."""

from gigagrad.cohorts.records import SlideResult
from gigagrad.config.predict import EmbedConfig, PredictConfig
from gigagrad.prediction.embed import Embedded, embed
from gigagrad.prediction.encoding import Encoder
from gigagrad.prediction.features import Features, features_of, open_features
from gigagrad.prediction.graphs import TissueGraph, patch_edges, smooth_scores, tissue_graph, write_graph
from gigagrad.prediction.predict import predict
from gigagrad.prediction.scores import Confusion, Evaluation, Score, evaluate, mean_sd, score_masks
from gigagrad.prediction.slide_scores import SlideEvaluation

__all__ = [
    "Confusion",
    "EmbedConfig",
    "Embedded",
    "Encoder",
    "Evaluation",
    "Features",
    "PredictConfig",
    "Score",
    "SlideEvaluation",
    "SlideResult",
    "TissueGraph",
    "embed",
    "evaluate",
    "features_of",
    "mean_sd",
    "open_features",
    "patch_edges",
    "predict",
    "score_masks",
    "smooth_scores",
    "tissue_graph",
    "write_graph",
]
