"""Memory of a reward model that is trained on pairs."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from lrlhf.models import ScoreModel
from lrlhf.models.loading.meta import reward_skeleton, runnable, shapes_only
from lrlhf.models.media_inputs import placeholder_ids
from lrlhf.planning.memory_phases import Dial, Held, Memory, Notes, Phase, options_of, spec_of
from lrlhf.planning.memory_ranks import optimizer_needs, weights_of
from lrlhf.planning.memory_trace import Shape, update_needs

_ASSUMED_TOKENS = 512


def reward_model_phases(
    options: Mapping[str, Any], data: Mapping[str, Any], memory: Memory, notes: Notes
) -> list[Phase]:
    """Return the phases of an optimizer step.

    Args:
        options: Of the module.
        data: Options of the data module.
        memory: The device, nothing on it yet.
        notes: Told what was assumed.
    """
    spec = spec_of(options["model"], ScoreModel)
    network = reward_skeleton(spec)
    plain = network.scorer.plain
    if placeholder_ids(plain.config):
        notes.add("not counted: what looks at images and videos, and their tokens")
    optimizer = optimizer_needs(options_of(options["optimizer"]), on_gpu=memory.sharing.on_gpu)
    held = Held(weights_of(network, plain, quantization=spec.quantization), optimizer)
    memory = replace(memory, held=(held,))
    pairs = int(data["batch_size"])
    shape = Shape(2 * pairs, _tokens(data, notes))
    with shapes_only():
        needed = update_needs(
            runnable(network, dtype=memory.pass_dtype()),
            lambda batch: network(batch).sum(),
            shape,
            memory.precision,
            # Lightning frees the gradients of a step after the forward pass of the next
            accumulates=True,
        )
    notes.add_smaller("model", options["model"], memory)
    hint = " and trainer.accumulate_grad_batches as much larger"
    dial = Dial("data.batch_size", pairs, 1, hint)
    return memory.updates("reward model", held, needed, accumulates=True, dial=dial)


def _tokens(data: Mapping[str, Any], notes: Notes) -> int:
    given = data.get("max_tokens")
    if given is None:
        notes.add(
            f"assumed: texts of up to {_ASSUMED_TOKENS} tokens; data.max_tokens would say how long "
            "they are"
        )
        return _ASSUMED_TOKENS
    return int(given)
