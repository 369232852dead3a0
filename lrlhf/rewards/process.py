"""Rewards for the steps of a response, from a process reward model (PRM)."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any, ClassVar, Literal, NamedTuple, cast

import numpy as np
import torch
from peft import PeftModel
from torch import nn
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from lrlhf.models import (
    STEP_SEPARATOR,
    StepModel,
    joined_steps,
    load_tokenizer,
    packs,
    plain_model,
    split_text,
    step_logits,
)
from lrlhf.models.loading.pretrained import DType
from lrlhf.models.sharding import device_of
from lrlhf.rewards.dispatch import until_timeout
from lrlhf.rewards.function import (
    Completion,
    LogExtra,
    LogMetric,
    StepReward,
    StepValues,
    check_positive,
    completion_segments,
)
from lrlhf.rewards.learned import (
    OwnModelReward,
    Row,
    as_text,
    batches_of,
    encoded,
    in_place,
    padded,
    rendered,
    resolve_device,
    share_media,
    token_limit,
)
from lrlhf.types import Prompt

Aggregate = Literal["min", "product", "mean", "last", "sum"]

_RUNNING: Mapping[Aggregate, Callable[[np.ndarray[Any, Any]], np.ndarray[Any, Any]]] = {
    "min": np.minimum.accumulate,
    "product": np.cumprod,
    "mean": lambda scores: np.cumsum(scores) / len(scores),
    "last": lambda scores: scores,
    "sum": np.cumsum,
}
"""Aggregates of the steps so far, of which the last is the value of the response."""


class Piece(NamedTuple):
    """A part of a response that the model reads as a step."""

    text: str
    end: int
    """Where it ends in characters of the response, the separator behind it included."""
    sampled: bool
    """Whether the policy wrote it, so that it is scored."""


class _Loaded(NamedTuple):
    model: PreTrainedModel | PeftModel
    tokenizer: PreTrainedTokenizerBase
    separator: str
    max_tokens: int | None
    device: torch.device


class ProcessReward(OwnModelReward[_Loaded]):
    """The probability of a process reward model that each step of a response is correct.

    The value of a response is an aggregate of its steps. What each step adds to the aggregate of
    those before it is credited to the token that ends the step, by every algorithm with credit for
    turns (PPO with GAE, REINFORCE, ...) unless ``advantage.credit`` is ``response``. The parts add
    up to the value:

        value      R_n
        step k     R_k - R_(k-1), with R_0 = 0 and R_k the aggregate of steps 1 to k

    with ``mean`` counting later steps as 0. Outputs of an environment or a tool in between are
    read as steps, and not scored. A response without a step has the value 0. The model is frozen,
    and loaded at the first use. Responses that are too long for it get no value, and
    ``rewards/process/too_long`` counts them; nothing is cut.

    Args:
        source: Folder written by ``ProcessRewardModel``, or any token classifier with two classes,
            the second of which means "correct": a folder, a hub id or
            ``package:<module>[/<path>]``.
        aggregate: ``min``, ``product``, ``mean``, ``last`` or ``sum``, where step k adds just its
            own probability.
        steps: ``separator``: the policy's text is split at ``split_at``; ``turn``: each turn of an
            episode is a step.
        split_at: Text that ends a step in the policy's responses; null: the step separator of the
            model.
        step_separator: Text behind a step in the model's training; null: that of its config, or a
            newline.
        tokenizer: Source of the tokenizer; null: the model's.
        chat_template: Jinja text for prompts that are chats; null: the tokenizer's.
        batch_size: Responses that are scored at once.
        max_tokens: Longest prompt and response together, if the model itself has no lower limit.
        device: ``auto`` is the process's current GPU, if there is one.
        dtype: Of the model; ``auto`` is as stored.
        attn_implementation: As in ``from_pretrained`` of ``transformers``.
        trust_remote_code: Run Python code that comes with the model.
        offload: Keep the model in main memory between two calls.

    Raises:
        ValueError: An option is out of its range.

    Reference:
        Lightman et al. 2023, https://arxiv.org/abs/2305.20050 (``product``, ``min``); Wang et al.
        2024, https://arxiv.org/abs/2312.08935, §3.4 (a reward at the end of each step)
    """

    scores_steps: ClassVar[bool] = True

    def __init__(  # noqa: PLR0913  the keys of a user's config
        self,
        source: str,
        aggregate: Aggregate = "min",
        steps: Literal["separator", "turn"] = "separator",
        split_at: str | None = None,
        step_separator: str | None = None,
        tokenizer: str | None = None,
        chat_template: str | None = None,
        batch_size: int = 8,
        max_tokens: int | None = None,
        device: str = "auto",
        dtype: DType = "auto",
        attn_implementation: str | None = None,
        trust_remote_code: bool = False,
        offload: bool = False,
    ) -> None:
        if "" in (split_at, step_separator):
            raise ValueError("split_at and step_separator must be text, or null")
        check_positive(batch_size=batch_size, max_tokens=max_tokens)
        self._source, self._aggregate, self._steps = source, aggregate, steps
        self._split_at, self._separator = split_at, step_separator
        self._tokenizer, self._chat_template = tokenizer, chat_template
        self._batch_size, self._max_tokens = batch_size, max_tokens
        self._device, self._offload = device, offload
        self._spec = StepModel(
            source=source,
            dtype=dtype,
            attn_implementation=attn_implementation,
            trust_remote_code=trust_remote_code,
        )
        self._start_afresh()

    @classmethod
    def of_model(
        cls,
        model: PreTrainedModel | PeftModel,
        tokenizer: PreTrainedTokenizerBase,
        **options: Any,
    ) -> ProcessReward:
        """Score with a model that is in memory already, where it is and as it is."""
        reward = cls("in memory", device=str(device_of(model)), **options)
        reward._loaded = reward._with(model, tokenizer)
        return reward

    def __call__(
        self,
        *,
        prompts: Sequence[Prompt],
        completions: Sequence[Completion],
        log_metric: LogMetric,
        log_extra: LogExtra,
        **columns: Any,
    ) -> StepValues:
        split_at = None
        if self._steps == "separator":
            split_at = self._split_at or self._ready().separator
        pieces = [split_steps(completion, split_at) for completion in completions]
        probabilities = self.judge(prompts, [[piece.text for piece in own] for own in pieces])
        # of the steps that the policy wrote; None: the response is too long
        scores: list[list[float] | None] = []
        steps: list[list[StepReward]] = []
        for own, values in zip(pieces, probabilities, strict=True):
            pairs = zip(own, values or [], strict=values is not None)
            sampled = [(piece.end, value) for piece, value in pairs if piece.sampled]
            scores.append(None if values is None else [value for _, value in sampled])
            running = _RUNNING[self._aggregate](np.array([value for _, value in sampled]))
            added = np.diff(running, prepend=0.0).tolist()
            ends = [end for end, _ in sampled]
            steps.append([*map(StepReward, ends, added)])
        known = [own for own in scores if own is not None]
        log_metric("process/too_long", 1 - len(known) / max(1, len(scores)))
        log_metric("process/steps", sum(map(len, known)) / max(1, len(known)))
        log_extra("step_scores", scores)
        totals = [
            None if own is None else math.fsum(step.value for step in credited)
            for own, credited in zip(scores, steps, strict=True)
        ]
        return StepValues(totals, steps)

    def judge(
        self, prompts: Sequence[Prompt], answers: Sequence[Sequence[str]]
    ) -> list[list[float] | None]:
        """Return the probability of every step to be correct; None: the answer is too long.

        Args:
            prompts: Text or the turns of a chat, one per answer.
            answers: The steps of each.
        """
        loaded = self._ready()
        separator = encoded(loaded.tokenizer, loaded.separator, specials=False)
        joined = []
        for prompt, steps in until_timeout(zip(prompts, answers, strict=True)):
            if not isinstance(prompt, str):  # as StepwiseDataModule does
                steps = split_text(loaded.tokenizer, list(steps))
            own = [encoded(loaded.tokenizer, step, specials=False) for step in steps]
            joined.append(joined_steps(self._prompt_ids(loaded, prompt), own, separator))
        rows = share_media([Row(each.input_ids) for each in joined], prompts)
        limit = loaded.max_tokens
        results: list[list[float] | None] = [
            None if limit is not None and len(each.input_ids) > limit else [] for each in joined
        ]
        scored = {
            index: row
            for index, row in enumerate(rows)
            if row is not None and joined[index].ends and results[index] is not None
        }
        packed = packs(plain_model(loaded.model))
        with in_place(loaded.model, loaded.device, offload=self._offload):
            for indices in batches_of(scored, self._batch_size, packed=packed):
                batch = [(scored[index], joined[index].ends) for index in indices]
                for index, values in zip(indices, _probabilities(loaded, batch), strict=True):
                    results[index] = values
        return results

    def _prompt_ids(self, loaded: _Loaded, prompt: Prompt) -> list[int]:
        tokenizer = loaded.tokenizer
        if isinstance(prompt, str):
            ids = encoded(tokenizer, prompt, specials=True)
            # which some tokenizers put behind every text; this one goes on
            return ids[:-1] if ids[-1:] == [tokenizer.eos_token_id] else ids
        turns = [as_text(turn) for turn in prompt]
        text = rendered(tokenizer, self._chat_template, turns, source=self._source, open_turn=True)
        return encoded(tokenizer, text, specials=False)

    def _load(self) -> _Loaded:
        model = self._spec.load(trainable=False)
        device = torch.device("cpu") if self._offload else resolve_device(self._device)
        cast(nn.Module, model).to(device)
        tokenizer = load_tokenizer(
            self._tokenizer or self._source, trust_remote_code=self._spec.trust_remote_code
        )
        return self._with(model.eval(), tokenizer)

    def _with(
        self, model: PreTrainedModel | PeftModel, tokenizer: PreTrainedTokenizerBase
    ) -> _Loaded:
        config = plain_model(model).config
        return _Loaded(
            model=model,
            tokenizer=tokenizer,
            separator=self._separator or str(getattr(config, "step_separator", STEP_SEPARATOR)),
            max_tokens=token_limit(self._max_tokens, config, tokenizer),
            device=resolve_device(self._device),
        )


def split_steps(completion: Completion, split_at: str | None) -> list[Piece]:
    """Cut a response into its steps.

    Args:
        completion: The policy's text is cut, and inputs in between are a piece each.
        split_at: Text behind a step; None: a step is a complete segment of the policy.

    Returns:
        Pieces without the space around them; empty ones are joined with the piece before.
    """
    pieces: list[Piece] = []
    offset = 0
    for segment in completion_segments(completion):
        first = len(pieces)
        parts, separator = [segment.text], ""
        if split_at is not None and segment.sampled:
            parts, separator = segment.text.split(split_at), split_at
        for number, part in enumerate(parts, 1):
            offset += len(part) + (len(separator) if number < len(parts) else 0)
            if text := part.strip():
                pieces.append(Piece(text, offset, segment.sampled))
            elif len(pieces) > first:
                pieces[-1] = pieces[-1]._replace(end=offset)
    return pieces


@torch.inference_mode()
def _probabilities(loaded: _Loaded, rows: Sequence[tuple[Row, Sequence[int]]]) -> list[list[float]]:
    batch = padded([row for row, _ in rows])
    mask = torch.zeros_like(batch.response_mask)
    for index, (_, ends) in enumerate(rows):
        mask[index, list(ends)] = True
    moved = replace(batch, response_mask=mask).to(loaded.device)
    logits = step_logits(loaded.model, moved).sigmoid().float().cpu()
    return [own[where].tolist() for own, where in zip(logits, mask, strict=True)]
