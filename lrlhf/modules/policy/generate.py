"""``module.generate("…")``: what every module with a policy answers."""

from __future__ import annotations

from typing import Any, Protocol

from lrlhf.modules.policy.policy_parts import PolicyParts
from lrlhf.rollout import Sampling


class _Generates(Protocol):
    parts: PolicyParts

    @property
    def global_step(self) -> int: ...


def generate(
    module: _Generates,
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
    else the policy itself does. Where the policy is split over ranks, all of them must call.

    Args:
        module: The module itself.
        prompts: Text that the policy goes on; a chat, as a list of messages (``role`` and
            ``content``), which the tokenizer's template renders; a row of a data set, with a column
            ``prompt``; or several of these in a list.
        sampling: How tokens are sampled; None: as in training.
        n: Responses to each prompt.
        seed: Gives the same responses in every call; None: others each time. Without effect at
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
        ValueError: A prompt cannot be read, or leaves no room for ``max_new_tokens``.

    Example:
        >>> module.generate("2 + 2 =", max_new_tokens=4, temperature=0)
        ' 4'
    """
    # not at the top: it brings all that reads data sets
    from lrlhf.modules.policy import text_generation as texts  # noqa: PLC0415

    parts = module.parts
    engine = parts.turn_engine
    copied = engine.capabilities.holds_copy
    if copied and engine.version != module.global_step:
        engine, copied = parts.own_engine, False
    try:
        return texts.generate_texts(
            texts.TextGenerator(parts.policy, engine),
            texts.PromptReader(parts.policy),
            prompts,
            texts.changed_sampling(sampling or parts.settings.sampling, options),
            n=n,
            seed=seed,
            images=images,
            batch_size=batch_size,
        )
    finally:
        if copied:  # else the run would find what was computed here in its cache
            engine.forget()
