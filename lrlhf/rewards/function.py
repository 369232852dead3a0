"""Reward functions: their interface, and how they read completions, columns and prompts."""

from __future__ import annotations

import difflib
import math
from abc import ABC, abstractmethod
from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence
from typing import Any, ClassVar, NamedTuple

from lrlhf.arguments import KeepsArguments
from lrlhf.types import Message, Prompt

Completion = str | Sequence[Message]
"""All that follows the prompt: text, or for a chat the turns that the policy added.

Where responses come from a rollout it is a `CompletionText` or `CompletionTurns`, whose
``segments`` separate what the policy wrote from inputs such as tool output, and of which
`completion_text` returns the former.
"""


class TextSegment(NamedTuple):
    """A part of a completion that has one origin."""

    text: str
    sampled: bool
    """Whether the policy wrote it; else it is an input, such as the output of a tool."""


class CompletionText(str):
    """A completion as a string with its segments."""

    segments: tuple[TextSegment, ...]
    """In order; the string is their concatenation."""

    def __new__(cls, segments: Iterable[TextSegment]) -> CompletionText:
        segments = tuple(segments)
        text = super().__new__(cls, "".join(segment.text for segment in segments))
        text.segments = segments
        return text

    def __reduce__(self) -> tuple[type[str], tuple[str]]:
        return str, (str(self),)  # other processes need not have this library


class CompletionTurns(list[Message]):
    """A completion of a chat, with its segments.

    Args:
        text: All of it.
        turns: Of an episode; None: one turn of the assistant's.
    """

    def __init__(self, text: CompletionText, turns: Sequence[Message] | None = None) -> None:
        super().__init__(turns or [{"role": "assistant", "content": str(text)}])
        self.segments: tuple[TextSegment, ...] = text.segments

    def __reduce__(self) -> tuple[type[list[Message]], tuple[list[Message]]]:
        return list, ([*self],)  # see CompletionText


def completion_segments(completion: Completion) -> tuple[TextSegment, ...]:
    """Return the segments of a completion; a plain text is one that the policy wrote."""
    # also those of `isolated_child.py`, which has classes of its own
    segments: Iterable[tuple[str, bool]] | None = getattr(completion, "segments", None)
    if segments is not None:
        return tuple(TextSegment(*segment) for segment in segments)
    return (TextSegment(completion_text(completion), sampled=True),)


def with_segments(
    completion: Completion, segments: Iterable[tuple[str, bool]] | None
) -> Completion:
    """Return a completion with segments; None: as it is."""
    if segments is None:
        return completion
    text = CompletionText([TextSegment(*segment) for segment in segments])
    return text if isinstance(completion, str) else CompletionTurns(text, completion)


RewardValues = Sequence[float | None]
"""One number per response; None: this function does not apply to the response."""

LogMetric = Callable[[str, float], None]
LogExtra = Callable[[str, Sequence[Any]], None]

RESERVED = ("prompts", "completions", "completion_ids", "log_metric", "log_extra")
"""Arguments that are no data columns."""
OF_RUNS = ("step", "max_steps", "truncated")
"""Columns that a run adds to those of the data, where these have none of the name."""
OTHER_REWARDS = "rewards"
"""Values of other rewards by name, for functions that name the argument."""
OF_EPISODES = ("episodes", "environments")
"""Further ones of functions that score episodes and name them."""


class RewardError(ValueError):
    """Rewards that cannot be used; a reward function may raise it to stop the run."""


class MissingColumnError(RewardError):
    """A reward function reads a column that the data lacks."""


class NoSiblingsError(RewardError):
    """A function compares the responses to a prompt, and no prompt of the batch has two."""


class PartialValues(list[float | None]):
    """Values of which some are missing, or stand in for others.

    Args:
        values: One per response; NaN: it is missing, None: the function does not apply.
        failure: The reason to be reported; the last line sums it up. Empty: there is none.
        failed: Number of responses to which the reason applies; None: all without a value.
    """

    def __init__(
        self, values: Iterable[float | None], failure: str, failed: int | None = None
    ) -> None:
        super().__init__(values)
        self.failure = failure
        missing = (value is not None and math.isnan(value) for value in self)
        self.failed = sum(missing) if failed is None else failed


class StepReward(NamedTuple):
    """The contribution of one step of a response to its value."""

    end: int
    """Where the step ends, in characters of the completion's joined segments."""
    value: float


class StepValues(list[float | None]):
    """Values that are sums over the steps of each response, and the contribution of each step.

    Algorithms with credit for single turns credit each step at the token that ends it, see
    `Advantage.credit`.

    Args:
        values: One per response.
        steps: Of each response; of one without a value they are not read.
    """

    def __init__(
        self, values: Iterable[float | None], steps: Iterable[Sequence[StepReward]]
    ) -> None:
        super().__init__(values)
        self.steps = tuple(steps)


def first_failure(failures: Mapping[int, str], what: str) -> str:
    """Return the first failure of several by response; the last line sums them up as ``what``."""
    first = min(failures)
    *details, summary = failures[first].splitlines()
    return "\n".join([*details, f"{what}, the first is response {first}: {summary}"])


class RewardFunction(KeepsArguments, ABC):
    """Scores responses; a plain function with the same arguments will do as well.

    Only those arguments are passed that the signature names (all of them with ``**columns``), so
    a function that reads text alone is ``def __call__(self, *, completions, **columns)``.
    ``__call__`` may be ``async``.
    """

    ends_by_itself: ClassVar[bool] = False
    """Its work ends, or has limits of its own: `Rewards` sets none with ``timeout: auto``."""

    sums_turns: ClassVar[bool] = False
    """Its value is the sum of an environment's rewards for single turns."""

    scores_steps: ClassVar[bool] = False
    """It returns `StepValues`."""

    none_is_missing: ClassVar[bool] = False
    """Its None means that it could not score a response, and not that it does not apply."""

    forwards_columns: ClassVar[bool] = False
    """Its arguments go to a function of the user, which may use all of them."""

    compares_responses: bool = False
    """It has values only for responses with siblings, others to the same prompt."""

    @classmethod
    def columns_read(cls, options: Mapping[str, Any]) -> Iterable[str]:
        """Return the data columns that it requires, besides those of its signature.

        They are checked before any weights are loaded.

        Args:
            options: Of the constructor, defaults left out or not.
        """
        return ()

    def prepare(self) -> None:
        """Load what is heavy; must be cheap when it is loaded already.

        Called in the caller's thread before every scoring, outside the timeout. Its exceptions
        stop the run.
        """

    def close(self) -> None:
        """End what it has started, such as processes; a later call may start it again."""

    @abstractmethod
    def __call__(
        self,
        *,
        prompts: Sequence[Prompt],
        completions: Sequence[Completion],
        completion_ids: Sequence[Sequence[int]],
        log_metric: LogMetric,
        log_extra: LogExtra,
        **columns: Any,
    ) -> RewardValues | Awaitable[RewardValues]:
        """Score every response.

        Args:
            prompts: Text, or the list of turns of a chat, one per response.
            completions: The responses: text, or a list of the assistant's turns where the prompt is
                a chat, so that ``prompt + completion`` is the full dialogue; see `Completion`.
            completion_ids: Token ids that the policy wrote, as the engine returned them.
            log_metric: ``log_metric(name, value)`` logs a number under ``rewards/<name>``,
                with the function's name before it where another may log the same.
            log_extra: ``log_extra(column, values)`` adds a column to the log of responses, one
                value per response.
            columns: Every other column of the data, as a list with one value per response. An
                argument ``rewards`` has the values of other functions, see ``inputs`` of
                `Rewards`.

        Returns:
            One finite number per response, or None for all responses to a prompt to which it does
            not apply: then the other functions decide, see `Rewards`.
        """


class CopiesStartAfresh(RewardFunction, ABC):
    """A reward whose copies and pickles have its settings, and nothing that runs."""

    _not_copied: ClassVar[tuple[str, ...]]
    """Attributes that `_start_afresh` sets, and that no copy gets."""

    @abstractmethod
    def _start_afresh(self) -> None:
        """Set what runs to what it is before the first call."""

    def __getstate__(self) -> dict[str, Any]:
        return {key: value for key, value in self.__dict__.items() if key not in self._not_copied}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        self._start_afresh()


def completion_text(completion: Completion) -> str:
    """Return the text that the policy wrote, without inputs in between.

    Args:
        completion: Text, or chat turns: the contents of the assistant's, joined by newlines. Of
            content that comes in parts, the text parts count. With segments, those that the policy
            wrote, joined by newlines: its calls of tools stand there as it wrote them.
    """
    if hasattr(completion, "segments"):
        own = (segment.text for segment in completion_segments(completion) if segment.sampled)
        return "\n".join(own)
    if isinstance(completion, str):
        return completion
    return "\n".join(
        content_text(message.get("content"))
        for message in completion
        if message.get("role") == "assistant"
    )


def content_text(content: Any) -> str:
    """Return the text of a chat turn: its content, or the text parts of it."""
    if content is None:  # a turn that only calls tools
        return ""
    if isinstance(content, str):
        return content
    return "".join(part["text"] for part in content if part.get("type") == "text")


def images_of_prompt(completion: Completion, images: Sequence[Any]) -> Sequence[Any]:
    """Return the images of a prompt: without those that the turns of an episode show behind it."""
    turns = () if isinstance(completion, str) else completion
    contents = (turn.get("content") for turn in turns)
    shown = sum(
        part.get("type") == "image" for each in contents if isinstance(each, list) for part in each
    )
    return images[: len(images) - shown]


def outside_thoughts(text: str) -> str:
    """Return a text behind its thoughts, up to one that it opens and never closes.

    ``</think>`` ends a thought, whose ``<think>`` the chat template may have written.
    """
    return before_open_thought(text).rpartition(_THOUGHT_END)[2]


def before_open_thought(text: str) -> str:
    """Return a text up to the thought that it opens and never closes; all of it: there is none."""
    thoughts, end, answer = text.rpartition(_THOUGHT_END)
    return thoughts + end + answer.partition(_THOUGHT)[0]


_THOUGHT, _THOUGHT_END = "<think>", "</think>"


def column_of(columns: Mapping[str, Any], name: str, *, setting: str) -> Sequence[Any]:
    """Return a data column that an option names.

    Args:
        columns: Arguments of the reward function.
        name: Of the column.
        setting: The option that names it, for the error.

    Raises:
        MissingColumnError: The data has no such column.
    """
    if name in columns:
        values: Sequence[Any] = columns[name]
        return values
    data = [column for column in columns if column not in (*RESERVED, *OF_RUNS)]
    listed = ", ".join(sorted(data)) or "none"
    raise MissingColumnError(
        f"the data has no column {name!r}{did_you_mean(name, data)} (columns: {listed}); set "
        f"{setting} to the column that holds it"
    )


def did_you_mean(word: str, known: Iterable[str]) -> str:
    """Return ``; did you mean 'x'?`` for what is closest to ``word``, else nothing."""
    close = difflib.get_close_matches(word, list(known), n=1, cutoff=0.5)
    return f"; did you mean {close[0]!r}?" if close else ""


def check_positive(**values: float | None) -> None:
    """Refuse settings that are not above 0; None stands for no limit.

    Raises:
        ValueError: One is not.
    """
    for name, value in values.items():
        if value is not None and not value > 0:
            raise ValueError(f"{name} is {value}; it must be above 0")
