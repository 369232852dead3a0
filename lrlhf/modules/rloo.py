"""REINFORCE leave-one-out, and every other algorithm without a critic."""

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
from lrlhf.modules.metrics.measurement import Measurement
from lrlhf.modules.optimizers import OptimizerConfig
from lrlhf.modules.policy import evaluation_steps
from lrlhf.modules.policy.complete_settings import complete_settings
from lrlhf.modules.policy.generate import generate, sample
from lrlhf.modules.policy.gradient_step import PolicyStep
from lrlhf.modules.policy.importance_sampling import ImportanceSampling
from lrlhf.modules.policy.load_policy import load_policy
from lrlhf.modules.policy.policy_guard import passes_guard
from lrlhf.modules.policy.policy_parts import PolicyParts
from lrlhf.modules.policy.retake import retake
from lrlhf.modules.policy.update_batches import minibatches_of
from lrlhf.modules.settings import (
    Advantage,
    DynamicSampling,
    Evaluation,
    Reference,
    Teacher,
    Update,
)
from lrlhf.rewards import Rewards
from lrlhf.rollout import RolloutEngine, Sampling
from lrlhf.types import PromptBatch, StoredRollout


class RLOO(TrainingModule):
    """Generates groups of responses, compares their scores, and updates the policy.

    One training step is one iteration: generate ``num_generations`` responses to each prompt of the
    batch, score them, turn the scores into advantages, take the optimizer steps.
    ``trainer.global_step`` counts iterations. A batch of stored rollouts takes the place of the
    first two. Any `Algorithm` that needs no critic fits: GRPO, Dr. GRPO, DAPO, GSPO, ReMax, ….

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
            of yours or its import path; None: rloo.
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

    Reference:
        Ahmadian et al. 2024, https://arxiv.org/abs/2402.14740
    """

    train_metric: str = "rollout/score"
    eval_metric: str = "eval/score"
    eval_mode: Literal["min", "max"] = "max"
    default_algorithm: ClassVar[str] = "rloo"
    """Where nothing names another."""
    default_minibatches: ClassVar[int] = 1
    """Optimizer steps per epoch over a rollout where ``update`` names no number."""

    def __init__(  # noqa: PLR0913  the constructor is the config schema
        self,
        policy: str | CausalLM | PreTrainedModel | PeftModel,
        rewards: Rewards | None = None,
        *,
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
        if self.settings.algorithm.estimator.uses_values:
            raise ValueError(
                f"algorithm {self.settings.algorithm.name!r} needs a critic, which "
                f"{type(self).__name__} has not: use lrlhf.modules.PPO"
            )
        loaded = load_policy(policy, tokenizer, processor)
        self.policy, self.tokenizer, self.processor = loaded
        self.optimizer_config = optimizer.filled(lr=1e-6)
        self.parts = PolicyParts(self, loaded, rewards, engine, self.settings)
        self.engine, self.rewards = self.parts.engine, self.parts.rewards
        self.policy_step = PolicyStep(
            self.policy, self.tokenizer, self.settings, self.parts.teaching
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
        with it.phase("logprob"):  # log π_old(y), log π_ref(y), then the advantages
            experience, context = parts.experience(sample, moments, self.kl_coef, it)
        it.show_rollout(experience, sample.records)
        if passes_guard(experience, sample, moments, context, seeds, self.tokenizer, it):
            with it.phase("update"):
                experience = experience.to("cpu") if self.settings.update.offload else experience
                for part, text in minibatches_of(
                    experience, batch.pretraining, self.settings, [self.policy], it
                ):
                    self.policy_step(part, text, it, context)
        parts.finish(self, experience, it, freeze_steps=[self.settings.update.freeze_steps])

    def configure_optimizers(self) -> OptimizerLRScheduler:
        learning = self.trainer.estimated_stepping_batches - self.settings.update.freeze_steps
        built = self.optimizer_config.build(self.policy.named_parameters(), learning)
        return [built.optimizer], [built.scheduler]

    def trainable_models(self) -> dict[str, nn.Module]:
        return {"policy": self.policy}

    generate = generate
    sample = sample

    def export_pretrained(self, folder: Path | None) -> None:
        """Write the policy, adapters merged, and its tokenizer, as ``transformers`` loads them."""
        self.parts.export(folder)

    def summary(self) -> dict[str, str]:
        """Say what is trained, how responses are made, and what judges them."""
        return {**super().summary(), **self.parts.summary(self.kl_coef)}

    def text_limits(self, *, training: bool) -> list[TextLimits]:
        return self.parts.text_limits(super().text_limits(training=training), training=training)

    def setup(self, stage: str) -> None:
        super().setup(stage)
        self.parts.setup(self, stage)

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
        return ("iteration", self.policy_step.stage)

    def retake(self, bundle: StepBundle) -> Retaken:
        """Take the step of a bundle again, see `lrlhf.guard.dump_replay`."""
        return retake(self, bundle, steps=[self.policy_step], parts=self.parts)
