"""The parts of a policy's iteration put together, for `RLOO`, `PPO` and modules of your own."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from peft import PeftModel
from torch import Tensor, nn

from lrlhf.arguments import brief
from lrlhf.models import (
    ReferencePolicy,
    TextLimits,
    check_has_experts,
    frozen_reference,
    limits_of,
    plain_model,
)
from lrlhf.modules.base import TrainingModule
from lrlhf.modules.checks import refuse_idle_encoder, refuse_other_batch
from lrlhf.modules.contracts import KLPenalized
from lrlhf.modules.metrics.rollout_metrics import (
    explained_variance,
    measure_kl,
    measure_mismatch,
)
from lrlhf.modules.policy.batch_plan import BatchPlan, plan_batches
from lrlhf.modules.policy.critic import ValueFunction
from lrlhf.modules.policy.evaluation import Evaluator, metrics_of
from lrlhf.modules.policy.experience import Sample, make_experience
from lrlhf.modules.policy.iteration import Iteration, UpdateContext
from lrlhf.modules.policy.load_policy import LoadedPolicy
from lrlhf.modules.policy.policy_settings import PolicySettings
from lrlhf.modules.policy.running_moments import RunningMoments, ScoreMoments
from lrlhf.modules.policy.sampler import Sampler
from lrlhf.modules.policy.scorer import Scorer
from lrlhf.modules.policy.teaching import Teaching, measure_distance
from lrlhf.modules.settings import Reference
from lrlhf.rewards.rewards import NoRewards, Rewards, as_rewards
from lrlhf.rollout import RolloutEngine, TransformersEngine
from lrlhf.rollout.episodes.episode_engine import EpisodeEngine
from lrlhf.rollout.vllm.rank_group import check_group_size
from lrlhf.run.quiet_output import quiet
from lrlhf.types import Experience, PromptBatch, SequenceBatch, StoredRollout

_SHOWN = ("rollout/score", "kl/reference", "teacher/reverse_kl")


class PolicyParts:
    """What generates, scores and judges the responses of one module.

    Args:
        module: Whose parts they are; only its seed is read here.
        policy: The model and its readers.
        rewards: What scores a response; None: there is only a teacher.
        engine: What generates; None: the policy itself.
        settings: Of the run.
        critic: The value function; None: there is none.
    """

    def __init__(
        self,
        module: TrainingModule,
        policy: LoadedPolicy,
        rewards: Rewards | None,
        engine: RolloutEngine | None,
        settings: PolicySettings,
        critic: ValueFunction | None = None,
    ) -> None:
        rewards = NoRewards() if rewards is None else as_rewards(rewards)
        self.settings = settings
        self.policy = policy
        self.critic = critic
        self.rewards = rewards
        self.turn_engine: RolloutEngine = engine or TransformersEngine()
        """Generates single responses."""
        self.engine = self.turn_engine
        if settings.episodes is not None:
            self.engine = EpisodeEngine(self.turn_engine, settings.episodes)
        self.own_engine = TransformersEngine()
        """Generates with the policy where ``turn_engine`` has other weights."""
        metrics = metrics_of(settings.evaluation, rewards)
        self.sampler = Sampler(
            policy, self.engine, rewards, settings, seed=module.seed, metrics=metrics
        )
        if settings.update.router_loss_coef > 0:
            check_has_experts(policy.model)
        self.reference = load_reference(policy.model, settings)
        self.teaching = (
            None if settings.teacher is None else Teaching(policy, settings, self.engine)
        )
        self.moments = RunningMoments()
        models = {"policy": policy.model, **({} if critic is None else {"critic": critic.model})}
        self.scorer = Scorer(
            policy.model,
            self.reference,
            self.engine,
            settings,
            critic=critic,
            models=models,
            teaching=self.teaching,
        )
        self.evaluator = Evaluator(
            self.sampler,
            rewards,
            metrics,
            settings,
            seed=module.seed,
            distance=self.scorer.distance if self.teaching else None,
        )
        self._shown_plan = ""
        module.stateful |= {
            "kl": _KLState(module, settings.kl_coef),
            "moments": self.moments,
            "sampler": self.sampler,
            "token_budget": module.token_budget,
            "reference": _ReferenceState(self.reference, settings),
        }

    # ---- one iteration

    def begin(self, module: TrainingModule, batch: PromptBatch | StoredRollout) -> Iteration:
        """Start an iteration: its sizes, its ranks, its metrics.

        Raises:
            ValueError: The batch does not fit the settings.
        """
        assert isinstance(module, KLPenalized)
        refuse_other_batch(module, batch, PromptBatch | StoredRollout, "PromptDataModule")
        module.seed_step()  # whatever a reward draws is the same after a resume
        it = Iteration(module)
        plan = plan_iteration(batch, self.settings, it)
        if not self._shown_plan:
            self._shown_plan = plan.table()
            module.print(self._shown_plan)
        check_texts(batch.pretraining, self.settings)
        if self.teaching is not None and isinstance(batch, PromptBatch):
            self.teaching.check_prompts(batch, "sampling")
        if module.kl_coef > 0 and self.reference is None:
            raise ValueError(
                f"the KL coefficient was set to {module.kl_coef}, but no reference was loaded: "
                "start with reference.kl_coef above 0"
            )
        module.samples_per_step = plan.responses_trained
        it.metrics.add("kl/coef", module.kl_coef, 1.0)
        it.metrics.add("train/lr", module.optimizer_of(0).param_groups[0]["lr"], 1.0)
        return it

    def experience(
        self, sample: Sample, moments: ScoreMoments, kl_coef: float, it: Iteration
    ) -> tuple[Experience, UpdateContext]:
        """Compute log-probabilities, values and advantages of a sample, without gradients.

        Args:
            sample: The responses and their scores.
            moments: Of the scores so far, these included.
            kl_coef: Strength of the KL penalty.
            it: The iteration.

        Returns:
            What the update trains on, and what holds for all of its steps.
        """
        entering = moments.as_they_enter(self.settings.advantage.scale_rewards)
        if self.critic is not None:
            self.critic.follow(entering, step=it.step)
        sample = sample._replace(rollout=self.scorer.ask_teacher(sample.rollout, it))
        scored = self.scorer(sample.rollout, it, stored=sample.stored, kl_coef=kl_coef)
        exact = self.engine.capabilities.exact
        experience = make_experience(
            sample, scored, moments, self.settings, kl_coef=kl_coef, exact=exact, it=it
        )
        measure_kl(experience, it.metrics)
        if scored.distance is not None:
            policy = (
                scored.old_logprobs if scored.policy_logprobs is None else scored.policy_logprobs
            )
            assert policy is not None
            measure_distance(scored.distance, policy, experience.response_mask, it.metrics)
        if scored.old_logprobs is not None and not (sample.stored or scored.from_engine):
            measure_mismatch(scored.old_logprobs, experience, it.metrics)
        return experience, UpdateContext(
            kl_coef=kl_coef,
            stored=sample.stored,
            from_engine=scored.from_engine,
            exact=exact,
            value_unit=entering.deviation,
        )

    def finish(
        self,
        module: TrainingModule,
        experience: Experience,
        it: Iteration,
        *,
        freeze_steps: Sequence[int],
    ) -> None:
        """Advance schedules and reference, and log.

        Args:
            module: Takes the step.
            experience: What was trained on.
            it: The iteration.
            freeze_steps: Iterations in which each optimizer waits at the start.
        """
        advance_schedules(module, freeze_steps)
        module.token_budget.settle(it.ranks.least)
        if self.teaching is not None:
            self.teaching.rest()
        mix_reference(self.reference, self.policy.model, self.settings.reference, it)
        log_iteration(module, experience, it)

    # ---- Lightning's hooks

    def setup(self, module: TrainingModule, stage: str) -> None:
        """Begin with a trainer: refuse what hangs, and attach the engine anew.

        Raises:
            ValueError: The engine cannot be split over so many processes, an encoder could wait
                for others, or evaluations could not be scored.
        """
        check_group_size(self.engine.capabilities.ranks_together, module.trainer.world_size)
        if stage == "fit":
            refuse_idle_encoder(
                module.trainer, plain_model(self.policy.model), self.policy.processor
            )
            self._shown_plan = ""
        if stage != "fit" or module.trainer.enable_validation:
            self.sampler.check_evaluations(answers_once=stage == "predict")
        self.sampler.reset()

    def text_limits(self, trained: list[TextLimits], *, training: bool) -> list[TextLimits]:
        """Return what the models can read of prompts that they are to respond to."""
        beside = [] if self.reference is None else [self.reference.model]
        response, option = self.settings.response_tokens(training=training)
        return [
            replace(one, response=response, option=option) for one in trained + limits_of(beside)
        ]

    def shard_frozen(self, module: TrainingModule) -> None:
        """Have reference and teacher split over the ranks as trained models are."""
        if self.reference is not None:
            module.shard_frozen(self.reference, offload=self.settings.reference.offload)
        self.shard_teacher(module)

    def shard_teacher(self, module: TrainingModule) -> None:
        """Have the teacher split, which evaluations ask too; done twice it is done once."""
        if self.teaching is not None and self.teaching.model is not None:
            module.shard_frozen(self.teaching.model, offload=self.teaching.settings.offload)

    def close(self) -> None:
        """Give back what engine, rewards and teacher hold."""
        self.sampler.close()
        if self.teaching is not None:
            self.teaching.close()

    def summary(self, kl_coef: float) -> dict[str, str]:
        """Say in a few words how responses are made and judged, by name."""
        settings = self.settings
        return {
            "algorithm": f"{settings.algorithm.name}, kl_coef {kl_coef:g}",
            "responses": (
                f"{settings.num_generations} per prompt, {brief(settings.sampling)}, "
                f"{brief(self.engine)}"
            ),
            "rewards": brief(self.rewards),
            **({} if settings.teacher is None else {"teacher": brief(settings.teacher)}),
        }

    def export(self, folder: Path | None) -> None:
        """Write the policy, adapters merged, and what reads for it, as ``transformers`` loads."""
        self.policy.save(folder)


def plan_iteration(
    batch: PromptBatch | StoredRollout, settings: PolicySettings, it: Iteration
) -> BatchPlan:
    """Work out the sizes of an iteration.

    Raises:
        ValueError: They do not fit; says which would.
    """
    stored, sampling = isinstance(batch, StoredRollout), settings.dynamic_sampling
    return plan_batches(
        prompts_per_rank=len(batch) // settings.num_generations if stored else len(batch),
        num_generations=settings.num_generations,
        world_size=it.ranks.world_size,
        minibatch_size=settings.update.minibatch_size,
        num_iterations=settings.update.num_iterations,
        num_minibatches=settings.update.num_minibatches,
        default_minibatches=settings.default_minibatches,
        kept_prompts=sampling.prompts if sampling and not stored else None,
        beside=() if stored else settings.algorithm.beside,
    )


def check_texts(texts: SequenceBatch | None, settings: PolicySettings) -> None:
    """Refuse texts without a weight, and a weight without texts.

    Raises:
        ValueError: One of the two is missing.
    """
    coefficient = settings.update.pretraining_coef
    if (texts is None) != (coefficient == 0):
        raise ValueError(
            f"update.pretraining_coef is {coefficient}, and the data has "
            f"{'no ' if texts is None else ''}pretraining texts (an option of "
            "PromptDataModule): set both, or neither"
        )


def advance_schedules(module: TrainingModule, freeze_steps: Sequence[int]) -> None:
    """Let every learning rate go on by one iteration, whether or not it took a step.

    Args:
        module: Its optimizers in their order.
        freeze_steps: Iterations at the start in which each waits: a schedule begins when its model
            begins to learn.
    """
    for index, frozen in enumerate(freeze_steps):
        if module.global_step >= frozen:
            module.advance_schedule(index)


def mix_reference(
    frozen: ReferencePolicy | None, policy: nn.Module, settings: Reference, it: Iteration
) -> None:
    """Mix the policy into its reference when its time has come."""
    every = settings.sync_every
    if frozen is not None and every is not None and (it.step + 1) % every == 0:
        frozen.mix(policy, settings.mixup)


def log_iteration(module: TrainingModule, experience: Experience, it: Iteration) -> None:
    """Log the metrics of an iteration, all ranks together."""
    it.measure_costs(float(experience.attention_mask.sum()))
    for name, count in module.step_guard.metrics().items():
        it.metrics.add(name, count, 1.0)
    reduced = it.metrics.reduce(it.ranks, it.device)
    if "value/return_std" in reduced:
        reduced["value/explained_variance"] = explained_variance(
            reduced["value/error_std"], reduced["value/return_std"]
        )
    for name, value in reduced.items():
        module.log(name, value, prog_bar=name in _SHOWN, batch_size=len(experience))


@quiet()
def load_reference(policy: Any, settings: PolicySettings) -> ReferencePolicy | None:
    """Freeze the policy, or another model, as the reference; None: there is no KL penalty.

    It stays out of the module tree: no gradient, no wrapping, no checkpoint.

    Raises:
        ValueError: A reference of adapters cannot move.
    """
    reference = settings.reference
    if reference.sync_every is not None and isinstance(policy, PeftModel):
        raise ValueError(
            "reference.sync_every is set, but the reference of a LoRA policy stays as the "
            "policy started; drop sync_every, or train all weights"
        )
    return frozen_reference(policy, reference.model) if settings.kl_coef else None


class _KLState:
    """The strength of the KL penalty, which callbacks steer through the module's ``kl_coef``."""

    def __init__(self, module: TrainingModule, configured: float) -> None:
        self._module = module
        self._configured = configured

    def state_dict(self) -> dict[str, Any]:
        assert isinstance(self._module, KLPenalized)
        return {"coef": self._module.kl_coef, "configured": self._configured}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        assert isinstance(self._module, KLPenalized)
        if state["configured"] == self._configured:
            self._module.kl_coef = state["coef"]


class _ReferenceState:
    """The weights of a reference that moves; one that never does is loaded from its source."""

    def __init__(self, reference: ReferencePolicy | None, settings: PolicySettings) -> None:
        self._reference = reference
        self._moves = settings.reference.sync_every is not None

    def state_dict(self) -> dict[str, Any]:
        if self._reference is None or not self._moves:
            return {"weights": None}
        return {"weights": self._reference.state_dict()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        weights: Mapping[str, Tensor] | None = state["weights"]
        if weights is None:
            return
        if self._reference is None:
            raise ValueError(
                "the checkpoint holds a moved reference policy, but reference.kl_coef is 0; "
                "resume with the configuration that the run was started with"
            )
        self._reference.load_state_dict(weights)
