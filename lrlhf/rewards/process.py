"""Rewards for the single steps of a response, from a process reward model."""

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
from lrlhf.rewards.dispatch import while_wanted
from lrlhf.rewards.function import (
    Completion,
    LogExtra,
    LogMetric,
    StepReward,
    StepValues,
    completion_segments,
)
from lrlhf.rewards.learned import (
    Row,
    as_text,
    encoded,
    in_place,
    padded,
    rendered,
    resolve_device,
    sharing,
    token_limit,
)
from lrlhf.rewards.own_model import OwnModelReward
from lrlhf.types import Prompt

Aggregate = Literal["min", "product", "mean", "last", "sum"]

_RUNNING: Mapping[Aggregate, Callable[[np.ndarray[Any, Any]], np.ndarray[Any, Any]]] = {
    "min": np.minimum.accumulate,
    "product": np.cumprod,
    "mean": lambda scores: np.cumsum(scores) / len(scores),
    "last": lambda scores: scores,
    "sum": np.cumsum,
}
"""What the steps so far are worth, of which the last is the value of all."""


class Piece(NamedTuple):
    """A part of a response that the model reads as a step."""

    text: str
    end: int
    """Characters of the response up to which it goes, the separator behind it included."""
    sampled: bool
    """Whether the policy wrote it, so that it is judged."""


class _Loaded(NamedTuple):
    model: PreTrainedModel | PeftModel
    tokenizer: PreTrainedTokenizerBase
    separator: str
    max_tokens: int | None
    device: torch.device


class ProcessReward(OwnModelReward[_Loaded]):
    """The probability that each step of a response is correct, as a process reward model sees it.

    The value of a response is an aggregate of its steps. What each step adds to the aggregate of
    those before it is credited to the token that ends the step, by every algorithm that looks at
    turns (PPO with GAE, REINFORCE, ...) unless ``advantage.credit`` is ``response``. The parts add
    up to the value:

        value      R_n
        step k     R_k - R_(k-1), with R_0 = 0 and R_k the aggregate of steps 1 to k

    with ``mean`` counting steps that are still to come as 0. What an environment or a tool said in
    between is read as a step, and not judged. A response without a step is worth 0. The model is
    frozen, and loaded at the first use. Responses that are too long for it get no value, and
    ``rewards/process/too_long`` counts them; nothing is cut.

    Args:
        source: Folder written by ``ProcessRewardModel``, or any token classifier with two classes,
            the second of which means "correct": a folder, a hub id or
            ``package:<module>[/<path>]``.
        aggregate: ``min``, ``product``, ``mean``, ``last`` or ``sum``, where step k adds just its
            own probability.
        steps: ``separator``: what the policy writes is split at ``split_at``; ``turn``: each turn
            of an episode is a step.
        split_at: Text that ends a step in the policy's responses; null: the step separator of the
            model.
        step_separator: Text that the model was trained to see behind a step; null: what its config
            says, or a newline.
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

    gives_steps: ClassVar[bool] = True

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
        if aggregate not in _RUNNING:
            raise ValueError(f"aggregate is {aggregate!r}; it must be {', '.join(_RUNNING)}")
        if steps not in ("separator", "turn"):
            raise ValueError(f"steps is {steps!r}; it must be separator or turn")
        if "" in (split_at, step_separator):
            raise ValueError("split_at and step_separator must be text, or null")
        if batch_size < 1:
            raise ValueError(f"batch_size is {batch_size}; it must be 1 or more")
        if max_tokens is not None and max_tokens < 1:
            raise ValueError(f"max_tokens is {max_tokens}; it must be 1 or more, or null")
        self._source = source
        self._aggregate, self._steps, self._split_at = aggregate, steps, split_at
        self._separator = step_separator
        self._tokenizer = tokenizer
        self._chat_template = chat_template
        self._batch_size = batch_size
        self._max_tokens = max_tokens
        self._device = device
        self._spec = StepModel(
            source=source,
            dtype=dtype,
            attn_implementation=attn_implementation,
            trust_remote_code=trust_remote_code,
        )
        self._offload = offload
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
        pieces = [split_steps(one, split_at) for one in completions]
        judged = self.judge(prompts, [[one.text for one in own] for own in pieces])
        scored = [_own_steps(*row) for row in zip(pieces, judged, strict=True)]
        known = [own for own in scored if own is not None]
        log_metric("process/too_long", 1 - len(known) / max(1, len(scored)))
        log_metric("process/steps", sum(map(len, known)) / max(1, len(known)))
        log_extra("step_scores", [own and [score for _, score in own] for own in scored])
        steps = [self._credited(own or []) for own in scored]
        values = [
            None if own is None else math.fsum(step.value for step in credited)
            for own, credited in zip(scored, steps, strict=True)
        ]
        return StepValues(values, steps)

    def _credited(self, steps: Sequence[tuple[int, float]]) -> list[StepReward]:
        """Return what each step adds to the aggregate of those before it."""
        running = _RUNNING[self._aggregate](np.array([score for _, score in steps]))
        added = np.diff(running, prepend=0.0).tolist()
        return [StepReward(end, value) for (end, _), value in zip(steps, added, strict=True)]

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
        for prompt, steps in while_wanted(zip(prompts, answers, strict=True)):
            if not isinstance(prompt, str):  # as StepwiseDataModule does
                steps = split_text(loaded.tokenizer, list(steps))
            own = [encoded(loaded.tokenizer, step, specials=False) for step in steps]
            joined.append(joined_steps(self._prompt_ids(loaded, prompt), own, separator))
        rows = sharing([Row(one.input_ids) for one in joined], prompts)
        limit = loaded.max_tokens
        found: list[list[float] | None] = [
            None if limit is not None and len(one.input_ids) > limit else [] for one in joined
        ]
        usable = {
            index: (row, joined[index].ends)
            for index, row in enumerate(rows)
            if row is not None and joined[index].ends and found[index] is not None
        }
        # as in LearnedReward: rows with one prompt, which is computed once, or rows of one length
        packed = packs(plain_model(loaded.model))
        order = sorted(
            usable,
            key=lambda i: (usable[i][0].prompt if packed else 0, len(usable[i][0].input_ids)),
        )
        with in_place(loaded.model, loaded.device, offload=self._offload):
            for start in while_wanted(range(0, len(order), self._batch_size)):
                chosen = order[start : start + self._batch_size]
                scores = _probabilities(loaded, [usable[index] for index in chosen])
                for index, own_scores in zip(chosen, scores, strict=True):
                    found[index] = own_scores
        return found

    def _prompt_ids(self, loaded: _Loaded, prompt: Prompt) -> list[int]:
        tokenizer = loaded.tokenizer
        if isinstance(prompt, str):
            ids = encoded(tokenizer, prompt, specials=True)
            # what some tokenizers put behind every text; this one goes on
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
        completion: What the policy wrote is cut, and what it was given in between is a piece each.
        split_at: Text behind a step; None: a step is all that the policy writes in one go.

    Returns:
        Pieces without the space around them; those with nothing in them belong to what is before.
    """
    pieces: list[Piece] = []
    offset = 0
    for segment in completion_segments(completion):
        first = len(pieces)
        whole = split_at is None or not segment.sampled
        for part in [segment.text] if whole else _parts(segment.text, str(split_at)):
            offset += len(part)
            text = (part if whole else part.removesuffix(str(split_at))).strip()
            if text:
                pieces.append(Piece(text, offset, segment.sampled))
            elif len(pieces) > first:
                pieces[-1] = pieces[-1]._replace(end=offset)
    return pieces


def _parts(text: str, split_at: str) -> list[str]:
    """Split a text behind every separator."""
    *ended, rest = text.split(split_at)
    return [*(part + split_at for part in ended), rest]


def _own_steps(
    pieces: Sequence[Piece], scores: Sequence[float] | None
) -> list[tuple[int, float]] | None:
    """Return end and score of the steps that the policy wrote; None: there are no scores."""
    if scores is None:
        return None
    return [(one.end, score) for one, score in zip(pieces, scores, strict=True) if one.sampled]


@torch.inference_mode()
def _probabilities(loaded: _Loaded, rows: Sequence[tuple[Row, Sequence[int]]]) -> list[list[float]]:
    batch = padded([row for row, _ in rows])
    mask = torch.zeros_like(batch.response_mask)
    for index, (_, ends) in enumerate(rows):
        mask[index, list(ends)] = True
    moved = replace(batch, response_mask=mask).to(loaded.device)
    logits = step_logits(loaded.model, moved).sigmoid().float().cpu()
    return [own[where].tolist() for own, where in zip(logits, mask, strict=True)]
