"""``module.generate("…")``, ``module.sample("…")``: what every module with a policy answers."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any, Protocol

from lrlhf.modules.policy.policy_parts import PolicyParts
from lrlhf.rollout import RolloutEngine, Sampling

if TYPE_CHECKING:
    from lrlhf.datamodules.rows.collate import PromptRow
    from lrlhf.modules.policy.text_generation import TextGenerator


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
    and where ranks do not share it, else the policy itself does. Where the policy is split over
    ranks, all of them must call.

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
        ValueError: A prompt cannot be read, or leaves no room for ``max_new_tokens``; or there is
            a ``structured`` format, and the engine that holds responses to it does not answer.

    Example:
        >>> module.generate("2 + 2 =", max_new_tokens=4, temperature=0)
        ' 4'
    """
    answer = partial(_answer, module, prompts, sampling, options)
    return answer(_texts, n=n, seed=seed, images=images, batch_size=batch_size)


def sample(
    module: _Generates,
    prompts: Any,
    sampling: Sampling | None = None,
    *,
    n: int = 1,
    scored: bool = False,
    seed: int | None = None,
    images: Any = None,
    batch_size: int = 64,
    **options: Any,
) -> Any:
    """Answer prompts as `generate` does, and tell more of each response than its text.

    The responses are those of `generate` with the same ``seed``. Where the run plays episodes, a
    response is a single turn.

    Args:
        module: The module itself.
        prompts: See `generate`. Rows of a data set may have the columns that rewards read.
        sampling: See `generate`.
        n: Responses to each prompt.
        scored: Have the module's rewards score the responses. Functions that fail leave theirs
            without a score, and do not count among the failures of the run.
        seed: See `generate`.
        images: See `generate`.
        batch_size: Responses computed, and scored, at the same time.
        **options: See `generate`.

    Returns:
        A `Sampled` for one prompt, a list for several; with ``n`` above 1 a list of ``n`` in the
        place of each. ``pandas.DataFrame`` makes a table of such a list.

    Raises:
        TypeError: See `generate`.
        ValueError: See `generate`; or a reward reads episodes, of which there are none.
        RewardError: The rewards cannot be asked; a row lacks a column that one of them reads.

    Example:
        >>> module.sample({"prompt": "2 + 2 =", "answer": "4"}, scored=True)
        Sampled(' 4', score=1, tokens=2, logprob=-0.53, finish_reason='stop')
    """
    from lrlhf.modules.policy import response_details as details  # noqa: PLC0415  see `_answer`

    score = details.Scoring(module.parts, module.global_step) if scored else None
    respond = partial(details.respond, score=score)
    answer = partial(_answer, module, prompts, sampling, options)
    return answer(respond, n=n, seed=seed, images=images, batch_size=batch_size)


def _texts(
    generator: TextGenerator, sampling: Sampling, rows: Sequence[PromptRow], seeds: Sequence[int]
) -> list[list[str]]:
    groups = generator.answer(rows, sampling, seeds=seeds)
    return [[answer.text for answer in group] for group in groups]


def _answer(
    module: _Generates,
    prompts: Any,
    sampling: Sampling | None,
    options: dict[str, Any],
    respond: Callable[..., Any],
    **further: Any,
) -> Any:
    """Answer with the module's own engine, or, where that does not do, with the policy."""
    # not at the top: it brings all that reads data sets
    from lrlhf.modules.policy import text_generation as texts  # noqa: PLC0415

    parts = module.parts
    engine = parts.turn_engine
    copied = engine.capabilities.holds_copy
    # one that ranks share would wait for those that are not asked
    alone = engine.capabilities.ranks_together == 1
    changed = texts.changed_sampling(sampling or parts.settings.sampling, options)
    if copied and not (alone and engine.version == module.global_step):
        if changed.structured is not None:
            _refuse_format(engine)
        engine, copied = parts.own_engine, False
    generator = texts.TextGenerator(parts.policy, engine)
    reader = texts.PromptReader(parts.policy)
    if further["images"] is not None and not reader.sees:
        raise ValueError("images were given, and the policy reads text only")
    read = partial(texts.read_fitting, reader, generator, changed)
    try:
        return texts.answer_prompts(prompts, read, partial(respond, generator, changed), **further)
    finally:
        if copied:  # else the run would find what was computed here in its cache
            engine.forget()


def _refuse_format(engine: RolloutEngine) -> None:
    """Say why an engine that holds responses to a format is not asked for it now.

    Raises:
        ValueError: It is one.
    """
    can = engine.capabilities
    if not can.structured:
        return  # what answers instead says what would
    reason = "does not have the policy's current weights"
    if can.ranks_together > 1:
        reason = f"is shared by {can.ranks_together} ranks, one of which cannot ask it alone"
    raise ValueError(
        f"sampling.structured: {type(engine).__name__} {reason}, so that the policy itself would "
        "answer, which holds no responses to a format: leave structured out here, or set "
        "eval_sampling.structured and validate, where all ranks ask the engine together"
    )
