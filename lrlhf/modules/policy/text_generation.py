"""Text in, text out: prompts as people write them, answered by a policy outside of training."""

from __future__ import annotations

import secrets
from collections.abc import Callable, Mapping, Sequence
from dataclasses import fields, replace
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

from lrlhf.datamodules.prompts import tokenize_drafts
from lrlhf.datamodules.rows.bad_rows import BadRow
from lrlhf.datamodules.rows.chat import ChatFormat
from lrlhf.datamodules.rows.collate import PromptRow, collate_prompts
from lrlhf.datamodules.rows.media_rows import MediaReader
from lrlhf.datamodules.rows.prompt_rows import PromptParser
from lrlhf.models import context_length
from lrlhf.models.sharding import device_of
from lrlhf.modules.policy.load_policy import LoadedPolicy
from lrlhf.modules.prompt_forms import refusal, rows_of
from lrlhf.rewards.function import did_you_mean
from lrlhf.rollout import RolloutEngine, Sampling
from lrlhf.rollout.texts import response_texts
from lrlhf.run import sample_seeds
from lrlhf.types import PromptBatch, Rollout

T = TypeVar("T")


class Answer(NamedTuple):
    """One response as text."""

    text: str
    finish_reason: str
    """``stop``, or ``length`` where the limit of tokens came first."""
    length: int
    """Tokens, the end-of-sequence token included."""


class PromptReader:
    """Reads prompts as the data modules do: text, chats, images and videos.

    Args:
        policy: Whose tokenizer and processor read.
        chat: How chats are rendered; None: with the tokenizer's template.
        **parsing: Other options of `PromptParser`.
    """

    def __init__(
        self, policy: LoadedPolicy, chat: ChatFormat | None = None, **parsing: Any
    ) -> None:
        self._tokenizer = policy.tokenizer
        self._media = MediaReader(policy.processor)
        self.sees = policy.processor is not None
        chat = chat or ChatFormat(policy.tokenizer)
        self._parse = PromptParser(chat, media=self._media, **parsing)

    def read(self, row: Mapping[str, Any], folder: Path | None = None) -> PromptRow:
        """Read a row, whose relative paths start from ``folder``.

        Raises:
            BadRow: It cannot be used.
        """
        drafts = tokenize_drafts(self._tokenizer, [self._parse(row, folder)])
        found = self._media.check(drafts)[0]
        if isinstance(found, BadRow):
            raise found
        return self._media(found)


class TextGenerator:
    """Has an engine answer prompts, and leaves policy and random numbers as they were.

    Args:
        policy: What generates.
        engine: How; it generates with the policy's current weights.
    """

    def __init__(self, policy: LoadedPolicy, engine: RolloutEngine) -> None:
        self._policy = policy
        self._engine = engine
        self.tokenizer = policy.tokenizer
        self.limit = context_length(policy.model)

    def answer(
        self, rows: Sequence[PromptRow], sampling: Sampling, *, seeds: Sequence[int]
    ) -> list[list[Answer]]:
        """Answer each prompt ``len(seeds) / len(rows)`` times.

        Args:
            rows: The prompts.
            sampling: How tokens are sampled.
            seeds: One per response, those of one prompt consecutive.
        """
        prompts, rollout = self.generate(rows, sampling, seeds=seeds)
        texts = response_texts(prompts, rollout, self.tokenizer, sampling)
        answers = [
            Answer(str(text), "length" if truncated else "stop", length)
            for text, truncated, length in zip(
                texts,
                rollout.truncated.tolist(),
                rollout.response_mask.sum(dim=1).tolist(),
                strict=True,
            )
        ]
        return in_groups(answers, len(rows))

    def generate(
        self, rows: Sequence[PromptRow], sampling: Sampling, *, seeds: Sequence[int]
    ) -> tuple[PromptBatch, Rollout]:
        """Return the prompts of `answer` as a batch, and the responses to them."""
        device = device_of(self._policy.model)
        pad_id = _pad_id(self.tokenizer.pad_token_id)
        prompts = collate_prompts(rows, pad_token_id=pad_id).to(device)
        self._engine.attach(*self._policy)
        n = len(seeds) // len(rows)
        return prompts, self._engine.generate(prompts, sampling, num_generations=n, seeds=seeds)

    def room(self, row: PromptRow) -> int | None:
        """Return how many tokens the model can read behind a prompt; None: it sets no limit."""
        return None if self.limit is None else self.limit - len(row.input_ids)


def answer_prompts(
    prompts: Any,
    read: Callable[[Mapping[str, Any], int], PromptRow],
    respond: Callable[[Sequence[PromptRow], Sequence[int]], list[list[T]]],
    *,
    n: int,
    seed: int | None,
    images: Any,
    batch_size: int,
) -> Any:
    """Answer prompts in any of the forms of `lrlhf.modules.RLOO.generate`.

    Args:
        prompts: In any of those forms.
        read: Reads a row, of which it is told the number.
        respond: Called with the prompts that go together, and one seed per response; returns the
            ``n`` responses to each.
        n: Responses to each prompt.
        seed: Of all responses; None: another one in each call.
        images: What prompts show besides.
        batch_size: Responses that go together.

    Returns:
        One response; a list for several prompts; with ``n`` above 1 lists in their place.

    Raises:
        TypeError: A prompt is neither text nor a chat nor a row.
        ValueError: A number is out of its range.
    """
    for name, value in (("n", n), ("batch_size", batch_size)):
        if value < 1:
            raise ValueError(f"{name} is {value}; it must be 1 or more")
    asked, alone = rows_of(prompts, images)
    rows = [read(row, number) for number, row in enumerate(asked)]
    seed = secrets.randbits(64) if seed is None else seed
    groups: list[list[T]] = []
    at_once = max(1, batch_size // n)
    for start in range(0, len(rows), at_once):
        chosen = rows[start : start + at_once]
        seeds = [
            one
            for number in range(start, start + len(chosen))
            for one in sample_seeds(seed, number, count=n)
        ]
        groups += respond(chosen, seeds)
    answers = [group[0] for group in groups] if n == 1 else groups
    return answers[0] if alone else answers


def in_groups(responses: Sequence[T], groups: int) -> list[list[T]]:
    """Put the responses to each prompt, which are consecutive, together."""
    n = len(responses) // groups
    return [list(responses[start : start + n]) for start in range(0, len(responses), n)]


def changed_sampling(sampling: Sampling, options: Mapping[str, Any]) -> Sampling:
    """Replace some options of a sampling.

    Raises:
        TypeError: There is no such option.
        ValueError: A value is out of its range.
    """
    known = [field.name for field in fields(Sampling)]
    for name in options:
        if name not in known:
            raise TypeError(
                f"there is no option {name!r}{did_you_mean(name, known)} (those of sampling "
                f"are {', '.join(known)})"
            )
    changed = dict(options)
    if "stop" in changed:
        stop = changed["stop"]
        changed["stop"] = (stop,) if isinstance(stop, str) else tuple(stop or ())
    return replace(sampling, **changed)


def _pad_id(pad_id: Any) -> int:
    return pad_id if isinstance(pad_id, int) else 0  # the mask says what is padding


def read_fitting(
    reader: PromptReader,
    generator: TextGenerator,
    sampling: Sampling,
    row: Mapping[str, Any],
    number: int,
) -> PromptRow:
    """Read a prompt that leaves the model room for a response.

    Args:
        reader: Reads it.
        generator: Will answer it.
        sampling: Says how long a response may be.
        row: The prompt.
        number: Of the row, for messages.

    Raises:
        ValueError: It cannot be read, or is too long.
    """
    try:
        read = reader.read(row)
    except BadRow as problem:
        raise refusal(number, problem) from problem
    room = generator.room(read)
    if room is not None and room < sampling.max_new_tokens:
        raise ValueError(
            f"prompt {number} (from 0) has {len(read.input_ids)} tokens, and "
            f"max_new_tokens is {sampling.max_new_tokens}: the model reads {generator.limit} in "
            f"all; set max_new_tokens to {room} or less, or shorten the prompt"
            if room > 0
            else f"prompt {number} (from 0) has {len(read.input_ids)} tokens, and the "
            f"model reads {generator.limit}; shorten it"
        )
    return read
