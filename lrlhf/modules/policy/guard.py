"""What the guard is shown of a policy's iterations and steps, and how their rows are described."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedTokenizerBase

from lrlhf.functional.algorithm import PolicyLoss
from lrlhf.functional.masking import masked_mean, masked_sum
from lrlhf.guard.anomalies import (
    IterationSums,
    StepWatch,
    judge,
    locate_in,
    measure,
    prompt_text,
    reference_kl,
    shown,
)
from lrlhf.guard.dump import StepBundle
from lrlhf.modules.policy.iteration import Iteration
from lrlhf.types import Experience

ITERATION = "iteration"
"""Stage of what is found before the update."""


def passes_guard(experience: Experience, it: Iteration, tokenizer: PreTrainedTokenizerBase) -> bool:
    """Look at an iteration before its update; False: all ranks leave the update out.

    Args:
        experience: What would be trained on.
        it: The iteration.
        tokenizer: Writes the rows of a dump.
    """
    guard = it.module.step_guard
    sums = IterationSums(*it.ranks.sum(measure(experience)).tolist())
    anomalies = judge(sums, guard.settings, guard.lengths)
    if not anomalies:
        guard.lengths.update(sums.tokens / max(sums.rows, 1))
        return True
    location = locate_in(experience, tokenizer)
    # what is about all ranks, the first one tells
    reported = [anomaly for anomaly in anomalies if it.ranks.rank == 0]
    if location:
        bad = next((item for item in anomalies if item.limit is None), anomalies[0])
        reported = [each for each in reported if each is not bad]
        reported.append(bad._replace(text=f"{bad.text} ({location})"))

    def bundle() -> StepBundle:
        return StepBundle(
            stage=ITERATION,
            batches={"experience": experience},
            seeds=[it.seeds],
            context={},
            records=describe_rows(experience, tokenizer, None),
        )

    guard.report(reported, bundle, it.module)
    return False


def show_probabilities(
    watch: StepWatch, logprobs: Tensor, micro: Experience, loss: PolicyLoss, *, unseen: bool
) -> None:
    """Show the guard how far a micro-batch's probabilities are from where they should be.

    Args:
        watch: Of the optimizer step.
        logprobs: `[B, T]` of the policy, without gradient.
        micro: The rows.
        loss: Whose ratios are limited.
        unseen: Whether this is the first time that engine and trainer can be compared.
    """
    watch.outputs["the policy's log-probabilities"] = logprobs
    if micro.old_source == "recorded":
        return  # another policy drew them
    mask = micro.loss_mask
    if micro.old_logprobs is not None:
        watch.see_ratios(log_ratios(logprobs, micro, loss))
    if unseen and watch.limits_mismatch:
        distance = (logprobs - micro.engine_logprobs).abs()
        watch.see_mismatch(masked_sum(distance, mask), mask.sum())


def log_ratios(logprobs: Tensor, experience: Experience, loss: PolicyLoss) -> Tensor:
    """`[B]`: how far the policy has moved on each response since it was sampled, in absolute nats.

    Of a loss per token the token that moved most; of one per response the mean over its tokens.
    """
    assert experience.old_logprobs is not None
    distance = logprobs.detach() - experience.old_logprobs
    if loss.level == "sequence":
        return masked_mean(distance, experience.loss_mask, 1).abs()
    return torch.where(experience.loss_mask, distance, 0.0).abs().amax(dim=1)


def describe_rows(
    experience: Experience, tokenizer: PreTrainedTokenizerBase, moves: Tensor | None
) -> list[dict[str, Any]]:
    """Describe each row in JSON types.

    Args:
        experience: The rows.
        tokenizer: Writes them.
        moves: `[B]`, how far each row's probabilities have moved, in nats; None: not at all.
    """
    kl = reference_kl(experience)
    advantages = masked_mean(experience.advantages, experience.response_mask, 1)
    rows = []
    for row in range(len(experience)):
        response_ids = experience.input_ids[row, experience.response_mask[row]].tolist()
        media = None if experience.media is None else experience.media[row]
        rows.append(
            {
                "row": row,
                "prompt": prompt_text(experience, row, tokenizer),
                "completion": str(tokenizer.decode(response_ids)),
                "length": len(response_ids),
                "score": shown(experience.scores[row]),
                "advantage": shown(advantages[row]),
                "kl": None if kl is None else shown(kl[row]),
                "log_ratio": None if moves is None else shown(moves[row]),
                **({} if media is None else {"media": list(media.names)}),
            }
        )
    return rows
