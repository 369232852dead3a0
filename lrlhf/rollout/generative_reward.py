"""A generative reward model (LLM as a judge) in the training process."""

from __future__ import annotations

import hashlib
import math
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any, NamedTuple, cast

import torch
from torch import nn
from transformers import PreTrainedConfig, PreTrainedTokenizerBase

from lrlhf.media import MediaError, MediaProcessor
from lrlhf.models import CausalLM, load_processor, load_tokenizer, plain_model, ruled_out_ids
from lrlhf.models.loading.pretrained import DType
from lrlhf.rewards.function import (
    Completion,
    LogExtra,
    LogMetric,
    RewardError,
    check_positive,
    images_of_prompt,
)
from lrlhf.rewards.judge.comparisons import (
    JudgePrompts,
    Reply,
    judge_columns,
    reply_texts,
    response_values,
    verdict_metrics,
)
from lrlhf.rewards.judge.verdicts import SYSTEM, FormName, marks_as_text
from lrlhf.rewards.learned import (
    OwnModelReward,
    Row,
    batches_of,
    encoded,
    in_place,
    rendered,
    resolve_device,
    text_without_marks,
    token_limit,
)
from lrlhf.rollout.engines.transformers_engine import TransformersEngine
from lrlhf.rollout.responses import token_prompts
from lrlhf.rollout.sampling import Sampling
from lrlhf.rollout.texts import response_texts
from lrlhf.types import Prompt


class _Loaded(NamedTuple):
    model: nn.Module
    engine: TransformersEngine
    tokenizer: PreTrainedTokenizerBase
    processor: MediaProcessor | None
    marks: tuple[str, ...]
    """Special tokens and placeholders of media that the question does not escape; responses must
    not contain them."""
    longest: float
    """Most tokens of a question."""
    device: torch.device


class _Request(NamedTuple):
    """A question for the model; equal questions have the same reply."""

    text: str
    media: tuple[int, ...]
    """Ids of the images and videos of the prompt."""
    sample: int

    @property
    def seed(self) -> int:
        """Seed of the reply, the same in every batch and every run."""
        digest = hashlib.blake2b(f"{self.sample} {self.text}".encode(), digest_size=4)
        return int.from_bytes(digest.digest(), "big")


_PromptMedia = tuple[Sequence[Any], Sequence[Any]]
"""Images and videos of a prompt."""


class GenerativeReward(OwnModelReward[_Loaded]):
    """Share of the other responses to a prompt that a generative reward model ranks lower.

    Questions and values are those of `JudgeReward` in mode ``pairwise``, in both orders: a win in
    one order only counts half. Verdicts are generated in this process, with `TransformersEngine`.
    Train the model by `SFT` and `RLOO` on `VerdictTasks`, with the same form, rubric, template and
    system prompt. A large one is better served by vLLM, with `JudgeReward`.

    A comparison has no value if the reply has no clear verdict or was truncated at
    ``max_new_tokens`` (``generative/malformed_fraction``), or if the question leaves no room for a
    reply (``generative/too_long``). ``generative/order_agreement`` is the share of comparisons with
    the same verdict in both orders. Equal questions have one, deterministic, reply. The model is
    frozen, and loaded at the first use.

    A vision-language model sees the prompts' images and videos; a text model reads the text.
    Prompts with audio are refused.

    Args:
        source: Folder of the trained model, hub id or ``package:<module>``.
        form: Verdict format, see `VerdictTasks`.
        rubric: Criteria, in words.
        template: Jinja2 template of the question in place of the form's.
        system: System prompt; empty: none.
        opponents: Number of responses that each is compared with, an even number; null: all.
        reference_column: Column of the answer that responses are compared with instead.
        samples: Replies per question, which are averaged. Above 1 it needs a temperature.
        temperature: Sampling temperature of the replies; 0 takes the most likely token.
        max_new_tokens: Longest reply, reasoning included.
        tokenizer: Source of the tokenizer; null: the model's.
        chat_template: Jinja template for the question as a chat; null: the tokenizer's.
        batch_size: Questions per batch.
        device: ``auto`` is the process's current GPU, if there is one.
        dtype: Type of the model's weights; ``auto`` is as stored.
        attn_implementation: As in ``from_pretrained`` of ``transformers``.
        trust_remote_code: Whether to run Python code that comes with the model.
        offload: Keep the model in main memory between two calls.

    Raises:
        ValueError: An option is out of its range, or they do not go together.
    """

    @classmethod
    def columns_read(cls, options: Mapping[str, Any]) -> Iterable[str]:
        return judge_columns(options)

    def __init__(  # noqa: PLR0913  the keys of a user's config
        self,
        source: str,
        form: FormName = "line",
        rubric: str | None = None,
        template: str | None = None,
        system: str = SYSTEM,
        opponents: int | None = None,
        reference_column: str | None = None,
        samples: int = 1,
        temperature: float = 0.0,
        max_new_tokens: int = 512,
        tokenizer: str | None = None,
        chat_template: str | None = None,
        batch_size: int = 16,
        device: str = "auto",
        dtype: DType = "auto",
        attn_implementation: str | None = None,
        trust_remote_code: bool = False,
        offload: bool = False,
    ) -> None:
        check_positive(samples=samples, batch_size=batch_size)
        if samples > 1 and temperature == 0:
            raise ValueError(
                "samples above 1 ask the same question again, and at temperature 0 the model says "
                "the same again: give temperature"
            )
        self._prompts = JudgePrompts(
            "pairwise",
            form,
            template=template,
            rubric=rubric,
            opponents=opponents,
            reference_column=reference_column,
            samples=samples,
        )
        self.compares_responses = self._prompts.compares_responses
        self._sampling = Sampling(temperature=temperature, max_new_tokens=max_new_tokens)
        self._spec = CausalLM(
            source=source,
            dtype=dtype,
            attn_implementation=attn_implementation,
            trust_remote_code=trust_remote_code,
        )
        self._system, self._chat_template = system, chat_template
        self._tokenizer = tokenizer or source
        self._batch_size, self._device, self._offload = batch_size, device, offload
        self._start_afresh()

    def __call__(
        self,
        *,
        prompts: Sequence[Prompt],
        completions: Sequence[Completion],
        log_metric: LogMetric,
        log_extra: LogExtra,
        images: Sequence[Sequence[Any]] | None = None,
        videos: Sequence[Sequence[Any]] | None = None,
        audios: Sequence[Sequence[Any]] | None = None,
        **columns: Any,
    ) -> list[float | None]:
        if any(audios or ()):
            raise RewardError("a generative reward model cannot be played the sounds of prompts")
        loaded = self._ready()
        if images and self._prompts.compares_responses:  # which need not show the same in turns
            images = [*map(images_of_prompt, completions, images)]
        media = _media_of(loaded, images, videos, count=len(completions))
        batch = self._prompts.batch(
            prompts,
            completions,
            [[id(entry) for kind in own for entry in kind] for own in media],
            columns,
            clean=partial(_neutral, marks=loaded.marks),
        )
        questions = self._prompts.questions(batch)
        requests = {
            question: _Request(
                self._prompts.text(batch, question),
                tuple(batch.shown[question.about] or ()),
                question.sample,
            )
            for question in questions
        }
        distinct = {request: media[question.about] for question, request in requests.items()}
        replies = self._replies(loaded, distinct)
        verdicts = {
            question: self._prompts.read(question, replies.get(requests[question]))
            for question in questions
        }
        log_metric("generative/too_long", len(distinct) - len(replies))
        for name, value in verdict_metrics(questions, verdicts).items():
            log_metric(f"generative/{name}", value)
        log_extra("judge", reply_texts(questions, verdicts, len(completions)))
        return response_values(questions, verdicts, len(completions))

    def _load(self) -> _Loaded:
        trust = self._spec.trust_remote_code
        model = self._spec.load(trainable=False)
        tokenizer = load_tokenizer(self._tokenizer, trust_remote_code=trust)
        config = plain_model(model).config
        limit = token_limit(None, config, tokenizer)
        if limit is not None and limit <= self._sampling.max_new_tokens:
            raise ValueError(
                f"{self._spec.source!r} reads {limit} tokens, and max_new_tokens is "
                f"{self._sampling.max_new_tokens}: nothing is left for the question"
            )
        processor = load_processor(self._spec.source, trust_remote_code=trust)
        device = resolve_device(self._device)
        cast(nn.Module, model).to("cpu" if self._offload else device)
        engine = TransformersEngine()
        engine.attach(model, tokenizer)
        return _Loaded(
            model=model,
            engine=engine,
            tokenizer=tokenizer,
            processor=MediaProcessor.for_model(processor, config),
            marks=_marks(tokenizer, config),
            longest=math.inf if limit is None else limit - self._sampling.max_new_tokens,
            device=device,
        )

    def _replies(
        self, loaded: _Loaded, requests: Mapping[_Request, _PromptMedia]
    ) -> dict[_Request, Reply]:
        """Return the replies to all requests but those that are too long."""
        rows = {request: self._row(loaded, request, own) for request, own in requests.items()}
        fits = {
            request: row
            for request, row in rows.items()
            if row is not None and len(row.input_ids) <= loaded.longest
        }
        replies: dict[_Request, Reply] = {}
        with in_place(loaded.model, loaded.device, offload=self._offload):
            for chosen in batches_of(fits, self._batch_size):
                seeds = [request.seed for request in chosen]
                generated = self._generated(loaded, [fits[request] for request in chosen], seeds)
                replies |= zip(chosen, generated, strict=True)
        return replies

    def _row(self, loaded: _Loaded, request: _Request, media: _PromptMedia) -> Row | None:
        """Encode a request; None: it is too long for the model."""
        system = [{"role": "system", "content": self._system}] if self._system else []
        parts = [
            {"type": kind} for kind, own in zip(("image", "video"), media, strict=True) for _ in own
        ]
        content = [*parts, {"type": "text", "text": request.text}] if parts else request.text
        text = rendered(
            loaded.tokenizer,
            self._chat_template,
            [*system, {"role": "user", "content": content}],
            source=self._spec.source,
            open_turn=True,
        )
        if loaded.processor is None or not parts:
            return Row(encoded(loaded.tokenizer, text, specials=False))
        try:
            return Row(*loaded.processor.encode(text, *media))
        except MediaError as error:
            if error.reason == "too long":
                return None
            raise RewardError(f"the model {self._spec.source!r}: {error}") from error

    def _generated(
        self, loaded: _Loaded, rows: Sequence[Row], seeds: Sequence[int]
    ) -> Iterator[Reply]:
        media = tuple(row.media for row in rows)
        prompts = token_prompts([row.input_ids for row in rows], media if any(media) else None).to(
            loaded.device
        )
        rollout = loaded.engine.generate(prompts, self._sampling, num_generations=1, seeds=seeds)
        texts = response_texts(prompts, rollout, loaded.tokenizer, self._sampling)
        lengths = rollout.response_mask.sum(dim=1).tolist()
        for text, cut, row, length in zip(
            texts, rollout.truncated.tolist(), rows, lengths, strict=True
        ):
            yield Reply(str(text), not cut, len(row.input_ids), length)


def _marks(tokenizer: PreTrainedTokenizerBase, config: PreTrainedConfig) -> tuple[str, ...]:
    """Return the tokens by which a response could leave its part of the question or show media."""
    media = tokenizer.convert_ids_to_tokens(list(ruled_out_ids(config)))
    added = [str(token) for token in tokenizer.added_tokens_decoder.values() if token.special]
    known = dict.fromkeys((*media, *tokenizer.all_special_tokens, *added))
    # the question escapes the others, as in training, which does not depend on the tokenizer
    return tuple(mark for mark in known if marks_as_text(mark) == mark)


def _neutral(text: str, marks: Sequence[str]) -> str:
    """Return a text without marks: those with ``<`` are escaped, the others removed."""
    text = text_without_marks(text, [mark for mark in marks if "<" not in mark])
    opening = [re.escape(mark) for mark in marks if "<" in mark]
    if not opening:
        return text
    pattern = re.compile("|".join(opening))
    # again, as two marks may share a character
    while (escaped := pattern.sub(lambda match: match[0].replace("<", "&lt;"), text)) != text:
        text = escaped
    return text


def _media_of(
    loaded: _Loaded,
    images: Sequence[Sequence[Any]] | None,
    videos: Sequence[Sequence[Any]] | None,
    *,
    count: int,
) -> list[_PromptMedia]:
    """Return images and videos of each prompt; none for a text model."""
    none: list[Sequence[Any]] = [()] * count
    if loaded.processor is None:
        return [((), ())] * count
    return [*zip(images or none, videos or none, strict=True)]
