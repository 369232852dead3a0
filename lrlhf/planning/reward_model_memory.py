"""Memory of a reward model that is trained on pairs."""

from __future__ import annotations

from typing import Any

from lrlhf.models import ScoreModel
from lrlhf.models.loading.meta import reward_skeleton
from lrlhf.models.media_inputs import placeholder_ids
from lrlhf.planning.config_entries import options_of, spec_of
from lrlhf.planning.dry_run import Shape
from lrlhf.planning.memory_phases import Dial, PhaseList
from lrlhf.planning.strategy_shares import weights_of


def add_reward_model_phases(phases: PhaseList, model: Any, data: Any) -> None:
    """Add the phases of an optimizer step.

    Args:
        phases: To add them to.
        model: The config's entry of the module.
        data: That of the data module.
    """
    options, pairs = options_of(model), int(options_of(data)["batch_size"])
    spec = spec_of(options["model"], ScoreModel)
    network = reward_skeleton(spec)
    plain = network.scorer.plain
    if placeholder_ids(plain.config):
        phases.note("not counted: what looks at images and videos, and their tokens")
    phases.suggest("model", options["model"])
    # Lightning frees the gradients of a step after the forward pass of the next
    weights = weights_of(network, plain, quantization=spec.quantization)
    shares = phases.hold(weights, options_of(options["optimizer"]), accumulates=True)
    usage = phases.dry_run.update(
        network,
        lambda batch: network(batch).sum(),
        Shape(2 * pairs, phases.tokens_of(data, "max_tokens", "texts")),
        accumulates=True,
    )
    hint = " and trainer.accumulate_grad_batches as much larger"
    phases.add_update("reward model", shares, usage, Dial("data.batch_size", pairs, 1, hint))
