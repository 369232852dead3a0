"""What a model is given besides tokens, each image, video and audio looked at once."""

from __future__ import annotations

import contextlib
import inspect
from collections.abc import Iterator, Mapping, Sequence
from contextvars import ContextVar
from itertools import chain, islice
from typing import Any, NamedTuple, cast

import torch
from jaxtyping import Bool, Int
from torch import Tensor, nn
from torch.nn import functional
from transformers import PreTrainedConfig, PreTrainedModel

from lrlhf.types import Media

KINDS = ("image", "video", "audio")
"""Kinds of placeholders; a number, counted from 1, tells a model which kind a token stands for."""

_MARKERS = ("vision_start", "vision_end", "boi", "eoi", "boa", "eoa")
_NESTED_FAMILIES = ("idefics2", "idefics3", "smolvlm")
"""Their pixels come as `[rows, images, ...]`, padded with empty images; the others' come flat."""
_POSITION_KEYS = ("image_grid_thw", "video_grid_thw", "second_per_grid_ts")
"""What M-RoPE computes positions from, beside the encoders."""

_OFFSETS = "rope_deltas"

Streams = tuple[Tensor, ...]
"""Features of one row's media of one kind, `[tokens, H]` each: the input to the language model, and
what some families add to its first layers."""


class _CachedFeatures(NamedTuple):
    """What an encoder made of one row's media of one kind."""

    media: Media
    streams: Streams
    template: Any
    """The encoder's output that they are from."""


_memory: ContextVar[dict[tuple[int, str, bool, int], _CachedFeatures] | None] = ContextVar(
    "media_features", default=None
)


def placeholder_ids(config: PreTrainedConfig) -> dict[str, int]:
    """Return the placeholder token id of each kind of media; empty for a text model."""
    values = vars(config)  # not to_dict(), which copies all of it: this runs in every pass
    ids = {kind: _token_id(values, kind) for kind in KINDS}
    return {kind: token for kind, token in ids.items() if token is not None}


def ruled_out_ids(config: PreTrainedConfig) -> tuple[int, ...]:
    """Return the tokens that a policy must never generate: media placeholders and delimiters.

    A placeholder without an image behind it makes the next forward pass fail.
    """
    values = vars(config)
    ids = {_token_id(values, name) for name in (*KINDS, *_MARKERS)}
    return tuple(sorted(token for token in ids if token is not None))


def backbone_inputs(
    model: PreTrainedModel,
    input_ids: Int[Tensor, "B T"],
    attention_mask: Bool[Tensor, "B T"],
    media: Sequence[Media | None] | None,
) -> dict[str, Any]:
    """Build the arguments of a forward pass over the body of a model, see also `check_media`.

    Rows that share their `Media` object share its features: the encoder sees it once. Position ids
    are left to the model, which numbers image and video tokens in its own way (M-RoPE).

    Args:
        model: Text or vision-language model, with or without its output head.
        input_ids: Placeholders included, as many as the media have features.
        attention_mask: Padding on either side.
        media: Of each row, or of a packed row those in it, one after the other.
    """
    inputs: dict[str, Any] = {"input_ids": input_ids, "attention_mask": attention_mask.long()}
    ids = placeholder_ids(model.config)
    if not ids:
        return inputs
    shown = _pieces(media)
    body = _body(model)
    arguments = inspect.signature(body.forward).parameters
    kinds = _kind_numbers(input_ids, ids)
    if "mm_token_type_ids" in arguments:
        inputs["mm_token_type_ids"] = kinds
    elif "token_type_ids" in arguments:
        inputs["token_type_ids"] = (kinds > 0).long()
    if not shown:
        return inputs
    if "mm_encoder_outputs" not in arguments:
        return inputs | joined_tensors(shown, _keys_of(shown), model.config.model_type)
    positions = [key for key in _POSITION_KEYS if key in arguments]
    features = {
        kind: _features(body, kind, [entry for entry in shown if entry.tokens.get(kind)])
        for kind in ids
    }
    return {
        **inputs,
        **joined_tensors(shown, positions, model.config.model_type),
        "mm_encoder_outputs": {
            kind: found for kind, found in features.items() if found is not None
        },
    }


def check_media(
    model: PreTrainedModel,
    input_ids: Int[Tensor, "B T"],
    media: Sequence[Media | None] | None,
) -> None:
    """Compare placeholders with media, row by row; a model compares their sums at most.

    Raises:
        ValueError: The model takes no such media, or a row's media do not fit its tokens.
    """
    ids = placeholder_ids(model.config)
    kinds = {kind for entry in media or () if entry is not None for kind in entry.tokens}
    if kinds and not ids:
        raise ValueError(
            f"{type(model).__name__} is a text model: it takes no images, videos or audio"
        )
    unseen = sorted(kinds - ids.keys())
    if unseen:
        raise ValueError(
            f"{type(model).__name__} takes no {unseen[0]}s; leave them out of the data"
        )
    for kind, token in ids.items() if kinds else ():
        counts = (input_ids == token).sum(dim=1).tolist()
        expected = [0 if entry is None else entry.tokens.get(kind, 0) for entry in media or ()]
        if counts != expected:
            raise ValueError(
                f"the rows have {counts} {kind} placeholders, and what they show is for "
                f"{expected}: texts and media do not belong together"
            )


def media_position_ids(
    model: PreTrainedModel,
    input_ids: Int[Tensor, "B T"],
    attention_mask: Bool[Tensor, "B T"],
    media: Sequence[Media | None],
) -> Int[Tensor, "3 B T"]:
    """Let a model number the tokens of rows in its own way (M-RoPE), see `numbers_media`."""
    number: Any = _body(model).compute_3d_position_ids
    inputs = {
        "input_ids": input_ids,
        "inputs_embeds": None,
        "attention_mask": attention_mask.long(),
        "past_key_values": None,
        "mm_token_type_ids": _kind_numbers(input_ids, placeholder_ids(model.config)),
    }
    known = inspect.signature(number).parameters
    shown = _pieces(media)
    inputs |= dict.fromkeys(_POSITION_KEYS) | joined_tensors(
        shown, _POSITION_KEYS, model.config.model_type
    )
    positions: Tensor = number(**{key: value for key, value in inputs.items() if key in known})
    return positions


def placed_media(
    input_ids: Int[Tensor, "B T"],
    media: Sequence[Media | None],
    placeholders: Mapping[str, int],
) -> list[list[tuple[Media, list[int]]]]:
    """Return the pieces of what each row shows, and the columns of their placeholders."""
    placed: list[list[tuple[Media, list[int]]]] = []
    for ids, entry in zip(input_ids, media, strict=True):
        columns = {
            kind: iter((ids == token).nonzero()[:, 0].tolist())
            for kind, token in placeholders.items()
        }
        row: list[tuple[Media, list[int]]] = []
        for piece in () if entry is None else entry.pieces:
            own = (islice(columns[kind], count) for kind, count in piece.tokens.items())
            row.append((piece, sorted(chain.from_iterable(own))))
        placed.append(row)
    return placed


def _pieces(media: Sequence[Media | None] | None) -> list[Media]:
    return [piece for entry in media or () if entry is not None for piece in entry.pieces]


def numbers_media(model: PreTrainedModel, media: Sequence[Media | None] | None) -> bool:
    """Whether the model numbers positions in its own way because of what is shown (M-RoPE)."""
    shown = any(entry is not None for entry in media or ())
    return shown and _OFFSETS in vars(_body(model))


def forget_offsets(model: PreTrainedModel) -> None:
    """Forget how far an earlier prompt's images moved positions (M-RoPE): the model keeps it."""
    body = _body(model)
    if _OFFSETS in vars(body):
        setattr(body, _OFFSETS, None)


def repeat_offsets(model: PreTrainedModel, copies: int) -> None:
    """Keep for every copy of a prompt how far its images moved the positions (M-RoPE)."""
    body = _body(model)
    offsets = vars(body).get(_OFFSETS)
    if offsets is not None:
        setattr(body, _OFFSETS, offsets.repeat_interleave(copies, dim=0))


@contextlib.contextmanager
def cached_vision_features() -> Iterator[None]:
    """Remember, for the duration of the block, features that no gradient goes through.

    So forward passes over parts of a batch encode each image once, as long as the encoder does not
    change meanwhile: without gradients, or where it is frozen.
    """
    token = _memory.set({})
    try:
        yield
    finally:
        _memory.reset(token)


def media_modules(model: PreTrainedModel) -> list[nn.Module]:
    """Return the parts of a model's body that only media reach: all but the text's."""
    if not placeholder_ids(model.config):
        return []
    body = _body(model)
    text_model: nn.Module = body.get_decoder()  # type: ignore[no-untyped-call]
    inside = {id(module) for module in text_model.modules()}
    parts = [module for module in body.children() if id(module) not in inside]
    return [part for part in parts if id(text_model) not in {id(m) for m in part.modules()}]


def vision_encoder(model: PreTrainedModel) -> nn.Module:
    """Return the encoder of images, without what fits its features to the language model.

    Raises:
        ValueError: The model sees no images.
    """
    if "image" not in placeholder_ids(model.config):
        what = "sees no images" if placeholder_ids(model.config) else "is a text model"
        raise ValueError(f"{type(model).__name__} {what}: it has no vision encoder")
    encoder: nn.Module = _body(model).get_encoder("image")
    return encoder


def _body(model: PreTrainedModel) -> PreTrainedModel:
    return cast(PreTrainedModel, model.base_model)


def _token_id(values: Mapping[str, Any], name: str) -> int | None:
    for key in (f"{name}_token_id", f"{name}_token_index"):
        if isinstance(values.get(key), int):
            return int(values[key])
    return None


def _kind_numbers(input_ids: Tensor, ids: Mapping[str, int]) -> Tensor:
    numbers = torch.zeros_like(input_ids)
    for kind, token in ids.items():
        numbers = numbers.masked_fill(input_ids == token, KINDS.index(kind) + 1)
    return numbers


def _features(body: PreTrainedModel, kind: str, shown: Sequence[Media]) -> Any:
    """Return the encoder's output for all rows, as the family's forward pass takes it."""
    if not shown:
        return None
    memory = _memory.get()
    known = {} if memory is None else memory
    # what was seen without gradients is no start for a pass that needs them
    learning = torch.is_grad_enabled()
    features: dict[int, Streams] = {
        id(entry): known[key].streams
        for entry in shown
        if (key := (id(body), kind, learning, id(entry))) in known
    }
    fresh = list({id(entry): entry for entry in shown if id(entry) not in features}.values())
    template: Any = None
    for group in _alike(fresh, kind):
        template = _encode(body, kind, group)
        streams = _split(template, [entry.tokens[kind] for entry in group], kind)
        for entry, parts in zip(group, streams, strict=True):
            features[id(entry)] = parts
            if memory is not None and not any(part.requires_grad for part in parts):
                # the entry is kept as well: its id must not be given to another
                memory[id(body), kind, learning, id(entry)] = _CachedFeatures(
                    entry, parts, template
                )
    if template is None:
        template = known[id(body), kind, learning, id(shown[0])].template
    return _filled(template, [features[id(entry)] for entry in shown])


def _alike(media: Sequence[Media], kind: str) -> list[list[Media]]:
    """Group rows that can be encoded together: videos of different length cannot be filled up."""
    groups: dict[tuple[torch.Size, ...], list[Media]] = {}
    for entry in media:
        shapes = (tensor.shape[1:] for key, tensor in entry.tensors.items() if "video" in key)
        groups.setdefault(tuple(shapes) if kind == "video" else (), []).append(entry)
    return list(groups.values())


def _encode(body: PreTrainedModel, kind: str, media: Sequence[Media]) -> Any:
    encoder = getattr(body, f"get_{kind}_features", None)
    if encoder is None:
        raise ValueError(f"{type(body).__name__} takes no {kind}s; leave them out of the data")
    there = _keys_of(media)
    keys = [key for key in inspect.signature(encoder).parameters if key in there]
    return encoder(**joined_tensors(media, keys, body.config.model_type), return_dict=True)


def _keys_of(media: Sequence[Media]) -> list[str]:
    return list(dict.fromkeys(key for entry in media for key in entry.tensors))


def joined_tensors(media: Sequence[Media], keys: Sequence[str], family: str) -> dict[str, Tensor]:
    """Join the inputs of a family's encoder, one after the other, filled up where it has to be."""
    nested = family in _NESTED_FAMILIES
    joined: dict[str, Tensor] = {}
    for key in keys:
        parts = [entry.tensors[key] for entry in media if key in entry.tensors]
        if parts:
            together = _stacked([part.flatten(0, 1) if nested else part for part in parts])
            joined[key] = together.unsqueeze(0) if nested else together
    return joined


def _stacked(parts: Sequence[Tensor]) -> Tensor:
    """Concatenate along the first dimension, the others filled up with zeros."""
    widest = [max(sizes) for sizes in zip(*(part.shape[1:] for part in parts), strict=True)]
    padded = []
    for part in parts:
        missing = [wide - own for wide, own in zip(widest, part.shape[1:], strict=True)]
        edges = [edge for size in reversed(missing) for edge in (0, size)]
        padded.append(functional.pad(part, edges) if any(missing) else part)
    return torch.cat(padded)


def _split(output: Any, counts: Sequence[int], kind: str) -> list[Streams]:
    """Cut an encoder's output into the rows that it belongs to."""
    streams = [_flat(output.pooler_output)]
    streams += [_flat(layer) for layer in output.get("deepstack_features") or ()]
    for stream in streams:
        if len(stream) != sum(counts):
            raise ValueError(
                f"the model makes {len(stream)} features of the {kind}s of {len(counts)} row(s), "
                f"whose texts have {sum(counts)} placeholders for them: processor and model do not "
                "belong together"
            )
    return list(zip(*(torch.split(stream, list(counts)) for stream in streams), strict=True))


def _flat(features: Tensor | Sequence[Tensor]) -> Tensor:
    if isinstance(features, Tensor):
        return features.flatten(0, -2)
    return torch.cat([part.flatten(0, -2) for part in features])


def _filled(template: Any, rows: Sequence[Streams]) -> Any:
    """Put rows' features into an output like ``template``."""
    pooled, *deep = (torch.cat(parts) for parts in zip(*rows, strict=True))
    shape = template.pooler_output
    is_tensor = isinstance(shape, Tensor)
    if is_tensor:
        # videos of different lengths do not stack; only the order of their features counts then
        even = len(pooled) % shape.shape[-2] == 0
        pooled = pooled.view(-1, *shape.shape[1:]) if even else pooled[None]
    return type(template)(
        pooler_output=pooled if is_tensor else (pooled,),
        **({"deepstack_features": [(layer,) for layer in deep]} if deep else {}),
    )
