"""Direct preference optimization, and the losses that followed it."""

from __future__ import annotations

import inspect
from functools import partial
from typing import Any, ClassVar

import torch
from peft import PeftModel
from torch import Tensor
from transformers import PreTrainedModel, PreTrainedTokenizerBase, ProcessorMixin

from lrlhf.functional.masking import masked_mean, masked_sum
from lrlhf.functional.names import import_value, unknown_name
from lrlhf.functional.preference import (
    PREFERENCE_LOSSES,
    PreferenceLoss,
    implicit_rewards,
    length_desensitized,
)
from lrlhf.guard import Guard
from lrlhf.models import CausalLM, loss_tokens, plain_model, sequence_logprobs
from lrlhf.modules.checks import refuse_other_batch
from lrlhf.modules.optimizers import OptimizerConfig
from lrlhf.modules.pairs.pair_losses import PairLoss, PairObjective
from lrlhf.modules.pairs.pair_module import PairModule, PairOutputs
from lrlhf.modules.pairs.pair_step import PairScores, concatenate, pad_id_of
from lrlhf.modules.policy.load_policy import load_policy
from lrlhf.modules.referenced_policy import ReferencedPolicy
from lrlhf.types import PreferenceBatch, SequenceBatch

_HEAD = "reward"


class DPO(ReferencedPolicy, PairModule):
    """Trains a policy on preference pairs, by the rewards that its log-probabilities imply.

    The implicit reward of an answer is β times the sum of its tokens' log-ratios of policy and
    reference. A pair's loss is one of reward models, of these rewards; everything else is as in
    `RewardModel`: the loss of an optimizer step is the mean over all of its pairs, and what is
    measured of scores is measured of these. Pairs that are labelled as equal add nothing.

    Args:
        policy: What to train: a hub id, a folder, ``package:<module>``, a `CausalLM` that says
            how to load it (LoRA, precision, frozen parts), or a model that is already built (then
            pass ``tokenizer``).
        tokenizer: For a policy that is already built.
        processor: For a vision-language policy that is already built; as ``AutoProcessor`` loads
            it.
        loss: ``sigmoid`` (DPO), ``sigmoid_norm`` (of rewards per token), ``ipo``, ``hinge``,
            ``robust``, ``exo_pair``, ``nca_pair``, ``bco_pair``, ``sppo_hard``, ``apo_zero``,
            ``apo_down``, ``discopop``, ``simpo`` (per token, without a reference), a
            `PreferenceLoss`, or the import path of one or of a function from rewards `[N]` of
            chosen and rejected answers to losses `[N]`.
        loss_options: Keyword arguments of the loss, such as ``{epsilon: 0.2}`` of ``robust``.
        beta: Scale of the rewards; None: 0.1, and 2 of ``sigmoid_norm`` and ``simpo``.
        margin: By how much the chosen reward should lead; a pair's own margin replaces it. None:
            0, and 1 of ``simpo`` (γ). ``nca_pair``, ``bco_pair``, ``sppo_hard`` and both ``apo``
            losses know none, those of pairs included.
        length_normalized: Whether rewards are means over the tokens of an answer; None: as the
            loss has it.
        label_smoothing: Label smoothing: assumed share of wrong labels (cDPO).
        ld_alpha: Weight of what the longer answer of a pair has beyond the length of the shorter
            one (LD-DPO), below 1; None: 1.
        sft_coef: Weight of the negative log-likelihood per token of the chosen answer, which keeps
            it from falling (RPO).
        reference: Another model as the reference, with the policy's tokenizer. None: the policy as
            it starts: a frozen copy, or with LoRA itself without what was learnt.
        precompute_reference: Ask the reference once about every row, before training, and let go
            of it: saves its memory, and its time from the second epoch on. Takes four bytes for
            each token of an answer.
        logprob_chunk: Tokens whose logits may exist at the same time.
        optimizer: AdamW and its schedule, counted in optimizer steps; 1e-6 where it names no
            ``lr``, and 3 % of the steps are warm-up unless ``warmup_steps`` says otherwise.
        max_grad_norm: Clip the gradient to this norm; ``inf`` leaves it.
            ``trainer.gradient_clip_val`` takes its place where that is set.
        guard: When an optimizer step is left out, and when to give up; of the limits only those
            of loss and gradient are about pairs.
        seed: Seeds dropout, together with rank and step; None: the seed of ``seed_everything``.

    Raises:
        ValueError: An option is out of its range, or does not belong to the loss.

    Reference:
        Rafailov et al. 2023, eq. 7, https://arxiv.org/abs/2305.18290
    """

    train_metric: ClassVar[str] = "rewards/accuracy"
    stage: ClassVar[str] = "preference"
    default_lr: ClassVar[float] = 1e-6
    data_module: ClassVar[str] = "PreferenceDataModule"
    answers_only: ClassVar[bool] = True
    """Data modules refuse pairs of images, videos or audio, which no policy writes."""

    def __init__(  # noqa: PLR0913  the constructor is the config schema
        self,
        policy: str | CausalLM | PreTrainedModel | PeftModel,
        *,
        tokenizer: PreTrainedTokenizerBase | None = None,
        processor: ProcessorMixin | None = None,
        loss: str | PreferenceLoss = "sigmoid",
        loss_options: dict[str, Any] = {},  # noqa: B006  not changed
        beta: float | None = None,
        margin: float | None = None,
        length_normalized: bool | None = None,
        label_smoothing: float = 0.0,
        ld_alpha: float | None = None,
        sft_coef: float = 0.0,
        reference: str | CausalLM | None = None,
        precompute_reference: bool = False,
        logprob_chunk: int = 1024,
        optimizer: OptimizerConfig = OptimizerConfig(),  # noqa: B008  frozen
        max_grad_norm: float = 1.0,
        guard: Guard = Guard(),  # noqa: B008  frozen
        seed: int | None = None,
    ) -> None:
        chosen = resolve_preference_loss(loss)
        self_beta = chosen.beta if beta is None else beta
        _check(self_beta, sft_coef, logprob_chunk)
        if ld_alpha is not None and not 0 <= ld_alpha <= 1:
            raise ValueError(f"ld_alpha is {ld_alpha}; it must lie in [0, 1]")
        if margin and not chosen.of_gap:
            raise ValueError(f"loss {chosen.name} knows no margin: leave margin out")
        options = {"reference": reference, "precompute_reference": precompute_reference}
        for name in (name for name, value in options.items() if value and not chosen.reference):
            raise ValueError(f"loss {chosen.name} has no reference: leave {name} out")
        super().__init__(
            PairObjective(
                losses=((_pair_loss(chosen, self_beta, loss_options), 1.0),),
                margin=chosen.margin if margin is None else margin,
                tie_weight=0.0,
                label_smoothing=label_smoothing,
                takes_margins=chosen.of_gap,
            ),
            optimizer=optimizer,
            max_grad_norm=max_grad_norm,
            guard=guard,
            seed=seed,
        )
        self.loss, self.beta, self.sft_coef = chosen, self_beta, sft_coef
        self.ld_alpha = ld_alpha
        self.length_normalized = (
            chosen.length_normalized if length_normalized is None else length_normalized
        )
        self.logprob_chunk = logprob_chunk
        loaded = load_policy(policy, tokenizer, processor)
        self.set_policy(loaded, reference, has_one=chosen.reference, ask_first=precompute_reference)
        self.set_heads([_HEAD], [1.0])

    def summary(self) -> dict[str, str]:
        """Say what is trained, and by which loss."""
        return {**super().summary(), "loss": f"{self.loss.name}, beta {self.beta:g}"}

    # ---- the pairs

    def _both(self, batch: PreferenceBatch) -> SequenceBatch:
        return concatenate(batch.candidate0, batch.candidate1, pad_id=pad_id_of(self.tokenizer))

    def sequences_of(self, batch: PreferenceBatch) -> list[SequenceBatch]:
        """Return both candidates of every pair."""
        refuse_other_batch(self, batch, PreferenceBatch, self.data_module)
        return [self._both(batch.to(self.device))]

    @property
    def plain(self) -> PreTrainedModel:
        return plain_model(self.policy)

    @staticmethod
    def train_name(metric: str) -> str:
        return f"rewards/{metric}"

    def outputs_of(self, batch: PreferenceBatch) -> PairOutputs:
        """Compute the implicit rewards of both candidates, what they share only once."""
        both = self._both(batch)
        mask = loss_tokens(self.policy, both)
        reference = self.of_reference(both)
        logprobs = sequence_logprobs(self.policy, both, chunk_size=self.logprob_chunk)
        counted, of_reference = logprobs, reference
        if self.ld_alpha is not None:
            counted = length_desensitized(logprobs, mask, alpha=self.ld_alpha)
            if reference is not None:
                of_reference = length_desensitized(reference, mask, alpha=self.ld_alpha)
        rewards = implicit_rewards(
            counted, of_reference, mask, beta=self.beta, length_normalized=self.length_normalized
        )
        scores = PairScores(*torch.split(rewards[:, None], len(batch)))
        chosen, rejected = _by_label(masked_sum(logprobs, mask, dim=1), batch.labels)
        values = {"logprobs/chosen": chosen.detach(), "logprobs/rejected": rejected.detach()}
        if not self.sft_coef:
            return PairOutputs(scores, values=values)
        likelihood, _ = _by_label(masked_mean(logprobs, mask, dim=1), batch.labels)
        loss = -likelihood.nan_to_num(0.0)
        values["train/sft_loss"] = -likelihood.detach()
        return PairOutputs(scores, self.sft_coef * loss, values)


def _by_label(values: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]:
    """Return the values `[B]` of chosen and rejected answers; NaN where there are none.

    Args:
        values: `[2B]`, of all first candidates, then of all second ones.
        labels: `[B, 1]`.
    """
    first, second = values.chunk(2)
    label = labels[:, 0].nan_to_num(0.0)
    nothing = torch.full_like(first, torch.nan)
    chosen = torch.where(label > 0, first, torch.where(label < 0, second, nothing))
    rejected = torch.where(label > 0, second, torch.where(label < 0, first, nothing))
    return chosen, rejected


def resolve_preference_loss(loss: str | PreferenceLoss) -> PreferenceLoss:
    """Look up a loss by name or import path.

    Raises:
        ValueError: Unknown name, or a path that leads to no loss.
    """
    if isinstance(loss, PreferenceLoss):
        return loss
    resolved = PREFERENCE_LOSSES.get(loss) or import_value("loss", loss, PREFERENCE_LOSSES)
    if isinstance(resolved, PreferenceLoss):
        return resolved
    if not callable(resolved):
        raise ValueError(
            f"loss {loss!r} is a {type(resolved).__name__}, neither a PreferenceLoss nor a function"
        )
    return PreferenceLoss(name=loss, function=resolved)


def _pair_loss(loss: PreferenceLoss, beta: float, options: dict[str, Any]) -> PairLoss:
    parameters = inspect.signature(loss.function).parameters.values()
    known = [each.name for each in parameters if each.kind is each.KEYWORD_ONLY]
    for name in options:
        if name not in known or name == "beta":
            raise unknown_name(f"option in loss_options (loss {loss.name})", name, known)
    own = {"beta": beta} if loss.takes_beta else {}
    function = partial(loss.function, **own, **options)
    if options:  # have it refuse values out of their range at once
        function(torch.zeros(1), torch.zeros(1))
    return function


def _check(beta: float, sft_coef: float, chunk: int) -> None:
    """Refuse options out of their ranges."""
    if beta <= 0:
        raise ValueError(f"beta is {beta}; it must be above 0")
    if sft_coef < 0:
        raise ValueError(f"sft_coef is {sft_coef}; it must be 0 or more")
    if chunk < 1:
        raise ValueError(f"logprob_chunk is {chunk}; it must be 1 or more")
