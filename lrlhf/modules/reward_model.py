"""Reward models from preference pairs."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, ClassVar

import torch
from lightning.pytorch.core.optimizer import LightningOptimizer
from lightning.pytorch.utilities.types import OptimizerLRScheduler
from torch import Tensor, nn
from torch.optim import Optimizer
from transformers import PreTrainedTokenizerBase, ProcessorMixin

from lrlhf.guard import Anomaly, Guard, Retaken, StepBundle
from lrlhf.guard.guard_settings import refuse_policy_limits
from lrlhf.models import RewardNetwork, ScoreModel
from lrlhf.modules.base import TrainingModule
from lrlhf.modules.checks import refuse_idle_encoder, refuse_other_batch, uses_loss_scaler
from lrlhf.modules.metrics.measurement import Measurement
from lrlhf.modules.metrics.reward_metrics import (
    INTERVAL,
    METRICS,
    RewardMetrics,
    RewardSummary,
    fit_tie_threshold,
    measurements_of,
    three_way_accuracy,
)
from lrlhf.modules.optimizers import OptimizerAndScheduler, OptimizerConfig
from lrlhf.modules.pairs.pair_losses import PairObjective, resolve_losses
from lrlhf.modules.pairs.pair_records import bad_place, score_records, step_records
from lrlhf.modules.pairs.pair_step import (
    MicroBatch,
    PairMean,
    PairScores,
    PairStep,
    concatenate,
)
from lrlhf.modules.pairs.reward_loading import load_reward_model
from lrlhf.modules.pairs.score import score
from lrlhf.modules.validation_sets import set_names
from lrlhf.run import Collectives, gradients_of, seed_everything_for
from lrlhf.run.lightning_internals import trainer_of
from lrlhf.types import PreferenceBatch, SequenceBatch

_LR = 1e-5
_WARMUP = 0.03
"""Share of a run's steps, where the optimizer does not say."""
_STAGE = "reward"


class RewardModel(TrainingModule):
    """Trains scalar scores on pairs of answers, with one head per named aspect.

    The loss of an optimizer step is the mean over all of its pairs, of all micro-batches and
    ranks, of the summed losses of each pair's labels. A label that is missing adds nothing. A step
    whose loss or gradient is not finite is left out on all ranks.

    Args:
        model: What to train: a hub id, a folder, ``package:<module>``, a `ScoreModel` that says how
            to load it, or a `RewardNetwork` that is already built (then pass ``tokenizer``).
        tokenizer: For a network that is already built.
        processor: For a vision-language network that is already built; as ``AutoProcessor`` loads
            it.
        loss: ``bradley_terry``, ``log_exp``, ``hps``, the dotted path of a function from chosen and
            rejected scores to losses, or a mix of these: a weight for each.
        margin: By how much the chosen score should lead; a pair's own margin replaces it.
        tie_weight: Weight of abs(score gap) of pairs labelled as equal, beside a preference's loss.
        head_weights: Weight of each head in the loss, 1 where none is given.
        center_coef: Strength of (chosen + rejected)², which keeps scores around 0; try 0.01.
        label_smoothing: Assumed share of wrong labels.
        optimizer: AdamW and its schedule, counted in optimizer steps; 3 % of them are warm-up
            unless ``warmup_steps`` says otherwise.
        max_grad_norm: Clip the gradient to this norm; ``inf`` leaves it.
            ``trainer.gradient_clip_val`` takes its place where that is set.
        guard: When an optimizer step is left out, and when to give up; of the limits only those
            of loss and gradient are about a reward model.
        seed: Seeds dropout, together with rank and step; None: the seed of ``seed_everything``.

    Raises:
        ValueError: An option is out of its range, or names a head that does not exist.
    """

    train_metric: ClassVar[str] = "reward_model/accuracy"
    eval_metric: ClassVar[str] = "eval/accuracy"

    def __init__(  # noqa: PLR0913  the constructor is the config schema
        self,
        model: str | ScoreModel | RewardNetwork,
        *,
        tokenizer: PreTrainedTokenizerBase | None = None,
        processor: ProcessorMixin | None = None,
        loss: str | dict[str, float] = "bradley_terry",
        margin: float = 0.0,
        tie_weight: float = 0.01,
        head_weights: dict[str, float] | None = None,
        center_coef: float = 0.0,
        label_smoothing: float = 0.0,
        optimizer: OptimizerConfig = OptimizerConfig(),  # noqa: B008  frozen
        max_grad_norm: float = 1.0,
        guard: Guard = Guard(),  # noqa: B008  frozen
        seed: int | None = None,
    ) -> None:
        super().__init__(guard=guard, seed=seed)
        self.automatic_optimization = True  # one loss, one optimizer: Lightning accumulates
        self.objective = PairObjective(
            losses=resolve_losses(loss),
            margin=margin,
            tie_weight=tie_weight,
            center_coef=center_coef,
            label_smoothing=label_smoothing,
        )
        self.optimizer_config = optimizer
        if max_grad_norm <= 0:
            raise ValueError(f"max_grad_norm is {max_grad_norm}; it must be above 0")
        self.max_grad_norm = max_grad_norm
        refuse_policy_limits(guard, type(self).__name__)
        self.network, self.tokenizer, self.processor = load_reward_model(
            model, tokenizer, processor
        )
        self.head_names: tuple[str, ...] = self.network.head_names
        weights = _weights(self.head_names, head_weights)
        self.head_weights: Tensor
        self.register_buffer("head_weights", torch.tensor(weights), persistent=False)
        self.tie_thresholds: Tensor
        self.register_buffer("tie_thresholds", torch.full((len(weights),), torch.nan))
        self.train_metrics = RewardMetrics(self.head_names, weights)
        self.eval_metrics = RewardMetrics(self.head_names, weights, by_set=True)
        self.measurements: list[Measurement] = []
        """What the last evaluation has found."""
        self.stateful["pairs"] = _UnloggedPairs(self, self.train_metrics)
        self._step = PairStep()

    # ---- what callbacks and data modules ask for

    def trainable_models(self) -> dict[str, nn.Module]:
        """Return what receives gradients, by role."""
        return {"reward": self.network}

    def export_pretrained(self, folder: Path | None) -> None:
        """Write the network and its tokenizer into ``folder``."""
        self.network.save_pretrained(folder, self.tokenizer)
        if self.processor is not None and folder is not None:
            self.processor.save(folder)

    score = score

    def summary(self) -> dict[str, str]:
        """Say what is trained, and on which heads."""
        return {**super().summary(), "heads": ", ".join(self.head_names)}

    # ---- training

    def configure_optimizers(self) -> OptimizerLRScheduler:
        optimizer, scheduler = self._optimizer(self.trainer.estimated_stepping_batches)
        return {
            "optimizer": optimizer,
            "lr_scheduler": {"scheduler": scheduler, "interval": "step"},
        }

    def _optimizer(self, steps: float) -> OptimizerAndScheduler:
        # a share of a run without an end is nothing
        warmup = _WARMUP if math.isfinite(steps) else 0
        config = self.optimizer_config.filled(lr=_LR, warmup_steps=warmup)
        return config.build(self.network.named_parameters(), steps)

    def on_fit_start(self) -> None:
        refuse_idle_encoder(self.trainer, self.network.scorer.plain, self.processor)
        self.network.train()  # from_pretrained leaves eval mode, and Lightning keeps it
        self._step = PairStep()  # an interrupted fit may have left half of one

    def forward(self, batch: SequenceBatch) -> Tensor:
        """Score every row; returns [B, H] in the order of ``head_names``."""
        scores: Tensor = self.network(batch)
        return scores

    def score_pairs(self, batch: PreferenceBatch) -> PairScores:
        """Score both candidates in one forward pass."""
        both = concatenate(batch.candidate0, batch.candidate1, pad_id=self._pad_id)
        return PairScores(*self(both).split(len(batch)))

    def training_step(self, batch: PreferenceBatch, batch_idx: int) -> Tensor:
        refuse_other_batch(self, batch, PreferenceBatch, "PreferenceDataModule")
        seed = (self.seed, self.global_rank, self.current_epoch, batch_idx)
        return self._loss(batch, seed)

    def _loss(self, batch: PreferenceBatch, seed: tuple[int, ...]) -> Tensor:
        """Return a micro-batch's share of the step's loss, see `PairStep`."""
        seed_everything_for(*seed)
        scores = self.score_pairs(batch)
        losses = self._measured(scores, batch, self.train_metrics)
        total = (losses * self.head_weights).sum()
        taken = MicroBatch(
            batch.host or batch, PairScores(*(part.detach() for part in scores)), seed
        )
        return self._step.add(total, taken, Collectives(self.trainer))

    def _measured(
        self, scores: PairScores, batch: PreferenceBatch, metrics: RewardMetrics, number: int = -1
    ) -> Tensor:
        losses = self.objective(*scores, batch.labels, batch.margin)
        lengths = torch.stack([batch.candidate0.lengths, batch.candidate1.lengths], dim=-1)
        metrics.update(*scores, losses, batch.labels, lengths, number)
        return losses

    def on_before_optimizer_step(self, optimizer: Optimizer) -> None:
        ranks = Collectives(self.trainer)
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
        self._log_training(float(norm))

    # ---- the guard

    def _anomalies(self, mean: PairMean, ranks: Collectives) -> list[Anomaly]:
        """Return what this rank knows of a step that is left out."""
        if mean.finite:
            return [Anomaly("gradient", "the gradient is not finite")] if ranks.rank == 0 else []
        place = bad_place(self._step.micro_batches, self.head_names, self.tokenizer)
        found = Anomaly("loss", f"the loss is not finite{f' ({place})' if place else ''}")
        return [found] if place or ranks.rank == 0 else []

    def _bundle(self) -> StepBundle:
        taken = self._step.micro_batches
        return StepBundle(
            stage=_STAGE,
            batches={str(index): one.batch for index, one in enumerate(taken)},
            seeds=[one.seed for one in taken],
            context={},
            records=step_records(taken, self.head_names, self.tokenizer),
        )

    @property
    def step_names(self) -> tuple[str, ...]:
        """The steps that `retake` knows."""
        return (_STAGE,)

    def retake(self, bundle: StepBundle) -> Retaken:
        """Take the step of a dump again, see `lrlhf.guard.dump_replay.Replayable`."""
        optimizer = self.optimizers()
        assert isinstance(optimizer, LightningOptimizer)
        for batch, seed in zip(bundle.batches.values(), bundle.seeds, strict=True):
            assert isinstance(batch, PreferenceBatch)
            self.manual_backward(self._loss(batch.to(self.device), seed))
        records = step_records(self._step.micro_batches, self.head_names, self.tokenizer)
        optimizer.step()
        return Retaken(records)

    @property
    def _pad_id(self) -> int:
        # every tokenizer that lrlhf loads has one; padding is masked, so any id would do
        pad_id = self.tokenizer.pad_token_id
        return pad_id if isinstance(pad_id, int) else 0

    # ---- evaluation

    def validation_step(
        self, batch: PreferenceBatch, batch_idx: int, dataloader_idx: int = 0
    ) -> dict[str, Any]:
        del batch_idx
        scores = self.score_pairs(batch)
        named = set_names(self.trainer)[dataloader_idx]
        self._measured(scores, batch, self.eval_metrics, dataloader_idx if named else -1)
        return {"records": score_records(scores, batch, self.head_names, self.tokenizer)}

    test_step = validation_step

    def predict_step(
        self, batch: PreferenceBatch, batch_idx: int, dataloader_idx: int = 0
    ) -> list[dict[str, Any]]:
        """Return the scores of every pair, see `score_records`."""
        del batch_idx, dataloader_idx
        scores = self.score_pairs(batch)
        return score_records(scores, batch, self.head_names, self.tokenizer)

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
        names = {*METRICS, *(f"{name}/{head}" for name in METRICS for head in heads)}
        sets = set_names(self.trainer)
        prefixes = {prefix for one in sets for prefix in ("", f"{one}/" if one else "")}
        return {f"eval/{prefix}{name}" for prefix in prefixes for name in names}

    # ---- logging

    def _log_training(self, norm: float) -> None:
        values = {**self.step_guard.metrics(), "train/grad_norm": norm}
        every = self.trainer.log_every_n_steps  # type: ignore[attr-defined]
        if (self.trainer.global_step + 1) % max(1, every) == 0:
            values |= self._training_values()
            self.log("train/loss", values.pop("train/loss"), batch_size=1, prog_bar=True)
        self.log_dict(values, batch_size=1)

    def on_train_epoch_end(self) -> None:
        self.log_dict(self._training_values(), batch_size=1, sync_dist=True)

    def _training_values(self) -> dict[str, float]:
        """Sum up the pairs since the last call, all ranks together; empty: there are none."""
        metrics = self._compute(self.train_metrics).metrics
        loss = {"train/loss": metrics.pop("loss")} if metrics else {}
        kept = {k: v for k, v in metrics.items() if k.split("/")[0] not in INTERVAL}
        return {**loss, **{f"reward_model/{k}": v for k, v in kept.items()}}

    def _log_evaluation(self, stage: str, summary: RewardSummary) -> None:
        values = self._evaluation_values(summary)
        names = set_names(self.trainer)
        for number, own in summary.sets.items():
            of_set = self._evaluation_values(own)
            values |= {f"{names[number]}/{key}": value for key, value in of_set.items()}
        # equal on all ranks already; sync_dist says so to Lightning
        logged = {f"{stage}/{key}": value for key, value in values.items()}
        self.log_dict(logged, batch_size=1, sync_dist=True)
        self.measurements = measurements_of(logged)

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
    def _compute(metrics: RewardMetrics) -> RewardSummary:
        metrics.update_with_nothing()
        summary: RewardSummary = metrics.compute()
        metrics.reset()
        return summary


class _UnloggedPairs:
    """The pairs, of all ranks, that the next logged row is about."""

    def __init__(self, module: TrainingModule, metrics: RewardMetrics) -> None:
        self._module = module
        self._metrics = metrics

    def state_dict(self) -> dict[str, Any]:
        return {"ranks": Collectives(self._module.trainer).gather(self._metrics.seen())}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        trainer = trainer_of(self._module)
        if trainer is not None:  # a run that goes on, not a model that is loaded
            self._metrics.resume(state["ranks"], Collectives(trainer))


def _weights(head_names: Sequence[str], given: Mapping[str, float] | None) -> list[float]:
    given = given or {}
    for name in given:
        if name not in head_names:
            raise ValueError(
                f"head_weights names the head {name!r}; the heads are {', '.join(head_names)}"
            )
    return [float(given.get(name, 1.0)) for name in head_names]
