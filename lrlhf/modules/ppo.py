"""Proximal policy optimization: an actor and a critic, each with its own optimizer."""

from __future__ import annotations

from pathlib import Path
from typing import ClassVar, Literal

from lightning.pytorch.utilities.types import OptimizerLRScheduler
from peft import PeftModel
from torch import nn
from transformers import PreTrainedModel, PreTrainedTokenizerBase, ProcessorMixin

from lrlhf.environments import Episodes
from lrlhf.functional.algorithm import Algorithm
from lrlhf.guard.bundle import StepBundle
from lrlhf.guard.dump_replay import Retaken
from lrlhf.guard.guard_settings import Guard
from lrlhf.models import CausalLM, TextLimits
from lrlhf.modules.base import TrainingModule
from lrlhf.modules.checks import uses_loss_scaler
from lrlhf.modules.metrics.measurement import Measurement
from lrlhf.modules.metrics.rollout_metrics import measure_critic
from lrlhf.modules.optimizers import OptimizerConfig
from lrlhf.modules.policy import evaluation_steps
from lrlhf.modules.policy.complete_settings import complete_settings
from lrlhf.modules.policy.critic import CriticStep, JointStep, ValueFunction, load_value_function
from lrlhf.modules.policy.generate import generate, sample
from lrlhf.modules.policy.gradient_step import OptimizerStep, PolicyStep
from lrlhf.modules.policy.importance_sampling import ImportanceSampling
from lrlhf.modules.policy.load_policy import load_policy
from lrlhf.modules.policy.policy_guard import passes_guard
from lrlhf.modules.policy.policy_parts import PolicyParts
from lrlhf.modules.policy.retake import retake
from lrlhf.modules.policy.update_batches import minibatches_of
from lrlhf.modules.settings import (
    Advantage,
    Critic,
    DynamicSampling,
    Evaluation,
    Reference,
    Teacher,
    Update,
)
from lrlhf.rewards import Rewards
from lrlhf.rollout import RolloutEngine, Sampling
from lrlhf.run import waits_for_every_parameter
from lrlhf.types import PromptBatch, StoredRollout


class PPO(TrainingModule):
    """Trains a policy and a critic with the clipped surrogate objective.

    Every response token has its own value and advantage. The critic is a network of its own
    (``critic.model``), or one head on the policy's backbone. Actor and critic have an optimizer
    each: their gradients, clipping, schedules and steps do not touch one another. One training step
    is one iteration, as in `RLOO`, with four minibatches unless ``update`` says otherwise.

    Args:
        policy: What to train: a hub id, a folder, ``package:<module>``, a `CausalLM` that says
            how to load it, or a model that is already built (then pass ``tokenizer``).
        rewards: What scores a response; from Python also a function, or a list of them.
            None: nothing but the teacher.
        tokenizer: For a policy that is already built.
        processor: For a vision-language policy that is already built; as ``AutoProcessor`` loads
            it.
        engine: What generates the responses; None: the policy itself, through ``transformers``.
        algorithm: A name from `lrlhf.functional.ALGORITHMS` (grpo, dapo, remax, …), an `Algorithm`
            of yours or its import path; None: ppo.
        num_generations: Responses per prompt.
        sampling: How training responses are generated.
        eval_sampling: How validation responses are generated; None: greedily, with the lengths and
            stop strings of ``sampling``, and at its temperature if several are sampled.
        evaluation: How many responses a validation samples, and what it measures.
        reference: The frozen policy and the KL penalty.
        advantage: How scores become advantages, where the algorithm's own way is not wanted.
        update: How advantages become optimizer steps.
        importance_sampling: Weights against the mismatch of engine and trainer; None: truncated
            ratios of tokens where the engine is not exact or its weights were older than the
            policy's, else none.
        optimizer: AdamW and its schedule, counted in iterations.
        guard: What counts as an anomaly, whose step is left out, and when to give up.
        dynamic_sampling: Train on groups that teach something only; None: on all.
        max_staleness: Iterations that the weights which sample a token may be behind those that
            train on it. 0: each iteration generates its own responses. 1: those of the next one are
            generated while this one trains. Above 1: those of so many, by an engine that takes new
            weights while it generates. Above 0 needs an engine in a process of its own
            (`VLLMServerEngine`).
        allow_truncated_sampling: Train on responses sampled with top_p, top_k or min_p, although
            their distribution is not the policy's.
        episodes: Turns with an environment or with tools in the place of single responses; None:
            single responses.
        teacher: A model to learn from, on the policy's own responses; None: rewards alone.
        seed: Seeds every random number of the run, together with rank, step and sample; None:
            the seed of ``seed_everything``.
        critic: The value function; None for an algorithm that needs none.

    Reference:
        Schulman et al. 2017, eq. 7 and 9, https://arxiv.org/abs/1707.06347; for language models
        Ouyang et al. 2022, §3.5, https://arxiv.org/abs/2203.02155
    """

    train_metric: str = "rollout/score"
    eval_metric: str = "eval/score"
    eval_mode: Literal["min", "max"] = "max"
    default_algorithm: ClassVar[str] = "ppo"
    """Where nothing names another."""
    default_minibatches: ClassVar[int] = 4
    """Optimizer steps per epoch over a rollout where ``update`` names no number."""

    def __init__(  # noqa: PLR0913  the constructor is the config schema
        self,
        policy: str | CausalLM | PreTrainedModel | PeftModel,
        rewards: Rewards | None = None,
        *,
        critic: Critic | None = Critic(),  # noqa: B008  frozen
        tokenizer: PreTrainedTokenizerBase | None = None,
        processor: ProcessorMixin | None = None,
        engine: RolloutEngine | None = None,
        algorithm: str | Algorithm | None = None,
        num_generations: int = 4,
        sampling: Sampling = Sampling(),  # noqa: B008  frozen
        eval_sampling: Sampling | None = None,
        evaluation: Evaluation = Evaluation(),  # noqa: B008  frozen
        reference: Reference = Reference(),  # noqa: B008  frozen
        advantage: Advantage = Advantage(),  # noqa: B008  frozen
        update: Update = Update(),  # noqa: B008  frozen
        importance_sampling: ImportanceSampling | None = None,
        optimizer: OptimizerConfig = OptimizerConfig(lr=1e-6),  # noqa: B008  frozen
        guard: Guard = Guard(),  # noqa: B008  frozen
        dynamic_sampling: DynamicSampling | None = None,
        max_staleness: int = 0,
        allow_truncated_sampling: bool = False,
        episodes: Episodes | None = None,
        teacher: Teacher | None = None,
        seed: int | None = None,
    ) -> None:
        super().__init__(guard=guard, seed=seed)
        if rewards is None:  # every score is 0 then
            self.train_metric, self.eval_metric = "teacher/reverse_kl", "eval/teacher_reverse_kl"
            self.eval_mode = "min"
        self.settings = complete_settings(
            default_algorithm=self.default_algorithm,
            default_minibatches=self.default_minibatches,
            algorithm=algorithm,
            num_generations=num_generations,
            sampling=sampling,
            eval_sampling=eval_sampling,
            evaluation=evaluation,
            reference=reference,
            advantage=advantage,
            update=update,
            importance_sampling=importance_sampling,
            dynamic_sampling=dynamic_sampling,
            max_staleness=max_staleness,
            allow_truncated_sampling=allow_truncated_sampling,
            episodes=episodes,
            teacher=teacher,
            scored=rewards is not None,
        )
        _check_critic(self.settings.algorithm, critic)
        loaded = load_policy(policy, tokenizer, processor)
        self.policy, self.tokenizer, self.processor = loaded
        self.optimizer_config = optimizer.filled(lr=1e-6)
        self.values: ValueFunction | None = None
        if critic is not None:
            self.values = load_value_function(critic, self.policy, self.tokenizer)
        self.critic = self.values and self.values.network
        self.value_head = self.values.head if self.values and not self.critic else None
        self.parts = PolicyParts(self, loaded, rewards, engine, self.settings, self.values)
        self.engine, self.rewards = self.parts.engine, self.parts.rewards
        self.policy_step = PolicyStep(
            self.policy, self.tokenizer, self.settings, self.parts.teaching
        )
        self.critic_step = self.joint_step = None
        if self.values is not None:
            self.critic_step = CriticStep(self.values, self.policy, self.tokenizer, self.settings)
        if self.critic_step is not None and self.value_head is not None:
            self.joint_step = JointStep(
                self.policy_step, self.critic_step, self.tokenizer, self.settings
            )
        self.measurements: list[Measurement] = []
        """What the last evaluation has found."""
        self.kl_coef = self.settings.kl_coef
        self.samples_per_step = 0

    def training_step(self, batch: PromptBatch | StoredRollout, batch_idx: int) -> None:
        parts = self.parts
        it = parts.begin(self, batch)
        sample = parts.sampler.sample(batch, it)  # y ~ π(· | x), and their scores
        moments = parts.moments.update(sample.scores, it.ranks)
        seeds = it.seed_before_update()
        with it.phase("logprob"):  # log π_old(y), log π_ref(y), V(x, y), then the advantages
            experience, context = parts.experience(sample, moments, self.kl_coef, it)
        it.show_rollout(experience, sample.records)
        if passes_guard(experience, sample, moments, context, seeds, self.tokenizer, it):
            with it.phase("update"):
                experience = experience.to("cpu") if self.settings.update.offload else experience
                models = list(self.trainable_models().values())
                for part, text in minibatches_of(
                    experience, batch.pretraining, self.settings, models, it
                ):
                    if self.joint_step is not None and not self.policy_step.stepped.waits(it):
                        self.joint_step(part, text, it, context)  # one pass over the backbone
                        continue
                    self.policy_step(part, text, it, context)
                    if self.critic_step is not None:
                        self.critic_step(part, None, it, context)
        if self.values is not None:
            measure_critic(experience, it.metrics)
            it.metrics.add("value/lr", self.optimizer_of(1).param_groups[0]["lr"], 1.0)
        parts.finish(self, experience, it, freeze_steps=self._freeze_steps)

    @property
    def _freeze_steps(self) -> list[int]:
        critic = [] if self.values is None else [self.values.settings.freeze_steps]
        return [self.settings.update.freeze_steps, *critic]

    def configure_optimizers(self) -> OptimizerLRScheduler:
        steps = self.trainer.estimated_stepping_batches
        learning = steps - self.settings.update.freeze_steps
        built = [self.optimizer_config.build(self.policy.named_parameters(), learning)]
        if self.values is not None:
            built.append(self.values.optimizer(steps))
        return [one.optimizer for one in built], [one.scheduler for one in built]

    def trainable_models(self) -> dict[str, nn.Module]:
        critic = {} if self.values is None else {"critic": self.values.model}
        return {"policy": self.policy, **critic}

    generate = generate
    sample = sample

    def export_pretrained(self, folder: Path | None) -> None:
        """Write the policy as ``transformers`` loads it, and a critic of its own in ``critic``."""
        self.parts.export(folder)
        if self.critic is not None:
            self.critic.save_pretrained(folder and folder / "critic", self.tokenizer)

    def summary(self) -> dict[str, str]:
        """Say what is trained, how responses are made, and what judges them."""
        return {**super().summary(), **self.parts.summary(self.kl_coef)}

    def text_limits(self, *, training: bool) -> list[TextLimits]:
        return self.parts.text_limits(super().text_limits(training=training), training=training)

    def setup(self, stage: str) -> None:
        super().setup(stage)
        self.parts.setup(self, stage)
        if stage == "fit" and self.values is not None and waits_for_every_parameter(self.trainer):
            raise ValueError(
                "actor and critic are trained by backward passes of their own, and this strategy "
                "waits for the gradients of all parameters in each: use trainer.strategy: "
                "ddp_find_unused_parameters_true"
            )
        if stage == "fit" and self.value_head is not None and uses_loss_scaler(self.trainer):
            raise ValueError(
                "trainer.precision 16-mixed scales the losses of actor and critic together, but "
                "unscales them apart, which a head on the policy's backbone does not allow; use "
                "bf16-mixed, or give the critic a network of its own (critic.model)"
            )

    def on_fit_start(self) -> None:
        self.parts.shard_frozen(self)

    def teardown(self, stage: str) -> None:
        self.parts.close()

    validation_step = test_step = evaluation_steps.validation_step
    on_validation_epoch_start = on_test_epoch_start = evaluation_steps.start
    on_validation_epoch_end = on_test_epoch_end = evaluation_steps.end
    evaluation_names = evaluation_steps.evaluation_names

    predict_step = evaluation_steps.predict_step

    @property
    def step_names(self) -> tuple[str, ...]:
        """Stages whose steps `retake` knows."""
        return ("iteration", *(step.stage for step in self._steps))

    @property
    def _steps(self) -> list[OptimizerStep]:
        steps = (self.policy_step, self.critic_step, self.joint_step)
        return [step for step in steps if step is not None]

    def retake(self, bundle: StepBundle) -> Retaken:
        """Take the step of a bundle again, see `lrlhf.guard.dump_replay`."""
        return retake(self, bundle, steps=self._steps, parts=self.parts)


def _check_critic(algorithm: Algorithm, critic: Critic | None) -> None:
    """Refuse a critic that nothing reads, and an algorithm that misses one.

    Raises:
        ValueError: One of the two.
    """
    if algorithm.estimator.uses_values == (critic is not None):
        return
    raise ValueError(
        f"algorithm {algorithm.name!r} needs a critic, and critic is null"
        if critic is None
        else f"algorithm {algorithm.name!r} uses no values: set critic: null, or take ppo"
    )
