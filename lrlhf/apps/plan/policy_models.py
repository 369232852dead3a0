"""Which models an iteration of a policy has beside the trained ones, from the config alone."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any

from peft import PeftModel
from transformers import PreTrainedModel

from lrlhf.cli.config_entries import is_a, options_of, spec_of
from lrlhf.functional.algorithm import Algorithm
from lrlhf.functional.algorithms import ALGORITHMS, ALIASES, distillation, resolve_algorithm
from lrlhf.models import CausalLM, PretrainedSpec, SourceError
from lrlhf.models.loading.meta import skeleton
from lrlhf.rewards import LearnedReward, ProcessReward
from lrlhf.rollout import GenerativeReward


def kl_penalty(options: Mapping[str, Any]) -> str | None:
    """Say where a module's KL penalty goes, reward or loss; None: there is none."""
    reference, algorithm = options_of(options.get("reference")), options.get("algorithm")
    if isinstance(algorithm, Mapping):
        own = options_of(algorithm)
        strength = own.get("kl_coef", Algorithm.kl_coef)
        kl_in = own.get("kl_in", Algorithm.kl_in)
    else:
        estimator = options_of(options.get("advantage")).get("estimator")
        default = "rloo" if options.get("rewards") is not None else distillation.ALGORITHM
        named = estimator if estimator in {*ALGORITHMS, *ALIASES} else default
        known = resolve_algorithm(algorithm or named)
        strength, kl_in = known.kl_coef, known.kl_in
    if (kl_coef := reference.get("kl_coef")) is not None:
        strength = kl_coef
    return str(reference.get("placement") or kl_in) if strength else None


def reference_spec(options: Mapping[str, Any], policy: CausalLM) -> CausalLM | None:
    """Return what a reference model of its own is loaded from; None: there is no such model."""
    if kl_penalty(options) is None:
        return None
    if (entry := options_of(options.get("reference")).get("model")) is not None:
        return spec_of(entry, CausalLM)
    return policy if policy.lora is None else None  # the policy without its adapters


def teacher_spec(options: Mapping[str, Any]) -> CausalLM | None:
    """Return what a teacher in the process is loaded from; None: there is none."""
    entry = options_of(options.get("teacher")).get("model")
    return None if entry is None else spec_of(entry, CausalLM, dtype="auto")


def reward_models(
    options: Mapping[str, Any], note: Callable[[str], None]
) -> Iterator[tuple[str, PreTrainedModel | PeftModel, Mapping[str, Any]]]:
    """Yield the name, skeleton and options of each reward model; what cannot be read is noted."""
    functions = options_of(options.get("rewards")).get("functions") or []
    entries = functions.items() if isinstance(functions, Mapping) else enumerate(functions)
    for name, entry in entries:
        own = options_of(entry)
        if own.get("device") == "cpu":
            continue
        if is_a(entry, GenerativeReward):
            note(f"not counted: the model of reward {name!r}, which generates")
        if not (is_a(entry, LearnedReward) or is_a(entry, ProcessReward)):
            continue
        keys = ("source", "dtype", "attn_implementation", "trust_remote_code")
        model_options = {"dtype": "auto"} | {key: own[key] for key in keys if key in own}
        try:
            model = skeleton(PretrainedSpec(**model_options), body=True, trainable=False)
        except SourceError as error:
            note(f"not counted: the model of reward {name!r}, which cannot be read: {error}")
            continue
        yield str(name), model, own
