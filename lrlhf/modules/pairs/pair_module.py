"""What training on preference pairs does, whatever gives the candidates their scores."""

from __future__ import annotations

import math
import time
from collections.abc import Mapping, Sequence
from typing import Any, ClassVar, NamedTuple

import lightning as L
import torch
from lightning.pytorch.core.optimizer import LightningOptimizer
from torch import Tensor
from torch.optim import Optimizer
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from lrlhf.datamodules.core import set_names
from lrlhf.datamodules.preferences import PreferenceDataModule
from lrlhf.guard import Anomaly, Guard, ReplayedStep, StepBundle
from lrlhf.models import packs, placeholder_ids
from lrlhf.models.token_budget import GIB, PEAK_MEMORY, peak_memory
from lrlhf.modules.base import SingleModelModule
from lrlhf.modules.checks import refuse_other_batch, uses_loss_scaler
from lrlhf.modules.metrics.measurement import Measurement
from lrlhf.modules.metrics.metric_sums import MetricSums
from lrlhf.modules.metrics.reward_metrics import (
    METRICS,
    OF_SOURCES,
    RewardMetrics,
    RewardSummary,
    fit_tie_threshold,
    measurements_of,
    three_way_accuracy,
)
from lrlhf.modules.optimizers import OptimizerConfig
from lrlhf.modules.pairs.pair_losses import PairObjective
from lrlhf.modules.pairs.pair_step import (
    PairBatch,
    PairMean,
    PairScores,
    PairStep,
    bad_place,
    concatenate,
    pad_id_of,
    score_records,
    step_records,
)
from lrlhf.modules.policy.iteration import UpdateCosts
from lrlhf.rollout import plan_micro_batches
from lrlhf.run import Collectives, gradients_of, seed_everything_for
from lrlhf.run.lightning_internals import data_in_use, trainer_of
from lrlhf.types import PreferenceBatch


class PairOutputs(NamedTuple):
    """What a model makes of pairs."""

    scores: PairScores
    loss: Tensor | None = None
    """`[B]`, of each pair, beside that of its labels; None: there is none."""
    values: Mapping[str, Tensor] = {}
    """`[B]` each, by the names that their means over an optimizer step are logged under."""


class PairModule(SingleModelModule):
    """Trains what gives scores to the candidates of pairs.

    The loss of an optimizer step is the mean over all of its pairs, of all micro-batches and
    ranks, of the summed losses of each pair's labels. A step whose loss or gradient is not finite
    is left out on all ranks. A subclass sets ``tokenizer``, calls `set_heads`, and defines
    ``trainable_models``, ``outputs_of`` and ``train_name``.

    Args:
        objective: Loss of the labels.
        optimizer: AdamW and its schedule.
        max_grad_norm: Clip the gradient to this norm.
        guard: When an optimizer step is left out.
        seed: Seeds dropout.
    """

    train_metric: ClassVar[str]
    eval_metric: ClassVar[str] = "eval/accuracy"
    stage: ClassVar[str]
    """What dumps call the step."""
    tokenizer: PreTrainedTokenizerBase

    def __init__(
        self,
        objective: PairObjective,
        *,
        optimizer: OptimizerConfig,
        max_grad_norm: float,
        guard: Guard,
        seed: int | None,
    ) -> None:
        super().__init__(optimizer=optimizer, max_grad_norm=max_grad_norm, guard=guard, seed=seed)
        self.automatic_optimization = True  # one loss, one optimizer: Lightning accumulates
        self.objective = objective
        self._step = PairStep()
        self._values = MetricSums()

    def set_heads(self, names: Sequence[str], weights: Sequence[float]) -> None:
        """Name what is scored, and weigh the losses of its labels."""
        self.head_names: tuple[str, ...] = tuple(names)
        self.head_weights: Tensor
        self.register_buffer("head_weights", torch.tensor(weights), persistent=False)
        self.tie_thresholds: Tensor
        self.register_buffer("tie_thresholds", torch.full((len(weights),), torch.nan))
        self.train_metrics = RewardMetrics(self.head_names, weights, intervals=False)
        self.eval_metrics = RewardMetrics(self.head_names, weights)
        self.measurements: list[Measurement] = []
        """What the last evaluation has found."""
        self.stateful["pairs"] = _UnloggedPairs(self, self.train_metrics)

    def outputs_of(self, batch: PreferenceBatch) -> PairOutputs:
        """Run the model over both candidates of every pair."""
        raise NotImplementedError

    @property
    def plain(self) -> PreTrainedModel:
        """The ``transformers`` model that is trained, with its adapters."""
        raise NotImplementedError

    @staticmethod
    def train_name(metric: str) -> str:
        """Return what a metric of the scores is logged as in training."""
        raise NotImplementedError

    def score_pairs(self, batch: PreferenceBatch) -> PairScores:
        """Score both candidates of every pair, `[B, H]` each."""
        return self.outputs_of(batch).scores

    # ---- training

    def on_fit_start(self) -> None:
        for model in self.trainable_models().values():
            model.train()  # from_pretrained leaves eval mode, and Lightning keeps it
        self._step, self._values = PairStep(), MetricSums()  # half of one may have been left

    def training_step(self, batch: PreferenceBatch, batch_idx: int) -> Tensor:
        refuse_other_batch(self, batch, PreferenceBatch, "PreferenceDataModule")
        seed = (self.seed, self.global_rank, self.current_epoch, batch_idx)
        return self._loss(batch, seed)

    def _loss(self, batch: PreferenceBatch, seed: tuple[int, ...]) -> Tensor:
        """Return a micro-batch's share of the step's loss, see `PairStep`."""
        if not self._step.micro_batches:
            self._began = time.perf_counter()
        seed_everything_for(*seed)
        scores, further, values = self.outputs_of(batch)
        losses = self._measured(scores, batch, self.train_metrics, _source_names(self.trainer))
        total = (losses * self.head_weights).sum()
        if further is not None:
            total = total + further.sum()
        for name, value in values.items():
            self._values.add_values(name, value)
        micro_batch = PairBatch(
            batch.host or batch, PairScores(*(part.detach() for part in scores)), seed
        )
        return self._step.add(total, micro_batch, Collectives(self.trainer))

    def _measured(
        self,
        scores: PairScores,
        batch: PreferenceBatch,
        metrics: RewardMetrics,
        named: Mapping[str, str],
        number: int = -1,
    ) -> Tensor:
        losses = self.objective(*scores, batch.labels, batch.margin)
        lengths = torch.stack([batch.candidate0.lengths, batch.candidate1.lengths], dim=-1)
        numbers = {source: index for index, source in enumerate(named)}
        sources = torch.tensor(
            [numbers.get(str(info.get("source")), -1) for info in batch.info], device=lengths.device
        )
        prompts = batch.prompt_ids
        metrics.update(*scores, losses, batch.labels, lengths, number, sources, prompts)
        return losses

    def on_before_optimizer_step(self, optimizer: Optimizer) -> None:
        ranks = Collectives(self.trainer)
        costs = self._costs()  # while the device computes the gradient
        mean = self._step.close(self.trainer.accumulate_grad_batches, ranks)
        gradients = gradients_of(self.trainer, optimizer)
        if mean.correction != 1.0:
            gradients.scale(mean.correction)
        norm = gradients.norm()
        gradients_finite = not ranks.sum((~norm.isfinite()).float())
        # a loss scaler finds its scale by overflowing, and leaves those steps out itself
        if not mean.finite or not (gradients_finite or uses_loss_scaler(self.trainer)):
            gradients.drop()
            self.step_guard.report(self._anomalies(mean, ranks), self._bundle, self)
        elif self.trainer.gradient_clip_val is None and self.max_grad_norm < norm < math.inf:
            gradients.scale(self.max_grad_norm / norm)
        self._step = PairStep()
        # the norm has waited for the device
        self._log_training(float(norm), costs)

    def _costs(self) -> UpdateCosts:
        """Count what went through the model since the last optimizer step."""
        costs = UpdateCosts(self.device)
        marks, pad_id = placeholder_ids(self.plain.config), pad_id_of(self.tokenizer)
        for batch, *_ in self._step.micro_batches:
            both = concatenate(batch.candidate0, batch.candidate1, pad_id=pad_id)
            packed = packs(self.plain, both)
            parts = plan_micro_batches(both, max_tokens=None, packed=packed, placeholders=marks)
            costs.count([self.plain], both.lengths.cpu(), parts)
        return costs

    # ---- the guard

    def _anomalies(self, mean: PairMean, ranks: Collectives) -> list[Anomaly]:
        """Return what this rank knows of a step that is left out."""
        if mean.finite:
            return [Anomaly("gradient", "the gradient is not finite")] if ranks.rank == 0 else []
        location = bad_place(self._step.micro_batches, self.head_names, self.tokenizer)
        anomaly = Anomaly("loss", f"the loss is not finite{f' ({location})' if location else ''}")
        return [anomaly] if location or ranks.rank == 0 else []

    def _bundle(self) -> StepBundle:
        micro_batches = self._step.micro_batches
        return StepBundle(
            stage=self.stage,
            batches={str(index): one.batch for index, one in enumerate(micro_batches)},
            seeds=[micro_batch.seed for micro_batch in micro_batches],
            context={},
            records=step_records(micro_batches, self.head_names, self.tokenizer),
        )

    @property
    def step_names(self) -> tuple[str, ...]:
        """The steps that `replay_step` knows."""
        return (self.stage,)

    def replay_step(self, bundle: StepBundle) -> ReplayedStep:
        """Replay the step of a dump, see `lrlhf.guard.dump_replay.Replayable`."""
        optimizer = self.optimizers()
        assert isinstance(optimizer, LightningOptimizer)
        for batch, seed in zip(bundle.batches.values(), bundle.seeds, strict=True):
            assert isinstance(batch, PreferenceBatch)
            self.manual_backward(self._loss(batch.to(self.device), seed))
        records = step_records(self._step.micro_batches, self.head_names, self.tokenizer)
        optimizer.step()
        return ReplayedStep(records)

    # ---- evaluation

    def validation_step(
        self, batch: PreferenceBatch, batch_idx: int, dataloader_idx: int = 0
    ) -> dict[str, Any]:
        del batch_idx
        scores = self.score_pairs(batch)
        number = dataloader_idx if set_names(self.trainer)[dataloader_idx] else -1
        named = _source_names(self.trainer, dataloader_idx)
        self._measured(scores, batch, self.eval_metrics, named, number)
        return {"records": self._records(scores, batch)}

    test_step = validation_step

    def predict_step(
        self, batch: PreferenceBatch, batch_idx: int, dataloader_idx: int = 0
    ) -> list[dict[str, Any]]:
        """Return the scores of every pair, see `score_records`."""
        del batch_idx, dataloader_idx
        scores = self.score_pairs(batch)
        return self._records(scores, batch)

    def _records(self, scores: PairScores, batch: PreferenceBatch) -> list[dict[str, Any]]:
        return score_records(
            scores,
            batch,
            self.head_names,
            self.tokenizer,
            head_weights=self.head_weights.tolist(),
            margin=self.objective.margin,
        )

    def on_validation_epoch_start(self) -> None:
        self.eval_metrics.reset()  # of one that was broken off

    on_test_epoch_start = on_validation_epoch_start

    def on_validation_epoch_end(self) -> None:
        summary = self._compute(self.eval_metrics)
        thresholds = [fit_tie_threshold(head) for head in summary.heads.values()]
        for index, threshold in enumerate(thresholds):
            self.tie_thresholds[index] = torch.nan if threshold is None else threshold
        self._log_evaluation("eval", summary)

    def on_test_epoch_end(self) -> None:
        # with the thresholds of the last validation: fitted on other pairs than these
        self._log_evaluation("test", self._compute(self.eval_metrics))

    def evaluation_names(self) -> set[str]:
        """Return the names of all metrics that evaluations may log."""
        heads = self.head_names if len(self.head_names) > 1 else ()
        sets = [*enumerate(set_names(self.trainer))]
        prefixes = {prefix for _, one in sets for prefix in ("", _of_set(one))}
        sources = {
            f"{_of_set(one)}{_of_source(source)}"
            for index, one in sets
            for source in _source_names(self.trainer, index).values()
        }
        return {
            f"eval/{prefix}{name}{head}"
            for among, names in ((prefixes, METRICS), (sources, OF_SOURCES))
            for prefix in among
            for name in names
            for head in ("", *(f"/{head}" for head in heads))
        }

    # ---- logging

    def _log_training(self, norm: float, costs: UpdateCosts) -> None:
        seconds = time.perf_counter() - self._began
        self._values.maximum("perf/update_s", seconds)
        costs.report(self._values, seconds, self.trainer.world_size)
        self._values.maximum(PEAK_MEMORY, peak_memory(self.device) / GIB)
        values = {**self.step_guard.metrics(), "train/grad_norm": norm}
        values |= self._values.reduce(Collectives(self.trainer), self.device)
        self._values = MetricSums()
        every = self.trainer.log_every_n_steps  # type: ignore[attr-defined]
        due = (self.trainer.global_step + 1) % max(1, every) == 0
        if due or self.trainer.global_step == 0:  # the first to be seen at once; a row has it too
            values |= self._training_values(keeps=not due)
            self.log("train/loss", values.pop("train/loss"), batch_size=1, prog_bar=True)
        self.log_dict(values, batch_size=1)

    def on_train_epoch_end(self) -> None:
        self.log_dict(self._training_values(), batch_size=1, sync_dist=True)

    def _training_values(self, *, keeps: bool = False) -> dict[str, float]:
        """Sum up the pairs since the last call, all ranks together; empty: there are none."""
        summary = self._compute(self.train_metrics, keeps=keeps)
        metrics = dict(summary.metrics)
        loss = {"train/loss": metrics.pop("loss")} if metrics else {}
        parts = {"": metrics} | self._by_source(summary, None)
        return loss | {
            self.train_name(f"{at}{k}"): value
            for at, own in parts.items()
            for k, value in own.items()
        }

    def _by_source(self, summary: RewardSummary, index: int | None) -> dict[str, dict[str, float]]:
        """Return what is told of each source of a mixture, see `_source_names`."""
        names = [*_source_names(self.trainer, index).values()]
        summaries = summary.sources.items()
        return {_of_source(names[number]): own.main_metrics for number, own in summaries}

    def _log_evaluation(self, stage: str, summary: RewardSummary) -> None:
        names = set_names(self.trainer)
        sets = [("", 0, summary)] + [(names[i], i, own) for i, own in summary.sets.items()]
        parts = {}
        for name, index, own in sets:
            at = f"{stage}/{_of_set(name)}"
            parts[at] = self._evaluation_values(own)
            for source, values in self._by_source(own, index).items():
                parts[f"{at}{source}"] = values
        logged = {f"{at}{key}": value for at, own in parts.items() for key, value in own.items()}
        # equal on all ranks already; sync_dist says so to Lightning
        self.log_dict(logged, batch_size=1, sync_dist=True)
        self.measurements = [each for at, own in parts.items() for each in measurements_of(own, at)]

    def _evaluation_values(self, summary: RewardSummary) -> dict[str, float]:
        values = dict(summary.metrics)
        several = len(self.head_names) > 1
        for (name, head), threshold in zip(
            summary.heads.items(), self.tie_thresholds.tolist(), strict=True
        ):
            if not math.isnan(threshold) and not head.labels.isnan().all():
                suffix = f"/{name}" if several else ""
                values[f"tie_threshold{suffix}"] = threshold
                values[f"three_way_accuracy{suffix}"] = three_way_accuracy(head, threshold)
        return values

    @staticmethod
    def _compute(metrics: RewardMetrics, *, keeps: bool = False) -> RewardSummary:
        metrics.update_with_nothing()
        summary: RewardSummary = metrics.compute()
        if not keeps:
            metrics.reset()
        return summary


def _of_set(name: str) -> str:
    """Return what the metrics of a validation set begin with, after ``eval/``."""
    return f"{name}/" if name else ""


def _of_source(name: str) -> str:
    """Return what the metrics of a source of a mixture begin with, after those of its set."""
    return f"source/{name}/"


class _UnloggedPairs:
    """The pairs, of all ranks, that the next logged row is about."""

    def __init__(self, module: PairModule, metrics: RewardMetrics) -> None:
        self._module = module
        self._metrics = metrics

    def state_dict(self) -> dict[str, Any]:
        trainer = self._module.trainer
        seen = Collectives(trainer).gather(self._metrics.seen())
        return {"ranks": seen, "sources": list(_source_names(trainer))}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        trainer = trainer_of(self._module)
        if trainer is not None:  # a run that goes on, not a model that is loaded
            # the data may have changed, and its sources have other numbers
            numbers = {source: number for number, source in enumerate(_source_names(trainer))}
            seen = state["ranks"]
            if "sources" in state:  # else from before they were named
                now = [numbers.get(source, -1) for source in state["sources"]]
                seen = [self._metrics.renumbered(each, now) for each in seen]
            self._metrics.resume(seen, Collectives(trainer))


def _source_names(trainer: L.Trainer, index: int | None = None) -> Mapping[str, str]:
    """Return what metrics call each source of a mixture of pairs, by the column ``source``.

    Args:
        trainer: Trains, evaluates or predicts.
        index: Of the validation loader; None: the train data.

    Returns:
        Names in the order of the data; empty where there is nothing to tell apart.
    """
    data = data_in_use(trainer)
    if not isinstance(data, PreferenceDataModule):
        return {}
    return data.source_names(None if index is None else data.val_names[index])
