"""What `lrlhf.modules.RLOO.sample` tells of responses: tokens, log-probabilities, scores."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import nullcontext

from torch import Tensor

from lrlhf.datamodules.rows.collate import PromptRow
from lrlhf.modules.policy.policy_parts import PolicyParts
from lrlhf.modules.policy.sampled import Sampled
from lrlhf.modules.policy.text_generation import TextGenerator, in_groups
from lrlhf.rewards import RewardResult
from lrlhf.rollout import Collector, Sampling, response_ids
from lrlhf.rollout.responses import response_starts
from lrlhf.rollout.texts import response_texts, token_texts
from lrlhf.types import PromptBatch, Rollout

_READS_EPISODES = ("episodes", "environments")


class Scoring:
    """Asks the rewards of a module beside its run.

    Args:
        parts: Of the module.
        step: Iterations behind its weights, for the rewards that ask.

    Raises:
        ValueError: A reward reads episodes.
    """

    def __init__(self, parts: PolicyParts, step: int) -> None:
        self._rewards = parts.rewards.beside_a_run()
        for argument in _READS_EPISODES:
            if names := self._rewards.asking_for(argument):
                raise ValueError(
                    f"the reward function {names[0]} reads {argument}, and sample() answers with "
                    "single turns: leave scored out, or have trainer.validate play episodes"
                )
        self._step = step
        tokenizer, sees = parts.policy.tokenizer, parts.policy.processor is not None
        self._collector = Collector(parts.turn_engine, self._rewards, tokenizer, shows_media=sees)

    def __call__(self, prompts: PromptBatch, rollout: Rollout, sampling: Sampling) -> RewardResult:
        collected = self._collector.score(
            prompts,
            rollout,
            sampling,
            step=self._step,
            phase=lambda _: nullcontext(),
            limited=False,
        )
        return collected.rewards


def respond(
    generator: TextGenerator,
    sampling: Sampling,
    rows: Sequence[PromptRow],
    seeds: Sequence[int],
    *,
    score: Scoring | None,
) -> list[list[Sampled]]:
    """Answer prompts, each ``len(seeds) / len(rows)`` times.

    Args:
        generator: Generates.
        sampling: How tokens are sampled.
        rows: The prompts.
        seeds: One per response, those of one prompt consecutive.
        score: Asks the rewards; None: nobody does.
    """
    prompts, rollout = generator.generate(rows, sampling, seeds=seeds)
    rewards = None if score is None else score(prompts, rollout, sampling)
    n = len(rollout) // len(prompts)
    texts = response_texts(prompts, rollout, generator.tokenizer, sampling)
    starts = response_starts(rollout, prompts)
    found = []
    for row, ids in enumerate(response_ids(rollout, prompts, given=True)):
        start = starts[row]
        here = slice(start, start + len(ids))
        before = rollout.input_ids[row, :start].tolist()
        found.append(
            Sampled(
                prompt=prompts.prompts[row // n],
                text=str(texts[row]),
                finish_reason="length" if rollout.truncated[row] else "stop",
                token_ids=tuple(ids),
                tokens=tuple(token_texts(generator.tokenizer, before, ids)),
                logprobs=tuple(
                    value if counts else None
                    for value, counts in zip(
                        rollout.sampling_logprobs[row, here].tolist(),
                        rollout.response_mask[row, here].tolist(),
                        strict=True,
                    )
                ),
                score=None if rewards is None else _known(rewards.scores[row]),
                rewards={} if rewards is None else dict(_values(rewards, row)),
            )
        )
    return in_groups(found, len(prompts))


def _values(rewards: RewardResult, row: int) -> Iterator[tuple[str, float | None]]:
    for name, value in zip(rewards.names, rewards.per_function[row], strict=True):
        yield name, _known(value)


def _known(value: Tensor) -> float | None:
    return None if value.isnan() else float(value)
