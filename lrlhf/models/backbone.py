"""The one way in which batches go through the body of a model."""

from __future__ import annotations

import inspect
import logging
from typing import Any, NamedTuple

import torch
from jaxtyping import Bool, Float, Int
from peft import PeftModel
from torch import Tensor, nn
from torch.nn.functional import embedding
from transformers import PreTrainedModel

from lrlhf.models.heads import body_of, plain_model
from lrlhf.models.loading.deferred_weights import waits
from lrlhf.models.media_inputs import (
    backbone_inputs,
    check_media,
    media_position_ids,
    numbers_media,
    placed_media,
    placeholder_ids,
    ruled_out_ids,
)
from lrlhf.models.modes import ModelRefusalError, evaluating, refusals, trial
from lrlhf.models.packed.packed_attention import (
    COMPARED_ATTENTION,
    FUNCTIONS,
    KEPT_SDPA,
    PACKED_ATTENTION,
    PACKED_NAMES,
    PACKED_OWN_ATTENTION,
    PACKED_SDPA,
    SEGMENTS,
    comparing,
    name_flash,
)
from lrlhf.models.packed.packing import Chains, Compacted, Packed, compact, find_trees, pack, unfold
from lrlhf.models.routing_replay import Replay
from lrlhf.models.sharding import device_of
from lrlhf.models.transformers_internals import attention_of, set_attention
from lrlhf.types import Media, SequenceBatch

logger = logging.getLogger(__name__)

_WINDOWED = {"full_attention", "sliding_attention"}
"""Kinds of layers whose attention packed rows know."""

_BOTH_WAYS = ("gemma4", "gemma4_unified", "deepseek_ocr2")
"""Families whose image tokens see each other, beside those that are told of them by
``token_type_ids``."""


class HiddenStates(NamedTuple):
    """What the body of a model makes of a batch."""

    rows: Compacted
    states: Float[Tensor, "N H"]
    """Of every token that was computed: what rows share once, and perhaps padding."""
    places: Int[Tensor, "B T"]
    """Where the state of every token of ``rows`` is; anything behind a row's end."""
    computed: Bool[Tensor, "R L"]
    """Which of the tokens that went through the model are no padding, as they went through it."""
    router_logits: tuple[Tensor, ...] | None
    """Of the layers with experts, where asked for."""
    windows: list[int | None]
    """How far each layer said that it sees; of packed rows only."""

    def of(self, tokens: Bool[Tensor, "B T"]) -> Float[Tensor, "M H"]:
        """Return the states of some tokens, in the order of the rows."""
        # unlike plain indexing its gradient is deterministic on GPUs too
        return embedding(self.places[tokens], self.states)

    def before(self, tokens: Bool[Tensor, "B T"]) -> Float[Tensor, "M H"]:
        """Return the states that some tokens follow, in the order of the rows."""
        places = self.places.gather(1, self.rows.previous.clamp(min=0))
        return embedding(places[tokens], self.states)

    def unpacked(self) -> Float[Tensor, "B T H"]:
        """Return the states of all rows; what is behind a row's end means nothing."""
        return embedding(self.places, self.states)


def hidden_states(
    plain: PreTrainedModel,
    batch: SequenceBatch,
    *,
    layer: nn.Module | None = None,
    share: bool = True,
    replay: bool = False,
    **options: Any,
) -> HiddenStates:
    """Run the body of a model over a batch.

    Where the model allows it, see `allow_packing`, the rows are laid one after another without
    padding, and rows of one group share the tokens that all of them begin with.

    Args:
        plain: The model, without adapters around it.
        batch: Tokens outside ``attention_mask`` are invisible, wherever they are.
        layer: The block whose output is wanted; None: the body's, final norm included.
        share: False: every row is computed whole.
        replay: Send tokens through the batch's ``routed_experts``, if it has any.
        options: Further arguments of the forward pass.
    """
    experts = batch.routed_experts if replay else None
    rows = compact(batch.input_ids, batch.attention_mask, batch.forks, experts)
    packed, chains = None, None
    if packs(plain, batch):
        marks = placeholder_ids(plain.config)
        trees = find_trees(rows, batch.group_ids if share else None, batch.media, marks)
        if any(tree.tokens for tree in trees):
            packed = pack(
                rows, trees, depth_first=_uses_depth_first_order(plain, rows.input_ids.device)
            )
    if packed is None:
        chains = unfold(rows)
        source = chains.source.flatten()
        shown = _media_of_chains(plain, rows, chains, batch.media)
        check_media(plain, chains.rows.input_ids, shown)
        inputs = backbone_inputs(plain, chains.rows.input_ids, chains.rows.attention_mask, shown)
    else:
        source, inputs = packed.source, _packed_inputs(plain, rows, batch.media, packed)
    replayed = None
    if rows.experts is not None:
        inputs["replay"] = replayed = Replay(plain, rows.experts.flatten(0, 1)[source])
    captured: list[Tensor] = []
    handle = None if layer is None else layer.register_forward_hook(_capture(captured))
    try:
        output = body_of(plain)(**inputs, **options)
    finally:
        if handle is not None:
            handle.remove()
    if replayed is not None:
        replayed.check()
    states = captured[0] if captured else output.last_hidden_state
    shape = states.shape[:2]
    if packed is None:
        assert chains is not None
        places, computed, windows = chains.places, chains.rows.attention_mask, []
    else:
        places, windows = packed.index, packed.segments.windows
        computed = torch.ones(shape, dtype=torch.bool, device=states.device)
    flat, routers = states.flatten(0, 1), output.get("router_logits")
    return HiddenStates(rows, flat, places, computed, routers, windows)


def _capture(captured: list[Tensor]) -> Any:
    def hook(_block: nn.Module, _inputs: Any, output: Any) -> None:
        captured.append(output[0] if isinstance(output, tuple) else output)

    return hook


def _media_of_chains(
    plain: PreTrainedModel,
    rows: Compacted,
    chains: Chains,
    media: tuple[Media | None, ...] | None,
) -> tuple[Media | None, ...] | None:
    """Return what each chain shows: of a row that forks, the parts whose places it has."""
    if media is None or rows.forks is None:
        return media
    placed = placed_media(rows.input_ids.cpu(), media, placeholder_ids(plain.config))
    shown: list[Media | None] = []
    own = zip(chains.owners.tolist(), chains.rows.order, chains.rows.attention_mask, strict=True)
    for row, order, mask in own:
        columns = {*order[mask].tolist()}
        parts = [part for part, places in placed[row] if columns.issuperset(places)]
        shown.append(Media.joined(parts, ()) if parts else None)
    return tuple(shown)


def _packed_inputs(
    plain: PreTrainedModel,
    rows: Compacted,
    media: tuple[Media | None, ...] | None,
    packed: Packed,
) -> dict[str, Any]:
    check_media(plain, rows.input_ids, media)
    ids = rows.input_ids.flatten()[packed.source][None]
    shown = None if media is None else _media_of_trees(plain, rows, media, packed)
    ones = torch.ones_like(ids, dtype=torch.bool)
    inputs = backbone_inputs(plain, ids, ones, shown)
    if media is not None and numbers_media(plain, media):
        # each token has its number on its own branch, which the media before it there move
        chains = unfold(rows)
        numbers = media_position_ids(
            plain,
            chains.rows.input_ids,
            chains.rows.attention_mask,
            _media_of_chains(plain, rows, chains, media) or (),
        )
        positions = numbers.flatten(1)[:, chains.places.flatten()[packed.source]][:, None]
    else:
        positions = packed.depths.flatten()[packed.source][None]
    return {
        **inputs,
        "position_ids": positions,
        # of four dimensions, it goes to the attention as it is, and that does not read it
        "attention_mask": torch.ones((1, 1, 1, 1), dtype=torch.bool, device=ids.device),
        SEGMENTS: packed.segments,
    }


def _media_of_trees(
    plain: PreTrainedModel,
    rows: Compacted,
    media: tuple[Media | None, ...],
    packed: Packed,
) -> list[Media]:
    """Return what a packed row shows, in its order: what a tree's rows share once."""
    if not any(entry is not None and entry.parts for entry in media):
        # the rows of a tree show the same, in front of what differs
        first = (media[tree.rows[0]] for tree in packed.trees)
        return [entry for entry in first if entry is not None]
    placed = placed_media(rows.input_ids.cpu(), media, placeholder_ids(plain.config))
    return [
        part
        for tree in packed.trees
        for number, row in enumerate(tree.rows)
        for part, places in placed[row]
        if number == 0 or places[0] >= tree.prefix
    ]


# ------------------------------------------------------------------ which models allow it


def packs(plain: PreTrainedModel, batch: SequenceBatch | None = None) -> bool:
    """Tell whether rows, by default without images, go through a plain model as one packed row."""
    if attention_of(_attention_config(plain)) not in FUNCTIONS:
        return False
    # such models let the tokens of an image see each other, which only their own masks do
    return batch is None or batch.media is None or not _sees_images_both_ways(plain)


def _uses_depth_first_order(plain: PreTrainedModel, device: torch.device) -> bool:
    """Tell whether FlashAttention or FlexAttention compute packed rows, where they can."""
    name = attention_of(_attention_config(plain))
    if name in (PACKED_SDPA, PACKED_OWN_ATTENTION):
        return False
    # on CPUs there is no backward pass, and compiling takes longer than most passes
    return device.type == "cuda" or name != PACKED_ATTENTION


def keep_attention(model: PreTrainedModel, requested: str | None) -> None:
    """Note which attention a new model was asked to have, before anything goes through it.

    Args:
        model: As ``from_pretrained`` loads it.
        requested: Its option ``attn_implementation``: with ``sdpa`` packed rows go without
            FlexAttention too; flash attention goes on, on CPUs with ``sdpa`` in its place.
    """
    config = _attention_config(model)
    name = attention_of(config)
    if name == requested == "sdpa":
        set_attention(config, KEPT_SDPA)
    elif "flash" in name:
        set_attention(config, name_flash(name))


def allow_packing(model: PreTrainedModel | PeftModel) -> bool:
    """Let a model compute packed rows from now on, if a trial gives the same hidden states.

    It needs a causal model whose attention is ``sdpa``, ``flex_attention`` or a flash kernel,
    through the interface of ``transformers`` for attention functions, without layers that read the
    sequence in another way (convolutions, state spaces, chunks). What does not fit is computed in
    padded rows, and the log says so.

    A model that asks for more than ``sdpa`` computes, such as Gemma 2 for bounded scores, gets the
    attention of its own file instead, packed or not.

    Args:
        model: Its config names another attention afterwards, which computes the same, and knows
            packed rows. Where its weights are not read yet, the trial waits for them; on the meta
            device otherwise, where nothing can be tried, it is taken to succeed.

    Returns:
        Whether it will.
    """
    plain = plain_model(model)
    config = _attention_config(plain)
    if packs(plain):
        return True
    if waits(plain, allow_packing):
        return False
    # an encoder is not expected to pack, and other attention was asked for
    expected = attention_of(config) in PACKED_NAMES and not _sees_what_follows(plain)
    reason = _pack_if_possible(plain)
    if plain.device.type == "meta":
        return reason is None
    if reason is not None:
        logger.log(
            logging.WARNING if expected else logging.INFO,
            "%s pads its rows and computes what they share anew for each, which is slower: %s.",
            type(plain).__name__,
            reason,
        )
    elif _sees_images_both_ways(plain):
        logger.info("%s pads its rows where there are images.", type(plain).__name__)
    return reason is None


def _pack_if_possible(plain: PreTrainedModel) -> str | None:
    """Have a model compute packed rows; returns why it cannot, if so."""
    config = _attention_config(plain)
    reason, name = _obstacle(plain), attention_of(config)
    packing = PACKED_NAMES.get(name, name)
    if name == KEPT_SDPA:
        name = "sdpa"
    if plain.device.type == "meta":
        if reason is None:
            bounded = name == "sdpa" and getattr(config, "attn_logit_softcapping", None) is not None
            set_attention(config, PACKED_OWN_ATTENTION if bounded else packing)
        return reason
    if name in PACKED_NAMES:
        padded, tried = "sdpa", PACKED_SDPA
        if _asks_for_more(plain):
            padded, tried = "eager", PACKED_OWN_ATTENTION
        reason = reason or _difference(plain, padded, tried)
        if name == "sdpa" and padded == "eager":
            name, packing = padded, tried
            logger.info(
                "%s asks for more than sdpa computes: its attention is that of its own file, which "
                "transformers calls eager and which takes more memory.",
                type(plain).__name__,
            )
        set_attention(config, name if reason else packing)
    return reason


def _asks_for_more(plain: PreTrainedModel) -> bool:
    """Tell whether the layers ask for more than ``sdpa`` computes."""
    config = _attention_config(plain)
    asking: list[str] = []
    try:
        set_attention(config, COMPARED_ATTENTION)
        with refusals(), comparing() as asking:
            _trial(plain)
    except ModelRefusalError as error:
        logger.debug("the attention of %s was not compared: %s", type(plain).__name__, error)
    finally:
        set_attention(config, "sdpa")
    return bool(asking)


def _obstacle(plain: PreTrainedModel) -> str | None:
    config = _attention_config(plain)
    if attention_of(config) not in PACKED_NAMES:
        return f"its attention is {attention_of(config)!r}, not 'sdpa'"
    if _sees_what_follows(plain):
        return "its tokens see what follows them"
    kinds = set(_layer_types(plain)) - _WINDOWED
    if kinds:
        return f"it has layers of the kind {sorted(kinds)[0]!r}"
    parameters = inspect.signature(body_of(plain).forward).parameters
    passes_on = any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters.values())
    if "position_ids" not in parameters or not passes_on:
        return "its forward pass takes no position ids, or passes nothing on to its attention"
    return None


def _layer_types(plain: PreTrainedModel) -> list[str]:
    # of some families a property, of others under another name, which only this looks up
    return list(getattr(_attention_config(plain), "layer_types", None) or ())


def _sees_what_follows(plain: PreTrainedModel) -> bool:
    body: Any = body_of(plain)
    return any(vars(module).get("is_causal") is False for module in body.get_decoder().modules())


def _attention_config(plain: PreTrainedModel) -> Any:
    body: Any = body_of(plain)
    return body.get_decoder().config


def _difference(plain: PreTrainedModel, padded: str, packed: str) -> str | None:
    """Say what keeps rows with ``packed`` attention from being the same as with ``padded``."""
    config = _attention_config(plain)
    differences = []
    try:
        with refusals():
            for attention in (padded, packed):
                set_attention(config, attention)
                differences.append(_trial(plain))
    except ModelRefusalError as error:
        return f"it refuses them ({error})"
    finally:
        set_attention(config, "sdpa")
    expected, actual = (each.of(each.rows.attention_mask).float() for each in differences)
    # 16 bits, which split weights may be gathered in, round the two orders of work differently
    exact = differences[0].states.dtype in (torch.float32, torch.float64)
    scale = expected.abs().amax(dim=1, keepdim=True)
    if ((actual - expected).abs() > (1e-4 if exact else 2e-2) * scale).any():
        return "its hidden states would differ"
    if sum(window is not None for window in differences[1].windows) < _windowed_layers(plain):
        return "its layers do not say how far they see"
    return None


def _windowed_layers(plain: PreTrainedModel) -> int:
    """Count the layers that see a part of the tokens before them only."""
    config = _attention_config(plain)
    if not getattr(config, "sliding_window", None) or not getattr(
        config, "use_sliding_window", True
    ):
        return 0
    kinds = _layer_types(plain)
    return kinds.count("sliding_attention") if kinds else int(config.num_hidden_layers)


@trial()
@torch.no_grad()
def _trial(plain: PreTrainedModel) -> HiddenStates:
    """Compute two rows with a common beginning and a longer one that has nothing in common."""
    marks = set(ruled_out_ids(plain.config))
    known = len(plain.get_input_embeddings().weight)  # type: ignore[arg-type]
    ids = [token for token in range(min(known, 64)) if token not in marks][:6]
    texts = [[1, 2, 3, 4, 5], [1, 2, 3, 5, 4, 2], [3, 2, 1, 2, 3, 4, 5]]
    tokens, mask = torch.zeros(3, 7, dtype=torch.long), torch.zeros(3, 7, dtype=torch.bool)
    for row, text in enumerate(texts):
        tokens[row, : len(text)] = torch.tensor([ids[position % len(ids)] for position in text])
        mask[row, : len(text)] = True
    device = device_of(plain)
    batch = SequenceBatch(
        input_ids=tokens.to(device),
        attention_mask=mask.to(device),
        response_mask=mask.to(device),
        group_ids=torch.tensor([0, 0, 1]),
    )
    with evaluating(plain):
        return hidden_states(plain, batch)


def _sees_images_both_ways(plain: PreTrainedModel) -> bool:
    arguments = inspect.signature(body_of(plain).forward).parameters
    return "token_type_ids" in arguments or plain.config.model_type in _BOTH_WAYS
