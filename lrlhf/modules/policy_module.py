"""What every module with a policy is made of: its options, its parts, and Lightning's hooks."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, ClassVar, Literal, TypedDict

from lightning.pytorch.utilities.types import OptimizerLRScheduler
from peft import PeftModel
from torch import Tensor, nn
from transformers import PreTrainedModel, PreTrainedTokenizerBase, ProcessorMixin

from lrlhf.arguments import short_text
from lrlhf.datamodules.core import set_names
from lrlhf.environments import Episodes
from lrlhf.functional.algorithm import Algorithm
from lrlhf.guard.anomalies import Guard, StepWatch, measure
from lrlhf.guard.dump import StepBundle
from lrlhf.guard.dump_replay import ReplayedStep
from lrlhf.models import (
    CausalLM,
    ReferencePolicy,
    TextLimits,
    allow_replay,
    cached_vision_features,
    check_has_experts,
    frozen_reference,
    limits_of,
    plain_model,
)
from lrlhf.modules.base import SteppedOptimizer, TrainingModule
from lrlhf.modules.checks import refuse_batch_size_finder, refuse_idle_encoder, refuse_other_batch
from lrlhf.modules.metrics.measurement import Measurement, logged_values
from lrlhf.modules.metrics.rollout_metrics import explained_variance
from lrlhf.modules.optimizers import OptimizerConfig
from lrlhf.modules.policy.critic import ValueFunction, check_critic, load_value_function
from lrlhf.modules.policy.evaluate import Evaluator, metrics_of
from lrlhf.modules.policy.experience import RunningScores, ScoreStatistics, with_advantages
from lrlhf.modules.policy.generate import generate, sample
from lrlhf.modules.policy.guard import ITERATION, describe_rows
from lrlhf.modules.policy.iteration import BatchPlan, Iteration, plan_batches
from lrlhf.modules.policy.load_policy import load_policy
from lrlhf.modules.policy.objective import PolicyStep
from lrlhf.modules.policy.sample import Sampler, chat_of
from lrlhf.modules.policy.score import RolloutT, Scorer
from lrlhf.modules.policy.settings import PolicySettings
from lrlhf.modules.policy.teacher import RunTeacher
from lrlhf.modules.settings import (
    Advantage,
    Critic,
    DynamicSampling,
    Evaluation,
    ImportanceSampling,
    Reference,
    Teacher,
    Update,
)
from lrlhf.options.conversion import parameters_of
from lrlhf.rewards import Rewards
from lrlhf.rewards.rewards import NoRewards, as_rewards
from lrlhf.rollout import Collected, RolloutEngine, Sampling, TransformersEngine
from lrlhf.rollout.episodes.episode_engine import EpisodeEngine
from lrlhf.rollout.vllm.rank_group import check_group_size
from lrlhf.run import Collectives
from lrlhf.run.quiet_output import quiet
from lrlhf.types import Experience, PromptBatch, SequenceBatch, StoredRollout

_SHOWN = ("rollout/score", "kl/reference", "teacher/reverse_kl")

OptimizerStepTaker = Callable[[Experience, SequenceBatch | None, Iteration], StepWatch | None]
"""Takes an optimizer step on a minibatch, see `PolicyStep`."""


class PolicyOptions(TypedDict, total=False):
    """The keyword arguments of `PolicyModule`, as type checkers see them in `PPO`."""

    tokenizer: PreTrainedTokenizerBase | None
    processor: ProcessorMixin | None
    engine: RolloutEngine | None
    algorithm: str | Algorithm | None
    num_generations: int
    sampling: Sampling
    eval_sampling: Sampling | None
    evaluation: Evaluation
    reference: Reference
    advantage: Advantage
    update: Update
    importance_sampling: ImportanceSampling | None
    optimizer: OptimizerConfig
    guard: Guard
    dynamic_sampling: DynamicSampling | None
    max_staleness: int
    allow_truncated_sampling: bool
    episodes: Episodes | None
    teacher: Teacher | None
    seed: int | None


class PolicyModule(TrainingModule):
    """Generates responses, scores them, and updates a policy; the base of `RLOO` and `PPO`.

    A subclass defines ``training_step``, which reads like the algorithm.

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
            of yours or its import path; None: that of the module, rloo or ppo.
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
        max_staleness: Bounded staleness of asynchronous (off-policy) rollouts: iterations that the
            weights which sample a token may be behind those that train on it. 0: each iteration
            generates its own responses. 1: those of the next one are generated while this one
            trains. Above 1: those of so many, by an engine that takes new weights while it
            generates. Above 0 needs an engine in a process of its own (`VLLMServerEngine`).
        allow_truncated_sampling: Train on responses sampled with top_p, top_k or min_p with
            probabilities over the whole vocabulary, which are not those sampled from. False:
            probabilities are renormalised over what was left (`lrlhf.types.SamplingMask`).
        episodes: Turns with an environment or with tools in the place of single responses; None:
            single responses.
        teacher: A model to learn from, on the policy's own responses; None: rewards alone.
        seed: Seeds every random number of the run, together with rank, step and sample; None:
            the seed of ``seed_everything``.
    """

    train_metric: str = "rollout/score"
    eval_metric: str = "eval/score"
    eval_mode: Literal["min", "max"] = "max"
    default_algorithm: ClassVar[str] = "rloo"
    """Where nothing names another."""
    default_minibatches: ClassVar[int] = 1
    """Optimizer steps per epoch over a rollout where ``update`` names no number."""
    critic_options: Critic | None = None
    """What its value function is made of; None: it has none."""

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
        settings = PolicySettings.complete(
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
        check_critic(settings.algorithm, self.critic_options)
        self.settings = settings
        self.loaded = loaded = load_policy(policy, tokenizer, processor)
        self.policy, self.tokenizer, self.processor = loaded
        self.values: ValueFunction | None = None
        if self.critic_options is not None:
            self.values = load_value_function(self.critic_options, self.policy, self.tokenizer)
        self.optimizer_config = optimizer.filled(lr=1e-6)
        self.rewards = NoRewards() if rewards is None else as_rewards(rewards)
        self.turn_engine: RolloutEngine = engine or TransformersEngine()
        """Generates single responses."""
        self.engine = self.turn_engine
        if episodes is not None:
            self.engine = EpisodeEngine(self.turn_engine, episodes)
        self.own_engine = TransformersEngine()
        """Generates with the policy where ``turn_engine`` has other weights."""
        metrics = metrics_of(evaluation, self.rewards)
        self.sampler = Sampler(
            loaded, self.engine, self.rewards, settings, seed=self.seed, metrics=metrics
        )
        if update.router_loss_coef > 0:
            check_has_experts(loaded.model)
        if update.replay_routing:
            allow_replay(loaded.model)
        self.reference = load_reference(loaded.model, settings)
        self.teacher = None if teacher is None else RunTeacher(loaded, settings, self.engine)
        self.running_scores = RunningScores()
        self.scorer = Scorer(
            loaded.model,
            self.reference,
            self.engine,
            settings,
            critic=self.values,
            models=self.trainable_models(),
            teacher=self.teacher,
        )
        self.evaluator = Evaluator(
            self.sampler,
            self.rewards,
            metrics,
            settings,
            seed=self.seed,
            distance=self._distance if self.teacher else None,
        )
        self.policy_step = PolicyStep(loaded, settings, self.teacher)
        self.measurements: list[Measurement] = []
        """Results of the last evaluation."""
        self.kl_coef = settings.kl_coef
        self.entropy_coef = settings.update.entropy_coef
        self.iteration_metrics: Mapping[str, float] = {}
        self.samples_per_step = 0
        self._shown_plan = ""
        self.stateful |= {
            "kl": _SteeredState(self, "kl_coef", settings.kl_coef),
            "entropy": _SteeredState(self, "entropy_coef", settings.update.entropy_coef),
            "running_scores": self.running_scores,
            "sampler": self.sampler,
            "token_budget": self.token_budget,
            "reference": _ReferenceState(
                self.reference, moves=settings.reference.sync_every is not None
            ),
        }
        if self.teacher is not None and self.teacher.moves:
            self.stateful["teacher"] = _ReferenceState(self.teacher.model, moves=True)

    def __init_subclass__(cls, **options: Any) -> None:
        super().__init_subclass__(**options)
        show_arguments(cls)

    def option_in_force(self, name: str) -> Any:
        """Return the value of an option, with the defaults that other options decide."""
        return getattr(self.settings, name, None) or super().option_in_force(name)

    def is_fixed(self, name: str) -> bool:
        """Whether a name is an option that was handed on to the parts of the module."""
        return name in parameters_of(type(self))[0] and name not in dict(self.named_children())

    # ---- one iteration

    def begin(self, batch: PromptBatch | StoredRollout) -> Iteration:
        """Start an iteration: its sizes, its ranks, its metrics.

        Raises:
            ValueError: The batch does not fit the settings.
        """
        refuse_other_batch(self, batch, PromptBatch | StoredRollout, "PromptDataModule")
        self.seed_step()  # whatever a reward draws is the same after a resume
        it = self._iteration()
        plan = plan_iteration(batch, self.settings, it)
        if not self._shown_plan:
            self._shown_plan = plan.table()
            self.print(self._shown_plan)
        check_texts(batch.pretraining, self.settings)
        if self.teacher is not None and isinstance(batch, PromptBatch):
            chat, _ = chat_of(self.trainer, self.loaded)
            self.teacher.check_prompts(batch, "sampling", chat)
        if self.kl_coef > 0 and self.reference is None:
            raise ValueError(
                f"the KL coefficient was set to {self.kl_coef}, but no reference was loaded: "
                "start with reference.kl_coef above 0"
            )
        self.samples_per_step = plan.responses_trained
        it.metrics.add("kl/coef", self.kl_coef, 1.0)
        it.metrics.add("train/lr", self.optimizer_of(0).param_groups[0]["lr"], 1.0)
        return it

    def _iteration(self, seeds: tuple[int, ...] | None = None) -> Iteration:
        it = Iteration(self, seeds=seeds)
        it.kl_coef, it.entropy_coef = self.kl_coef, self.entropy_coef
        it.exact = self.engine.capabilities.exact
        return it

    def prepare(self, experience: Experience, it: Iteration) -> Experience:
        """Compute log-probabilities, values and advantages of a sample, without gradients."""
        it.seed_before_update()
        entering = self._enter_scores(it)
        if self.values is not None:
            self.values.follow(entering, step=it.step)
        if experience.privileged is None:  # a dump holds it
            experience = self._informed(experience, it.records)
        if (privileged := experience.privileged) is not None:
            informed = privileged.informed[experience.counted]
            it.metrics.add_values("teacher/informed_fraction", informed.double())
            if self.teacher is not None and self.teacher.context is not None:
                self.teacher.context.observe(informed)
        experience = self.scorer(experience, it)
        return with_advantages(experience, self.running_scores.statistics, self.settings, it)

    def _informed(self, rollout: RolloutT, records: Sequence[Mapping[str, Any]]) -> RolloutT:
        """Put what a teacher with privileged context reads beside a rollout."""
        context = None if self.teacher is None else self.teacher.context
        if context is None:
            return rollout
        chat, _ = chat_of(self.trainer, self.loaded)
        return replace(rollout, privileged=context.rows(rollout, records, chat))

    def _distance(self, collected: Collected, it: Iteration) -> dict[str, Tensor]:
        return self.scorer.distance(self._informed(collected.rollout, collected.records), it)

    def _enter_scores(self, it: Iteration) -> ScoreStatistics:
        """Return the statistics of the scores that advantages are made of; they scale values."""
        scale = self.settings.advantage.scale_rewards
        entering = self.running_scores.statistics.of_scaled(scale)
        it.value_unit = entering.std
        return entering

    def finish(self, experience: Experience, it: Iteration) -> None:
        """Advance schedules and reference, and log what was trained on."""
        advance_schedules(self, [optimizer.freeze_steps for optimizer in self.stepped_optimizers()])
        self.token_budget.update(it.ranks.least)
        if self.teacher is not None:
            self.teacher.follow(self.policy)
            self.teacher.reshard()
        mix_reference(self.reference, self.policy, self.settings.reference, it)
        log_iteration(self, experience, it)

    def stepped_optimizers(self) -> list[SteppedOptimizer]:
        """Return how each optimizer steps, in their order."""
        return [self.policy_step.optimizer]

    # ---- a step of a dump

    def optimizer_steps(self) -> dict[str, OptimizerStepTaker]:
        """Return what takes optimizer steps, by what dumps call it."""
        return {self.policy_step.stage: self.policy_step}

    @property
    def step_names(self) -> tuple[str, ...]:
        """Stages whose steps `replay_step` knows."""
        return (ITERATION, *self.optimizer_steps())

    def replay_step(self, bundle: StepBundle) -> ReplayedStep:
        """Replay the step of a bundle, see `lrlhf.guard.dump_replay.Replayable`."""
        it = self._iteration(bundle.seeds[0])
        if bundle.stage == ITERATION:
            experience = bundle.batches["experience"].to(it.device)
            assert isinstance(experience, Experience)
            experience = self.prepare(experience, it)
            records = describe_rows(experience, self.tokenizer, None)
            return ReplayedStep(records, measure(experience))
        part, text = bundle.batches["part"], bundle.batches.get("text")
        assert isinstance(part, Experience)
        assert text is None or isinstance(text, SequenceBatch)
        self._enter_scores(it)
        for model in self.trainable_models().values():
            model.train()
        with cached_vision_features():
            watch = self.optimizer_steps()[bundle.stage](part, text, it)
        moves = None if watch is None else watch.log_ratios
        return ReplayedStep(describe_rows(part, self.tokenizer, moves))

    # ---- Lightning's hooks

    def configure_optimizers(self) -> OptimizerLRScheduler:
        learning = self.trainer.estimated_stepping_batches - self.settings.update.freeze_steps
        built = self.optimizer_config.build(self.policy.named_parameters(), learning)
        return [built.optimizer], [built.scheduler]

    def trainable_models(self) -> dict[str, nn.Module]:
        return {"policy": self.policy}

    def setup(self, stage: str) -> None:
        super().setup(stage)
        refuse_batch_size_finder(self.trainer, self)
        check_group_size(self.engine.capabilities.ranks_together, self.trainer.world_size)
        if stage == "fit":
            refuse_idle_encoder(self.trainer, plain_model(self.policy), self.processor)
            self._shown_plan = ""
        if stage != "fit" or self.trainer.enable_validation:
            self.sampler.check_evaluations(answers_once=stage == "predict")
        self.sampler.reset()

    def on_fit_start(self) -> None:
        if self.reference is not None:
            self.shard_frozen(self.reference, offload=self.settings.reference.offload)
        self._shard_teacher()

    def _shard_teacher(self) -> None:
        """Have the teacher split, which evaluations ask too; done twice it is done once."""
        if self.teacher is not None and self.teacher.model is not None:
            self.shard_frozen(self.teacher.model, offload=self.teacher.settings.offload)

    def teardown(self, stage: str) -> None:
        """Release what engine, rewards and teacher hold."""
        self.sampler.close()
        if self.teacher is not None:
            self.teacher.close()

    # ---- evaluation

    def validation_step(
        self, batch: PromptBatch, batch_idx: int, dataloader_idx: int = 0
    ) -> dict[str, Any]:
        """Answer the prompts of a batch; returns a readable line for each response."""
        name = set_names(self.trainer)[dataloader_idx]
        if self.teacher is not None:
            chat, _ = chat_of(self.trainer, self.loaded)
            self.teacher.check_prompts(batch, "eval_sampling", chat)
        it = self._iteration()
        return {"records": self.evaluator.evaluate(batch, batch_idx, it, name=name)}

    test_step = validation_step

    def predict_step(
        self, batch: PromptBatch, batch_idx: int, dataloader_idx: int = 0
    ) -> list[dict[str, Any]]:
        """Answer each prompt once; returns a readable line for each response."""
        del dataloader_idx
        return self.evaluator.answer(batch, batch_idx, self._iteration()).records

    def on_validation_epoch_start(self) -> None:
        self._shard_teacher()  # no training may have come before
        self.evaluator.reset()  # of one that was broken off

    def on_validation_epoch_end(self) -> None:
        self.measurements = self.evaluator.measure(Collectives(self.trainer))
        for name, value in logged_values(self.measurements).items():
            # equal on all ranks already; sync_dist says so to Lightning
            self.log(name, value, prog_bar=name == self.eval_metric, batch_size=1, sync_dist=True)

    on_test_epoch_start, on_test_epoch_end = on_validation_epoch_start, on_validation_epoch_end

    def evaluation_names(self) -> set[str]:
        """Return the names of all metrics that evaluations log."""
        return self.evaluator.metric_names(set_names(self.trainer))

    # ---- what a person or a callback asks of it

    generate = generate
    sample = sample

    def export_pretrained(self, folder: Path | None) -> None:
        """Write the policy, adapters merged, and its tokenizer, as ``transformers`` loads them."""
        self.loaded.save(folder)

    def summary(self) -> dict[str, str]:
        """Say what is trained, how responses are made, and what scores them."""
        settings = self.settings
        return {
            **super().summary(),
            "algorithm": f"{settings.algorithm.name}, kl_coef {self.kl_coef:g}",
            "responses": (
                f"{settings.num_generations} per prompt, {short_text(settings.sampling)}, "
                f"{short_text(self.engine)}"
            ),
            "rewards": short_text(self.rewards),
            **({} if settings.teacher is None else {"teacher": short_text(settings.teacher)}),
        }

    def text_limits(self, *, training: bool) -> list[TextLimits]:
        """Return what the models can read of prompts that they are to respond to."""
        frozen = [] if self.reference is None else [self.reference.model]
        response, option = self.settings.response_tokens(training=training)
        limits = super().text_limits(training=training) + limits_of(frozen)
        return [replace(limit, response=response, option=option) for limit in limits]


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
        extra_samples=() if stored else settings.algorithm.extra_samples,
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
        freeze_steps: Iterations at the start in which each is frozen: a schedule begins when its
            model begins to learn.
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
    it.measure_costs(
        float(experience.attention_mask.sum()), generated=float(experience.response_mask.sum())
    )
    for name, count in module.step_guard.metrics().items():
        it.metrics.add(name, count, 1.0)
    reduced = it.metrics.reduce(it.ranks, it.device)
    module.iteration_metrics = reduced
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


class _SteeredState:
    """The strength of KL penalty or entropy bonus, an attribute that callbacks steer."""

    def __init__(self, module: PolicyModule, name: str, configured: float) -> None:
        self._module, self._name, self._configured = module, name, configured

    def state_dict(self) -> dict[str, Any]:
        return {"coef": getattr(self._module, self._name), "configured": self._configured}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        if state["configured"] == self._configured:
            setattr(self._module, self._name, state["coef"])


class _ReferenceState:
    """The weights of a reference that moves; one that never does is loaded from its source."""

    def __init__(self, reference: ReferencePolicy | None, *, moves: bool) -> None:
        self._reference = reference
        self._moves = moves

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


def show_arguments(kind: type) -> None:
    """Give a direct subclass the documentation of its inherited arguments, and a whole signature.

    So `help`, notebooks and ``lrlhf help`` show all arguments, which are written once.
    """
    if PolicyModule not in kind.__bases__:
        return
    _, title, arguments = (PolicyModule.__doc__ or "").partition("    Args:\n")
    own = kind.__doc__ or ""
    if title in own:
        kind.__doc__ = own.replace(title, title + arguments.rstrip() + "\n")
    else:
        head, reference, rest = own.partition("    Reference:\n")
        kind.__doc__ = f"{head}{title}{arguments.rstrip()}\n\n{reference}{rest}"
    constructor: Any = vars(kind).get("__init__")
    if constructor is None or "options" not in constructor.__annotations__:
        return
    # parsers of configs follow ``**options`` to the base, unless a type takes its place
    constructor.__annotations__["options"] = Any
    _, *parameters = inspect.signature(constructor).parameters.values()
    named = {each.name: each for each in parameters if each.kind is not each.VAR_KEYWORD}
    inherited = inspect.signature(PolicyModule).parameters
    kind.__signature__ = inspect.Signature([*(inherited | named).values()])  # type: ignore[attr-defined]
