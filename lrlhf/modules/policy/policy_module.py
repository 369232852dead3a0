"""What RLOO and PPO share: drawing, scoring, and updating a policy, iteration by iteration."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any, ClassVar, Literal

import torch
from lightning.pytorch.utilities.types import OptimizerLRScheduler
from peft import PeftModel
from torch import nn
from torchmetrics import MeanMetric
from transformers import PreTrainedModel, PreTrainedTokenizerBase, ProcessorMixin

from lrlhf.guard.guard_settings import Guard, with_quota
from lrlhf.guard.step_guard import StepGuard
from lrlhf.models import (
    CausalLM,
    check_has_experts,
    frozen_reference,
    looking_once,
    plain_model,
    save_model,
)
from lrlhf.modules.checks import (
    check_group_policy_options,
    check_penalty,
    prepare_trainer,
    refuse_idle_encoder,
    refuse_other_weights,
    refuse_pure_low_precision,
)
from lrlhf.modules.metrics.metric_sums import MetricSums
from lrlhf.modules.metrics.rollout_metrics import (
    explained_variance,
    measure_kl,
    measure_mismatch,
)
from lrlhf.modules.optimizers import OptimizerAndScheduler, OptimizerConfig
from lrlhf.modules.policy.batch_plan import BatchPlan, plan_batches
from lrlhf.modules.policy.importance_sampling import ImportanceSampling
from lrlhf.modules.policy.iteration import Iteration
from lrlhf.modules.policy.policy_loading import load_policy
from lrlhf.modules.policy.policy_rollout import PolicyRollout
from lrlhf.modules.policy.running_moments import RunningMoments
from lrlhf.modules.policy.stored_rollouts import check_stored
from lrlhf.modules.settings import Advantage, DynamicSampling, Reference, Update
from lrlhf.rewards import Rewards
from lrlhf.rollout import (
    Collector,
    RolloutEngine,
    Sampling,
    SyncedEngine,
    TransformersEngine,
)
from lrlhf.run import (
    Collectives,
    SplitsModels,
    Updater,
    count_iterations_as_steps,
    run_seed,
    seed_everything_for,
)
from lrlhf.types import Experience, PromptBatch, StoredRollout


class PolicyModule(PolicyRollout):
    """Draws responses, scores them, compares the scores, and updates the policy.

    One training step is one iteration: draw ``num_generations`` responses to each prompt of the
    batch, score them, turn the scores into advantages, take the optimizer steps.
    ``trainer.global_step`` counts iterations. A batch of stored rollouts takes the place of the
    first two.

    Args:
        policy: What to train: a hub id, a folder, ``package:<module>``, a `CausalLM` that says
            how to load it, or a model that is already built (then pass ``tokenizer``).
        rewards: What scores a response.
        tokenizer: For a policy that is already built.
        processor: For a vision-language policy that is already built; as ``AutoProcessor`` loads
            it.
        engine: What draws the responses; None: the policy itself, through ``transformers``.
        num_generations: Responses per prompt.
        sampling: How training responses are drawn.
        eval_sampling: How validation responses are drawn; None: greedily, with the lengths and
            stop strings of ``sampling``.
        reference: The frozen policy and the KL penalty.
        advantage: How scores become advantages.
        update: How advantages become optimizer steps.
        importance_sampling: Weights against the mismatch of engine and trainer; None: truncated
            ratios of tokens where the engine is not exact or its weights were older than the
            policy's, else none.
        optimizer: AdamW and its schedule, counted in iterations.
        guard: What counts as an anomaly, whose step is left out, and when to give up.
        dynamic_sampling: Train on groups with different scores only; None: on all.
        rollout_ahead: 1: draw the next iteration's responses while this one trains, with weights
            that are then one update old; needs an engine in a process of its own
            (`VLLMServerEngine`).
        allow_truncated_sampling: Train on responses drawn with top_p, top_k or min_p, although
            their distribution is not the policy's.
        seed: Seeds every random number of the run, together with rank, step and sample; None:
            the seed of ``seed_everything``.
    """

    default_estimator: ClassVar[str] = "rloo"
    """Where ``advantage`` names none."""

    def __init__(  # noqa: PLR0913  the constructor is the config schema
        self,
        policy: str | CausalLM | PreTrainedModel | PeftModel,
        rewards: Rewards,
        *,
        tokenizer: PreTrainedTokenizerBase | None = None,
        processor: ProcessorMixin | None = None,
        engine: RolloutEngine | None = None,
        num_generations: int = 4,
        sampling: Sampling = Sampling(),  # noqa: B008  frozen
        eval_sampling: Sampling | None = None,
        reference: Reference = Reference(),  # noqa: B008  frozen
        advantage: Advantage = Advantage(),  # noqa: B008  frozen
        update: Update = Update(),  # noqa: B008  frozen
        importance_sampling: ImportanceSampling | None = None,
        optimizer: OptimizerConfig = OptimizerConfig(lr=1e-6),  # noqa: B008  frozen
        guard: Guard = Guard(),  # noqa: B008  frozen
        dynamic_sampling: DynamicSampling | None = None,
        rollout_ahead: Literal[0, 1] = 0,
        allow_truncated_sampling: bool = False,
        seed: int | None = None,
    ) -> None:
        super().__init__()
        self.automatic_optimization = False
        self.num_generations = num_generations
        self.sampling = sampling
        self.eval_sampling = eval_sampling or Sampling(
            temperature=0.0,
            max_new_tokens=sampling.max_new_tokens,
            stop=sampling.stop,
            stop_in_text=sampling.stop_in_text,
        )
        self.reference = reference
        # named here and not by defaults of this signature: Python passes settings whole, YAML key
        # by key on top of such defaults, and both must mean the same
        self.advantage = advantage = advantage.named(self.default_estimator)
        self.update = update = update.following(advantage.function)
        self.importance_sampling = importance_sampling
        self.optimizer_config = optimizer.filled(lr=1e-6)
        self.dynamic_sampling = dynamic_sampling
        self.rollout_ahead = rollout_ahead
        self.allow_truncated_sampling = allow_truncated_sampling
        self.seed = run_seed(seed)
        check_group_policy_options(
            num_generations,
            sampling,
            advantage,
            update,
            penalty_in_reward=self._kl_in_reward and reference.kl_coef > 0,
            allow_truncated_sampling=allow_truncated_sampling,
            needs_groups=dynamic_sampling is not None,
        )
        check_penalty(reference, in_reward=self._kl_in_reward)
        self.kl_coef = reference.kl_coef
        self.samples_per_step = 0
        quota = with_quota(guard, "update.max_skipped_steps", update.max_skipped_steps)
        self.step_guard = StepGuard(self, *quota)
        self._replayed = self._takes_drawn = self._moved = False
        self.moments = RunningMoments()
        self.policy, self.tokenizer, self.processor = load_policy(policy, tokenizer, processor)
        if update.router_loss_coef > 0:
            check_has_experts(self.policy)
        if reference.sync_every is not None and isinstance(self.policy, PeftModel):
            raise ValueError(
                "reference.sync_every is set, but the reference of a LoRA policy stays as the "
                "policy started; drop sync_every, or train all weights"
            )
        # frozen models stay out of the module tree: no gradient, no wrapping, no checkpoint
        self.frozen = frozen_reference(self.policy, reference.model) if reference.kl_coef else None
        self.rewards = rewards
        self.engine: RolloutEngine = engine or TransformersEngine()
        self._check_engine()
        self._collector = Collector(
            self.engine, rewards, self.tokenizer, shows_media=self.processor is not None
        )
        self._ahead = self._look_ahead() if rollout_ahead else None
        self._eval_names = ["eval/score", *(f"eval/{name}" for name in rewards.names)]
        self._eval_names += ["eval/response_length", "eval/truncated_fraction"]
        self._eval_means = nn.ModuleList(
            MeanMetric(nan_strategy="ignore") for _ in self._eval_names
        )
        self._updater = Updater(self)
        self._iteration = Iteration(self)
        self._planned = False
        self._ready = False
        self._check_critic()

    def _check_critic(self) -> None:
        if self.advantage.function.uses_values:
            raise ValueError(
                f"advantage.estimator {self.advantage.estimator!r} needs a critic, which "
                f"{type(self).__name__} has not: use lrlhf.modules.PPO"
            )

    @property
    def _kl_in_reward(self) -> bool:
        if self.reference.placement is not None:
            return self.reference.placement == "reward"
        return self.advantage.function.kl_in_reward

    # ------------------------------------------------------------------ contracts

    def trainable_models(self) -> dict[str, nn.Module]:
        return {"policy": self.policy}

    def export_pretrained(self, folder: Path | None) -> None:
        """Write the policy, adapters merged, and its tokenizer, as ``transformers`` loads them."""
        save_model(self.policy, folder, self.tokenizer)
        if self.processor is not None and folder is not None:
            self.processor.save(folder)

    # ------------------------------------------------------------------ set-up

    def setup(self, stage: str) -> None:
        prepare_trainer(self.trainer, stage)
        if stage == "fit":
            for model in self.trainable_models().values():
                refuse_pure_low_precision(self.trainer, model)
            refuse_idle_encoder(self.trainer, plain_model(self.policy), self.processor)
            count_iterations_as_steps(self.trainer)
            self._planned = False
        self._ready = False

    def on_fit_start(self) -> None:
        strategy = self.trainer.strategy
        if self.frozen is not None and isinstance(strategy, SplitsModels):
            shard = partial(strategy.shard_frozen, whole=self.reference.offload)
            self.frozen.split(shard)

    def teardown(self, stage: str) -> None:
        if self._ahead is not None:
            self._ahead.drop()
        self.engine.close()

    def configure_optimizers(self) -> OptimizerLRScheduler:
        built = self._optimizers(self.trainer.estimated_stepping_batches)
        return [one.optimizer for one in built], [one.scheduler for one in built]

    def _optimizers(self, total_steps: float) -> list[OptimizerAndScheduler]:
        learning = total_steps - self.update.freeze_steps
        return [self.optimizer_config.build(self.policy.named_parameters(), learning)]

    # ------------------------------------------------------------------ one iteration

    def training_step(self, batch: PromptBatch | StoredRollout, batch_idx: int) -> None:
        collectives = Collectives(self.trainer)
        metrics = MetricSums()
        self._iteration.begin()
        plan = self._plan(batch, collectives)
        if self.kl_coef > 0 and self.frozen is None:
            raise ValueError(
                f"the KL coefficient was set to {self.kl_coef}, but no reference was loaded: start "
                "with reference.kl_coef above 0"
            )
        seed_everything_for(self.seed, self.global_step, collectives.rank)
        self._moved = False
        self.samples_per_step = plan.responses_trained
        collected, filler = self._responses(batch, metrics, collectives)
        self._replayed, moments = isinstance(batch, StoredRollout), self.moments.state_dict()
        if isinstance(self.engine, SyncedEngine):
            self.engine.sleep()
        with self._iteration.phase("logprob"), looking_once():
            experience = self._experience(
                collected.rollout, collected.rewards.scores, filler, metrics
            )
        self._free_gathered()
        self._iteration.tell_rollout(experience, collected.records)
        measure_kl(experience, metrics)
        if experience.old_logprobs is not None and not (self._replayed or self._takes_drawn):
            measure_mismatch(experience.old_logprobs, experience, metrics)
        inputs = self._iteration_inputs(experience, filler, moments)
        passes = self._passes_guard(experience, inputs, collectives)
        del inputs  # holds the experience on its device
        if self.update.offload:
            experience = experience.to("cpu")
        with self._iteration.phase("update"):
            texts = self._texts(batch.pretraining, plan)
            self._update(experience, texts, metrics, collectives, skip=not passes)
        self._sync_reference()
        self._log_iteration(experience, metrics, collectives)

    def _plan(self, batch: PromptBatch | StoredRollout, collectives: Collectives) -> BatchPlan:
        stored = isinstance(batch, StoredRollout)
        if isinstance(batch, StoredRollout):
            if self.dynamic_sampling is not None:
                raise ValueError(
                    "dynamic_sampling draws responses, but the data holds stored ones: drop "
                    "dynamic_sampling, or train on prompts"
                )
            check_stored(
                batch,
                num_generations=self.num_generations,
                temperature=self.sampling.temperature,
                allow_truncated_sampling=self.allow_truncated_sampling,
            )
        plan = plan_batches(
            prompts_per_rank=len(batch) // self.num_generations if stored else len(batch),
            num_generations=self.num_generations,
            world_size=collectives.world_size,
            minibatch_size=self.update.minibatch_size,
            num_iterations=self.update.num_iterations,
            num_minibatches=self.update.num_minibatches,
            default_minibatches=self.default_minibatches,
            kept_prompts=self.dynamic_sampling.prompts if self.dynamic_sampling else None,
        )
        if not self._planned:
            self.print(plan.table())
            self._planned = True
        return plan

    def _sync_reference(self) -> None:
        every = self.reference.sync_every
        if self.frozen is not None and every is not None and (self.global_step + 1) % every == 0:
            self.frozen.mix(self.policy, self.reference.mixup)

    # ------------------------------------------------------------------ reports

    def _log_iteration(
        self, experience: Experience, metrics: MetricSums, collectives: Collectives
    ) -> None:
        self._iteration.measure(
            metrics,
            tokens=float(experience.attention_mask.sum()),
            world_size=collectives.world_size,
        )
        metrics.add("kl/coef", self.kl_coef, 1.0)
        for name, count in self.step_guard.metrics().items():
            metrics.add(name, count, 1.0)
        shown = ("rollout/score", "kl/reference")
        reduced = metrics.reduce(collectives, self.device)
        if "value/return_std" in reduced:
            reduced["value/explained_variance"] = explained_variance(
                reduced["value/error_std"], reduced["value/return_std"]
            )
        for name, value in reduced.items():
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

    # ------------------------------------------------------------------ checkpoints

    def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        checkpoint["lrlhf"] = {
            "kl_coef": self.kl_coef,
            "configured_kl_coef": self.reference.kl_coef,
            "guard": self.step_guard.state_dict(),
            "moments": self.moments.state_dict(),
            # a checkpoint is rank 0's: of several ranks the others would miss their responses
            "ahead": self._ahead.state_dict()
            if self._ahead is not None and self.trainer.world_size == 1
            else None,
            # a reference that never moves is loaded from its source again
            "reference": self.frozen.state_dict()
            if self.frozen is not None and self.reference.sync_every is not None
            else None,
        }

    def on_load_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        refuse_other_weights(self, checkpoint)
        state = checkpoint["lrlhf"]
        if state["configured_kl_coef"] == self.reference.kl_coef:
            self.kl_coef = state["kl_coef"]
        self.step_guard.load_checkpoint(state)
        self.moments.load_state_dict(state["moments"])
        if self._ahead is not None:
            self._ahead.load_state_dict(state.get("ahead"), self.device)
        if state["reference"] is not None:
            if self.frozen is None:
                raise ValueError(
                    "the checkpoint holds a moved reference policy, but reference.kl_coef is 0; "
                    "resume with the configuration that the run was started with"
                )
            self.frozen.load_state_dict(state["reference"])
