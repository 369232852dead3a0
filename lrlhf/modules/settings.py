"""Groups of options that RLOO and PPO share, as their YAML spells them."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from lrlhf.functional.algorithm import Aggregate
from lrlhf.functional.importance import IMPORTANCE_MODES, IMPORTANCE_PRESETS, check_rejection
from lrlhf.functional.names import unknown_name
from lrlhf.models import CausalLM, HeadKind, ValueModel, ValueNetwork
from lrlhf.modules.optimizers import OptimizerConfig
from lrlhf.options.conversion import settings
from lrlhf.rewards.lookup import NamedFunction
from lrlhf.statistics.repeated_samples import usual_sizes


@settings
@dataclass(frozen=True, kw_only=True)
class Reference:
    """The reference model, and the KL penalty that keeps the policy close to it.

    Args:
        kl_coef: Strength of the penalty on KL(policy || reference), in reward units per nat;
            0 loads no reference. None: as the algorithm has it, which is 0.05, or 0 where its paper
            does without a penalty (dapo, gmpo, cispo, sapo and others).
        kl_estimator: Estimator of the penalty per token: k1, k2 or k3. None: k1 in the reward, as
            its mean is the KL, and k3 in the loss. k1 is refused in the loss, where it does
            nothing but add noise. In the loss also "unbiased": k3 weighted by the importance
            ratio, see `lrlhf.functional.unbiased_kl_estimate`.
        placement: Where the penalty goes: "reward" or "loss". None follows the algorithm: the
            RLOO and REINFORCE families in the reward, the GRPO family and functions of your own in
            the loss.
        sync_every: Moving reference (a reference reset where ``mixup`` is 1): mix the policy into
            it every so many iterations (TR-DPO, Gorbatovski et al. 2024,
            https://arxiv.org/abs/2404.09656, eq. 2); None: never.
        mixup: Weight of the policy in that mix; 1 replaces the reference.
        model: Another model with the policy's tokenizer; None: the policy as it starts.
        offload: Keep it in main memory between its passes. Strategies that split models over the
            ranks leave it whole then.
    """

    kl_coef: float | None = None
    kl_estimator: Literal["k1", "k2", "k3", "unbiased"] | None = None
    placement: Literal["reward", "loss"] | None = None
    sync_every: int | None = None
    mixup: float = 0.6
    model: CausalLM | None = None
    offload: bool = False

    def __post_init__(self) -> None:
        if self.kl_coef is not None and self.kl_coef < 0:
            raise ValueError(f"reference.kl_coef is {self.kl_coef}; it must be 0 or more")
        if self.sync_every is not None and self.sync_every < 1:
            raise ValueError(f"reference.sync_every is {self.sync_every}; it must be 1 or more")
        if self.sync_every is not None and self.kl_coef == 0:
            raise ValueError("reference.sync_every is set, but kl_coef is 0: there is no reference")
        if not 0 < self.mixup <= 1:
            raise ValueError(f"reference.mixup is {self.mixup}; it must lie in (0, 1]")


@settings
@dataclass(frozen=True, kw_only=True)
class Teacher:
    r"""A frozen model that the policy learns from on its own responses (on-policy distillation).

    Alone, without rewards, or beside them. The teacher reads the same tokens as the policy, at the
    same sampling temperature, but for a ``context`` in its prompt. With that, the policy itself can
    be the teacher (self-distillation).

    Args:
        model: The teacher: a hub id, a folder, ``package:<module>``, or a `CausalLM` that says how
            to load it, quantized or in 16 bits. It has the policy's tokenizer. None, and no
            ``server``: the policy itself, which needs a ``context``.
        server: URL of a vLLM server that holds the teacher, in place of ``model``; its token is
            the environment's ``VLLM_API_KEY``. It answers about single tokens and ``top_k`` best
            ones, at temperature 1, and reads text only.
        placement: "reward": -coef · (log π - log T) of each sampled token is added to its
            advantage, after all else but ``advantage.clip``. "loss": the divergence of the whole
            distributions is added to the loss, weighed and averaged like a KL penalty there.
        coef: Weight of the term.
        beta: Of the divergence in the loss: 1 is the reverse KL(π || T), 0 the forward
            KL(T || π), between them the generalized Jensen-Shannon divergence (Agarwal et al.
            2024, eq. 1, https://arxiv.org/abs/2306.13649).
        top_k: Take the divergence over the teacher's so many best tokens and one more that stands
            for all others, kept from one pass before the update; None: over the whole
            vocabulary, of which the update computes the logits chunk by chunk.
        discount: How much of the reward of later tokens counts towards a token's advantage, per
            token: 0 none of it, 1 all of it, as the gradient of the KL between responses has it.
        offload: Keep the teacher in main memory between its passes, as `Reference.offload` does.
        context: Privileged context: the prompt as only the teacher reads it, of a chat its last
            turn of the user. A jinja2 template, such as
            ``"{{ prompt }}\n\nThe right answer is {{ answer }}."``, over ``prompt``, the columns of
            the row, what reward functions log as extras, and of the response ``completion``,
            ``score``, ``feedback`` (what its environment said) and ``correct_response`` (another
            response to the prompt with a score of at least ``threshold``); or a function of these
            as one mapping, or its dotted path. Nothing is learnt from the teacher of a response
            whose template writes an empty value, or whose context is None or blank.
        threshold: Score from which on a response is a ``correct_response``.
        update_rate: Of a policy that is its own teacher. 0: with the weights it started with. 1: as
            they are. Between: with a moving average, of which each iteration replaces that share.
    """

    model: str | CausalLM | None = None
    server: str | None = None
    placement: Literal["reward", "loss"] = "reward"
    coef: float = 1.0
    beta: float = 1.0
    top_k: int | None = None
    discount: float = 0.0
    offload: bool = False
    context: str | Callable[[Mapping[str, Any]], str | None] | None = None
    threshold: float = 1.0
    update_rate: float = 0.0

    @property
    def is_policy(self) -> bool:
        """Whether the policy is its own teacher."""
        return self.model is None and self.server is None

    def __post_init__(self) -> None:
        self._check_model()
        if not self.coef > 0:
            raise ValueError(f"teacher.coef is {self.coef}; it must be above 0")
        if not (0 <= self.beta <= 1 and 0 <= self.discount <= 1):
            raise ValueError(
                f"teacher.beta is {self.beta} and teacher.discount {self.discount}; both must lie "
                "in [0, 1]"
            )
        if self.top_k is not None and self.top_k < 1:
            raise ValueError(f"teacher.top_k is {self.top_k}; it must be 1 or more, or null")
        if self.placement == "loss" and self.discount:
            raise ValueError(
                "teacher.discount is about rewards, and teacher.placement is loss: drop discount"
            )
        if self.placement == "reward" and (self.beta != 1 or self.top_k is not None):
            raise ValueError(
                "teacher.beta and teacher.top_k are about the divergence in the loss, and "
                "teacher.placement is reward: set placement: loss, or drop them"
            )
        if self.server is not None and self.placement == "loss" and self.top_k is None:
            raise ValueError(
                "teacher.server gives the best tokens of a distribution only, and "
                "teacher.placement is loss: set teacher.top_k, at most the --max-logprobs of the "
                "server (20), or placement: reward, or load the teacher with teacher.model"
            )

    def _check_model(self) -> None:
        both = self.model is not None and self.server is not None
        if both or (self.is_policy and self.context is None):
            raise ValueError(
                f"teacher.model and teacher.server: {'both are' if both else 'neither is'} set; "
                "set one of the two, or teacher.context, with which the policy is its own teacher"
            )
        if math.isnan(self.threshold):
            raise ValueError("teacher.threshold is nan, which no score reaches: set a number")
        if not 0 <= self.update_rate <= 1:
            raise ValueError(f"teacher.update_rate is {self.update_rate}; it must lie in [0, 1]")
        if not self.is_policy and self.update_rate != 0:
            raise ValueError(
                "teacher.update_rate is about a policy that is its own teacher: drop it, or "
                "teacher.model and teacher.server"
            )
        if self.is_policy and self.update_rate == 1 and self.offload:
            raise ValueError(
                "teacher.offload is set, but the teacher is the policy, which stays where it is: "
                "drop it"
            )


@settings
@dataclass(frozen=True, kw_only=True)
class Advantage:
    """How scores become advantages.

    Args:
        estimator: Advantages in place of the algorithm's own: those of another algorithm by its
            name (`lrlhf.functional.ESTIMATORS`; gae and group_norm are other names of those of ppo
            and grpo), or the import path of a function or `Estimator` of yours. Where ``algorithm``
            is not set, a name selects the whole algorithm, its loss included.
        options: Keyword arguments of the estimator.
        scale_rewards: Divide scores by the running standard deviation of all scores so far
            ("std"), or also subtract their running mean ("mean_std"); before everything else.
        reward_clip_range: Lowest and highest score, applied next.
        normalize: Advantage normalisation (whitening): shift and scale the advantages of all ranks
            to mean 0 and deviation 1. None does what the estimator's paper does.
        clip: Bound on the absolute value of every advantage, after all else; None: no bound.
        credit: Where the rewards of turns count. "turn": at the end of their turn, with algorithms
            that read them (ppo, reinforce, reinforce_plus_plus, rloo_turn, mt_grpo); for the
            others they are a part of the score. "response": all of a score counts at the end of
            the response.
        truncated: What becomes of responses that ran into the length limit. "train": nothing
            special. "exclude": they are not trained on, do not count in any mean, and do not enter
            their siblings' baseline. "trl": as TRL's mask_truncated_completions: not trained on,
            but still counted in the mean and in the baselines. "bootstrap": their return goes on
            with the critic's value (Pardo et al. 2018, §4, https://arxiv.org/abs/1712.00378),
            by approximation that of the state before the last token; `PPO` only.
        unscorable: What becomes of responses that no reward could score. "exclude": as for
            truncated ones. "trl": no advantage, but counted in the mean, as in TRL.
    """

    estimator: str | None = None
    options: dict[str, Any] = field(default_factory=dict)
    scale_rewards: Literal["none", "std", "mean_std"] = "none"
    reward_clip_range: tuple[float, float] | None = None
    normalize: bool | None = None
    clip: float | None = None
    credit: Literal["turn", "response"] = "turn"
    truncated: Literal["train", "exclude", "trl", "bootstrap"] = "train"
    unscorable: Literal["exclude", "trl"] = "exclude"

    def __post_init__(self) -> None:
        if self.reward_clip_range is not None and not (
            self.reward_clip_range[0] < self.reward_clip_range[1]
        ):
            raise ValueError(
                f"advantage.reward_clip_range is {self.reward_clip_range}; the first number must "
                "be the smaller one"
            )
        if self.clip is not None and self.clip <= 0:
            raise ValueError(f"advantage.clip is {self.clip}; it must be above 0, or null")


@settings
@dataclass(frozen=True, kw_only=True)
class Update:
    """How experience becomes optimizer steps.

    Args:
        loss: A policy loss in place of the algorithm's own: a name from
            `lrlhf.functional.POLICY_LOSSES` (sequence_clip, token_clip, gspo, luspo, gmpo, cispo,
            dapo, dr_grpo, cpgd, sapo, vespo, dppo, clip_cov, kl_cov, reinforce, remax), or the
            import path of a function or `PolicyLoss` of yours.
        options: Keyword arguments of the loss, for example ``clip_high: 0.28``.
        aggregate: Loss aggregation (token-level, sequence-level): what a loss per token, and the KL
            and entropy terms beside it, are averaged over: token_mean, sequence_mean, sequence_sum
            or constant. None: as the algorithm has it for its own loss, else as the loss's paper.
            With one ratio per response the KL and entropy terms are summed over each response
            (sequence_clip) or averaged (gspo), like the logarithm of its ratio; the router's and
            the texts' losses follow.
        num_iterations: Passes (epochs, μ of GRPO) over each rollout.
        num_minibatches: Optimizer steps per pass, each on an equal share of the rollout. None: 4
            in `PPO`, or as near below as divides a process's responses; 1 elsewhere.
        minibatch_size: The same said otherwise: responses of all processes per optimizer step.
        micro_batch_tokens: Tokens of one forward pass as they are computed: the prompt of several
            responses counts once where the model allows it, padding counts where there is any.
            Memory, not results, depends on it. "auto": on a GPU as many as fit, which the first
            iterations find out (`lrlhf.models.TokenBudget`), elsewhere as None; None: a minibatch
            at once.
        max_grad_norm: Clip the gradient to this norm; ``inf`` leaves it.
        entropy_coef: Weight of the entropy bonus.
        high_entropy_fraction: Take the policy loss over this share of each response's tokens only,
            those at which the policy was least sure (Wang et al. 2025,
            https://arxiv.org/abs/2506.01939); KL and entropy terms stay on all tokens.
        off_policy_threshold: Drop responses with a negative advantage, of which the policy has gone
            further than so many nats per token away from the engine that sampled them (off-policy
            sequence masking, DeepSeek-V3.2, https://arxiv.org/abs/2512.02556); None: none.
        router_loss_coef: Weight of the load-balancing loss of a mixture-of-experts policy.
        replay_routing: Routing replay (R3, Ma et al. 2025, https://arxiv.org/abs/2510.11370): send
            each token through the experts that the engine, a `TransformersEngine`, chose for it.
        pretraining_coef: Weight of the log-likelihood of the data's ``pretraining`` texts (PTX,
            Ouyang et al. 2022, eq. 2, https://arxiv.org/abs/2203.02155).
        freeze_steps: Iterations at the start in which the policy stays as it is.
        offload: Keep the experience in CPU memory between the forward passes.
        logprob_chunk: Tokens whose logits may exist at the same time; those of a pass that has more
            are computed again in the backward pass.
    """

    loss: str | None = None
    options: dict[str, Any] = field(default_factory=dict)
    aggregate: Aggregate | None = None
    num_iterations: int = 1
    num_minibatches: int | None = None
    minibatch_size: int | None = None
    micro_batch_tokens: int | Literal["auto"] | None = "auto"
    max_grad_norm: float = 1.0
    entropy_coef: float = 0.0
    high_entropy_fraction: float = 1.0
    off_policy_threshold: float | None = None
    router_loss_coef: float = 0.0
    replay_routing: bool = False
    pretraining_coef: float = 0.0
    freeze_steps: int = 0
    offload: bool = False
    logprob_chunk: int = 1024

    def __post_init__(self) -> None:
        for name in (
            "num_iterations",
            "num_minibatches",
            "minibatch_size",
            "micro_batch_tokens",
            "logprob_chunk",
        ):
            value = getattr(self, name)
            if isinstance(value, int) and value < 1:
                raise ValueError(f"update.{name} is {value}; it must be 1 or more")
        if self.num_minibatches is not None and self.minibatch_size is not None:
            raise ValueError(
                f"update.num_minibatches is {self.num_minibatches} and update.minibatch_size is "
                f"{self.minibatch_size}, which say the same: drop one of the two"
            )
        if self.max_grad_norm <= 0:
            raise ValueError(f"update.max_grad_norm is {self.max_grad_norm}; it must be above 0")
        for name in (
            "entropy_coef",
            "router_loss_coef",
            "pretraining_coef",
            "freeze_steps",
            "off_policy_threshold",
        ):
            value = getattr(self, name)
            if value is not None and value < 0:
                raise ValueError(f"update.{name} is {value}; it must be 0 or more")
        if not 0 < self.high_entropy_fraction <= 1:
            raise ValueError(
                f"update.high_entropy_fraction is {self.high_entropy_fraction}; it must lie in "
                "(0, 1]"
            )


@settings
@dataclass(frozen=True, kw_only=True)
class ImportanceSampling:
    """Importance weights that correct the mismatch between engine and trainer.

    Every token's gradient is multiplied by a weight made of the ratio of the two probabilities, in
    losses per token and per response alike. Those of KL, entropy and value terms are not, and no
    denominator changes.

    Args:
        mode: What becomes of the ratio: token_truncate (truncated importance
            sampling, TIS), token_mask (IcePop),
            sequence_truncate, sequence_mask or sequence_mean_mask, see
            `lrlhf.functional.importance_weights`; none: no weights, whatever the engine. Or a
            preset of verl's by its name, which also says what is rejected
            (`lrlhf.functional.IMPORTANCE_PRESETS`).
        low: Smallest ratio that still counts, where the mode masks; None: 0.5 for token_mask, 0
            for sequence_mask, 0.95 for sequence_mean_mask.
        high: Largest ratio that counts as it is; None: 2 where the mode truncates, 5 for
            token_mask, 3 for sequence_mask, 1.05 for sequence_mean_mask.
        reject: Tokens or responses that get the weight 0 besides: bounds by criterion, such as
            ``{seq_mean_k1: [0.999, 1.001], token_k3: [0, 0.01]}``, see
            `lrlhf.functional.rejection_mask`. Every criterion must accept. None: as the preset has
            it, else nothing.

    Raises:
        ValueError: A bound that the mode does not have, or one on the wrong side of 1.
    """

    mode: Literal[
        "none",
        "token_truncate",
        "token_mask",
        "sequence_truncate",
        "sequence_mask",
        "sequence_mean_mask",
        "decoupled_token_is",
        "decoupled_seq_is",
        "decoupled_token_icepop",
        "decoupled_seq_is_rs",
        "decoupled_geo_rs",
        "decoupled_geo_rs_seq_tis",
        "decoupled_geo_rs_token_tis",
        "decoupled_k3_rs",
        "decoupled_k3_rs_seq_tis",
        "decoupled_k3_rs_token_tis",
    ]
    low: float | None = None
    high: float | None = None
    reject: dict[str, tuple[float, float]] | None = None

    def __post_init__(self) -> None:
        if self.mode not in ("none", *IMPORTANCE_MODES, *IMPORTANCE_PRESETS):
            known = ("none", *IMPORTANCE_MODES, *IMPORTANCE_PRESETS)
            raise unknown_name("importance_sampling.mode", self.mode, known)
        mode = IMPORTANCE_MODES.get(self.weights)
        for name, value in (("low", self.low), ("high", self.high)):
            if value is not None and (mode is None or (name == "low" and mode.truncates)):
                raise ValueError(
                    f"importance_sampling.{name} is {value}, but mode {self.mode!r} has no such "
                    "bound: leave it out, or choose a mode that has (token_mask, sequence_mask)"
                )
        if self.low is not None and not 0 <= self.low <= 1:
            raise ValueError(f"importance_sampling.low is {self.low}; it must lie in [0, 1]")
        if self.high is not None and not self.high >= 1:
            raise ValueError(f"importance_sampling.high is {self.high}; it must be 1 or more")
        for criterion, (low, high) in (self.reject or {}).items():
            check_rejection(criterion, low, high)

    @property
    def weights(self) -> str:
        """The mode of the weights, or none."""
        return IMPORTANCE_PRESETS.get(self.mode, (self.mode,))[0]

    @property
    def rejection(self) -> Mapping[str, tuple[float, float]]:
        """Bounds by criterion."""
        if self.reject is not None:
            return self.reject
        return IMPORTANCE_PRESETS[self.mode][1] if self.mode in IMPORTANCE_PRESETS else {}

    @property
    def bounds(self) -> tuple[float, float]:
        """Smallest and largest ratio, with the mode's own where none is set."""
        mode = IMPORTANCE_MODES[self.weights]
        return (
            mode.low if self.low is None else self.low,
            mode.high if self.high is None else self.high,
        )


AUTOMATIC = ImportanceSampling(mode="token_truncate")
"""Where none is set. The variance of a whole response's ratio grows with its length: at a mean
difference of 0.03 nats per token, weights by response leave a quarter of the batch at 4,096."""


@settings
@dataclass(frozen=True, kw_only=True)
class DynamicSampling:
    """Dynamic sampling (DAPO): leave out zero-variance groups, and sample until there are enough.

    The prompts of a batch are candidates. They are answered in rounds until ``prompts`` of them
    teach something, or the batch is used up: its size is the budget. Groups that are still missing
    then are filled up with others, which count in no loss and no mean. An algorithm that compares
    responses or has a baseline of its own learns from groups to which it gives an advantage (as of
    turns with different rewards under equal scores), any other one from groups whose scores, or
    turns that it looks at, differ.

    Args:
        prompts: Groups per process and iteration that are trained on, at most ``data.batch_size``.

    Reference:
        Yu et al. 2025 (DAPO), §3.2, https://arxiv.org/abs/2503.14476
    """

    prompts: int

    def __post_init__(self) -> None:
        if self.prompts < 1:
            raise ValueError(f"dynamic_sampling.prompts is {self.prompts}; it must be 1 or more")


@settings
@dataclass(frozen=True, kw_only=True)
class Evaluation:
    """What a validation of a policy samples and measures.

    With several responses to a prompt, its metrics are their means, and all means and intervals are
    over prompts. A response is right if the value that ``correct`` names reaches ``threshold``.

    Args:
        num_samples: Responses per prompt and temperature; one at temperature 0, where all would be
            equal. They are generated in rounds of ``num_generations`` per prompt, so that what
            generation needs does not grow with their number.
        temperatures: At which every prompt is answered. The metrics of each are called
            ``eval/t0.7/score`` and so on; those of the first also ``eval/score``. Empty: at that of
            ``eval_sampling`` alone.
        metrics: Reward functions that are asked in evaluations only and enter no score: a list, or
            a mapping that names them.
        correct: Name of the reward or metric that judges whether a response is right; None: the
            score.
        threshold: Its least value for a right response.
        pass_at: Each k of ``pass@k``, the share of prompts with a right one among k responses
            (Chen et al. 2021, eq. 1, https://arxiv.org/abs/2107.03374). None: the powers of two up
            to ``num_samples`` and that itself, if it is above 1.

    Raises:
        ValueError: An option is out of its range.
    """

    num_samples: int = 1
    temperatures: tuple[float, ...] = ()
    metrics: list[NamedFunction] | dict[str, NamedFunction] = field(default_factory=list)
    correct: str | None = None
    threshold: float = 1.0
    pass_at: tuple[int, ...] | None = None

    def __post_init__(self) -> None:
        if self.num_samples < 1:
            raise ValueError(f"evaluation.num_samples is {self.num_samples}; it must be 1 or more")
        if len(set(self.temperatures)) < len(self.temperatures) or min((0, *self.temperatures)) < 0:
            raise ValueError(
                f"evaluation.temperatures is {[*self.temperatures]}: give each once, 0 or more"
            )
        if not all(1 <= k <= self.num_samples for k in self.pass_at or ()):
            raise ValueError(
                f"evaluation.pass_at is {[*(self.pass_at or ())]}; each must lie between 1 and "
                f"num_samples ({self.num_samples})"
            )

    @property
    def tried(self) -> tuple[int, ...]:
        """Each k of pass@k."""
        if self.pass_at is not None:
            return tuple(sorted(set(self.pass_at)))
        return usual_sizes(self.num_samples) if self.num_samples > 1 else ()


@settings
@dataclass(frozen=True, kw_only=True)
class Critic:
    """The value function of PPO, and how it learns.

    Args:
        model: Its own network: a hub id, a folder (of a language model, of a trained reward model,
            of an exported critic), ``package:<module>``, a `ValueModel` that says how to load it,
            or a network that is already built. None: one head on the policy's own backbone.
        optimizer: Of the critic alone, counted in iterations. Where it names no ``lr``, a new head
            has 0.5 / hidden size, and a body, or a head that was trained before, 1e-5: new weights
            have further to go, and a step of a head moves its values by all of its inputs at once.
        value_clip_range: ε of value clipping, in standard deviations of the scores so far; None:
            plain squared error.
        max_grad_norm: Clip the critic's gradient to this norm; ``inf`` leaves it.
        freeze_steps: Iterations at the start in which the critic stays as it is.
        head: Kind of the head, ``linear`` or ``mlp``, unless ``model`` says it itself.
        backbone_coef: Weight of the value loss in the policy's own gradient, where the critic is a
            head on its backbone; 0: the head reads the backbone without moving it.
    """

    model: str | ValueModel | ValueNetwork | None = None
    optimizer: OptimizerConfig = field(default_factory=OptimizerConfig)
    value_clip_range: float | None = 0.2
    max_grad_norm: float = 1.0
    freeze_steps: int = 0
    head: HeadKind = "linear"
    backbone_coef: float = 0.0

    def __post_init__(self) -> None:
        if self.value_clip_range is not None and self.value_clip_range <= 0:
            raise ValueError(
                f"critic.value_clip_range is {self.value_clip_range}; it must be above 0, or null"
            )
        if self.max_grad_norm <= 0:
            raise ValueError(f"critic.max_grad_norm is {self.max_grad_norm}; it must be above 0")
        for name in ("freeze_steps", "backbone_coef"):
            value = getattr(self, name)
            if value < 0:
                raise ValueError(f"critic.{name} is {value}; it must be 0 or more")
        if self.model is not None and self.backbone_coef > 0:
            raise ValueError(
                "critic.backbone_coef is about a head on the policy's backbone, but critic.model "
                "gives the critic a network of its own: drop one of the two"
            )
        if not (self.model is None or isinstance(self.model, str)) and self.head != "linear":
            raise ValueError("critic.head is set beside a critic.model that has its own: drop it")
