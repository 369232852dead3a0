"""Reward models from preference pairs."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import lightning as L
import torch
from lightning.pytorch.utilities.types import OptimizerLRScheduler
from torch import Tensor, nn
from torch.optim import Optimizer
from transformers import PreTrainedTokenizerBase, ProcessorMixin

from lrlhf.guard.anomalies import Anomaly
from lrlhf.guard.guard_settings import Guard, as_guard, refuse_policy_limits, with_quota
from lrlhf.guard.random_state import random_state
from lrlhf.guard.step_guard import StepGuard
from lrlhf.media import MediaProcessor
from lrlhf.models import LoRA, RewardNetwork, ScoreModel
from lrlhf.modules.checks import (
    prepare_trainer,
    refuse_idle_encoder,
    refuse_other_weights,
    refuse_pure_low_precision,
    uses_loss_scaler,
)
from lrlhf.modules.metrics.reward_metrics import (
    RewardMetrics,
    RewardSummary,
    fit_tie_threshold,
    three_way_accuracy,
)
from lrlhf.modules.optimizers import OptimizerAndScheduler, OptimizerConfig
from lrlhf.modules.pairs.gradient_window import ClosedWindow, GradientWindow
from lrlhf.modules.pairs.pair_batches import PairScores, concatenate, score_records
from lrlhf.modules.pairs.pair_losses import PairObjective, resolve_losses
from lrlhf.modules.pairs.pair_steps import TakenPairs
from lrlhf.modules.pairs.pending_pairs import pending_pairs, take_up_pairs
from lrlhf.run import Collectives, gradients_of, seed_everything_for
from lrlhf.types import PreferenceBatch, SequenceBatch

_LR = 1e-5
_WARMUP = 0.03
"""Share of a run's steps, where the optimizer does not say."""
_EVAL_ONLY = ("accuracy_low", "accuracy_high", "pairs")


class RewardModel(L.LightningModule):
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
        max_skipped_steps: Older name of ``guard.max_skipped``; null: that decides.
        seed: Seeds dropout, together with rank and step.

    Raises:
        ValueError: An option is out of its range, or names a head that does not exist.
    """

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
        max_skipped_steps: int | None = None,
        seed: int = 0,
    ) -> None:
        super().__init__()
        self._save_options(model, optimizer, guard)
        self.objective = PairObjective(
            losses=resolve_losses(loss),
            margin=margin,
            tie_weight=tie_weight,
            center_coef=center_coef,
            label_smoothing=label_smoothing,
        )
        self.optimizer_config = _as_optimizer_config(optimizer)
        if max_grad_norm <= 0:
            raise ValueError(f"max_grad_norm is {max_grad_norm}; it must be above 0")
        self.max_grad_norm = max_grad_norm
        self.seed = seed
        guard = as_guard(guard)
        refuse_policy_limits(guard)
        quota = with_quota(guard, "max_skipped_steps", max_skipped_steps)
        self.step_guard = StepGuard(self, *quota)
        self.network, self.tokenizer, self.processor = _loaded(model, tokenizer, processor)
        self.head_names: tuple[str, ...] = self.network.head_names
        weights = _weights(self.head_names, head_weights)
        self.head_weights: Tensor
        self.register_buffer("head_weights", torch.tensor(weights), persistent=False)
        self.tie_thresholds: Tensor
        self.register_buffer("tie_thresholds", torch.full((len(weights),), torch.nan))
        self.train_metrics = RewardMetrics(self.head_names, weights)
        self.eval_metrics = RewardMetrics(self.head_names, weights)
        self._window = GradientWindow()
        self.taken_pairs = TakenPairs(self.head_names, self.tokenizer)

    def _save_options(self, model: object, optimizer: object, guard: object) -> None:
        built = isinstance(model, nn.Module)
        readers = ["tokenizer", "processor"]
        self.save_hyperparameters(ignore=["model", *readers] if built else readers)
        if "_instantiator" in self.hparams:
            return  # LightningCLI gave the options as the YAML spells them
        # checkpoints are read with weights_only=True, which refuses dataclasses
        specs = {"optimizer": optimizer, "guard": guard, **({} if built else {"model": model})}
        kinds = OptimizerConfig | ScoreModel | Guard
        plain = {k: asdict(v) for k, v in specs.items() if isinstance(v, kinds)}
        self.save_hyperparameters(plain)

    # ---- what callbacks and data modules ask for

    def trainable_models(self) -> dict[str, nn.Module]:
        """Return what receives gradients, by role."""
        return {"reward": self.network}

    def export_pretrained(self, folder: Path | None) -> None:
        """Write the network and its tokenizer into ``folder``."""
        self.network.save_pretrained(folder, self.tokenizer)
        if self.processor is not None and folder is not None:
            self.processor.save(folder)

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

    def setup(self, stage: str) -> None:
        prepare_trainer(self.trainer, stage)

    def on_fit_start(self) -> None:
        refuse_pure_low_precision(self.trainer, self.network)
        refuse_idle_encoder(self.trainer, self.network.scorer.plain, self.processor)
        self.network.train()  # from_pretrained leaves eval mode, and Lightning keeps it

    def on_train_batch_start(self, batch: PreferenceBatch, batch_idx: int) -> None:
        del batch
        seed_everything_for(self.seed, self.global_rank, self.current_epoch, batch_idx)

    def forward(self, batch: SequenceBatch) -> Tensor:
        """Score every row; returns [B, H] in the order of ``head_names``."""
        scores: Tensor = self.network(batch)
        return scores

    def score_pairs(self, batch: PreferenceBatch) -> PairScores:
        """Score both candidates in one forward pass."""
        both = concatenate(batch.candidate0, batch.candidate1, pad_id=self._pad_id)
        return PairScores(*self(both).split(len(batch)))

    def training_step(self, batch: PreferenceBatch, batch_idx: int) -> Tensor:
        del batch_idx
        random = random_state(self.device) if self.step_guard.keeps_inputs else None
        scores = self.score_pairs(batch)
        several = self.trainer.accumulate_grad_batches > 1
        self.taken_pairs.add(batch, scores, random, several=several)
        losses = self._measured(scores, batch, self.train_metrics)
        total = (losses * self.head_weights).sum()
        return self._window.add(total, len(batch), Collectives(self.trainer))

    def _measured(
        self, scores: PairScores, batch: PreferenceBatch, metrics: RewardMetrics
    ) -> Tensor:
        losses = self.objective(*scores, batch.labels, batch.margin)
        lengths = torch.stack([batch.candidate0.lengths, batch.candidate1.lengths], dim=-1)
        metrics.update(*scores, losses, batch.labels, lengths)
        return losses

    def on_before_optimizer_step(self, optimizer: Optimizer) -> None:
        ranks = Collectives(self.trainer)
        window = self._window.close(self.trainer.accumulate_grad_batches, ranks)
        self._log_training(self._finish_gradients(optimizer, window, ranks))

    def _finish_gradients(
        self, optimizer: Optimizer, window: ClosedWindow, ranks: Collectives
    ) -> float:
        gradients = gradients_of(self.trainer, optimizer)
        if window.correction != 1.0:
            gradients.scale(window.correction)
        norm = gradients.norm()
        gradients_finite = not ranks.sum((~norm.isfinite()).float())
        # a loss scaler finds its scale by overflowing, and leaves those steps out itself
        finite = window.finite and (gradients_finite or uses_loss_scaler(self.trainer))
        if not finite:
            gradients.drop()
            self.step_guard.report(self._anomalies(window, ranks), self.taken_pairs.inputs())
        elif self.trainer.gradient_clip_val is None and self.max_grad_norm < norm < math.inf:
            gradients.scale(self.max_grad_norm / norm)
        self.taken_pairs.clear()
        return float(norm)

    def _anomalies(self, window: ClosedWindow, ranks: Collectives) -> list[Anomaly]:
        """What this rank knows of a step that is left out."""
        place = self.taken_pairs.place()
        if window.finite:
            found = Anomaly("gradient", "the gradient is not finite")
        else:
            found = Anomaly("loss", f"the loss is not finite{f' ({place})' if place else ''}")
        return [found] if place or ranks.rank == 0 else []

    @property
    def skipped_steps(self) -> int:
        """Optimizer steps that were left out so far, resumed runs included."""
        return self.step_guard.skipped

    @skipped_steps.setter
    def skipped_steps(self, count: int) -> None:
        self.step_guard.skipped = count

    @property
    def _pad_id(self) -> int:
        # every tokenizer that lrlhf loads has one; padding is masked, so any id would do
        pad_id = self.tokenizer.pad_token_id
        return pad_id if isinstance(pad_id, int) else 0

    # ---- evaluation

    def validation_step(
        self, batch: PreferenceBatch, batch_idx: int, dataloader_idx: int = 0
    ) -> dict[str, Any]:
        del batch_idx, dataloader_idx
        return self._evaluate(batch)

    def test_step(
        self, batch: PreferenceBatch, batch_idx: int, dataloader_idx: int = 0
    ) -> dict[str, Any]:
        del batch_idx, dataloader_idx
        return self._evaluate(batch)

    def predict_step(
        self, batch: PreferenceBatch, batch_idx: int, dataloader_idx: int = 0
    ) -> dict[str, Any]:
        """Return the scores of every pair as ``records``, see `score_records`."""
        del batch_idx, dataloader_idx
        return {"records": score_records(self.score_pairs(batch), batch, self.head_names)}

    def on_validation_epoch_end(self) -> None:
        summary = self._compute(self.eval_metrics)
        thresholds = [fit_tie_threshold(head) for head in summary.heads.values()]
        for index, threshold in enumerate(thresholds):
            self.tie_thresholds[index] = torch.nan if threshold is None else threshold
        self._log_evaluation("eval", summary)

    def on_test_epoch_end(self) -> None:
        # with the thresholds of the last validation: fitted on other pairs than these
        self._log_evaluation("test", self._compute(self.eval_metrics))

    def _evaluate(self, batch: PreferenceBatch) -> dict[str, Any]:
        scores = self.score_pairs(batch)
        self._measured(scores, batch, self.eval_metrics)
        return {"records": score_records(scores, batch, self.head_names)}

    # ---- logging

    def _log_training(self, norm: float) -> None:
        values = {**self.step_guard.metrics(), "train/grad_norm": norm}
        every = self.trainer.log_every_n_steps  # type: ignore[attr-defined]
        if (self.trainer.global_step + 1) % max(1, every) == 0:
            values |= self._training_values()
            self.log("train/loss", values.pop("train/loss"), batch_size=1, prog_bar=True)
        self.log_dict(values, batch_size=1)

    def on_train_epoch_end(self) -> None:
        if self.train_metrics.update_called:
            self.log_dict(self._training_values(), batch_size=1, sync_dist=True)

    def _training_values(self) -> dict[str, float]:
        """Sum up the pairs since the last call, all ranks together."""
        metrics = self._compute(self.train_metrics).metrics
        loss = metrics.pop("loss")
        kept = {k: v for k, v in metrics.items() if k.split("/")[0] not in _EVAL_ONLY}
        return {"train/loss": loss, **{f"reward_model/{k}": v for k, v in kept.items()}}

    def _log_evaluation(self, stage: str, summary: RewardSummary) -> None:
        values = dict(summary.metrics)
        several = len(self.head_names) > 1
        for (name, head), threshold in zip(
            summary.heads.items(), self.tie_thresholds.tolist(), strict=True
        ):
            if not math.isnan(threshold) and not head.labels.isnan().all():
                suffix = f"/{name}" if several else ""
                values[f"tie_threshold{suffix}"] = threshold
                values[f"three_way_accuracy{suffix}"] = three_way_accuracy(head, threshold)
        # equal on all ranks already; sync_dist says so to Lightning
        self.log_dict({f"{stage}/{k}": v for k, v in values.items()}, batch_size=1, sync_dist=True)

    @staticmethod
    def _compute(metrics: RewardMetrics) -> RewardSummary:
        metrics.update_with_nothing()
        summary: RewardSummary = metrics.compute()
        metrics.reset()
        return summary

    # ---- checkpoints

    def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        checkpoint["guard"] = self.step_guard.state_dict()
        checkpoint["pending_pairs"] = pending_pairs(self.train_metrics)

    def on_load_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        refuse_other_weights(self, checkpoint)
        self.step_guard.load_checkpoint(checkpoint)
        take_up_pairs(self.train_metrics, checkpoint.get("pending_pairs", ()))


def _loaded(
    model: object, tokenizer: PreTrainedTokenizerBase | None, processor: ProcessorMixin | None
) -> tuple[RewardNetwork, PreTrainedTokenizerBase, MediaProcessor | None]:
    if isinstance(model, RewardNetwork):
        if tokenizer is None:
            raise ValueError("model is already built: pass its tokenizer too")
        network = model
    else:
        spec = _as_score_model(model)
        network = spec.load()
        tokenizer = tokenizer or spec.load_tokenizer()
        processor = processor or spec.load_processor()
    return network, tokenizer, MediaProcessor.for_model(processor, network.config)


def _as_score_model(model: object) -> ScoreModel:
    if isinstance(model, str):
        return ScoreModel(source=model)
    if isinstance(model, Mapping):  # as a checkpoint holds it
        lora = model["lora"]
        return ScoreModel(**{**model, "lora": None if lora is None else LoRA(**lora)})
    if isinstance(model, ScoreModel):
        return model
    raise ValueError(
        f"model is a {type(model).__name__}, expected a source, a ScoreModel or a RewardNetwork"
    )


def _as_optimizer_config(optimizer: OptimizerConfig | Mapping[str, Any]) -> OptimizerConfig:
    if not isinstance(optimizer, OptimizerConfig):
        optimizer = OptimizerConfig(**optimizer)  # as a checkpoint holds it
    return optimizer


def _weights(head_names: Sequence[str], given: Mapping[str, float] | None) -> list[float]:
    given = given or {}
    for name in given:
        if name not in head_names:
            raise ValueError(
                f"head_weights names the head {name!r}; the heads are {', '.join(head_names)}"
            )
    return [float(given.get(name, 1.0)) for name in head_names]
