"""``module.score(prompts, responses)``: what a reward model says of texts."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple, Protocol

from transformers import PreTrainedTokenizerBase

from lrlhf.datamodules.rows.bad_rows import BadRow
from lrlhf.datamodules.rows.chat import read_messages
from lrlhf.datamodules.rows.columns import text_of
from lrlhf.datamodules.rows.media_rows import MediaReader
from lrlhf.datamodules.rows.prompt_rows import DEFAULT_PROMPT_COLUMN, column_or_dialogue
from lrlhf.media import MediaOptions, MediaProcessor, read_audio, read_image, read_video
from lrlhf.models import RewardNetwork, evaluating
from lrlhf.modules.prompt_forms import refusal, rows_of
from lrlhf.rewards import LearnedReward
from lrlhf.types import Prompt


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
    alone = isinstance(responses, str)
    listed = [responses] if isinstance(responses, str) else list(responses)
    read = prompts_of(prompts, images, len(listed), module.processor)
    reward = LearnedReward.of_network(
        module.network, module.tokenizer, module.processor, head=head, batch_size=batch_size
    )
    with evaluating(module.network):
        scores = reward(
            prompts=[prompt.prompt for prompt in read],
            completions=listed,
            log_metric=lambda *_: None,
            images=[each.images for each in read],
            videos=[item.videos for item in read],
            audios=[one.audios for one in read],
        )
    return scores[0] if alone else scores


class PromptWithMedia(NamedTuple):
    """A prompt, and what it shows."""

    prompt: Prompt
    images: list[Any]
    videos: list[Any]
    audios: list[Any]


def prompts_of(
    prompts: Any, images: Any, count: int, processor: MediaProcessor | None
) -> list[PromptWithMedia]:
    """Read the prompt of each of ``count`` responses.

    Raises:
        TypeError: A prompt is of no known form.
        ValueError: They are not as many, or one cannot be read.
    """
    if images is not None and processor is None:
        raise ValueError("images were given, and the reward model reads text only")
    rows, alone = rows_of(prompts, images)
    reader = MediaReader(processor)
    read = []
    for number, row in enumerate(rows):
        try:
            read.append(_read(row, reader))
        except BadRow as problem:
            raise refusal(number, problem) from problem
    if alone:
        return read * count
    if len(read) != count:
        raise ValueError(
            f"there are {len(read)} prompts and {count} responses; give a prompt for each "
            "response, or one prompt for all"
        )
    return read


def _read(row: Mapping[str, Any], reader: MediaReader) -> PromptWithMedia:
    column = column_or_dialogue(
        row, DEFAULT_PROMPT_COLUMN, default=DEFAULT_PROMPT_COLUMN, setting="prompt"
    )
    turns: Prompt
    refs = reader.of_columns(row, None)
    if isinstance(row[column], str):
        (turns,) = reader.of_texts((text_of(row, column),), refs)
    else:
        turns, refs = reader.of_messages(read_messages(row[column], column), refs, None)
    options = MediaOptions()
    return PromptWithMedia(
        turns,
        [read_image(value, options) for value in refs.images],
        [read_video(value, options) for value in refs.videos],
        [read_audio(value) for value in refs.audios],
    )
