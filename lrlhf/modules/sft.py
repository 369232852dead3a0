"""Supervised fine-tuning on texts, prompts with completions, and conversations."""

from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path
from typing import Any, ClassVar, Literal

from lightning.pytorch.utilities.types import OptimizerLRScheduler
from peft import PeftModel
from torch import Tensor, nn
from transformers import PreTrainedModel, PreTrainedTokenizerBase, ProcessorMixin

from lrlhf.functional.masking import masked_sum
from lrlhf.functional.names import import_function
from lrlhf.functional.supervised import TOKEN_LOSSES, TokenLoss
from lrlhf.guard.anomalies import locate, prompt_text, shown
from lrlhf.guard.bundle import StepBundle
from lrlhf.guard.dump_replay import Retaken
from lrlhf.guard.guard_settings import Guard, refuse_policy_limits
from lrlhf.guard.step_watch import StepWatch
from lrlhf.models import (
    CausalLM,
    SequenceOutputs,
    packs,
    plain_model,
    said_tokens,
    sequence_outputs,
)
from lrlhf.modules.base import TrainingModule
from lrlhf.modules.checks import refuse_idle_encoder, refuse_other_batch
from lrlhf.modules.metrics.metric_sums import MetricSums
from lrlhf.modules.optimizers import OptimizerConfig
from lrlhf.modules.policy.iteration import Iteration
from lrlhf.modules.policy.load_policy import load_policy
from lrlhf.modules.policy.row_step import RowStep, Stepped
from lrlhf.modules.policy.update_batches import plan_micro_batches
from lrlhf.modules.validation_sets import set_names
from lrlhf.rollout import trim
from lrlhf.rollout.records import origin
from lrlhf.run import Collectives
from lrlhf.types import SequenceBatch, SupervisedBatch

_LR = 2e-5
_WARMUP = 0.03
"""Share of a run's steps, where the optimizer does not say."""
_STAGE = "supervised"
_METRICS = ("loss", "mean_logprob", "perplexity", "token_accuracy", "entropy")


class SFT(TrainingModule):
    """Trains a language model on given texts, with images where it reads them.

    One training step is one optimizer step. Its loss is the mean over all trained tokens of its
    rows, of all ranks: no padding, packing, split into micro-batches or share of a rank changes it.

        L = Σ_b Σ_t m[b,t] ℓ(log π(y[b,t] | y[b,<t])) / Σ_b Σ_t m[b,t]

    The mask m is the data's, see `lrlhf.datamodules.SupervisedDataModule`. Wherever a check at
    load time shows that it is exact, rows go through the model one after another without padding,
    each with positions and attention of its own.

    Args:
        policy: What to train: a hub id, a folder, ``package:<module>``, a `CausalLM` that says
            how to load it (LoRA, precision, frozen parts), or a model that is already built (then
            pass ``tokenizer``).
        tokenizer: For a policy that is already built.
        processor: For a vision-language policy that is already built; as ``AutoProcessor`` loads
            it.
        loss: Of a token: ``nll``, ``dft`` (dynamic fine-tuning), or the dotted path of a function
            from log-probabilities and mask, `[B, T]`, to losses `[B, T]`.
        micro_batch_tokens: Tokens of one forward pass as they are computed, padding included.
            Memory, not results, depends on it. "auto": on a GPU as many as fit, which the first
            steps find out, elsewhere as None; None: all rows of a batch at once.
        require_packing: Refuse a model whose rows have to be padded.
        log_entropy: Log the mean entropy of the next-token distributions, which takes a second
            buffer of logits.
        router_loss_coef: Weight of the load-balancing loss of a mixture of experts.
        optimizer: AdamW and its schedule; 2e-5 where it names no ``lr``, and 3 % of the steps are
            warm-up unless ``warmup_steps`` says otherwise.
        max_grad_norm: Clip the gradient to this norm; ``inf`` leaves it.
        logprob_chunk: Tokens whose logits may exist at the same time; those of a pass that has more
            are computed again in the backward pass.
        guard: When an optimizer step is left out, and when to give up; of the limits only those
            of loss and gradient are about given texts.
        seed: Seeds dropout, together with rank and step; None: the seed of ``seed_everything``.

    Raises:
        ValueError: An option is out of its range.
    """

    train_metric: ClassVar[str] = "train/loss"
    eval_metric: ClassVar[str] = "eval/mean_logprob"

    def __init__(  # noqa: PLR0913  the constructor is the config schema
        self,
        policy: str | CausalLM | PreTrainedModel | PeftModel,
        *,
        tokenizer: PreTrainedTokenizerBase | None = None,
        processor: ProcessorMixin | None = None,
        loss: str = "nll",
        micro_batch_tokens: int | Literal["auto"] | None = "auto",
        require_packing: bool = False,
        log_entropy: bool = False,
        router_loss_coef: float = 0.0,
        optimizer: OptimizerConfig = OptimizerConfig(),  # noqa: B008  frozen
        max_grad_norm: float = 1.0,
        logprob_chunk: int = 1024,
        guard: Guard = Guard(),  # noqa: B008  frozen
        seed: int | None = None,
    ) -> None:
        super().__init__(guard=guard, seed=seed)
        refuse_policy_limits(guard, type(self).__name__)
        _check(micro_batch_tokens, router_loss_coef, max_grad_norm, logprob_chunk)
        self.token_loss: TokenLoss = TOKEN_LOSSES.get(loss) or import_function(
            "loss", loss, TOKEN_LOSSES
        )
        self.micro_batch_tokens = micro_batch_tokens
        self.require_packing = require_packing
        self.log_entropy, self.logprob_chunk = log_entropy, logprob_chunk
        self.router_loss_coef = router_loss_coef
        self.optimizer_config = optimizer
        self.max_grad_norm = max_grad_norm
        self._loaded = load_policy(policy, tokenizer, processor)
        self.policy, self.tokenizer, self.processor = self._loaded
        self.stateful["token_budget"] = self.token_budget
        self._evaluated = MetricSums()
        self._rows = RowStep[SequenceBatch](
            [self.policy], max_tokens=micro_batch_tokens, shared=False, place_of=self._place_of
        )

    # ---- what callbacks and strategies ask for

    def trainable_models(self) -> dict[str, nn.Module]:
        return {"policy": self.policy}

    def export_pretrained(self, folder: Path | None) -> None:
        """Write the policy, adapters merged, and its tokenizer, as ``transformers`` loads them."""
        self._loaded.save(folder)

    def configure_optimizers(self) -> OptimizerLRScheduler:
        steps = self.trainer.estimated_stepping_batches
        # a share of a run without an end is nothing
        config = self.optimizer_config.filled(
            lr=_LR, warmup_steps=_WARMUP if math.isfinite(steps) else 0
        )
        built = config.build(self.policy.named_parameters(), steps)
        return [built.optimizer], [built.scheduler]

    def on_fit_start(self) -> None:
        refuse_idle_encoder(self.trainer, plain_model(self.policy), self.processor)
        if self.require_packing and not packs(plain_model(self.policy)):
            raise ValueError(
                f"require_packing is set, and {type(plain_model(self.policy)).__name__} cannot "
                "compute rows without padding (the log says why): take another model or "
                "attn_implementation, or leave require_packing out"
            )

    # ---- training

    def training_step(self, batch: SupervisedBatch, batch_idx: int) -> None:
        it = Iteration(self)
        it.metrics.add("train/lr", self.optimizer_of(0).param_groups[0]["lr"], 1.0)
        with it.phase("update"):
            self._take(self._trained(batch), it, batch.places)
        self.advance_schedule(0)
        self.token_budget.settle(it.ranks.least)
        it.measure_times(float(batch.attention_mask.sum()))
        for name, count in self.step_guard.metrics().items():
            it.metrics.add(name, count, 1.0)
        for name, value in _named(it.metrics.reduce(it.ranks, it.device)).items():
            self.log(name, value, prog_bar=name == self.train_metric, batch_size=len(batch))

    def _trained(self, batch: SupervisedBatch) -> SequenceBatch:
        """Return the rows, trained on what the model can say."""
        refuse_other_batch(self, batch, SupervisedBatch, "SupervisedDataModule")
        rows = batch.rows
        return replace(rows, response_mask=said_tokens(self.policy, rows))

    def _take(
        self, part: SequenceBatch, it: Iteration, places: tuple[str, ...] | None = None
    ) -> None:
        """Take an optimizer step, unless there is nothing to learn from."""
        self.policy.train()
        total = it.ranks.sum(part.response_mask.sum().float().to(it.device))
        it.metrics.add("train/tokens", total, 1.0)
        # a step without a gradient would still move the weights by the optimizer's momentum
        if not total:
            return

        def loss_of(micro: SequenceBatch, share: float, watch: StepWatch) -> Tensor:
            out = self._outputs(micro)
            watch.outputs["the log-probabilities"] = out.logprobs.detach()
            mask = micro.response_mask
            losses = self.token_loss(out.logprobs, mask)
            self._measure(losses, out, micro, it.metrics, "train/")
            loss = masked_sum(losses, mask) / total
            if out.router_loss is not None:
                it.metrics.add("train/router_loss", out.router_loss, share)
                loss = loss + self.router_loss_coef * mask.sum() / total * out.router_loss
            return loss

        def bundle(seeds: tuple[int, ...], watch: StepWatch) -> StepBundle:
            del watch
            records = self._records(part, places)
            return StepBundle(
                stage=_STAGE, batches={"part": part}, seeds=[seeds], context={}, records=records
            )

        stepped = Stepped(0, "train", self.max_grad_norm, freeze_steps=0)
        self._rows.take(part, it, loss_of=loss_of, optimizers=[stepped], bundle=bundle)

    def _outputs(self, rows: SequenceBatch) -> SequenceOutputs:
        return sequence_outputs(
            self.policy,
            rows,
            chunk_size=self.logprob_chunk,
            entropy=self.log_entropy,
            router_loss=self.router_loss_coef > 0 and self.training,
        )

    def _measure(
        self,
        losses: Tensor,
        out: SequenceOutputs,
        rows: SequenceBatch,
        metrics: MetricSums,
        prefix: str,
    ) -> None:
        """Add to the means over tokens whose names begin with ``prefix``."""
        mask = rows.response_mask
        tokens = mask.sum()
        metrics.add(f"{prefix}loss", masked_sum(losses.detach(), mask), tokens)
        metrics.add(f"{prefix}mean_logprob", masked_sum(out.logprobs.detach(), mask), tokens)
        metrics.add(f"{prefix}token_accuracy", (out.is_top & mask).sum(), tokens)
        if out.entropy is not None:
            metrics.add(f"{prefix}entropy", masked_sum(out.entropy.detach(), mask), tokens)

    # ---- the guard

    def _place_of(self, rows: SequenceBatch, watch: StepWatch) -> str:
        return locate(rows, watch.outputs, tokenizer=self.tokenizer, rows=watch.rows)

    def _records(
        self, rows: SequenceBatch, places: tuple[str, ...] | None = None
    ) -> list[dict[str, Any]]:
        """Describe each row in JSON types."""
        return [
            {
                **origin(place),
                "prompt": prompt_text(rows, row, self.tokenizer),
                "completion": str(
                    self.tokenizer.decode(rows.input_ids[row, rows.response_mask[row]].tolist())
                ),
                "tokens": int(rows.response_mask[row].sum()),
            }
            for row, place in enumerate(places or ("",) * len(rows))
        ]

    @property
    def step_names(self) -> tuple[str, ...]:
        """Stages whose steps `retake` knows."""
        return (_STAGE,)

    def retake(self, bundle: StepBundle) -> Retaken:
        """Take the step of a dump again, see `lrlhf.guard.dump_replay.Replayable`."""
        part = bundle.batches["part"]
        assert isinstance(part, SequenceBatch)
        self._take(part, Iteration(self, seeds=bundle.seeds[0]))
        return Retaken(self._records(part))

    # ---- evaluation

    def validation_step(
        self, batch: SupervisedBatch, batch_idx: int, dataloader_idx: int = 0
    ) -> dict[str, Any]:
        del batch_idx
        named = set_names(self.trainer)[dataloader_idx]
        return {"records": self._evaluate(batch, {"", f"{named}/" if named else ""})}

    test_step = validation_step

    def predict_step(
        self, batch: SupervisedBatch, batch_idx: int, dataloader_idx: int = 0
    ) -> list[dict[str, Any]]:
        """Return a line for each text, with the log-probability of what is trained on."""
        del batch_idx, dataloader_idx
        return self._evaluate(batch, set())

    def _evaluate(self, batch: SupervisedBatch, prefixes: set[str]) -> list[dict[str, Any]]:
        """Add rows to the metrics; returns a line for each."""
        part, it = self._trained(batch), Iteration(self)
        records = self._records(part, batch.places)
        micro_batches = plan_micro_batches(
            part, [self.policy], it, max_tokens=self.micro_batch_tokens, shared=False
        )
        for one in micro_batches:
            micro = trim(part.select(one.rows)).to(it.device)
            out = self._outputs(micro)
            losses = self.token_loss(out.logprobs, micro.response_mask)
            for prefix in prefixes:
                self._measure(losses, out, micro, self._evaluated, prefix)
            for row, logprob in zip(one.rows.tolist(), out.logprobs.sum(dim=1), strict=True):
                records[row]["logprob"] = shown(logprob)
        return records

    def on_validation_epoch_start(self) -> None:
        self._evaluated = MetricSums()  # of one that was broken off

    on_test_epoch_start = on_validation_epoch_start

    def on_validation_epoch_end(self) -> None:
        self._log_evaluation("eval")

    def on_test_epoch_end(self) -> None:
        self._log_evaluation("test")

    def _log_evaluation(self, stage: str) -> None:
        found = self._evaluated.reduce(Collectives(self.trainer), self.device)
        values = {f"{stage}/{name}": value for name, value in _named(found).items()}
        # equal on all ranks already; sync_dist says so to Lightning
        self.log_dict(values, batch_size=1, sync_dist=True)

    def evaluation_names(self) -> set[str]:
        """Return the names of all metrics that evaluations may log."""
        prefixes = {"", *(f"{one}/" for one in set_names(self.trainer) if one)}
        names = [name for name in _METRICS if self.log_entropy or name != "entropy"]
        return {f"eval/{prefix}{name}" for prefix in prefixes for name in names}


def _check(
    micro_batch_tokens: int | str | None, router_loss_coef: float, norm: float, chunk: int
) -> None:
    """Refuse options out of their ranges."""
    if isinstance(micro_batch_tokens, int) and micro_batch_tokens < 1:
        raise ValueError(f"micro_batch_tokens is {micro_batch_tokens}; it must be 1 or more")
    if router_loss_coef < 0:
        raise ValueError(f"router_loss_coef is {router_loss_coef}; it must be 0 or more")
    if norm <= 0:
        raise ValueError(f"max_grad_norm is {norm}; it must be above 0")
    if chunk < 1:
        raise ValueError(f"logprob_chunk is {chunk}; it must be 1 or more")


def _named(means: dict[str, float]) -> dict[str, float]:
    """Add the perplexity to each mean log-probability."""
    named = dict(means)
    for name, value in means.items():
        if name.endswith("mean_logprob"):
            # a model that knows nothing of a token is no reason to stop
            perplexity = math.exp(-value) if value > -700 else math.inf
            named[name.replace("mean_logprob", "perplexity")] = perplexity
    return named
