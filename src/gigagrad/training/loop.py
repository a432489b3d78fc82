"""`fit`: train a network on whole slides, keep the weights of the lowest validation loss, test them.

One step is one slide, or the mean of several: exact loss and gradients by the engine, then one step of Adam, as in the
founding experiment (Remedios et al., MIDL 2023), or of another optimizer. Everything random is a function of the seed,
the epoch and the slide's index, and a checkpoint holds whatever else a step depends on, so a run that was killed at any
moment ends with the same bits as one that was not.
"""

from __future__ import annotations

import math
import shutil
import time
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch

from gigagrad.at_work import WorkFile
from gigagrad.cohorts import Cohort, Row, Size, cases_of, check_images, class_table, read_cohort
from gigagrad.cohorts.patches import Bags
from gigagrad.config.fit import FitConfig
from gigagrad.devices import device_for
from gigagrad.errors import ConfigError, GigagradError, ModelError
from gigagrad.events import Events, Listener, MetricsLogged, Notice
from gigagrad.files import content_digest, write_json, write_text
from gigagrad.images import Image, open_image
from gigagrad.images.bag import Bag
from gigagrad.losses import Weighted, kind_of, named_loss
from gigagrad.models import load_weights_into, resolve, save_model
from gigagrad.models.registry import is_reloadable
from gigagrad.models.saved import load_weights
from gigagrad.plans import Plan
from gigagrad.ranks import Mesh, from_environment, launch
from gigagrad.training.dataset import Case, Dataset, Jitter, Steps, draws_of, made_label, varied
from gigagrad.training.evaluation import FitResult, test, validate, write_model
from gigagrad.training.folder import Checkpoint, Progress, RunFolder, environment
from gigagrad.training.frozen import features_once, head_of
from gigagrad.training.learner import Learner, freeze
from gigagrad.training.sharing import check_same_start, check_same_weights, check_seen, plan_alike
from gigagrad.training.state import random_states_kept, seed_all
from gigagrad.training.targets import BALANCED, class_weights, fit_loss
from gigagrad.training.trackers import RunLog, Tracker


def fit(
    config: FitConfig | Mapping[str, Any] | str | Path,
    listeners: Iterable[Listener] = (),
    *,
    overwrite: bool = False,
    trust: Collection[str] = (),
) -> FitResult:
    """Train as `config` (a `FitConfig`, a mapping of its settings, or the path of a YAML file) says.

    A run folder that holds a checkpoint of the same run is continued from it, a finished one is returned as it is;
    `overwrite` starts anew. `trust` lists what a YAML file may import, as `FitConfig.from_yaml` has it. Listeners get
    `JobStarted`, `JobAdvanced` and `JobFinished` for the jobs `patches` (of bags), `label`, `features`, `train`,
    `validate` and `test` (counted in slides), `MetricsLogged` for every step and epoch, `Notice`, and the engine's own.

    Processes that were started together (torchrun) train one network, every one of them calling this; the first has
    the listeners and writes the run's files, on a disk that all of them see.

    Raises a `GigagradError` for anything the user can mend. Settings, cohort, sizes, model, loss and budget are all
    checked before the run folder is touched.
    """
    settings = as_config(config, trust)
    everybody = from_environment(settings.rank_timeout)
    # The caller's random numbers are not ours to disturb.
    with everybody.job_error_scope(), random_states_kept(), ExitStack() as held:
        mesh = Mesh.of(everybody, settings.mesh_shape, settings.rank_timeout)
        events = Events(tuple(listeners) if mesh.first else ())
        return _Run(settings, events, mesh, held, overwrite=overwrite).fit()


def as_config(config: FitConfig | Mapping[str, Any] | str | Path, trust: Collection[str] = ()) -> FitConfig:
    """Read settings as `fit` takes them, with absolute paths."""
    if isinstance(config, (str, Path)):
        return FitConfig.from_yaml(config, trust=trust)
    settings = config if isinstance(config, FitConfig) else FitConfig.from_dict(config)
    return settings.relative_to(Path.cwd())


class _Run:
    """One run from its checks to its summary. Until `held` is closed, nobody else writes it."""

    def __init__(self, config: FitConfig, events: Events, mesh: Mesh, held: ExitStack, *, overwrite: bool) -> None:
        self.events, self.mesh = events, mesh
        self.folder = RunFolder(Path(config.out))
        self.cohort: Cohort = read_cohort(config.slides, config.fold, config.patches)
        self.table = class_table(self.cohort, config.classes)
        if self.table is not None:
            if not config.classes and self.cohort.rows[0].label is not None and kind_of(config.loss) == "numbers":
                raise ConfigError(
                    f"{config.loss} learns numbers, and the labels of {config.slides} are names ({self.table}); write "
                    "numbers, with a point before decimals, or say with --classes NAME=NUMBER which they are"
                )
            config = replace(config, classes=self.table.entries)
        self.config = config
        device_for(config.device)  # refuses one that is not there
        self.bags = None if config.patches is None else Bags(config.patches, config.input_view)
        self.loss = named_loss(config.loss)
        if self.loss.survival and config.accumulate < 2:
            raise ConfigError(
                "cox compares the slides of a step with each other, and accumulate is 1; give --accumulate 8, or as "
                "many patients as a step is to see"
            )
        self.jitter = Jitter(config.stain_jitter, config.colour_jitter)
        self.sizes = self._sizes()
        self.launches = tuple(sorted({*mesh.world.all_gather_object(launch())} - {""}))
        if mesh.first:
            held.enter_context(self.folder.written(self.launches, config.rank_timeout))
        self.overwrite = overwrite and not self._has_overwritten()
        self.progress = Progress()
        self.resumed: Checkpoint | None = None
        if self.folder.checkpoint.exists() and not self.overwrite:
            self.folder.check_own()
            found = Checkpoint.load(self.folder.checkpoint)
            self._continue(found, lambda: found.check_same_run(self.config, self.cohort.fingerprint))
        step = None if self.resumed is None else self.progress.step
        shapes = [size.shape for size in self.sizes]
        check_same_start(mesh.world, self.folder, step, self.config, self.cohort, shapes)
        self.contents = self._contents(self._contents_of)
        if (begun := self.resumed) is not None:
            self._continue(begun, lambda: begun.check_same_contents(self.config, self.contents))

    def _sizes(self) -> tuple[Size, ...]:
        """Return the sizes of all slides, or of their bags, each of which is looked at by one rank."""
        config, rows = self.config, self.cohort.rows
        if (bags := self.bags) is None:
            return check_images(self.cohort, config.level, look=config.input_view, table=self.table)

        def shape(row: Row) -> tuple[int, ...]:
            try:
                with bags.open(row) as bag:
                    return bag.shape
            except GigagradError as error:
                raise ConfigError(f"{self.cohort.where(row)}: {error}") from error

        with self.events.job("patches", len(rows)) as advance:

            def tell(done: int, found: Sequence[int]) -> None:
                advance(done, f"{rows[done - 1].name}: {found[0]} patches")

            return tuple(Size(tuple(found), 1, False) for found in self.mesh.world.map(rows, shape, tell))

    def _contents(self, of: Callable[[Row], dict[str, str]]) -> dict[str, str]:
        """Return digests of files, each found by one rank."""
        found = self.mesh.world.map(self.cohort.rows, of)
        return {path: digest for each in found for path, digest in each.items()}

    def _contents_of(self, row: Row) -> dict[str, str]:
        corners = {} if self.config.patches is None else self.config.patches.contents(row)
        return self.cohort.contents(row) | self._made_contents(row) | corners

    def _made_contents(self, row: Row) -> dict[str, str]:
        """Digest the label that the recipe has made of the row, if it has, by its name in the run's folder."""
        made = made_label(self.folder.labels, row)
        if row.label is not None or row.masks or not made.exists():
            return {}
        return {f"{made.parent.name}/{made.name}": content_digest(made)}

    def _has_overwritten(self) -> bool:
        """Return whether those that torchrun starts again after one of them had failed did so before."""
        if not self.launches or not self.folder.checkpoint.exists():
            return False
        try:
            return not {*self.launches}.isdisjoint(Checkpoint.load(self.folder.checkpoint).launches)
        except ConfigError:  # a checkpoint of anybody's
            return False

    def _continue(self, checkpoint: Checkpoint, check: Callable[[], None]) -> None:
        """Go on from `checkpoint`. Raises `ConfigError` where `check` finds another run's, unless that took no step."""
        try:
            check()
        except ConfigError:
            if checkpoint.progress.step:
                raise
            # It binds nobody: what stopped it before its first step may be what was changed since.
            self.overwrite, self.resumed, self.progress = True, None, Progress()
        else:
            self.resumed, self.progress = checkpoint, checkpoint.progress

    def fit(self) -> FitResult:
        if self.mesh.world.all_gather_object(self._ended() and self.folder.summary.exists())[0]:
            self.events.emit(Notice(f"{self.folder.path} holds this run, finished; --overwrite starts it anew"))
            return FitResult.load(self.folder.path)
        self._build()
        check_same_weights(self.mesh.world, self.model)
        plan = plan_alike(self.engine, self._plan, self.mesh.data)
        self.tile = (int(plan.tile[0]), int(plan.tile[1]))
        if self.mesh.first:
            self._prepare_folder(plan)
        self.mesh.world.barrier()
        check_seen(self.mesh.world, self.folder)
        with ExitStack() as stack:
            if self.mesh.first:
                self._record(stack)
            self._label()
            if self.features is not None:
                self.features.compute(self.cohort, self.events, self.mesh.world)
            self._train()
            return self._test()

    def _record(self, stack: ExitStack) -> None:
        """Write down what happens, until the stack is closed."""
        metrics_bytes = self.resumed.metrics_bytes if self.resumed else 0
        self.log = stack.enter_context(RunLog(self.folder, metrics_bytes=metrics_bytes))
        self.events.subscribe(self.log)
        self.events.subscribe(stack.enter_context(WorkFile(self.folder.path)))
        for name in self.config.trackers:
            tracker = Tracker(name, self.folder, self.progress.step, self.config.to_dict(), self.events)
            self.events.subscribe(stack.enter_context(tracker))
        for engine in self.learner.engines:
            engine.events.subscribe(self.events.emit)

    def _build(self) -> None:
        """Make the model, the optimizer and the engine, in the state of the checkpoint if there is one."""
        config = self.config
        seed_all(config.seed)
        # The weights of a run that goes on are in its checkpoint.
        self.model = resolve(config.model, published=self.resumed is None).to(config.device)
        if config.weights is not None and self.resumed is None:
            report = load_weights_into(self.model, config.weights)
            self.events.emit(Notice(str(report), warning=not report.complete))
        if not is_reloadable(config.model):
            text = f"{config.model} is made by a function; only a class can be loaded again by predict and evaluate"
            self.events.emit(Notice(text, warning=True))
        if self.table is not None:
            self.events.emit(Notice(f"classes: {self.table}"))
        if frozen := freeze(config, self.model):
            self.events.emit(Notice(f"{len(frozen)} parameters are frozen, from {frozen[0]} to {frozen[-1]}"))
        # The other splits only need a forward pass, which takes less than any backward pass.
        trained = [pair for pair in zip(self.cohort.rows, self.sizes, strict=True) if pair[0].split == "train"]
        self.largest, _ = max(trained, key=lambda pair: math.prod(pair[1].shape))
        self.loss, rule = fit_loss(config, self.loss, self.cohort, self.sizes, self.table, self.model, self.events)
        self.features = features_once(config, self.model, self.bags, self.largest, self.folder.features, self.events)
        self.dataset = Dataset(
            rule,
            level=config.level,
            look=config.input_view,
            labels=self.folder.labels,
            table=self.table,
            bags=self.bags,
            features=self.features,
            events=self.events,
        )
        grouped = self.loss.survival or len(cases_of(self.cohort.rows)) < len(self.cohort.rows)
        journal = self.folder.journal if config.journal else None
        computed = None if self.features is None else head_of(self.model)
        self.learner = Learner(
            config, self.model, self.loss, self.mesh, grouped=grouped, journal=journal, computed=computed
        )
        if untrained := self.learner.untrained:
            of_loss = f"{len(untrained)} parameters of the loss are not trained, from {untrained[0]} to {untrained[-1]}"
            self.events.emit(Notice(f"{of_loss}; a run trains those of its model", warning=True))
        if (groups := self.mesh.data.count) > config.accumulate:
            slides = f"{config.accumulate} slide{'s'[: config.accumulate - 1]}"
            text = f"a step has {slides} for {groups} groups of the mesh, so some have nothing to do (--accumulate)"
            self.events.emit(Notice(text, warning=True))
        pixels = {row: math.prod(size.shape) for row, size in zip(self.cohort.rows, self.sizes, strict=True)}
        self.steps = Steps(config, self.cohort, pixels, self.dataset, self.jitter, self.learner)
        self.engine = self.learner.engine
        if 0 < (steps := self.steps.made(Progress(config.epochs))) <= config.warmup:
            text = f"the learning rate rises over {config.warmup} steps, and the run has {steps}, so it never comes to"
            self.events.emit(Notice(f"{text} {config.learning_rate:g}; lower warmup", warning=True))
        if self.resumed is not None:
            self._resume(self.resumed)
        self.saved_step, self.logged_bytes = self.progress.step, 0

    def _resume(self, checkpoint: Checkpoint) -> None:
        try:
            self.learner.load(checkpoint, self.folder.optimizer_after(checkpoint.progress.step))
        except Exception as error:  # whatever lies in the place of what was saved
            reason = " ".join(str(error).split())[:200]
            unfit = f"{self.folder.checkpoint} does not fit this model ({reason})"
            raise ConfigError(f"cannot continue the run: {unfit}; start anew with --overwrite") from error

    def _plan(self) -> Plan:
        """Plan the largest training slide. Raises `BudgetError` while nothing has been written yet."""
        row, group = self.largest, self.learner.group
        if row.mask is None and row.label is None:
            # Its label does not exist yet; a plan only needs the shape and the dtype.
            with row.open(self.config.level) as slide:
                blank = np.broadcast_to(np.zeros((), np.uint8), (1, *slide.shape[1:]))
                seen = self.jitter.of(self.config.input_view.of(slide), self.config.seed, 0, 0)
                return self._planned(seen, open_image(blank))
        if self.features is not None:
            zeros = self.features.blank(row)  # there are none yet
            return self._planned(zeros, self.dataset.label(row)) if group is None else group.plan(zeros)
        with self.dataset.open(row) as (opened, target):
            shown = varied(opened, self.jitter, self.config.seed, 0, 0, augment=self.config.augment)
            return self._planned(shown, target) if group is None else group.plan(shown)

    def _planned(self, slide: Image | Bag, target: Image | torch.Tensor) -> Plan:
        if self.mesh.data.count > 1:
            self.engine.check_independent(slide, target)
        return self.engine.plan(slide, target)

    def _prepare_folder(self, plan: Plan) -> None:
        """Write what is known before the first step; refuse a folder that holds something else under our names."""
        folder = self.folder
        if self.resumed is None:
            if self.overwrite:
                folder.clear()
            elif leftover := folder.leftover():
                raise ConfigError(f"{leftover} exists and belongs to no run; choose another --out, or --overwrite it")
            self._save()
        else:
            self.events.emit(Notice(f"continuing {folder.path} after step {self.steps.made(self.progress)}"))
            if self.tile != self.resumed.tile:
                text = f"tiles are {self.tile} px now and were {self.resumed.tile}: sums are rounded otherwise"
                self.events.emit(Notice(text, warning=True))
            if changed := folder.other_versions():
                text = (
                    f"versions are others than when the run was begun ({', '.join(changed)}): bits may be others, too"
                )
                self.events.emit(Notice(text, warning=True))
        # A run that goes on is no longer finished.
        folder.summary.unlink(missing_ok=True)
        self.config.save(folder.config)
        write_json(folder.environment, environment())
        write_json(folder.plan_data, plan.to_dict())
        write_text(folder.plan_text, f"{plan}\n")

    def _label(self) -> None:
        """Make the labels that the cohort leaves to the recipe, and sample every target."""
        rows = self.cohort.rows

        def prepare(row: Row) -> list[int]:
            with self.cohort.telling(row):
                return sorted(self.dataset.prepare(row, self.model))

        with self.events.job("label", len(rows)) as advance:
            seen = self.mesh.world.map(rows, prepare, lambda done, _: advance(done, rows[done - 1].name))
        self.dataset.check_seen({value for values in seen for value in values})
        made = self._contents(self._made_contents)
        if self.resumed is not None:
            self.resumed.check_same_contents(self.config, made)
        self.contents |= made
        if self.config.class_weights == (BALANCED,):
            self._balance()

    def _balance(self) -> None:
        """Set the weights of classes by how rare they are in the training slides."""
        rows = self.cohort.of("train")
        counts = self.mesh.world.map(rows, lambda row: self.dataset.counts(row).tolist())
        weighted = [module for _, module in self.loss.made_of if isinstance(module, Weighted)]
        weights = class_weights((BALANCED,), np.array(counts), len(weighted[0].weight))
        for module in weighted:
            module.weight.copy_(torch.tensor(weights))
        self.events.emit(Notice(f"class weights: {', '.join(f'{weight:.4g}' for weight in weights)}"))

    def _train(self) -> None:
        config = self.config
        if not self.cohort.of("val"):
            text = "no slide has the split 'val': the weights of the last epoch are kept"
            self.events.emit(Notice(text, warning=True))
        self._note_state()
        self.saved_at = time.monotonic()
        try:
            with self.events.job("train", config.epochs * len(self.steps.cases), config.model) as advance:
                while not self._ended():
                    for chosen in self.steps.remaining(self.progress):
                        self._step(chosen, advance)
                        if self._is_time_to_save():
                            self._save()
                    self._end_epoch()
                self._save()
        except BaseException:
            self._save_interrupted()
            raise

    def _ended(self) -> bool:
        """Return whether there is nothing left to train."""
        config, progress = self.config, self.progress
        waited = progress.epoch - progress.best_epoch
        return progress.epoch >= config.epochs or 0 < config.patience <= waited

    def _step(self, chosen: Sequence[Case], advance: Callable[[int, str], None]) -> None:
        """Take one step with the mean gradient of some cases. Raises `ConfigError` if a loss is no longer a number."""
        progress, slides = self.progress, len(chosen)

        def tell(done: int, loss: float) -> None:
            text = f"epoch {progress.epoch + 1} of {self.config.epochs}, loss {loss:.4g}"
            advance(progress.step + done, text)

        told = self.steps.gradients(chosen, progress, lambda done, loss: tell(done, loss) if done < slides else None)
        done, steps = self.steps.made(progress), self.steps.made(Progress(self.config.epochs))
        told[-1] |= self.learner.step(done, steps, slides)
        self.progress = replace(progress, index=progress.index + slides, step=progress.step + slides)
        for number, values in enumerate(told, self.progress.step - len(told) + 1):
            self.events.emit(MetricsLogged("train", progress.epoch + 1, number, values))
        self._note_state()
        tell(slides, told[-1]["loss"])

    def _end_epoch(self) -> None:
        """Validate, keep the weights if they are the best so far, and count the epoch as done."""
        epoch, rows = self.progress.epoch + 1, self.cohort.of("val")
        best_loss, best_epoch = self.progress.best_loss, self.progress.best_epoch
        with self.learner.as_kept():
            best = True
            if rows:
                # A model may draw in eval mode, too: with numbers that are no training slide's of this epoch.
                seed_all(draws_of(self.config.seed, self.progress.epoch, len(self.cohort.rows)))
                value = validate(self.learner, self.dataset, rows, self.events, self.mesh)
                self.events.emit(MetricsLogged("val", epoch, self.progress.step, {"loss": value}))
                if math.isnan(value) and not best_epoch:  # nothing would ever be lower
                    raise ConfigError(
                        "the validation loss of the first epoch is no number, so the weights of no other epoch would "
                        "be kept; see whether the mask of a slide of split 'val' holds nothing but ignored pixels, or "
                        f"lower learning_rate (it is {self.config.learning_rate:g})"
                    )
                best = value < best_loss or not best_epoch
                best_loss = value if best else best_loss
            if best and self.mesh.first:
                save_model(self.folder.best, self.config.model, self.model)
        best_epoch = epoch if best else best_epoch
        self.progress = replace(self.progress, epoch=epoch, index=0, best_loss=best_loss, best_epoch=best_epoch)
        self._note_state()
        if best:  # a run that goes on for fewer epochs than it had is to have weights that its checkpoint knows
            self._save()

    def _is_time_to_save(self) -> bool:
        """Return whether a checkpoint is due, by the first rank's clock where all save."""
        is_time = time.monotonic() - self.saved_at >= self.config.checkpoint_seconds
        return is_time if self.learner.shards is None else bool(self.mesh.world.all_gather_object(is_time)[0])

    def _note_state(self) -> None:
        """Note, between two steps, what else a checkpoint of this moment needs."""
        self.at_step, self.writes = self.progress, self.learner.writes()
        if self.mesh.first:
            self.logged_bytes = self.log.position()

    def _save_interrupted(self) -> None:
        """Save a checkpoint of the last whole step, unless one had begun to write when the interrupt came."""
        if self.learner.shards is not None:  # the others may be gone
            return
        if self.at_step.step > self.saved_step and self.learner.writes() == self.writes:
            self.progress = self.at_step
            self._save()

    def _save(self) -> None:
        """Save a checkpoint. Ranks that share the optimizer's state call it together, once there is any."""
        if not self.mesh.first and self.learner.shards is None:
            return
        sharded = self.folder.optimizer_after(self.progress.step) if self.progress.step else None
        state = self.learner.state(sharded)
        if not self.mesh.first:
            return
        Checkpoint(
            config=self.config.to_dict(),
            cohort=self.cohort.fingerprint,
            progress=self.progress,
            tile=self.tile,
            metrics_bytes=self.logged_bytes,
            launches=self.launches,
            contents=self.contents,
            **state,
        ).save(self.folder.checkpoint)
        for older in self.folder.optimizer.glob("step-*"):
            if older != sharded:
                shutil.rmtree(older, ignore_errors=True)
        self.saved_at, self.saved_step = time.monotonic(), self.progress.step

    def _test(self) -> FitResult:
        """Score the best weights on the test slides and write the summary."""
        config = self.config
        self.mesh.world.barrier()  # behind whoever has written them
        # Built from what the user asked for; of the file, only the weights.
        model = load_weights(self.folder.best, resolve(config.model, published=False)).to(config.device)
        tested = model if self.features is None else head_of(model)
        metric, scores, evaluation = test(
            tested, config, self.loss, self.dataset, self.table, self.cohort, self.events, self.mesh.world
        )
        result = FitResult(
            out=self.folder.path,
            metric=metric,
            scores=scores,
            epochs=self.progress.epoch,
            steps=self.steps.made(self.progress),
            best_epoch=self.progress.best_epoch,
            best_loss=self.progress.best_loss if math.isfinite(self.progress.best_loss) else None,
            evaluation=evaluation,
        )
        if result.scores:
            named = {f"{result.metric}_mean": result.mean, f"{result.metric}_sd": result.sd}
            measures = {"accuracy": result.accuracy, "c_index": result.c_index}
            named |= {name: value for name, value in measures.items() if value is not None}
            self.events.emit(MetricsLogged("test", self.progress.epoch, self.progress.step, named))
        if self.mesh.first:
            with self._opened_largest() as seen:
                mpp = seen.mpp
            try:
                write_model(model, config, self.cohort, result, mpp)
            except ModelError as error:
                self.events.emit(Notice(f"there is no {self.folder.model}: {error}", warning=True))
            result.save(model=config.model, parameters=sum(p.numel() for p in model.parameters()))
        return result

    def _opened_largest(self) -> AbstractContextManager[Image | Bag]:
        return self.largest.open(self.config.level) if self.bags is None else self.bags.open(self.largest)
