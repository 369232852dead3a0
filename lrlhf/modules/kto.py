"""KTO: a policy learns from single answers that are desirable or not."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import fields, replace
from typing import Any, ClassVar, Literal

import torch
from peft import PeftModel
from torch import Tensor
from transformers import PreTrainedModel, PreTrainedTokenizerBase, ProcessorMixin

from lrlhf.functional.masking import last_tokens
from lrlhf.functional.preference import implicit_rewards, kto_loss
from lrlhf.guard.anomalies import Guard, shown
from lrlhf.models import CausalLM, evaluating, loss_tokens, sequence_logprobs, sequence_outputs
from lrlhf.models.sharding import reshard
from lrlhf.modules.checks import refuse_other_batch
from lrlhf.modules.metrics.metric_sums import MetricSums
from lrlhf.modules.optimizers import OptimizerConfig
from lrlhf.modules.policy.iteration import Iteration
from lrlhf.modules.policy.load_policy import load_policy
from lrlhf.modules.referenced_policy import ReferencedPolicy
from lrlhf.modules.row_module import RowModule, RowOutputs
from lrlhf.run import Collectives
from lrlhf.types import SequenceBatch, UnpairedBatch, UnpairedRows

_METRICS = ("loss", "kl", "chosen_mean", "rejected_mean", "margin", "auroc")


class KTO(ReferencedPolicy, RowModule[UnpairedRows]):
    """Trains a policy on answers of which each is desirable or undesirable, without pairs (KTO).

    The implicit reward of an answer is r = β Σ_t (log π(y_t) - log π_ref(y_t)). The loss is the
    mean over all answers of the optimizer step, of all ranks: no padding, order, packing, split
    into micro-batches or share of a rank changes it.

        ℓ = λ_D (1 - σ(r - β z0)) of a desirable answer,    λ_U (1 - σ(β z0 - r)) of another
        z0 = max(0, mean of Σ_t (log π(y'_t | x) - log π_ref(y'_t | x)))      without gradient

    `lrlhf.datamodules.UnpairedPreferenceDataModule` makes a mismatched pair (x, y') for each row;
    z0 is the mean over those of the step, of all ranks, in evaluations of the whole set.
    Differs from the paper: there y' are the answers of a micro-batch, shifted by one.

    Args:
        policy: As in `DPO`.
        tokenizer: As in `DPO`.
        processor: As in `DPO`.
        loss: ``kto``, or ``apo_zero_unpaired``, whose z0 is 0: for desirable answers that are
            better than the policy's.
        beta: Scale of the rewards.
        desirable_weight: λ_D. The paper advises a ratio between 1 and 4/3 of λ_D times the number
            of desirable answers to λ_U times that of the others.
        undesirable_weight: λ_U.
        reference: As in `DPO`.
        precompute_reference: As in `DPO`; takes four bytes for each token of an answer, twice.
        micro_batch_tokens: As in `SFT`.
        logprob_chunk: As in `DPO`.
        router_loss_coef: As in `SFT`.
        optimizer: As in `SFT`, with 1e-6 where it names no ``lr``.
        max_grad_norm: As in `SFT`.
        guard: As in `SFT`.
        seed: As in `SFT`.

    Raises:
        ValueError: An option is out of its range.

    Reference:
        Ethayarajh et al. 2024, eq. 8, https://arxiv.org/abs/2402.01306
    """

    train_metric: ClassVar[str] = "rewards/margin"
    eval_metric: ClassVar[str] = "eval/auroc"
    stage: ClassVar[str] = "unpaired"
    default_lr: ClassVar[float] = 1e-6
    output_name: ClassVar[str] = "the log-probabilities"
    data_module: ClassVar[str] = "UnpairedPreferenceDataModule"

    def __init__(  # noqa: PLR0913  the constructor is the config schema
        self,
        policy: str | CausalLM | PreTrainedModel | PeftModel,
        *,
        tokenizer: PreTrainedTokenizerBase | None = None,
        processor: ProcessorMixin | None = None,
        loss: Literal["kto", "apo_zero_unpaired"] = "kto",
        beta: float = 0.1,
        desirable_weight: float = 1.0,
        undesirable_weight: float = 1.0,
        reference: str | CausalLM | None = None,
        precompute_reference: bool = False,
        micro_batch_tokens: int | Literal["auto"] | None = "auto",
        logprob_chunk: int = 1024,
        router_loss_coef: float = 0.0,
        optimizer: OptimizerConfig = OptimizerConfig(),  # noqa: B008  frozen
        max_grad_norm: float = 1.0,
        guard: Guard = Guard(),  # noqa: B008  frozen
        seed: int | None = None,
    ) -> None:
        super().__init__(
            micro_batch_tokens=micro_batch_tokens,
            optimizer=optimizer,
            max_grad_norm=max_grad_norm,
            guard=guard,
            seed=seed,
            router_loss_coef=router_loss_coef,
        )
        weights = {"desirable_weight": desirable_weight, "undesirable_weight": undesirable_weight}
        for name, value in {"beta": beta, **weights}.items():
            if not value > 0:
                raise ValueError(f"{name} is {value}; it must be above 0")
        if logprob_chunk < 1:
            raise ValueError(f"logprob_chunk is {logprob_chunk}; it must be 1 or more")
        self.estimates_kl = loss == "kto"
        self.beta, self.weights, self.logprob_chunk = beta, weights, logprob_chunk
        loaded = load_policy(policy, tokenizer, processor)
        self.set_policy(loaded, reference, ask_first=precompute_reference)
        self._measured: dict[str, list[Tensor]] = {}
        """`[N, 3]`, reward, log-ratio of the mismatched pair and label of what was evaluated."""

    # ---- its rows

    def rows_of(self, batch: UnpairedBatch, it: Iteration, *, training: bool) -> UnpairedRows:
        """Return the rows with the log-ratios of the mismatched pairs, in training their mean."""
        own, mismatched = self._parts_of(batch)
        known = mismatched.response_mask.any(dim=1)
        kl = torch.zeros(known.shape, device=known.device)
        if self.estimates_kl:
            with torch.no_grad(), evaluating(self.policy):
                for rows, micro in self.micro_batches(mismatched, it):
                    logprobs = sequence_logprobs(self.policy, micro, chunk_size=self.logprob_chunk)
                    kl[rows] = self._rewards(logprobs, micro, beta=1.0).to(kl)
            reshard(self.policy)
            if training:
                total = torch.stack([kl[known].sum(), known.sum().to(kl)])
                total, count = it.ranks.sum(total.to(it.device))
                kl = (total / count.clamp(min=1)).expand(kl.shape)
                it.metrics.add("train/kl", kl[0].clamp(min=0), 1.0)
            else:
                kl = torch.where(known, kl, torch.nan)
        values = {field.name: getattr(own, field.name) for field in fields(own)}
        return UnpairedRows(**values, labels=batch.labels, kl=kl)

    def _parts_of(self, batch: UnpairedBatch) -> list[SequenceBatch]:
        """Return rows and mismatched pairs, whose answers are what the policy can say."""
        refuse_other_batch(self, batch, UnpairedBatch, self.data_module)
        return [
            replace(part, response_mask=loss_tokens(self.policy, part))
            for part in (batch.rows, batch.mismatched)
        ]

    def sequences_of(self, batch: UnpairedBatch) -> Iterator[SequenceBatch]:
        """Go through the rows and the mismatched pairs."""
        for part in self._parts_of(batch)[: 2 if self.estimates_kl else 1]:
            yield from (micro for _, micro in self.micro_batches(part, Iteration(self)))

    def _rewards(self, logprobs: Tensor, rows: SequenceBatch, *, beta: float) -> Tensor:
        mask, reference = rows.response_mask, self.of_reference(rows)
        return implicit_rewards(logprobs, reference, mask, beta=beta)

    def outputs_of(self, rows: UnpairedRows) -> RowOutputs:
        """Compute log-probabilities, and the loss and reward of each answer, at all its tokens."""
        out = sequence_outputs(
            self.policy,
            rows,
            chunk_size=self.logprob_chunk,
            router_loss=self.router_loss_coef > 0 and self.training,
        )
        rewards = self._rewards(out.logprobs, rows, beta=self.beta)
        losses = kto_loss(rewards, rows.labels, self.beta * rows.kl.clamp(min=0), **self.weights)
        at_tokens = rows.response_mask.shape
        return RowOutputs(
            out.logprobs,
            losses[:, None].expand(at_tokens),
            {"reward": rewards[:, None].expand(at_tokens)},
            out.router_loss,
        )

    def counted(self, rows: UnpairedRows) -> Tensor:
        """Return the last token of each answer: every answer counts once."""
        return last_tokens(rows.response_mask)

    def records_of(
        self, rows: UnpairedRows, places: tuple[str, ...] | None
    ) -> list[dict[str, Any]]:
        """Describe each row in JSON types, with its label."""
        records = super().records_of(rows, places)
        labels = rows.labels.tolist()
        return [record | {"label": label} for record, label in zip(records, labels, strict=True)]

    # ---- metrics

    def _measure(
        self, outputs: RowOutputs, rows: UnpairedRows, metrics: MetricSums, prefix: str
    ) -> None:
        rewards = _of_answers(outputs)
        if metrics is self._evaluated:  # z0, and with it the loss, is known once all are
            part = torch.stack([rewards, rows.kl.to(rewards), rows.labels.to(rewards)], dim=1)
            self._measured.setdefault(prefix, []).append(part.cpu())
        else:
            super()._measure(outputs._replace(values={}), rows, metrics, prefix)
            prefix = "rewards/"
        metrics.add_values(f"{prefix}chosen_mean", rewards[rows.labels])
        metrics.add_values(f"{prefix}rejected_mean", rewards[~rows.labels])

    def derived(self, means: dict[str, float]) -> dict[str, float]:
        """Add the margins between desirable and undesirable answers."""
        margins = {}
        for name, chosen in means.items():
            rejected = means.get(name.replace("chosen_mean", "rejected_mean"))
            if name.endswith("chosen_mean") and rejected is not None:
                margins[name.replace("chosen_mean", "margin")] = chosen - rejected
        return means | margins

    def tell(
        self,
        outputs: RowOutputs,
        rows: UnpairedRows,
        records: list[dict[str, Any]],
        prefixes: set[str],
    ) -> None:
        """Add the reward of each answer."""
        del prefixes
        for record, reward in zip(records, _of_answers(outputs), strict=True):
            record["reward"] = shown(reward)

    def metric_names(self) -> list[str]:
        return [name for name in _METRICS if self.estimates_kl or name != "kl"]

    def on_validation_epoch_start(self) -> None:
        super().on_validation_epoch_start()
        self._measured = {}

    def evaluation_values(self) -> dict[str, float]:
        """Return what all rows were measured to be, from their common reference point."""
        own = {prefix: torch.cat(parts) for prefix, parts in self._measured.items()}
        values = super().evaluation_values()
        values |= self.roc_areas({prefix: part[:, [0, 2]] for prefix, part in own.items()})
        for prefix in self.prefixes():
            parts = Collectives(self.trainer).gather(own.get(prefix, torch.empty(0, 3)))
            rewards, kl, labels = torch.cat(parts).unbind(dim=1)
            if not len(rewards):
                continue
            # of no pair there is no mean
            point = kl.nanmean().nan_to_num(0.0).clamp(min=0).expand(rewards.shape)
            losses = kto_loss(rewards, labels > 0, self.beta * point, **self.weights)
            values[f"{prefix}loss"] = float(losses.mean())
            if self.estimates_kl:
                values[f"{prefix}kl"] = float(point[0])
        return values


def _of_answers(outputs: RowOutputs) -> Tensor:
    """Return the rewards `[B]` of answers."""
    return outputs.values["reward"].detach()[:, 0]
