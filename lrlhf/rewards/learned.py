"""Rewards from trained reward models in this process.

`LearnedReward` scores complete responses. Below it are the parts that other rewards with a model
share: how prompt and response become one text and its tokens, how rows are batched, and where the
model is while it computes.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import re
from abc import abstractmethod
from collections.abc import Hashable, Iterator, Mapping, Sequence
from typing import Any, ClassVar, Generic, Literal, NamedTuple, TypeVar

import torch
from torch import Tensor, nn
from transformers import PreTrainedConfig, PreTrainedTokenizerBase

from lrlhf.media import MediaError, MediaProcessor, MediaRefs
from lrlhf.models import (
    TEMPLATE_ERRORS,
    RewardNetwork,
    cached_vision_features,
    context_of,
    load_processor,
    load_tokenizer,
    packs,
    reader_of,
    rejoined,
    ruled_out_ids,
    split_messages,
)
from lrlhf.models.chat_templates import readable_messages
from lrlhf.models.loading.pretrained import DType
from lrlhf.models.sharding import device_of
from lrlhf.rewards.dispatch import until_timeout
from lrlhf.rewards.function import (
    Completion,
    CopiesStartAfresh,
    LogMetric,
    RewardError,
    check_positive,
    completion_text,
    content_text,
    did_you_mean,
)
from lrlhf.types import Media, Message, Prompt, SequenceBatch
from lrlhf.vllm_worker.fingerprint import fingerprint

SpecialTokens = Literal["with_eos", "tokenizer", "none"]
"""Around a plain text: the tokenizer's special tokens and an end, these tokens, or nothing."""
_NO_LIMIT = 10**9  # tokenizers without a limit have one of 30 digits

LoadedT = TypeVar("LoadedT")


class OwnModelReward(CopiesStartAfresh, Generic[LoadedT]):
    """A reward with a model that is loaded at the first use, and by each copy on its own device."""

    ends_by_itself: ClassVar[bool] = True
    none_is_missing: ClassVar[bool] = True
    _not_copied = ("_loaded",)

    def _start_afresh(self) -> None:
        self._loaded: LoadedT | None = None

    def prepare(self) -> None:
        """Load the model.

        Raises:
            ValueError: The source leads to no model of this kind, or to one that does not fit the
                options.
        """
        self._ready()

    def _ready(self) -> LoadedT:
        if self._loaded is None:
            self._loaded = self._load()
        return self._loaded

    @abstractmethod
    def _load(self) -> LoadedT:
        """Load the model and what goes with it."""


class TextMarks(NamedTuple):
    """Texts that become special tokens of a model."""

    padding: tuple[str, ...] = ()
    """Of padding and of the end of a text."""
    media: tuple[str, ...] = ()
    """Placeholders of one image, video or audio, before the processor counts its tokens."""


class ModelFacts(NamedTuple):
    """The model of a learned reward."""

    source: str
    heads: tuple[str, ...]
    head: str
    """The one whose score counts."""
    fingerprint: str
    """16 letters that change with all that scores depend on, such as weights and tokenizer."""
    marks: TextMarks


class _Loaded(NamedTuple):
    network: RewardNetwork
    tokenizer: PreTrainedTokenizerBase
    processor: MediaProcessor | None
    marks: tuple[str, ...]
    """Placeholders of media in the model's texts; a response must not contain them."""
    head: int
    max_tokens: int | None
    device: torch.device


class LearnedReward(OwnModelReward[_Loaded]):
    """The score of a trained reward model for prompt and response.

    The model reads text, through its own tokenizer and chat template, so that it may be of another
    family than the policy. The model is frozen, and loaded at the first use.
    A multimodal reward model reads the prompts' images, videos and audio, through its own
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
        special_tokens: Around texts that are no chats: ``with_eos``, those of the tokenizer and
            the end-of-sequence token, as ``RewardModel`` trains; ``tokenizer``, only the first;
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
        check_positive(batch_size=batch_size, max_tokens=max_tokens)
        self._source, self._head, self._special_tokens = source, head, special_tokens
        self._tokenizer, self._chat_template = tokenizer, chat_template
        self._batch_size, self._max_tokens = batch_size, max_tokens
        self._device, self._dtype, self._offload = device, dtype, offload
        self._attn_implementation = attn_implementation
        self._trust_remote_code = trust_remote_code
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
        """Load the model, and describe it.

        Raises:
            ValueError: As :meth:`prepare`.
        """
        loaded = self._ready()
        tokenizer, processor = loaded.tokenizer, loaded.processor
        template = self._chat_template or tokenizer.chat_template
        settings = (loaded.head, loaded.max_tokens, template, sorted(tokenizer.get_vocab().items()))
        special = "" if self._special_tokens == "with_eos" else self._special_tokens
        text = repr(settings) + special
        digest = hashlib.blake2b(text.encode("utf-8", "surrogatepass"), digest_size=8)
        for name, weight in sorted(loaded.network.state_dict().items()):
            digest.update(
                f"{name} {weight.dtype} {[*weight.shape]} {int(fingerprint(weight))}".encode()
            )
        return ModelFacts(
            source=self._source,
            heads=loaded.network.head_names,
            head=loaded.network.head_names[loaded.head],
            fingerprint=digest.hexdigest(),
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
            self._row(loaded, *each)
            for each in until_timeout(zip(prompts, completions, shown, strict=True))
        ]
        rows = share_media(rows, prompts, shown)
        limit = loaded.max_tokens
        long = [row is None or (limit is not None and len(row.input_ids) > limit) for row in rows]
        log_metric("learned/too_long", sum(long) / max(1, len(rows)))
        scored = {
            index: row
            for index, row in enumerate(rows)
            if row is not None and row.input_ids and not long[index]
        }
        packed = packs(loaded.network.scorer.plain)
        scores: list[float | None] = [None] * len(rows)
        with (
            cached_vision_features(),
            in_place(loaded.network, loaded.device, offload=self._offload),
        ):
            for indices in batches_of(scored, self._batch_size, packed=packed):
                values = _score(loaded, [scored[index] for index in indices])
                for index, score in zip(indices, values, strict=True):
                    scores[index] = score
        return scores

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
            if not isinstance(completion, str):
                completion = [as_text(turn) for turn in completion]
        text = full_text(tokenizer, self._chat_template, prompt, completion, source=self._source)
        if loaded.processor is None or not shown:
            marks = self._special_tokens
            return Row(text_ids(tokenizer, text, chat=chat, special_tokens=marks))
        if not chat and self._special_tokens == "with_eos":
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


class Row(NamedTuple):
    """One response with its prompt, as the reward model reads it."""

    input_ids: Sequence[int]
    media: Media | None = None
    prompt: int = 0
    """Equal for rows with the same prompt."""


def share_media(
    rows: Sequence[Row | None],
    prompts: Sequence[Prompt],
    shown: Sequence[MediaRefs] | None = None,
) -> list[Row | None]:
    """Give rows with the same objects the same `Media`, whose features are computed once."""
    media: dict[tuple[int, ...], Media] = {}
    numbers: dict[str, int] = {}
    shared: list[Row | None] = []
    shown = shown or [MediaRefs()] * len(rows)
    for row, prompt, refs in zip(rows, prompts, shown, strict=True):
        if row is not None:
            text = prompt if isinstance(prompt, str) else repr(prompt)
            row = row._replace(prompt=numbers.setdefault(text, len(numbers)))
        if row is not None and row.media is not None:
            key = tuple(map(id, refs.everything))
            row = row._replace(media=media.setdefault(key, row.media))
        shared.append(row)
    return shared


def text_without_marks(text: str, marks: Sequence[str]) -> str:
    """Remove marks, also those that the removal of others leaves."""
    pattern = re.compile("|".join(map(re.escape, marks)))
    while (left := pattern.sub("", text)) != text:
        text = left
    return text


def without_marks(completion: Completion, marks: Sequence[str]) -> Completion:
    """Remove what the reward model would read as media: a policy can spell it by letters."""

    def clean(value: Any) -> Any:
        """Remove marks from all texts in a value of JSON, such as a turn with calls."""
        if isinstance(value, str):
            return text_without_marks(value, marks)
        if isinstance(value, Mapping):
            return {name: clean(entry) for name, entry in value.items()}
        return [clean(entry) for entry in value] if isinstance(value, list | tuple) else value

    cleaned: Completion = clean(completion) if marks else completion
    return cleaned


def as_text(turn: Message) -> Message:
    """Reduce content that comes in parts to its text, for a text model."""
    content = turn.get("content")
    return {**turn, "content": content_text(content)} if isinstance(content, list) else turn


def encoded(tokenizer: PreTrainedTokenizerBase, text: str, *, specials: bool) -> list[int]:
    """Tokenize a text; a beginning-of-sequence token is not doubled."""
    reader = reader_of(tokenizer, text)
    ids: list[int] = reader(text, add_special_tokens=specials, verbose=False)["input_ids"]
    bos = tokenizer.bos_token_id
    doubled = bos is not None and ids[:2] == [bos, bos]
    return ids[1:] if doubled else ids


def text_ids(
    tokenizer: PreTrainedTokenizerBase,
    text: str,
    *,
    chat: bool,
    special_tokens: SpecialTokens = "with_eos",
) -> list[int]:
    """Tokenize prompt and response; a chat gets its special tokens from its template.

    Args:
        tokenizer: The reward model's.
        text: Of both.
        chat: Whether a template has rendered it.
        special_tokens: Of other text; the default is what ``RewardModel`` trains on.
    """
    ids = encoded(tokenizer, text, specials=not chat and special_tokens != "none")
    end = tokenizer.eos_token_id
    ended = chat or special_tokens != "with_eos" or end is None or ids[-1:] == [end]
    return ids if ended else [*ids, end]


def full_text(
    tokenizer: PreTrainedTokenizerBase,
    template: str | None,
    prompt: Prompt,
    completion: Completion,
    *,
    source: str,
) -> str:
    """Return prompt and response as one text; see `rendered`."""
    if isinstance(prompt, str):
        # a text with all inputs in between, as the policy has read it
        return prompt + (completion if isinstance(completion, str) else completion_text(completion))
    turns = (
        [{"role": "assistant", "content": completion}]
        if isinstance(completion, str)
        else completion
    )
    return rendered(tokenizer, template, (*prompt, *turns), source=source)


def padded(rows: Sequence[Row]) -> SequenceBatch:
    """Pad at the right; the id does not matter, as the mask is False there."""
    lengths = torch.tensor([len(row.input_ids) for row in rows])
    input_ids = torch.nn.utils.rnn.pad_sequence([torch.tensor(row.input_ids) for row in rows], True)
    mask = torch.arange(input_ids.shape[1]) < lengths[:, None]
    return SequenceBatch(
        input_ids=input_ids,
        attention_mask=mask,
        response_mask=mask,
        media=tuple(row.media for row in rows),
        group_ids=torch.tensor([row.prompt for row in rows]),
    )


def rendered(
    tokenizer: PreTrainedTokenizerBase,
    template: str | None,
    turns: Sequence[Message],
    *,
    source: str,
    open_turn: bool = False,
) -> str:
    """Render a chat as the reward model reads it; special tokens in the content are split.

    Calls become text if its template leaves them out.

    Args:
        tokenizer: The reward model's.
        template: Jinja text; None: the tokenizer's.
        turns: Of the chat.
        source: The reward model, for messages.
        open_turn: End where the assistant is to answer.

    Raises:
        RewardError: There is no template, or it refuses the turns.
    """
    if template is None and tokenizer.chat_template is None:
        raise RewardError(f"the prompts are chats, and {no_template(tokenizer, source, open_turn)}")

    def render(turns: Sequence[Message]) -> str:
        try:
            split = split_messages(tokenizer, turns, template)
            text = tokenizer.apply_chat_template(
                readable_messages(split, tokenizer.get_chat_template(template)),
                chat_template=template,
                tokenize=False,
                add_generation_prompt=open_turn,
            )
        except TEMPLATE_ERRORS as error:
            raise RewardError(
                f"the chat template of {source!r} refuses the messages: {error}; give chat_template"
            ) from error
        return rejoined(str(text))

    text = render(turns)
    if any(turn.get("tool_calls") for turn in turns):
        other = {"type": "function", "function": {"name": "LRLHF-CALL-5E1D", "arguments": {}}}
        marked = [
            {**turn, "tool_calls": [other]} if turn.get("tool_calls") else turn for turn in turns
        ]
        if render(marked) == text:
            return render([_calls_as_text(turn) for turn in turns])
    return text


def _calls_as_text(turn: Message) -> Message:
    """Put calls into the content, for templates without a form for them."""
    texts = [content_text(turn.get("content"))]
    for call in turn.get("tool_calls") or ():
        function = call.get("function", call)
        fields = {"name": function.get("name"), "arguments": function.get("arguments")}
        text = json.dumps(fields, ensure_ascii=False, default=str)
        texts.append(f"<tool_call>\n{text}\n</tool_call>")
    return {**turn, "content": "\n".join(filter(None, texts))} if len(texts) > 1 else turn


def no_template(tokenizer: PreTrainedTokenizerBase, source: str, open_turn: bool) -> str:
    """Return the message that a tokenizer cannot render chats, with the option that helps."""
    return (
        f"the tokenizer of {source!r} has no chat template: give chat_template; for a model that "
        f"was trained on plain texts chat_template: {plain_template(tokenizer, open_turn)!r}"
    )


def plain_template(tokenizer: PreTrainedTokenizerBase, open_turn: bool) -> str:
    """Return the template that renders a chat as plain text is encoded: turn after turn.

    It contains the special tokens around plain text, which a chat gets from its template.

    Args:
        tokenizer: The reward model's.
        open_turn: The text goes on, so that nothing ends it.
    """
    bare, ids = (text_ids(tokenizer, "a", chat=chat) for chat in (True, False))
    starts = [i for i in range(len(ids)) if ids[i : i + len(bare)] == bare]
    start = starts[0] if starts else 0
    before, after = ids[:start], ids[start + len(bare) :]
    first, last = ("".join(tokenizer.convert_ids_to_tokens(part)) for part in (before, after))
    turns = "{% for m in messages %}{{ m.content }}{% endfor %}"
    return f"{first}{turns}{'' if open_turn else last}"


def token_limit(
    max_tokens: int | None, config: PreTrainedConfig, tokenizer: PreTrainedTokenizerBase
) -> int | None:
    """Return how many tokens an input may have; None: no limit."""
    limits = [max_tokens, context_of(config)]
    if tokenizer.model_max_length < _NO_LIMIT:
        limits.append(int(tokenizer.model_max_length))
    return min((limit for limit in limits if limit is not None), default=None)


def resolve_device(device: str) -> torch.device:
    """Return a device by its name, ``auto`` being the process's current GPU, if any."""
    if device != "auto":
        return torch.device(device)
    if torch.cuda.is_available():
        return torch.device("cuda", torch.cuda.current_device())
    return torch.device("cpu")


RowT = TypeVar("RowT", bound=Hashable)


def batches_of(
    rows: Mapping[RowT, Row], batch_size: int, *, packed: bool = False
) -> Iterator[list[RowT]]:
    """Yield the keys of rows that go through the model together, until the call times out.

    Rows of like lengths need little padding; in a model that computes ``packed`` rows, those with
    the same prompt, which is computed once.

    Raises:
        CallTimeoutError: See `until_timeout`.
    """
    order = sorted(
        rows, key=lambda key: (rows[key].prompt if packed else 0, len(rows[key].input_ids))
    )
    for start in until_timeout(range(0, len(order), batch_size)):
        yield order[start : start + batch_size]


@contextlib.contextmanager
def in_place(network: nn.Module, device: torch.device, *, offload: bool) -> Iterator[None]:
    """Hold a network on its device inside the block, and with ``offload`` not longer."""
    # threads do not inherit the process's current GPU
    current = torch.cuda.device(device) if device.type == "cuda" else contextlib.nullcontext()
    with current:
        if not offload:
            yield
            return
        network.to(device)
        try:
            yield
        finally:
            network.to("cpu")
