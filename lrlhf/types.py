"""The batches that flow between the parts, one per stage of a step.

Everything per token is ``[B, T]``, right-padded and aligned with ``input_ids``: entry ``[b, t]``
belongs to ``input_ids[b, t]`` given what precedes it. Masks are bool and True means "counts".
"""

from __future__ import annotations

import operator
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from itertools import chain, islice
from typing import Any, Literal, Self

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

Message = Mapping[str, Any]
"""One chat turn: ``role``, ``content``, and whatever else the chat template reads."""

Prompt = str | tuple[Message, ...]
"""Plain text, or the turns of a chat that the policy is to continue."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Media:
    """What one row shows: images, videos, audio, in the order of their placeholders in its text.

    Rows with the same prompt hold the same object, which is how a model knows that it need not
    look at it again.
    """

    tensors: Mapping[str, Tensor]
    """By argument of the model's forward pass, as its processor makes them of this row alone."""
    tokens: Mapping[str, int]
    """Placeholder tokens in the row by kind, ``image``, ``video`` and ``audio``."""
    images: tuple[Any, ...] = ()
    """``PIL.Image``, RGB, as the processor got them."""
    videos: tuple[Any, ...] = ()
    """uint8 `[F, H, W, 3]` with ``fps``, as the processor got them."""
    audios: tuple[Any, ...] = ()
    """float32 samples `[N]` with ``sampling_rate``, as the processor got them."""
    prompt_ids: tuple[int, ...] = ()
    """The prompt with one placeholder for each of them, for engines that count for themselves."""
    names: tuple[str, ...] = ()
    """What logs call the images, videos and audio."""
    parts: tuple[Media, ...] = ()
    """What a row of several turns shows, one after the other, a part once for each of its places;
    such a row has no tensors of its own, so that rows and turns share their parts."""

    @classmethod
    def joined(cls, parts: Sequence[Media], prompt_ids: Sequence[int]) -> Media:
        """Return the media of a row that shows some parts one after the other."""
        tokens: Counter[str] = Counter()
        for part in parts:
            tokens.update(part.tokens)
        kinds = ("images", "videos", "audios")
        shown: dict[str, tuple[Any, ...]] = {
            kind: tuple(chain.from_iterable(getattr(p, kind) for p in parts)) for kind in kinds
        }
        names: list[list[str]] = [[], [], []]  # kind by kind, as those of each part
        for part in parts:
            remaining = iter(part.names)
            for own, kind in zip(names, kinds, strict=True):
                own += islice(remaining, len(getattr(part, kind)))
        shown["names"] = tuple(chain.from_iterable(names))
        return cls(
            tensors={}, tokens=dict(tokens), prompt_ids=tuple(prompt_ids), parts=(*parts,), **shown
        )

    @property
    def pieces(self) -> tuple[Media, ...]:
        """Its parts, or itself."""
        return self.parts or (self,)


@dataclass(frozen=True, slots=True, kw_only=True, repr=False)
class TensorBatch:
    """Rows of tensors and of Python values that move and split together.

    Lightning refuses to move a frozen dataclass that has no ``to``, and a DataLoader silently
    leaves one unpinned that has no ``pin_memory``, so both are here.
    """

    def __repr__(self) -> str:
        values = ((field.name, getattr(self, field.name)) for field in fields(self))
        lines = [f"{name}: {_summary(value)}" for name, value in values if value is not None]
        return "\n  ".join([type(self).__name__, *lines])

    def map(self, function: Callable[[Tensor], Tensor], *, media: bool = False) -> Self:
        """Apply ``function`` to every tensor, also inside nested batches.

        Args:
            function: What to apply.
            media: Also to the tensors of images and videos, which have no rows or columns in
                common with the others. Rows that share media still share them afterwards.
        """
        return self._mapped(function, {} if media else None)

    def _mapped(self, function: Callable[[Tensor], Tensor], seen: dict[int, Media] | None) -> Self:
        """Apply ``function``; ``seen``: what became of the media so far, None: they stay."""
        changed: dict[str, Any] = {}
        for field in fields(self):
            value = getattr(self, field.name)
            if isinstance(value, Tensor):
                changed[field.name] = function(value)
            elif isinstance(value, TensorBatch):
                changed[field.name] = value._mapped(function, seen)
            elif isinstance(value, Mapping):
                changed[field.name] = {name: function(column) for name, column in value.items()}
            elif seen is not None and field.name == "media" and value is not None:
                changed[field.name] = _map_media(value, function, seen)
        return replace(self, **changed)

    def to(self, device: torch.device | str, *, non_blocking: bool = False) -> Self:
        """Move every tensor to ``device``."""
        return self.map(lambda tensor: tensor.to(device, non_blocking=non_blocking), media=True)

    def pin_memory(self) -> Self:
        """Pin every tensor, so that the copy to a GPU can overlap with work."""
        return self.map(lambda tensor: tensor.pin_memory(), media=True)

    def select(self, rows: Int[Tensor, " N"]) -> Self:
        """Return the batch of the given rows: tensors, tuples and nested batches alike."""
        positions = rows.tolist()
        changed: dict[str, Any] = {}
        for field in fields(self):
            value = getattr(self, field.name)
            if isinstance(value, Tensor):
                changed[field.name] = value[rows.to(value.device)]
            elif isinstance(value, TensorBatch):
                changed[field.name] = value.select(rows)
            elif isinstance(value, Mapping):
                changed[field.name] = {
                    name: column[rows.to(column.device)] for name, column in value.items()
                }
            elif isinstance(value, tuple):
                changed[field.name] = tuple(value[position] for position in positions)
        return replace(self, **changed)


def _summary(value: Any) -> str:
    """Write a field of a batch without its numbers."""
    if isinstance(value, Tensor):
        device = f" on {value.device}".removesuffix(" on cpu")
        return f"{str(value.dtype).removeprefix('torch.')} {list(value.shape)}{device}"
    if isinstance(value, TensorBatch):
        return repr(value).replace("\n", "\n  ")
    if isinstance(value, Mapping):
        return ", ".join(value) or "none"
    return f"{len(value)} rows" if isinstance(value, tuple) else repr(value)


def _map_media(
    media: tuple[Media | None, ...], function: Callable[[Tensor], Tensor], seen: dict[int, Media]
) -> tuple[Media | None, ...]:
    """Apply ``function`` once to each tensor, however many rows and nested batches share it."""
    for entry in media:
        if entry is not None and id(entry) not in seen:
            tensors = {name: function(tensor) for name, tensor in entry.tensors.items()}
            parts = tuple(part for part in _map_media(entry.parts, function, seen) if part)
            same = all(tensors[name] is tensor for name, tensor in entry.tensors.items())
            same &= all(map(operator.is_, parts, entry.parts))
            # what is on the device already stays the object that features are remembered by
            seen[id(entry)] = entry if same else replace(entry, tensors=tensors, parts=parts)
    return tuple(None if entry is None else seen[id(entry)] for entry in media)


@dataclass(frozen=True, slots=True, kw_only=True, repr=False)
class SamplingMask(TensorBatch):
    """The ids that truncated sampling (top_p, top_k, min_p) left to choose from at each token.

    As ragged rows (CSR): 4 bytes for each id that was left, and 4 for each token.

    Reference:
        "Keep sampling mask" of DeepSeek-V3.2, section 3.1, https://arxiv.org/abs/2512.02556
    """

    sizes: Int[Tensor, "B T"]
    """How many ids were left; 0: all, or the token was not sampled."""
    ids: Int[Tensor, " E"]
    """Those of one token after the other, row by row."""

    @property
    def starts(self) -> Int[Tensor, "B T"]:
        """Where the ids of each token begin."""
        sizes = self.sizes.long().flatten()
        return (sizes.cumsum(0) - sizes).view_as(self.sizes)

    def ids_at(self, starts: Int[Tensor, "*dims"], sizes: Int[Tensor, "*dims"]) -> Tensor:
        """Return the ids of some tokens, one after the other, `[E']`."""
        sizes = sizes.long().flatten()
        shift = starts.flatten() - (sizes.cumsum(0) - sizes)
        index = torch.repeat_interleave(shift, sizes)
        return self.ids[index + torch.arange(len(index), device=index.device)]

    def holds(self, tokens: Int[Tensor, "B T"]) -> Bool[Tensor, "B T"]:
        """Tell which tokens are among the ids that were left."""
        owner = torch.repeat_interleave(self.sizes.flatten().long())
        held = self.sizes.flatten() == 0
        held[owner[self.ids == tokens.flatten()[owner]]] = True
        return held.view_as(self.sizes)

    def select(self, rows: Int[Tensor, " N"]) -> SamplingMask:
        return self._at(rows.to(self.sizes.device))

    def rows(self) -> list[SamplingMask]:
        """Return the mask of each row."""
        ids = torch.split(self.ids, self.sizes.sum(dim=1).tolist())
        sizes = torch.split(self.sizes, 1)
        return [SamplingMask(sizes=each, ids=own) for each, own in zip(sizes, ids, strict=True)]

    def columns(self, start: int, end: int) -> SamplingMask:
        """Return the mask of some columns of all rows."""
        return self._at((slice(None), slice(start, end)))

    def _at(self, index: Any) -> SamplingMask:
        sizes = self.sizes[index]
        return SamplingMask(sizes=sizes, ids=self.ids_at(self.starts[index], sizes))


@dataclass(frozen=True, slots=True, kw_only=True, repr=False)
class SequenceBatch(TensorBatch):
    """Token sequences, right-padded."""

    input_ids: Int[Tensor, "B T"]
    attention_mask: Bool[Tensor, "B T"]
    response_mask: Bool[Tensor, "B T"]
    """True on the tokens that are trained on: no prompt, no padding, no tool output."""
    media: tuple[Media | None, ...] | None = None
    """Of each row; None: no row has any."""
    group_ids: Int[Tensor, " B"] | None = None
    """Rows with equal ids may begin with the same tokens, such as the responses to one prompt, and
    models that can compute those once; None: no row has anything in common with another."""
    forks: Int[Tensor, "B T"] | None = None
    """Where a row goes on from an earlier place: a token follows the one that stands so many of the
    row's tokens before its left neighbour, and sees what that one sees. 0 of a token that follows
    its neighbour; None: all do. A conversation whose history was rewritten is one row so, a tree
    whose branches stand one after the other."""
    sampling_mask: SamplingMask | None = None
    """What models renormalise the probabilities of each token over; None: all ids."""
    routed_experts: Int[Tensor, "B T L K"] | None = None
    """The K experts that the engine chose for each token in each of L layers; -1: not recorded, as
    of the last token that was sampled, which no engine computes. None: of no token."""

    def __len__(self) -> int:
        return self.input_ids.shape[0]

    @property
    def lengths(self) -> Int[Tensor, " B"]:
        """Tokens of each row, padding excluded."""
        return self.attention_mask.sum(dim=1)


@dataclass(frozen=True, slots=True, kw_only=True, repr=False)
class TextBatch(SequenceBatch):
    """Texts from a data set, each a row of its own."""

    places: tuple[str, ...] | None = None
    """Where each row stands in the data, such as ``chats.jsonl:17``; None: nowhere."""

    def to(self, device: torch.device | str, *, non_blocking: bool = False) -> Self:
        """Move every tensor but those of images and videos, which follow micro-batch by batch."""
        return self.map(lambda tensor: tensor.to(device, non_blocking=non_blocking))

    @property
    def rows(self) -> SequenceBatch:
        """The rows alone, which move with what they show."""
        values = {field.name: getattr(self, field.name) for field in fields(SequenceBatch)}
        return SequenceBatch(**values)


@dataclass(frozen=True, slots=True, kw_only=True, repr=False)
class SupervisedBatch(TextBatch):
    """Texts to be learnt."""


@dataclass(frozen=True, slots=True, kw_only=True, repr=False)
class UnpairedBatch(TextBatch):
    """Prompts with an answer each, and whether it is desirable."""

    labels: Bool[Tensor, " B"]
    """True: desirable."""
    mismatched: SequenceBatch
    """Each row's prompt with the answer to another prompt; no ``response_mask``: there is none."""


@dataclass(frozen=True, slots=True, kw_only=True, repr=False)
class UnpairedRows(SequenceBatch):
    """Rows of an `UnpairedBatch` with what their losses are measured from."""

    labels: Bool[Tensor, " B"]
    """True: desirable."""
    kl: Float[Tensor, " B"]
    """Log-ratio of each mismatched pair, NaN without one; in training their mean over the step."""


@dataclass(frozen=True, slots=True, kw_only=True, repr=False)
class StepBatch(TextBatch):
    """Answers in steps; ``response_mask`` is True where a step ends that has a label."""

    labels: Float[Tensor, "B T"]
    """Probability that the step which ends at a token is correct: 1, 0, or between; 0 elsewhere."""
    step_ends: Bool[Tensor, "B T"]
    """The tokens at which steps end, labelled or not."""
    starts: Int[Tensor, " B"]
    """Where the first step of each row begins."""


def joined_media(batches: Sequence[SequenceBatch]) -> tuple[Media | None, ...] | None:
    """Return the media of the rows of several batches, one after the other."""
    if all(batch.media is None for batch in batches):
        return None
    return tuple(entry for batch in batches for entry in batch.media or (None,) * len(batch))


@dataclass(frozen=True, slots=True, kw_only=True, repr=False)
class PreferenceBatch(TensorBatch):
    """Pairs of candidate answers and which of the two each head prefers."""

    candidate0: SequenceBatch
    candidate1: SequenceBatch
    labels: Float[Tensor, "B H"]
    """+1 candidate 0 is better, -1 candidate 1 is better, 0 they are equal, NaN not labelled."""
    margin: Float[Tensor, " B"] | None = None
    """By how much the better candidate should win; None: the loss's own constant."""
    info: tuple[Mapping[str, Any], ...]
    """What else the row held; written to the evaluation file as it is."""
    places: tuple[str, ...] | None = None
    """Where each row stands in the data, such as ``pairs.jsonl:17``; None: nowhere."""
    source_texts: tuple[tuple[str, str, str] | None, ...] | None = None
    """Prompt and answers as the row has them, where the tokens do not give them back."""
    prompt_ids: Int[Tensor, " B"] | None = None
    """Rows with equal ids are about the same prompt; None: each has its own."""

    host: PreferenceBatch | None = None
    """The batch in main memory that this one is a copy of on a device; None: this is it."""

    def to(self, device: torch.device | str, *, non_blocking: bool = False) -> Self:
        """Move every tensor to ``device``, and keep hold of the batch in main memory."""
        alone = replace(self, host=None)
        moved = TensorBatch.to(alone, device, non_blocking=non_blocking)
        leaves = self.labels.device.type == "cpu" and moved.labels.device.type != "cpu"
        return replace(moved, host=alone if leaves else self.host)

    def __len__(self) -> int:
        return self.labels.shape[0]


@dataclass(frozen=True, slots=True, kw_only=True, repr=False)
class PromptBatch(TensorBatch):
    """Unique prompts, ready to generate from."""

    input_ids: Int[Tensor, "B P"]
    """Left-padded, the one exception to the convention: generation continues at the right."""
    attention_mask: Bool[Tensor, "B P"]
    prompts: tuple[Prompt, ...]
    columns: tuple[Mapping[str, Any], ...]
    """Every other column of each row, passed on to the rewards."""
    media: tuple[Media | None, ...] | None = None
    """See `SequenceBatch.media`."""
    places: tuple[str, ...] | None = None
    """Where each row stands in the data, such as ``prompts.jsonl:17``; None: nowhere."""
    room: Int[Tensor, " B"] | None = None
    """Tokens that a response may have, where that is fewer than the sampling allows; an engine may
    ignore it."""
    pretraining: SequenceBatch | None = None
    """Texts of the second stream that is mixed into the policy's loss (PTX); rows of its own,
    which `select` leaves alone."""

    def __len__(self) -> int:
        return self.input_ids.shape[0]

    def select(self, rows: Int[Tensor, " N"]) -> Self:
        """Return the given prompts, with the whole of ``pretraining``."""
        chosen = TensorBatch.select(replace(self, pretraining=None), rows)
        return replace(chosen, pretraining=self.pretraining)


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Episode:
    """What happened between a policy and its environment behind one prompt."""

    prompt: Prompt
    """As the policy read it, what the environment showed at the start included."""
    messages: tuple[Message, ...]
    """What followed, turn by turn: ``assistant`` is the policy, word for word, the others the
    environment. Calls that could be read stand under ``tool_calls`` too."""
    rewards: tuple[float, ...] | None
    """What the environment gave for each turn of the policy's; None: it gives no rewards."""
    finish_reason: str
    """``stop``: the policy made no further call. ``done``: the environment ended it. ``length``,
    ``max_turns``: it was cut off there. ``failed``: the environment broke."""
    failure: str = ""
    """What went wrong in the environment; the episode has no score then."""
    environment: Any = None
    """As the episode left it, until the rewards have read it."""
    release: Callable[[], None] | None = None
    """Closes the environment; None: there is nothing to close."""
    call_contents: tuple[tuple[int, str | None], ...] = ()
    """Numbers of the messages with calls, and what each says beside them; None: nobody can tell."""
    images: tuple[Any, ...] = ()
    """``PIL.Image``, RGB: what the bare parts of prompt and messages show, in order."""

    @property
    def turns(self) -> int:
        """How often the policy wrote."""
        return sum(message["role"] == "assistant" for message in self.messages)

    @property
    def completion(self) -> list[Message]:
        """The messages in which each call stands once: apart from the content, or only in it."""
        contents = dict(self.call_contents)
        return [
            {**message, "content": content}
            if (content := contents.get(number)) is not None
            else {name: value for name, value in message.items() if name != "tool_calls"}
            for number, message in enumerate(self.messages)
        ]


@dataclass(frozen=True, slots=True, kw_only=True, repr=False)
class TeacherTokens(TensorBatch):
    """What a teacher says of the tokens of a rollout, as far as it is kept."""

    logprobs: Float[Tensor, "B T"]
    """Of the sampled tokens, 0 outside the response."""
    top_ids: Int[Tensor, "B T K"]
    """Its most probable ids, the best first; 0 outside the response."""
    top_logprobs: Float[Tensor, "B T K"]


@dataclass(frozen=True, slots=True, kw_only=True, repr=False)
class PrivilegedRows(SequenceBatch):
    """What a teacher with privileged context reads: the rows of a rollout with other prompts.

    Each row has the response tokens of the rollout's row, in their order.
    """

    informed: Bool[Tensor, " B"]
    """Whether there is such context; a row without it is the rollout's own, and not learnt from."""


@dataclass(frozen=True, slots=True, kw_only=True, repr=False)
class Rollout(SequenceBatch):
    """Responses as the engine returned them; rows of one prompt are consecutive."""

    sampling_logprobs: Float[Tensor, "B T"]
    """The engine's own log-probabilities at the sampling temperature, 0 outside the response."""
    group_ids: Int[Tensor, " B"]
    """Rows with equal ids answer the same prompt."""
    truncated: Bool[Tensor, " B"]
    """The length limit came before an end-of-sequence token."""
    kept_mass: Float[Tensor, "B T"] | None = None
    """Probability that top_p, top_k and min_p left at each token; None: nothing was cut off. In
    general the policy's probability of a token divided by its probability in the distribution that
    it was drawn from: above 1 for some tokens drawn at ``Sampling.first_temperature``."""
    weight_version: Int[Tensor, " B"] | None = None
    """Training iterations behind the oldest weights that sampled any of a response; None: the
    policy's own."""
    token_versions: Int[Tensor, "B T"] | None = None
    """Training iterations behind the weights that sampled each token, 0 outside the response; None:
    each response is of one version."""
    prompt_lengths: Int[Tensor, " B"] | None = None
    """Tokens before each response of episodes, which may change the prompts; None: nothing did."""
    turn_rewards: Float[Tensor, "B T"] | None = None
    """The part of each score that the environment gave for single turns, or a reward for single
    steps, at the last token of each, weighted as in the score; None: there are only scores of whole
    responses."""
    episodes: tuple[Episode, ...] | None = None
    """What happened in each row, until it is scored; None: single responses, or all is scored."""
    teacher: TeacherTokens | None = None
    """None: there is no teacher, or its whole distributions are computed as they are needed."""
    privileged: PrivilegedRows | None = None
    """What the teacher reads in the place of the rows; None: the same."""

    def taught(self, mask: Bool[Tensor, "B T"]) -> Bool[Tensor, "B T"]:
        """Return which tokens of a mask the teacher says something of."""
        return mask if self.privileged is None else mask & self.privileged.informed[:, None]

    @property
    def versions(self) -> Int[Tensor, "B T"] | None:
        """Training iterations behind the weights that sampled each token of the responses."""
        if self.token_versions is not None or self.weight_version is None:
            return self.token_versions
        return self.weight_version[:, None].expand_as(self.input_ids)

    @property
    def engine_logprobs(self) -> Float[Tensor, "B T"]:
        """What the engine gave each token over the ids that the policy is normalised over.

        With a ``sampling_mask`` those that were left. Without, all: tokens that top_p, top_k or
        min_p cut off raise the probability of the others, and that is no difference between engine
        and trainer.
        """
        if self.kept_mass is None or self.sampling_mask is not None:
            return self.sampling_logprobs
        return self.sampling_logprobs + self.kept_mass.log()


ROLLOUT_TENSORS = tuple(
    field.name
    for field in fields(Rollout)
    if field.name not in ("media", "episodes", "teacher", "privileged", "sampling_mask")
)
"""The fields of a `Rollout` that are tensors with a row for each response."""


@dataclass(frozen=True, slots=True, kw_only=True, repr=False)
class StoredRollout(TensorBatch):
    """Scored responses of an earlier iteration, to be trained on again without an engine."""

    rollout: Rollout
    scores: Float[Tensor, " B"]
    """NaN: no reward could score the response."""
    records: tuple[Mapping[str, Any], ...]
    """One readable line per response, as `RolloutLog` writes them."""
    pretraining: SequenceBatch | None = None
    """See `PromptBatch.pretraining`."""
    as_recorded: bool = False
    """Train as the earlier run has trained on it, see `lrlhf.datamodules.ReplayDataModule`."""

    def __len__(self) -> int:
        return len(self.rollout)


@dataclass(frozen=True, slots=True, kw_only=True, repr=False)
class Experience(Rollout):
    """A rollout with all that the update needs."""

    scores: Float[Tensor, " B"]
    """Outcome reward of each sequence before any KL; NaN: no reward could score it."""
    columns: Mapping[str, Float[Tensor, " B"]] | None = None
    """What advantages are made of besides, by name: what each reward function gave
    (``reward/<name>``) and what it counts (``weight/<name>``), and the scores of extra samples.
    None: the advantages are computed."""
    old_logprobs: Float[Tensor, "B T"] | None = None
    """Of the policy before the update, from which the ratio starts; None: the first update is
    exactly on-policy."""
    old_source: Literal["recorded", "engine", "policy"] | None = None
    """Where ``old_logprobs`` come from: the engine of an earlier run, which recorded them with the
    rollout; this run's engine, which computes as the policy does; a pass of the policy before the
    update; None: the update's own first pass."""
    policy_logprobs: Float[Tensor, "B T"] | None = None
    """The policy's own before the update, where another one sampled the rollout (replay)."""
    advantages: Float[Tensor, "B T"]
    loss_mask: Bool[Tensor, "B T"]
    """The response tokens that are trained on; a response left out as a whole has none."""
    counted: Bool[Tensor, " B"]
    """The rows that count in means over sequences."""
    importance_weights: Float[Tensor, "B T"] | None = None
    """What each token's policy loss is multiplied by, 1 outside the response; None: 1."""
    selected: Bool[Tensor, "B T"] | None = None
    """Tokens that the policy loss is restricted to; None: all of ``loss_mask``. A loss per response
    does not know them: a response without any would still have its loss -A."""
    covariant: Bool[Tensor, "B T"] | None = None
    """Tokens that a loss has chosen by the covariance of log-probability and advantage; None: the
    loss chooses none."""
    ref_logprobs: Float[Tensor, "B T"] | None = None
    """None: no KL term."""
    values: Float[Tensor, "B T"] | None = None
    """None: no critic."""
    returns: Float[Tensor, "B T"] | None = None
    entropy: Float[Tensor, "B T"] | None = None
    """Of the policy's next-token distributions before the update; None: it was not needed."""
    teacher_advantages: Float[Tensor, "B T"] | None = None
    """What a teacher adds to the advantages; None: nothing, or it is added."""

    @property
    def value_mask(self) -> Bool[Tensor, "B T"]:
        """The tokens of trained responses with a return: what a critic learns from."""
        known = self.counted & ~self.scores.isnan() & self.loss_mask.any(dim=1)
        return self.response_mask & known[:, None]
