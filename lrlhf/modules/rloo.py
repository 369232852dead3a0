"""REINFORCE leave-one-out and its siblings, for any causal language model."""

from __future__ import annotations

import contextlib
import math
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import lightning as L
import torch
from lightning.pytorch.core.optimizer import LightningOptimizer
from lightning.pytorch.utilities.types import OptimizerLRScheduler
from peft import PeftModel
from torch import Tensor, nn
from torchmetrics import MeanMetric
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from lrlhf.models import (
    CausalLM,
    ReferencePolicy,
    check_output_head,
    frozen_reference,
    save_model,
    sequence_logprobs,
)
from lrlhf.modules.checks import (
    check_batch_algebra,
    check_group_policy_options,
    refuse_pure_low_precision,
    uses_loss_scaler,
)
from lrlhf.modules.metric_sums import MetricSums
from lrlhf.modules.optimizers import OptimizerConfig
from lrlhf.modules.policy_objective import (
    Denominators,
    as_experience,
    compute_advantages,
    denominators,
    policy_loss,
)
from lrlhf.modules.rollout_metrics import (
    measure_kl,
    measure_mismatch,
    measure_rollout,
    measure_update,
)
from lrlhf.modules.settings import Advantage, Reference, Update
from lrlhf.rewards import Rewards
from lrlhf.rollout import (
    Collected,
    Collector,
    RolloutEngine,
    RolloutListener,
    Sampling,
    TransformersEngine,
    micro_batch_rows,
    micro_batches,
    minibatches,
    trim,
)
from lrlhf.strategies import (
    Collectives,
    PlainUpdater,
    count_iterations_as_steps,
    run_seed,
    sample_seeds,
    seed_everything_for,
)
from lrlhf.types import Experience, PromptBatch, Rollout

_EVAL_STREAM = 1_000_003
"""Keeps the random numbers of validation apart from those of any training step."""


class RLOO(L.LightningModule):
    """Trains a policy with REINFORCE and a leave-one-out baseline, or one of its siblings.

    One training step is one iteration: draw ``num_generations`` responses to each prompt of the
    batch, score them, compare each with its siblings, update the policy. ``trainer.global_step``
    counts iterations. The defaults are those of TRL's ``RLOOTrainer``: clip the raw score,
    subtract beta times the summed KL, leave one out, one clipped ratio per sequence.

    Args:
        policy: What to train: a hub id, a folder, ``package:<module>``, a `CausalLM` that says
            how to load it, or a model that is already built (then pass ``tokenizer``).
        rewards: What scores a response.
        tokenizer: For a policy that is already built.
        engine: What draws the responses; None: the policy itself, through ``transformers``.
        num_generations: Responses per prompt.
        sampling: How training responses are drawn.
        eval_sampling: How validation responses are drawn; None: greedily, with the lengths and
            stop strings of ``sampling``.
        reference: The frozen policy and the KL penalty.
        advantage: How scores become advantages.
        update: How advantages become optimizer steps.
        optimizer: AdamW and its schedule, counted in iterations.
        allow_truncated_sampling: Train on responses drawn with top_p, top_k or min_p, although
            their distribution is not the policy's.
        seed: Seeds every random number of the run, together with rank, step and sample; None:
            the seed of ``seed_everything``.

    Reference:
        Ahmadian et al. 2024, "Back to Basics", eq. 8, https://arxiv.org/abs/2402.14740
    """

    policy: PreTrainedModel | PeftModel
    frozen: ReferencePolicy | None

    def __init__(  # noqa: PLR0913  the constructor is the config schema
        self,
        policy: str | CausalLM | PreTrainedModel | PeftModel,
        rewards: Rewards,
        *,
        tokenizer: PreTrainedTokenizerBase | None = None,
        engine: RolloutEngine | None = None,
        num_generations: int = 4,
        sampling: Sampling = Sampling(),  # noqa: B008  frozen
        eval_sampling: Sampling | None = None,
        reference: Reference = Reference(),  # noqa: B008  frozen
        advantage: Advantage = Advantage(),  # noqa: B008  frozen
        update: Update = Update(),  # noqa: B008  frozen
        optimizer: OptimizerConfig = OptimizerConfig(lr=1e-6),  # noqa: B008  frozen
        allow_truncated_sampling: bool = False,
        seed: int | None = None,
    ) -> None:
        super().__init__()
        self.automatic_optimization = False
        self.num_generations = num_generations
        self.sampling = sampling
        self.eval_sampling = eval_sampling or Sampling(
            temperature=0.0, max_new_tokens=sampling.max_new_tokens, stop=sampling.stop
        )
        self.reference = reference
        self.advantage = advantage
        self.update = update
        self.optimizer_config = optimizer
        self.seed = run_seed(seed)
        check_group_policy_options(
            num_generations,
            sampling,
            advantage,
            update,
            penalty_in_reward=self._kl_in_reward and reference.kl_coef > 0,
            allow_truncated_sampling=allow_truncated_sampling,
        )
        self.kl_coef = reference.kl_coef
        self.samples_per_step = 0
        self.skipped_steps = 0
        self.policy, self.tokenizer = _loaded(policy, tokenizer)
        if reference.sync_every is not None and isinstance(self.policy, PeftModel):
            raise ValueError(
                "reference.sync_every is set, but the reference of a LoRA policy is its base "
                "model, which cannot move; drop sync_every, or train all weights"
            )
        # frozen models stay out of the module tree: no gradient, no wrapping, no checkpoint
        self.frozen = frozen_reference(self.policy, reference.model) if reference.kl_coef else None
        self.rewards = rewards
        self.engine: RolloutEngine = engine or TransformersEngine()
        self._collector = Collector(self.engine, rewards, self.tokenizer)
        self._eval_names = ["eval/score", *(f"eval/{name}" for name in rewards.names)]
        self._eval_names += ["eval/response_length", "eval/truncated_fraction"]
        self._eval_means = nn.ModuleList(
            MeanMetric(nan_strategy="ignore") for _ in self._eval_names
        )
        self._updater = PlainUpdater(self)
        self._seconds: dict[str, float] = {}

    @property
    def _kl_in_reward(self) -> bool:
        if self.reference.placement is not None:
            return self.reference.placement == "reward"
        return self.advantage.function.kl_in_reward

    # ------------------------------------------------------------------ contracts

    def trainable_models(self) -> dict[str, nn.Module]:
        return {"policy": self.policy}

    def export_pretrained(self, folder: Path) -> None:
        """Write the policy, adapters merged, and its tokenizer, as ``transformers`` loads them."""
        save_model(self.policy, folder, self.tokenizer)

    # ------------------------------------------------------------------ set-up

    def setup(self, stage: str) -> None:
        if stage == "fit":
            refuse_pure_low_precision(self.trainer, self.policy)
            count_iterations_as_steps(self.trainer)
        self.engine.attach(self.policy, self.tokenizer)
        self.rewards.prepare()

    def configure_optimizers(self) -> OptimizerLRScheduler:
        optimizer, scheduler = self.optimizer_config.build(
            self.policy.named_parameters(), total_steps=self.trainer.estimated_stepping_batches
        )
        return [optimizer], [scheduler]

    # ------------------------------------------------------------------ one iteration

    def training_step(self, batch: PromptBatch, batch_idx: int) -> None:
        collectives = Collectives(self.trainer)
        metrics = MetricSums()
        self._seconds = {}
        rows = len(batch) * self.num_generations
        check_batch_algebra(rows, self.update.minibatch_size, collectives.world_size)
        if self.kl_coef > 0 and self.frozen is None:
            raise ValueError(
                f"the KL coefficient was set to {self.kl_coef}, but no reference was loaded: start "
                "with reference.kl_coef above 0"
            )
        seed_everything_for(self.seed, self.global_step, collectives.rank)
        self.samples_per_step = collectives.world_size * rows
        collected = self._collector.collect(
            batch,
            self.sampling,
            seeds=self._seeds(collectives.rank * len(batch), len(batch)),
            step=self.global_step,
            phase=self._phase,
        )
        with self._phase("logprob"):
            experience = self._experience(collected, collectives)
        self._tell_listeners(experience, collected)
        measure_rollout(
            experience, collected.rewards, metrics, num_generations=self.num_generations
        )
        measure_kl(experience, metrics)
        if experience.old_logprobs is not None:
            measure_mismatch(experience.old_logprobs, experience, metrics)
        with self._phase("update"):
            self._update(experience, metrics, collectives)
        self._sync_reference()
        self._log_iteration(experience, metrics, collectives)

    def _seeds(self, first_prompt: int, prompts: int) -> list[int]:
        """One seed per response, whichever rank draws it."""
        return [
            seed
            for row in range(first_prompt, first_prompt + prompts)
            for seed in sample_seeds(self.seed, self.global_step, row, count=self.num_generations)
        ]

    @torch.no_grad()
    def _experience(self, collected: Collected, collectives: Collectives) -> Experience:
        rollout = collected.rollout
        penalized = self.frozen is not None and self.kl_coef > 0
        needs_old = self._takes_several_steps(len(rollout)) or (penalized and self._kl_in_reward)
        self.policy.eval()
        experience = as_experience(
            rollout,
            scores=collected.rewards.scores.to(rollout.input_ids.device),
            # an update that is exactly on-policy needs none: they are the new ones
            old_logprobs=self._in_parts(rollout, self._policy_logprobs) if needs_old else None,
            ref_logprobs=self._in_parts(rollout, self._reference_logprobs) if penalized else None,
        )
        return compute_advantages(
            experience,
            settings=self.advantage,
            kl_in_reward=self._kl_in_reward,
            kl_coef=self.kl_coef,
            num_generations=self.num_generations,
            whiten=collectives.whiten,
        )

    def _takes_several_steps(self, rows: int) -> bool:
        size = self.update.minibatch_size
        return self.update.num_iterations > 1 or (
            size is not None and size < rows * self.trainer.world_size
        )

    def _policy_logprobs(self, part: Rollout) -> Tensor:
        return sequence_logprobs(
            self.policy,
            part,
            temperature=self.sampling.temperature,
            chunk_size=self.update.logprob_chunk,
        )

    def _reference_logprobs(self, part: Rollout) -> Tensor:
        assert self.frozen is not None
        self.frozen.to(self.device)
        return self.frozen.logprobs(
            part, temperature=self.sampling.temperature, chunk_size=self.update.logprob_chunk
        )

    def _in_parts(self, rollout: Rollout, function: Callable[[Rollout], Tensor]) -> Tensor:
        output = torch.zeros_like(rollout.sampling_logprobs)
        for rows in micro_batch_rows(rollout.lengths, max_tokens=self.update.micro_batch_tokens):
            values = function(trim(rollout.select(rows)))
            output[rows.to(output.device), : values.shape[1]] = values
        return output

    def _update(
        self, experience: Experience, metrics: MetricSums, collectives: Collectives
    ) -> None:
        optimizer, scheduler = self.optimizers(), self.lr_schedulers()
        assert isinstance(optimizer, LightningOptimizer)
        assert isinstance(scheduler, torch.optim.lr_scheduler.LRScheduler)
        metrics.add("train/lr", optimizer.param_groups[0]["lr"], 1.0)
        size = self.update.minibatch_size
        local_size = None if size is None else size // collectives.world_size
        self.policy.train()
        for _ in range(self.update.num_iterations):
            for part in minibatches(experience, size=local_size):
                self._optimizer_step(optimizer, part, metrics, collectives)
        scheduler.step()

    def _optimizer_step(
        self,
        optimizer: LightningOptimizer,
        part: Experience,
        metrics: MetricSums,
        collectives: Collectives,
    ) -> None:
        counts = collectives.sum(denominators(part).to(self.device))
        totals = Denominators(rows=counts[0], tokens=counts[1])
        cuts = micro_batches(part, max_tokens=self.update.micro_batch_tokens)
        for index, micro in enumerate(cuts):
            # a micro-batch holds its share of the step's loss: the shares add up to it
            loss = self._loss(micro, totals, metrics, share=1 / len(cuts) / collectives.world_size)
            # ranks' gradients are averaged, while the denominators already span all ranks
            self._updater.backward(loss * collectives.world_size, last=index == len(cuts) - 1)
        norm = self._updater.step(optimizer, max_grad_norm=self.update.max_grad_norm)
        if math.isfinite(norm):
            metrics.add("policy/grad_norm", norm, 1.0)
            return
        if uses_loss_scaler(self.trainer):
            return
        self.skipped_steps += 1
        if self.skipped_steps > self.update.max_skipped_steps:
            raise ValueError(
                f"the gradient was not finite in {self.skipped_steps} optimizer steps "
                f"(update.max_skipped_steps is {self.update.max_skipped_steps}); lower the "
                "learning rate, or look at the scores and log-probabilities of the last iterations"
            )

    def _loss(
        self, micro: Experience, totals: Denominators, metrics: MetricSums, *, share: float
    ) -> Tensor:
        logprobs, entropy = self._logprobs_and_entropy(micro)
        terms = policy_loss(
            logprobs,
            micro,
            update=self.update,
            reference=self.reference,
            kl_coef=0.0 if self._kl_in_reward else self.kl_coef,
            totals=totals,
            max_new_tokens=self.sampling.max_new_tokens,
            entropy=entropy,
        )
        metrics.add("train/loss", terms.loss, share)
        metrics.add("policy/loss", terms.policy, share)
        measure_update(logprobs.detach(), entropy, micro, metrics, loss=self.update.function)
        return terms.loss

    def _logprobs_and_entropy(self, micro: Experience) -> tuple[Tensor, Tensor | None]:
        temperature, chunk_size = self.sampling.temperature, self.update.logprob_chunk
        if self.update.entropy_coef == 0:
            logprobs = sequence_logprobs(
                self.policy, micro, temperature=temperature, chunk_size=chunk_size
            )
            return logprobs, None
        return sequence_logprobs(
            self.policy,
            micro,
            temperature=temperature,
            chunk_size=chunk_size,
            return_entropy=True,
        )

    def on_before_optimizer_step(self, optimizer: torch.optim.Optimizer) -> None:
        self._updater.before_step(optimizer)

    def _sync_reference(self) -> None:
        every = self.reference.sync_every
        if self.frozen is not None and every is not None and (self.global_step + 1) % every == 0:
            self.frozen.mix(self.policy, self.reference.mixup)

    # ------------------------------------------------------------------ reports

    @contextlib.contextmanager
    def _phase(self, name: str) -> Iterator[None]:
        for listener in self._listeners():
            listener.on_phase(name)
        start = time.perf_counter()
        yield
        self._seconds[name] = self._seconds.get(name, 0.0) + time.perf_counter() - start
        for listener in self._listeners():
            listener.on_phase("")

    def _listeners(self) -> list[RolloutListener]:
        callbacks: list[L.Callback] = self.trainer.callbacks  # type: ignore[attr-defined]
        return [callback for callback in callbacks if isinstance(callback, RolloutListener)]

    def _tell_listeners(self, experience: Experience, collected: Collected) -> None:
        first = experience.response_mask.long().argmax(dim=1)
        advantages = experience.advantages.gather(1, first[:, None])[:, 0].tolist()
        for record, advantage in zip(collected.records, advantages, strict=True):
            record["advantage"] = advantage
        for listener in self._listeners():
            listener.on_rollout(self.trainer, self, experience, collected.records)

    def _log_iteration(
        self, experience: Experience, metrics: MetricSums, collectives: Collectives
    ) -> None:
        for phase, seconds in self._seconds.items():
            metrics.maximum(f"perf/{phase}_s", seconds)
        busy = sum(self._seconds.values())
        metrics.add(
            "perf/tokens_per_s", experience.attention_mask.sum() / busy, 1 / collectives.world_size
        )
        metrics.add("kl/coef", self.kl_coef, 1.0)
        metrics.add("train/skipped_steps", float(self.skipped_steps), 1.0)
        shown = ("rollout/score", "kl/reference")
        for name, value in metrics.reduce(collectives, self.device).items():
            self.log(name, value, prog_bar=name in shown, batch_size=len(experience))

    # ------------------------------------------------------------------ evaluation

    def validation_step(self, batch: PromptBatch, batch_idx: int) -> dict[str, Any]:
        collected = self._answer(batch, batch_idx)
        scores = collected.rewards.scores[:, None]
        mask = collected.rollout.response_mask
        values = torch.cat(
            [
                scores.to(self.device),
                collected.rewards.per_function.to(self.device),
                mask.sum(dim=1, keepdim=True),
                collected.rollout.truncated[:, None],
            ],
            dim=1,
        )
        for name, metric, column in zip(self._eval_names, self._eval_means, values.T, strict=True):
            metric(column)
            self.log(name, metric, prog_bar=name == "eval/score", batch_size=len(batch))  # type: ignore[arg-type]
        return {"records": collected.records}

    def test_step(self, batch: PromptBatch, batch_idx: int) -> dict[str, Any]:
        return self.validation_step(batch, batch_idx)

    def predict_step(self, batch: PromptBatch, batch_idx: int) -> list[dict[str, Any]]:
        return self._answer(batch, batch_idx).records

    def _answer(self, batch: PromptBatch, batch_idx: int) -> Collected:
        position = batch_idx * self.trainer.world_size + self.trainer.global_rank
        return self._collector.collect(
            batch,
            self.eval_sampling,
            seeds=sample_seeds(self.seed, _EVAL_STREAM, position, count=len(batch)),
            step=self.global_step,
            phase=self._phase,
        )

    # ------------------------------------------------------------------ checkpoints

    def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        checkpoint["lrlhf"] = {
            "kl_coef": self.kl_coef,
            "configured_kl_coef": self.reference.kl_coef,
            "skipped_steps": self.skipped_steps,
            # a reference that never moves is loaded from its source again
            "reference": self.frozen.state_dict()
            if self.frozen is not None and self.reference.sync_every is not None
            else None,
        }

    def on_load_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        state = checkpoint["lrlhf"]
        if state["configured_kl_coef"] == self.reference.kl_coef:
            self.kl_coef = state["kl_coef"]
        self.skipped_steps = state["skipped_steps"]
        if state["reference"] is not None:
            if self.frozen is None:
                raise ValueError(
                    "the checkpoint holds a moved reference policy, but reference.kl_coef is 0; "
                    "resume with the configuration that the run was started with"
                )
            self.frozen.load_state_dict(state["reference"])


def _loaded(
    policy: str | CausalLM | PreTrainedModel | PeftModel, tokenizer: PreTrainedTokenizerBase | None
) -> tuple[nn.Module, PreTrainedTokenizerBase]:
    if isinstance(policy, str):
        policy = CausalLM(source=policy)
    if isinstance(policy, CausalLM):
        return policy.load(), tokenizer or policy.load_tokenizer()
    if tokenizer is None:
        raise ValueError("policy is a model that is already built: pass its tokenizer too")
    check_output_head(policy)
    return policy, tokenizer
