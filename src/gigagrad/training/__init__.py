"""Train on whole slides: cohorts, losses, turns, the loop, checkpoints and the run folder."""

from gigagrad.cohorts import Cohort, Row, read_cohort
from gigagrad.config.fit import FitConfig
from gigagrad.training.evaluation import FitResult
from gigagrad.training.folds import FoldResult, cross_validate
from gigagrad.training.loop import fit

__all__ = ["Cohort", "FitConfig", "FitResult", "FoldResult", "Row", "cross_validate", "fit", "read_cohort"]
