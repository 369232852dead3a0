"""Distance of a policy to its teacher: over the vocabulary, and as a reward of each token."""

from __future__ import annotations

from typing import NamedTuple, Protocol, runtime_checkable

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from lrlhf.functional.advantages import discounted_returns
from lrlhf.functional.logprobs import OutputHead, TokenStatistics

_FAR = -1e4
"""Lowest log-probability in a divergence. Below it p is 0 in float64 too, and so is p log p, while
0 · -inf would make NaN of a token that a head rules out."""


def generalized_jsd(
    logprobs: Float[Tensor, "*dims V"], teacher_logprobs: Float[Tensor, "*dims V"], *, beta: float
) -> Float[Tensor, "*dims"]:
    """Divergence between a policy π and its teacher T over the last axis, in nats.

        β = 1: KL(π || T)        β = 0: KL(T || π)
        else:  β KL(T || M) + (1 - β) KL(π || M)        with M = β T + (1 - β) π

    Args:
        logprobs: Of the policy, normalised, with gradient.
        teacher_logprobs: Normalised; no gradient flows into them.
        beta: From the forward (0) to the reverse KL (1); the values between are bounded.

    Raises:
        ValueError: ``beta`` is outside [0, 1].

    Reference:
        Agarwal et al. 2024 (GKD), eq. 1 and §3, https://arxiv.org/abs/2306.13649, whose β is that
        of TRL. At 0 and 1, where the formula itself is 0, the two KLs stand, as in TRL.
    """
    if not 0 <= beta <= 1:
        raise ValueError(f"beta is {beta}; it must lie in [0, 1]")
    own, teacher = logprobs.clamp(min=_FAR), teacher_logprobs.detach().clamp(min=_FAR)
    if beta == 1:
        return _kl(own, teacher)
    if beta == 0:
        return _kl(teacher, own)
    weight = torch.tensor(beta, dtype=own.dtype, device=own.device)
    mixture = torch.logaddexp(own + torch.log1p(-weight), teacher + weight.log())
    return beta * _kl(teacher, mixture) + (1 - beta) * _kl(own, mixture)


def _kl(logprobs: Float[Tensor, "*dims V"], other: Float[Tensor, "*dims V"]) -> Tensor:
    return (logprobs.exp() * (logprobs - other)).sum(dim=-1)


def with_rest(logprobs: Float[Tensor, "N K"]) -> Float[Tensor, "N L"]:
    """Add the log-probability of all other tokens together as one more column, L = K + 1.

    Without gradient: a rest that is smaller than what rounding leaves of it is as small as that.
    """
    mass = logprobs.exp().sum(dim=-1, keepdim=True)
    remainder = (1 - mass).clamp(min=torch.finfo(mass.dtype).eps).log()
    return torch.cat([logprobs, remainder], dim=-1)


def gathered_with_rest(
    logprobs: Float[Tensor, "N V"], ids: Int[Tensor, "N K"]
) -> Float[Tensor, "N L"]:
    """Take some tokens' log-probabilities, and as one more column those of all others together.

    Exact and with gradient however little the others have: a policy that is far too sure of a token
    must learn from the teacher what it lacks elsewhere.
    """
    # not -inf, as a sum of nothing else has no gradient
    others = logprobs.scatter(1, ids, _FAR).logsumexp(dim=-1, keepdim=True)
    return torch.cat([logprobs.gather(1, ids), others], dim=-1)


def teacher_advantages(
    logprobs: Float[Tensor, "B T"],
    teacher_logprobs: Float[Tensor, "B T"],
    response_mask: Bool[Tensor, "B T"],
    *,
    coef: float,
    discount: float = 0.0,
) -> Float[Tensor, "B T"]:
    """Return to go of the reward that the reverse KL to the teacher is, without gradient.

        A_t = Σ_{s ≥ t} γ^{s-t} r_s,        r_t = -coef · (log π(y_t) - log T(y_t))

    At γ = 0 the policy gradient of it is that of the reverse KL at each token, the way to the token
    taken as given; at γ = 1 it is that of the reverse KL between whole responses.

    Args:
        logprobs: Of the policy before the update, in nats.
        teacher_logprobs: Of the teacher.
        response_mask: Outside it the reward is 0.
        coef: Advantage per nat.
        discount: γ, per token.

    Reference:
        Lu & Thinking Machines Lab 2025, "On-Policy Distillation", §Implementation,
        https://thinkingmachines.ai/blog/on-policy-distillation (γ = 0); Gu et al. 2024 (MiniLLM),
        eq. 2, https://arxiv.org/abs/2306.08543 (γ = 1)
    """
    distance = (logprobs - teacher_logprobs).detach()
    rewards = torch.where(response_mask, -coef * distance, 0.0)
    if discount == 0:
        return rewards
    return discounted_returns(rewards, response_mask, gamma=discount)


class Compared(NamedTuple):
    """What policy and teacher say of some rows."""

    policy: Float[Tensor, "C W"]
    """Log-probabilities over what both know, with gradient."""
    teacher: Float[Tensor, "C W"]
    teacher_target: Float[Tensor, " C"]
    """Of the target."""
    teacher_top: Int[Tensor, " C"]
    """The teacher's most probable id."""


@runtime_checkable
class TeacherRows(Protocol):
    """What a teacher says of the next token, row by row."""

    def compare(
        self, rows: slice, logprobs: Float[Tensor, "C V"], targets: Int[Tensor, " C"]
    ) -> Compared:
        """Put the policy's log-probabilities of some rows beside the teacher's."""
        ...


class BatchDistribution(NamedTuple):
    """A teacher whose whole distribution is computed from its hidden states, chunk by chunk."""

    hidden: Float[Tensor, "N H"]
    head: OutputHead
    temperature: float

    def logprobs(self, rows: slice, width: int) -> Float[Tensor, "C W"]:
        """Return its log-probabilities of the first ids, at most ``width``, renormalised."""
        logits = self.head(self.hidden[rows])[:, :width]
        wide = torch.promote_types(logits.dtype, torch.float32)
        return torch.log_softmax(logits.to(wide) / self.temperature, dim=-1)

    def compare(
        self, rows: slice, logprobs: Float[Tensor, "C V"], targets: Int[Tensor, " C"]
    ) -> Compared:
        """See `TeacherRows`; what only one of the two embeddings has, as padding, is left out."""
        with torch.no_grad():
            teacher = self.logprobs(rows, logprobs.shape[1])
        policy, width = logprobs, teacher.shape[1]
        if width < logprobs.shape[1]:
            policy = torch.log_softmax(logprobs[:, :width], dim=-1)
        chosen = teacher.gather(1, targets[:, None])[:, 0]
        return Compared(policy, teacher, chosen, teacher.argmax(dim=1))


class TopRows(NamedTuple):
    """A teacher of which only the most probable ids are known; all others count as one."""

    ids: Int[Tensor, "N K"]
    """Most probable first."""
    logprobs: Float[Tensor, "N K"]
    target_logprobs: Float[Tensor, " N"]

    def compare(
        self, rows: slice, logprobs: Float[Tensor, "C V"], targets: Int[Tensor, " C"]
    ) -> Compared:
        ids = self.ids[rows]
        teacher = self.logprobs[rows].to(logprobs.dtype)
        if ids.shape[1] == logprobs.shape[1]:  # there are no others
            policy = logprobs.gather(1, ids)
        else:
            policy, teacher = gathered_with_rest(logprobs, ids), with_rest(teacher)
        return Compared(policy, teacher, self.target_logprobs[rows], ids[:, 0])


class TeacherStatistics(NamedTuple):
    """How far the policy is from its teacher in each row, in nats."""

    divergence: Float[Tensor, " N"]
    """With gradient."""
    reverse_kl: Float[Tensor, " N"]
    """KL(π || T), without gradient."""
    agrees: Bool[Tensor, " N"]
    """Whether both have the same most probable id."""
    logprobs: Float[Tensor, " N"]
    """The teacher's, of the targets."""


def compared_statistics(
    hidden: Float[Tensor, "N H"],
    head: OutputHead,
    targets: Int[Tensor, " N"],
    teacher: TeacherRows,
    *,
    beta: float = 1.0,
    temperature: float = 1.0,
    chunk_size: int = 1024,
    return_entropy: bool = False,
) -> tuple[TokenStatistics, TeacherStatistics]:
    """Compute what `token_statistics` does, and the distance to a teacher, from the same logits.

    Logits of at most ``chunk_size`` rows exist at the same time; the backward pass computes them
    again, the teacher's too.

    Args:
        hidden: Hidden state that predicts each token.
        head: From hidden states to logits.
        targets: Id of each token.
        teacher: Of the same rows.
        beta: See `generalized_jsd`.
        temperature: The policy's logits are divided by it.
        chunk_size: Rows whose logits may exist at the same time.
        return_entropy: Also return the entropy of every row's distribution.
    """

    def of_chunk(states: Tensor, ids: Tensor, rows: slice) -> tuple[Tensor, ...]:
        logits = head(states)
        wide = torch.promote_types(logits.dtype, torch.float32)
        logprobs = torch.log_softmax(logits.to(wide) / temperature, dim=-1)
        chosen = logprobs.gather(1, ids[:, None])[:, 0]
        entropy = chosen.detach()
        if return_entropy:
            entropy = -(logprobs.exp() * logprobs.clamp(min=_FAR)).sum(dim=-1)
        both = teacher.compare(rows, logprobs, ids)
        divergence = generalized_jsd(both.policy, both.teacher, beta=beta)
        with torch.no_grad():
            reverse = generalized_jsd(both.policy, both.teacher, beta=1.0)
            is_top, agrees = chosen >= logprobs.amax(dim=1), logprobs.argmax(1) == both.teacher_top
        return chosen, entropy, is_top, divergence, reverse, agrees, both.teacher_target

    parts, several = [], len(hidden) > chunk_size
    for start in range(0, len(hidden), chunk_size):
        rows = slice(start, start + chunk_size)
        if torch.is_grad_enabled() and several:
            part = checkpoint(of_chunk, hidden[rows], targets[rows], rows, use_reentrant=False)
        else:
            part = of_chunk(hidden[rows], targets[rows], rows)
        parts.append(part)
    chosen, entropy, is_top, *rest = (torch.cat(each) for each in zip(*parts, strict=True))
    own = TokenStatistics(chosen, entropy if return_entropy else None, is_top)
    return own, TeacherStatistics(*rest)
