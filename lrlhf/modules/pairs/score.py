"""``module.score(prompts, responses)``: what a reward model says of texts."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol

from transformers import PreTrainedTokenizerBase

from lrlhf.media import MediaProcessor
from lrlhf.models import RewardNetwork, evaluating
from lrlhf.rewards import LearnedReward


class _Scores(Protocol):
    network: RewardNetwork
    tokenizer: PreTrainedTokenizerBase
    processor: MediaProcessor | None


def score(
    module: _Scores,
    prompts: Any,
    responses: str | Sequence[str],
    *,
    head: str | None = None,
    images: Any = None,
    batch_size: int = 8,
) -> Any:
    """Score responses with the network as it is now, before, during or after training.

    The network reads them as it does in a run of PPO: plain text is ended with the end-of-sequence
    token, chats go through the tokenizer's template. No trainer is needed; modes and random states
    stay as they are.

    Args:
        module: The module itself.
        prompts: Text, or a chat as a list of messages; or a list with one for each response.
        responses: One, or several: to one prompt, or to as many prompts.
        head: Which score; needed only if there are several.
        images: For a vision-language network: an image (path, ``PIL.Image``, array, bytes) or a
            list of them; with several prompts, a list with an entry for each. Text is then the
            user's turn of a chat.
        batch_size: Responses scored at the same time.

    Returns:
        A number for one response, a list for several; None in the place of those that are too long
        for the model.

    Raises:
        ValueError: Prompts and responses are not as many, one cannot be read, or there is no such
            head.

    Example:
        >>> module.score("What is 2 + 2?", ["4", "5"])
        [3.1, -2.7]
    """
    # not at the top: it brings all that reads data sets
    from lrlhf.modules.pairs import score_inputs  # noqa: PLC0415

    alone = isinstance(responses, str)
    listed = [responses] if isinstance(responses, str) else list(responses)
    asked = score_inputs.prompts_of(prompts, images, len(listed), module.processor)
    reward = LearnedReward.of_network(
        module.network, module.tokenizer, module.processor, head=head, batch_size=batch_size
    )
    with evaluating(module.network):
        scores = reward(
            prompts=[one.prompt for one in asked],
            completions=listed,
            log_metric=lambda *_: None,
            images=[one.images for one in asked],
            videos=[one.videos for one in asked],
            audios=[one.audios for one in asked],
        )
    return scores[0] if alone else scores
