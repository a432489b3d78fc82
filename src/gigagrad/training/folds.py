"""Cross-validation: for each fold of a cohort a run that is trained on the others, and its scores on that fold."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, Final

from gigagrad.cohorts import folds_of, read_rows
from gigagrad.config.fit import FitConfig
from gigagrad.errors import ConfigError
from gigagrad.events import Listener
from gigagrad.files import write_json
from gigagrad.models.registry import called_path
from gigagrad.prediction.cohort_scores import evaluate_model
from gigagrad.prediction.scores import Evaluation
from gigagrad.ranks import from_environment
from gigagrad.training.loop import as_config, fit

SUMMARY: Final = "folds.json"


@dataclass(frozen=True, slots=True)
class FoldResult:
    """Scores of the best weights of a fold's run, in the folder `out`, on its `slides` slides, by measure."""

    fold: int
    out: Path
    slides: int
    best_epoch: int
    scores: dict[str, float]


def cross_validate(
    config: FitConfig | Mapping[str, Any] | str | Path,
    listeners: Iterable[Listener] = (),
    *,
    overwrite: bool = False,
    trust: Collection[str] = (),
) -> tuple[FoldResult, ...]:
    """Run `fit` once for each fold of the cohort, into `out/fold-N`, and score it on that fold.

    The scores are means over the fold's slides, Dice and IoU or what `evaluate` says of labels, and are written to
    `out/folds.json`. Folds that are finished are not trained again. Raises what `fit` raises, and `ConfigError` for a
    cohort without folds.
    """
    settings, listeners = as_config(config, trust), tuple(listeners)
    if settings.fold is not None:
        raise ConfigError(f"one fold is named, {settings.fold}, and all are to be trained; leave it out")
    ranks = from_environment(settings.rank_timeout)
    with ranks.job_error_scope():
        path, results = Path(settings.slides), list[FoldResult]()
        folds = folds_of(path, *read_rows(path)) if path.is_file() else []
        if len(folds) < 2:
            raise ConfigError(
                f"{path} has no folds to validate in turn; give it a column 'fold' with two or more numbers, or split "
                "files"
            )
        for fold in folds:
            config = replace(settings, fold=fold, out=str(Path(settings.out) / f"fold-{fold}"))
            result = fit(config, listeners, overwrite=overwrite)
            found = _scored(config, result.out, listeners, trust) if ranks.index == 0 else None
            slides, scores = ranks.all_gather_object(found)[0]
            results.append(FoldResult(fold, result.out, slides, result.best_epoch, scores))
        if ranks.index == 0:
            written = [{**asdict(result), "out": result.out.name} for result in results]
            write_json(Path(settings.out) / SUMMARY, {"folds": written})
    return tuple(results)


def _scored(
    config: FitConfig, run: Path, listeners: tuple[Listener, ...], trust: Collection[str]
) -> tuple[int, dict[str, float]]:
    """Count the slides to validate, and score the best weights on them."""
    found = evaluate_model(
        run,
        config.slides,
        split="val",
        memory=config.memory,
        scratch=config.scratch,
        device=config.device,
        trust=(*trust, called_path(config.model)),  # that file is our own
        listeners=listeners,
    )
    assert found is not None, "there are no other shares"
    if isinstance(found, Evaluation):
        return len(found.scores), {"dice": found.dice[0], "iou": found.iou[0]}
    return len(found.slides), {name: measure.value for name, measure in found.measures.items()}
