"""``module.generate("…")``, ``module.sample("…")``: what every module with a policy answers."""

from __future__ import annotations

import secrets
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field, fields, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple, TypeVar

from torch import Tensor

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
from lrlhf.rewards import RewardResult
from lrlhf.rewards.function import did_you_mean
from lrlhf.rollout import Collector, RolloutEngine, Sampling, response_ids
from lrlhf.rollout.responses import response_starts
from lrlhf.rollout.texts import response_texts, token_texts
from lrlhf.run import sample_seeds
from lrlhf.types import Prompt, PromptBatch, Rollout

if TYPE_CHECKING:
    from lrlhf.modules.policy_module import PolicyModule

T = TypeVar("T")
_LONGEST = 200
"""Characters of a text in the ``repr``."""
_READS_EPISODES = ("episodes", "environments")


def generate(
    module: PolicyModule,
    prompts: Any,
    sampling: Sampling | None = None,
    *,
    n: int = 1,
    seed: int | None = None,
    images: Any = None,
    batch_size: int = 64,
    **options: Any,
) -> Any:
    """Answer prompts with the policy as it is now, before, during or after training.

    No trainer is needed. Modes, random states and the engine stay as they are. The module's own
    engine generates; one with a copy of the weights only while that is the policy's current ones,
    and where ranks do not share it, else the policy itself does. Where the policy is split over
    ranks, all of them must call.

    Args:
        module: The module itself.
        prompts: Text that the policy goes on; a chat, as a list of messages (``role`` and
            ``content``), which the tokenizer's template renders; a row of a data set, with a column
            ``prompt``; or several of these in a list.
        sampling: How tokens are sampled; None: as in training.
        n: Responses to each prompt.
        seed: Makes every call return the same responses; None: others each time. Without effect at
            temperature 0.
        images: For a vision-language policy: an image (path, ``PIL.Image``, array, bytes) or a list
            of them; with several prompts, a list with an entry for each. Text is then the user's
            turn of a chat.
        batch_size: Responses computed at the same time.
        **options: Single options of `Sampling` to change, such as ``max_new_tokens=64``.

    Returns:
        A string for one prompt, a list of strings for several; with ``n`` above 1 a list of ``n``
        strings in the place of each.

    Raises:
        TypeError: A prompt is of no known form, or there is no such option.
        ValueError: A prompt cannot be read, or leaves no room for ``max_new_tokens``; or there is
            a ``structured`` format, and the engine that holds responses to it does not answer.

    Example:
        >>> module.generate("2 + 2 =", max_new_tokens=4, temperature=0)
        ' 4'
    """
    answer = partial(_answer, module, prompts, sampling, options)
    return answer(_texts, n=n, seed=seed, images=images, batch_size=batch_size)


def sample(
    module: PolicyModule,
    prompts: Any,
    sampling: Sampling | None = None,
    *,
    n: int = 1,
    scored: bool = False,
    seed: int | None = None,
    images: Any = None,
    batch_size: int = 64,
    **options: Any,
) -> Any:
    """Answer prompts as `generate` does, and tell more of each response than its text.

    The responses are those of `generate` with the same ``seed``. Where the run plays episodes, a
    response is a single turn.

    Args:
        module: The module itself.
        prompts: See `generate`. Rows of a data set may have the columns that rewards read.
        sampling: See `generate`.
        n: Responses to each prompt.
        scored: Have the module's rewards score the responses. Functions that fail leave theirs
            without a score, and do not count among the failures of the run.
        seed: See `generate`.
        images: See `generate`.
        batch_size: Responses computed, and scored, at the same time.
        **options: See `generate`.

    Returns:
        A `Sampled` for one prompt, a list for several; with ``n`` above 1 a list of ``n`` in the
        place of each. ``pandas.DataFrame`` makes a table of such a list.

    Raises:
        TypeError: See `generate`.
        ValueError: See `generate`; or a reward reads episodes, of which there are none.
        RewardError: The rewards cannot be asked; a row lacks a column that one of them reads.

    Example:
        >>> module.sample({"prompt": "2 + 2 =", "answer": "4"}, scored=True)
        Sampled(' 4', score=1, tokens=2, logprob=-0.53, finish_reason='stop')
    """
    answer = partial(_answer, module, prompts, sampling, options)
    describe = partial(respond, score=Scoring(module) if scored else None)
    return answer(describe, n=n, seed=seed, images=images, batch_size=batch_size)


def _texts(
    generator: TextGenerator, sampling: Sampling, rows: Sequence[PromptRow], seeds: Sequence[int]
) -> list[list[str]]:
    groups = generator.answer(rows, sampling, seeds=seeds)
    return [[answer.text for answer in group] for group in groups]


def _answer(
    module: PolicyModule,
    prompts: Any,
    sampling: Sampling | None,
    options: dict[str, Any],
    respond: Callable[..., Any],
    **further: Any,
) -> Any:
    """Answer with the module's own engine, or, where that does not do, with the policy."""
    engine = module.turn_engine
    copied = engine.capabilities.holds_copy
    # one that ranks share would wait for those that are not asked
    alone = engine.capabilities.ranks_together == 1
    changed = changed_sampling(sampling or module.settings.sampling, options)
    if copied and not (alone and engine.version == module.global_step):
        if changed.structured is not None:
            _refuse_format(engine)
        engine, copied = module.own_engine, False
    generator = TextGenerator(module.loaded, engine)
    reader = PromptReader(module.loaded)
    if further["images"] is not None and not reader.sees:
        raise ValueError("images were given, and the policy reads text only")
    read = partial(read_fitting, reader, generator, changed)
    try:
        return answer_prompts(prompts, read, partial(respond, generator, changed), **further)
    finally:
        if copied:  # else the run would find what was computed here in its cache
            engine.forget()


def _refuse_format(engine: RolloutEngine) -> None:
    """Say why an engine that holds responses to a format is not asked for it now.

    Raises:
        ValueError: It is one.
    """
    can = engine.capabilities
    if not can.structured:
        return  # what answers instead says what would
    reason = "does not have the policy's current weights"
    if can.ranks_together > 1:
        reason = f"is shared by {can.ranks_together} ranks, one of which cannot ask it alone"
    raise ValueError(
        f"sampling.structured: {type(engine).__name__} {reason}, so that the policy itself would "
        "answer, which holds no responses to a format: leave structured out here, or set "
        "eval_sampling.structured and validate, where all ranks ask the engine together"
    )


@dataclass(frozen=True, kw_only=True, repr=False)
class Sampled:
    """One response; printed, it is its text."""

    prompt: Prompt
    text: str
    """Without special tokens, and without the stop string that ended it."""
    score: float | None = None
    """None: it was not asked for, or no reward could tell."""
    rewards: Mapping[str, float | None] = field(default_factory=dict)
    """What each function returned, if the score was asked for."""
    finish_reason: str
    """``stop``, or ``length`` where the limit of tokens came first."""
    token_ids: tuple[int, ...]
    """As the engine returned them, the end-of-sequence token included."""
    tokens: tuple[str, ...]
    """Their texts, which joined are those of all; special tokens are shown."""
    logprobs: tuple[float | None, ...]
    """Of each token at the sampling temperature, in nats; None: the token was not sampled."""

    @property
    def logprob(self) -> float:
        """Log-probability of the response: the sum over its sampled tokens."""
        return sum(value for value in self.logprobs if value is not None)

    def __str__(self) -> str:
        return self.text

    def __repr__(self) -> str:
        text = self.text if len(self.text) <= _LONGEST else self.text[: _LONGEST - 1] + "…"
        score = "" if self.score is None else f"score={self.score:.4g}, "
        return (
            f"Sampled({text!r}, {score}tokens={len(self.token_ids)}, logprob={self.logprob:.4g}, "
            f"finish_reason={self.finish_reason!r})"
        )


class Scoring:
    """Scores responses with the rewards of a module, apart from its run.

    Args:
        module: Whose rewards; they may ask for the iterations behind its weights.

    Raises:
        ValueError: A reward reads episodes.
    """

    def __init__(self, module: PolicyModule) -> None:
        self._rewards = module.rewards.with_own_failures()
        for argument in _READS_EPISODES:
            if names := self._rewards.asking_for(argument):
                raise ValueError(
                    f"the reward function {names[0]} reads {argument}, and sample() answers with "
                    "single turns: leave scored out, or have trainer.validate play episodes"
                )
        self._step = module.global_step
        self._collector = Collector(
            module.turn_engine,
            self._rewards,
            module.tokenizer,
            shows_media=module.processor is not None,
        )

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
        score: Computes the rewards; None: there are none.
    """
    prompts, rollout = generator.generate(rows, sampling, seeds=seeds)
    rewards = None if score is None else score(prompts, rollout, sampling)
    n = len(rollout) // len(prompts)
    texts = response_texts(prompts, rollout, generator.tokenizer, sampling)
    starts = response_starts(rollout, prompts)
    responses = []
    for row, ids in enumerate(response_ids(rollout, prompts, given=True)):
        start = starts[row]
        here = slice(start, start + len(ids))
        before = rollout.input_ids[row, :start].tolist()
        responses.append(
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
    return in_groups(responses, len(prompts))


def _values(rewards: RewardResult, row: int) -> Iterator[tuple[str, float | None]]:
    for name, value in zip(rewards.names, rewards.per_function[row], strict=True):
        yield name, _known(value)


def _known(value: Tensor) -> float | None:
    return None if value.isnan() else float(value)


class GeneratedText(NamedTuple):
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
        readable = self._media.check(drafts)[0]
        if isinstance(readable, BadRow):
            raise readable
        return self._media(readable)


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
    ) -> list[list[GeneratedText]]:
        """Answer each prompt ``len(seeds) / len(rows)`` times.

        Args:
            rows: The prompts.
            sampling: How tokens are sampled.
            seeds: One per response, those of one prompt consecutive.
        """
        prompts, rollout = self.generate(rows, sampling, seeds=seeds)
        texts = response_texts(prompts, rollout, self.tokenizer, sampling)
        answers = [
            GeneratedText(str(text), "length" if truncated else "stop", length)
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
        pad_id = int(self.tokenizer.pad_token_id)
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
    prompt_rows, alone = rows_of(prompts, images)
    rows = [read(row, number) for number, row in enumerate(prompt_rows)]
    seed = secrets.randbits(64) if seed is None else seed
    groups: list[list[T]] = []
    at_once = max(1, batch_size // n)
    for start in range(0, len(rows), at_once):
        chosen = rows[start : start + at_once]
        seeds = [
            each
            for number in range(start, start + len(chosen))
            for each in sample_seeds(seed, number, count=n)
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
