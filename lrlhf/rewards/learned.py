"""Rewards from trained reward models."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor
from transformers import PreTrainedTokenizerBase

from lrlhf.media import MediaError, MediaProcessor, MediaRefs
from lrlhf.models import (
    RewardNetwork,
    load_processor,
    load_tokenizer,
    looking_once,
    packs,
    ruled_out_ids,
)
from lrlhf.models.loading.pretrained import DType
from lrlhf.models.sharding import device_of
from lrlhf.rewards.dispatch import while_wanted
from lrlhf.rewards.function import (
    Completion,
    LogMetric,
    RewardError,
    did_you_mean,
)
from lrlhf.rewards.learned_rows import (
    Row,
    SpecialTokens,
    as_text,
    check_special_tokens,
    in_place,
    padded,
    resolve_device,
    sharing,
    text_ids,
    token_limit,
    without_marks,
    written,
)
from lrlhf.rewards.own_model import OwnModelReward
from lrlhf.types import Prompt
from lrlhf.vllm_worker.fingerprint import fingerprint


class TextMarks(NamedTuple):
    """Texts that a model reads as something else than letters."""

    padding: tuple[str, ...] = ()
    """Of padding and of the end of a text."""
    media: tuple[str, ...] = ()
    """What stands for one image, video or audio, before the processor counts its tokens."""


class ModelFacts(NamedTuple):
    """What a learned reward tells of its model."""

    source: str
    heads: tuple[str, ...]
    head: str
    """The one whose score counts."""
    fingerprint: str
    """16 letters that change with the weights, the tokenizer, and what else scores depend on."""
    marks: TextMarks


class _Loaded(NamedTuple):
    network: RewardNetwork
    tokenizer: PreTrainedTokenizerBase
    processor: MediaProcessor | None
    marks: tuple[str, ...]
    """What stands for media in the model's texts; a response must not say it."""
    head: int
    max_tokens: int | None
    device: torch.device


class LearnedReward(OwnModelReward[_Loaded]):
    """The score that a trained reward model gives to prompt and response.

    The model reads text, through its own tokenizer and chat template, so that it may be of another
    family than the policy. The model is frozen, and loaded at the first use.
    A multimodal reward model is shown the prompts' images, videos and audio, through its own
    processor; a text model reads the text parts of such prompts. Responses that are too long for
    it get no score, and ``rewards/learned/too_long`` counts them; nothing is cut.

    Args:
        source: Folder written by ``RewardModel``, or any sequence classifier with one label: a
            folder, a hub id or ``package:<module>[/<path>]``.
        head: Which of the model's scores counts; needed only if it has several.
        tokenizer: Source of the tokenizer; null: the model's.
        chat_template: Jinja text for prompts that are chats; null: the tokenizer's.
        batch_size: Responses that are scored at once.
        max_tokens: Longest prompt and response together, if the model itself has no lower limit.
        device: ``auto`` is the process's current GPU, if there is one.
        dtype: Of the model; ``auto`` is as stored.
        attn_implementation: As in ``from_pretrained`` of ``transformers``.
        trust_remote_code: Run Python code that comes with the model.
        offload: Keep the model in main memory between two calls.
        special_tokens: Around texts that are no chats: ``with_eos``, what the tokenizer puts there
            and the end-of-sequence token, as ``RewardModel`` trains; ``tokenizer``, only the first;
            ``none``, as TRL's ``RLOOTrainer`` scores.
    """

    def __init__(  # noqa: PLR0913  the keys of a user's config
        self,
        source: str,
        head: str | None = None,
        tokenizer: str | None = None,
        chat_template: str | None = None,
        batch_size: int = 8,
        max_tokens: int | None = None,
        device: str = "auto",
        dtype: DType = "auto",
        attn_implementation: str | None = None,
        trust_remote_code: bool = False,
        offload: bool = False,
        special_tokens: SpecialTokens = "with_eos",
    ) -> None:
        check_special_tokens(special_tokens)
        if batch_size < 1:
            raise ValueError(f"batch_size is {batch_size}; it must be 1 or more")
        if max_tokens is not None and max_tokens < 1:
            raise ValueError(f"max_tokens is {max_tokens}; it must be 1 or more, or null")
        self._source = source
        self._head = head
        self._tokenizer = tokenizer
        self._chat_template = chat_template
        self._batch_size = batch_size
        self._max_tokens = max_tokens
        self._device = device
        self._dtype = dtype
        self._attn_implementation = attn_implementation
        self._trust_remote_code = trust_remote_code
        self._offload = offload
        self._special_tokens = special_tokens
        self._start_afresh()

    @classmethod
    def of_network(
        cls,
        network: RewardNetwork,
        tokenizer: PreTrainedTokenizerBase,
        processor: MediaProcessor | None,
        *,
        head: str | None = None,
        batch_size: int = 8,
    ) -> LearnedReward:
        """Score with a network that is in memory already, where it is and as it is.

        Raises:
            ValueError: It has no such head, or several and none was chosen.
        """
        device = device_of(network)
        reward = cls("in memory", head=head, batch_size=batch_size, device=str(device))
        reward._loaded = reward._with(network, tokenizer, processor)
        return reward

    def describe(self) -> ModelFacts:
        """Load the model, and tell which one it is.

        Raises:
            ValueError: As :meth:`prepare`.
        """
        loaded = self._ready()
        tokenizer, processor = loaded.tokenizer, loaded.processor
        template = self._chat_template or tokenizer.chat_template
        settings = (loaded.head, loaded.max_tokens, template, sorted(tokenizer.get_vocab().items()))
        return ModelFacts(
            source=self._source,
            heads=loaded.network.head_names,
            head=loaded.network.head_names[loaded.head],
            fingerprint=_fingerprint(
                loaded.network, repr(settings) + ("" if self._ends_text else self._special_tokens)
            ),
            marks=TextMarks(
                padding=tuple(
                    str(mark) for mark in (tokenizer.pad_token, tokenizer.eos_token) if mark
                ),
                media=tuple(processor.markers.values()) if processor else (),
            ),
        )

    def __call__(
        self,
        *,
        prompts: Sequence[Prompt],
        completions: Sequence[Completion],
        log_metric: LogMetric,
        images: Sequence[Sequence[Any]] | None = None,
        videos: Sequence[Sequence[Any]] | None = None,
        audios: Sequence[Sequence[Any]] | None = None,
        **columns: Any,
    ) -> list[float | None]:
        loaded = self._ready()
        nothing: list[Sequence[Any]] = [()] * len(prompts)
        shown = [
            MediaRefs(*map(tuple, row))
            for row in zip(images or nothing, videos or nothing, audios or nothing, strict=True)
        ]
        rows = [
            self._row(loaded, *given)
            for given in while_wanted(zip(prompts, completions, shown, strict=True))
        ]
        rows = sharing(rows, prompts, shown)
        limit = loaded.max_tokens
        long = [row is None or (limit is not None and len(row.input_ids) > limit) for row in rows]
        log_metric("learned/too_long", sum(long) / max(1, len(rows)))
        scored = {
            index: row
            for index, row in enumerate(rows)
            if row is not None and row.input_ids and not long[index]
        }
        # what goes through the model together: rows with one prompt, which is computed once, or
        # rows of one length, which need no padding
        packed = packs(loaded.network.scorer.plain)
        short = sorted(
            scored,
            key=lambda row: (scored[row].prompt if packed else 0, len(scored[row].input_ids)),
        )
        scores: list[float | None] = [None] * len(rows)
        with looking_once(), in_place(loaded.network, loaded.device, offload=self._offload):
            for start in while_wanted(range(0, len(short), self._batch_size)):
                chosen = short[start : start + self._batch_size]
                found = _score(loaded, [scored[row] for row in chosen])
                for row, score in zip(chosen, found, strict=True):
                    scores[row] = score
        return scores

    @property
    def _ends_text(self) -> bool:
        return self._special_tokens == "with_eos"

    def _load(self) -> _Loaded:
        network = RewardNetwork.from_pretrained(
            self._source,
            dtype=self._dtype,
            attn_implementation=self._attn_implementation,
            trust_remote_code=self._trust_remote_code,
        )
        device = resolve_device(self._device)
        network.to("cpu" if self._offload else device).eval().requires_grad_(False)
        tokenizer = load_tokenizer(
            self._tokenizer or self._source, trust_remote_code=self._trust_remote_code
        )
        processor = load_processor(self._source, trust_remote_code=self._trust_remote_code)
        return self._with(network, tokenizer, MediaProcessor.for_model(processor, network.config))

    def _with(
        self,
        network: RewardNetwork,
        tokenizer: PreTrainedTokenizerBase,
        processor: MediaProcessor | None,
    ) -> _Loaded:
        return _Loaded(
            network=network,
            tokenizer=tokenizer,
            processor=processor,
            marks=tuple(tokenizer.convert_ids_to_tokens(list(ruled_out_ids(network.config)))),
            head=_head_index(network.head_names, self._head, self._source),
            max_tokens=token_limit(self._max_tokens, network.config, tokenizer),
            device=resolve_device(self._device),
        )

    def _row(
        self,
        loaded: _Loaded,
        prompt: Prompt,
        completion: Completion,
        shown: MediaRefs,
    ) -> Row | None:
        """Encode a response with its prompt; None: it is too long for the model."""
        tokenizer = loaded.tokenizer
        completion = without_marks(completion, loaded.marks)
        chat = not isinstance(prompt, str)
        if loaded.processor is None and not isinstance(prompt, str):
            prompt = tuple(as_text(turn) for turn in prompt)
        text = written(tokenizer, self._chat_template, prompt, completion, source=self._source)
        if loaded.processor is None or not shown:
            marks = self._special_tokens
            return Row(text_ids(tokenizer, text, chat=chat, special_tokens=marks))
        if not chat and self._ends_text:
            end_text = str(tokenizer.eos_token or "")
            text = text.removesuffix(end_text) + end_text
        complete = chat or self._special_tokens == "none"
        try:
            return Row(
                *loaded.processor.encode(
                    text, shown.images, shown.videos, shown.audios, complete=complete
                )
            )
        except MediaError as error:
            if error.reason == "too long":
                return None
            raise RewardError(f"the reward model {self._source!r}: {error}") from error


def _fingerprint(network: RewardNetwork, settings: str) -> str:
    digest = hashlib.blake2b(settings.encode("utf-8", "surrogatepass"), digest_size=8)
    for name, weight in sorted(network.state_dict().items()):
        digest.update(
            f"{name} {weight.dtype} {[*weight.shape]} {int(fingerprint(weight))}".encode()
        )
    return digest.hexdigest()


@torch.inference_mode()
def _score(loaded: _Loaded, rows: Sequence[Row]) -> list[float]:
    scores: Tensor = loaded.network(padded(rows).to(loaded.device))
    return scores[:, loaded.head].float().tolist()


def _head_index(heads: Sequence[str], head: str | None, source: str) -> int:
    if head is None and len(heads) == 1:
        return 0
    if head is None:
        raise ValueError(
            f"the reward model {source!r} has the heads {', '.join(heads)}: choose one with head"
        )
    if head not in heads:
        raise ValueError(
            f"the reward model {source!r} has no head {head!r}{did_you_mean(head, heads)} (heads: "
            f"{', '.join(heads)})"
        )
    return list(heads).index(head)
