"""The first rows of the data, read as the run would read them."""

from __future__ import annotations

import difflib
import inspect
import itertools
import logging
import re
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from numbers import Number
from types import SimpleNamespace
from typing import Any, Protocol, runtime_checkable

import lightning as L
from huggingface_hub.constants import HF_HUB_OFFLINE
from lightning.pytorch.utilities.seed import isolate_rng
from torch import Tensor
from transformers import PreTrainedTokenizerBase

from lrlhf.cli.checks.models import TrainedModel
from lrlhf.cli.config_entries import class_of, is_a, is_lrlhf, options_of, reward_entries
from lrlhf.datamodules import HubSource, Source, TextDataModule, Weighted
from lrlhf.datamodules.core import HasTexts
from lrlhf.datamodules.loading.sources import resolve_source
from lrlhf.datamodules.loading.splits import FirstRows
from lrlhf.datamodules.loading.validation import is_named
from lrlhf.datamodules.rows.collate import PromptRow
from lrlhf.datamodules.rows.step_rows import StepRow
from lrlhf.functional.names import import_value
from lrlhf.models import TextLimits, load_tokenizer
from lrlhf.modules import DPO
from lrlhf.options.errors import MistakeError
from lrlhf.rewards import LearnedReward, ProcessReward, RewardError, RewardFunction
from lrlhf.rewards.dispatch import Call, Dispatcher
from lrlhf.rewards.function import OF_EPISODES, OF_RUNS, OTHER_REWARDS, RESERVED
from lrlhf.rewards.learned import no_template
from lrlhf.rewards.lookup import BUILTINS, chosen_arguments, filled_by_python
from lrlhf.rewards.reward_values import check_values
from lrlhf.rollout import GenerativeReward

logger = logging.getLogger(__name__)

ROWS = 100
"""Rows of each source that are looked at."""
_ENTRIES = ("train", "val", "pretraining")
_MEDIA = frozenset({"images", "videos", "audios"})
"""What functions get of a policy that reads media."""
_ALWAYS = {*RESERVED, *OF_RUNS, OTHER_REWARDS, *_MEDIA}
"""What a reward function may ask for that is no column of the data."""


@runtime_checkable
class _PromptLike(Protocol):
    @property
    def columns(self) -> Mapping[str, Any]: ...


@dataclass(frozen=True)
class CheckedRows:
    """What the first rows tell."""

    splits: Sequence[FirstRows[Any]]
    columns: frozenset[str]
    """What rewards get beside prompts and responses; empty for pairs."""
    longest: int
    """Tokens of the longest prompt, or of the longest answer with its prompt."""

    @property
    def train(self) -> FirstRows[Any]:
        """The first rows of the train data."""
        return self.splits[0]


def check_sources(data: Any) -> None:
    """Refuse a path of the data that leads to nothing."""
    if not is_a(data, TextDataModule):
        return
    options = options_of(data)
    for name in _ENTRIES:
        for entry in [source for source in _sources(options.get(name)) if isinstance(source, str)]:
            try:
                for source in resolve_source(entry):
                    if isinstance(source, HubSource) and HF_HUB_OFFLINE:
                        source.prepare()  # from the cache, or not at all
            except ValueError as error:
                raise MistakeError(("data", name), str(error), value=entry) from error


def taken_from(model: Any, trained: TrainedModel, vocabulary: int | None = None) -> SimpleNamespace:
    """Return what data modules take from the module that the config describes, without weights.

    Args:
        model: The section of the config.
        trained: The model.
        vocabulary: Rows of its embedding; None: not known.
    """
    # how long texts are is another check's business, which knows more of the config
    limits = TextLimits(source=trained.spec.source, context=None, vocabulary=vocabulary)
    tokenizer = trained.tokenizer()
    return SimpleNamespace(
        text_limits=lambda training: [limits],
        tokenizer=tokenizer,
        end_token_ids=trained.end_token_ids(tokenizer),
        processor=trained.processor(),
        head_names=options_of(options_of(model).get("model")).get("heads"),
        answers_only=is_a(model, DPO),
    )


def check_rows(
    data: Any,
    model: Any,
    trained: TrainedModel | None,
    vocabulary: int | None,
    build: Callable[[], L.LightningDataModule],
) -> CheckedRows | None:
    """Refuse data whose first rows cannot be used.

    Args:
        data: The config's entry of the data module.
        model: Of the module.
        trained: The model that it trains.
        vocabulary: Rows of its embedding; None: not known.
        build: Makes the data module.

    Returns:
        What was seen; None: the rows cannot be had yet, or are of a kind that is not known.
    """
    if trained is None or not (is_lrlhf(data) and is_a(data, TextDataModule)):
        return None
    options = options_of(data)
    if not all(_is_here(source) for name in _ENTRIES for source in _sources(options.get(name))):
        return None
    module = build()
    assert isinstance(module, TextDataModule)
    try:
        splits = module.first_rows(taken_from(model, trained, vocabulary), ROWS)
    except ValueError as error:
        named = re.search(r"`(\w+)`", str(error))  # the option that the message advises to set
        option = [named[1]] if named and named[1] in options else []
        raise MistakeError(("data", *option), str(error)) from error
    rows = [row for split in splits for row in split.rows]
    lengths = [
        len(text.input_ids) for row in rows if isinstance(row, HasTexts) for text in row.texts
    ]
    columns = [row.columns for row in splits[0].rows if isinstance(row, _PromptLike)]
    return CheckedRows(splits, frozenset().union(*columns), max(lengths, default=0))


def check_reward_columns(
    model: Any, columns: frozenset[str], reads_media: bool = True
) -> list[str] | None:
    """Refuse a reward function that asks for a column that the data lacks.

    Args:
        model: The section of the config.
        columns: Of the data.
        reads_media: Whether the policy does, so that rewards get what it is shown.

    Returns:
        The columns that the functions read; None: there are no rewards, or not of a known kind.
    """
    entry = options_of(model).get("rewards")
    if not is_lrlhf(entry):
        return None
    metrics = options_of(options_of(model).get("evaluation")).get("metrics")
    places = {("rewards", "functions"): options_of(entry)}
    places["evaluation", "metrics"] = {"functions": metrics}
    required = [
        (column, name, ("model", *place))
        for place, functions in places.items()
        for column, name in _needed_columns(functions)
    ]
    plays = options_of(model).get("episodes") is not None
    for column, name, place in required:
        if column in OF_EPISODES and not plays:
            raise MistakeError(
                place,
                f"the reward function {name} reads {column!r}, which only episodes have: set "
                "model.episodes",
                value=name,
            )
        if column in _MEDIA - columns and not reads_media:
            raise MistakeError(
                place,
                f"the reward function {name} reads {column!r}, and the policy reads text only",
                value=name,
            )
        if column in columns | _ALWAYS | {*OF_EPISODES}:
            continue
        near = difflib.get_close_matches(column, columns, n=1)
        raise MistakeError(
            place,
            f"the reward function {name} reads the column '{column}', and the data has none of "
            f"that name{f'; did you mean {near[0]!r}?' if near else ''} (columns: "
            f"{', '.join(sorted(columns)) or 'none'})",
            value=name,
        )
    return sorted({column for column, _, _ in required} - _ALWAYS - {*OF_EPISODES})


def check_environment_columns(model: Any, columns: frozenset[str], reads_media: bool) -> None:
    """Refuse a ``reset`` or an agent that asks for a column that the data lacks.

    Args:
        model: The section of the config.
        columns: Of the data.
        reads_media: Whether the policy does, so that environments get the images of prompts.
    """
    always = {"prompt", "seed", *(["images"] if reads_media else [])}
    episodes = options_of(options_of(model).get("episodes"))
    for option in ("environment", "agent"):
        path, place = episodes.get(option), ("model", "episodes", option)
        if not isinstance(path, str):
            continue
        try:
            environment = import_value(option, path, ())
        except ValueError as error:
            raise MistakeError(place, str(error), value=path) from error
        arguments, name, own = _of_signature(environment), f"{path}()", _OF_AGENTS
        if option == "environment":
            reset = getattr(environment, "reset", None)
            arguments = [] if reset is None else _of_signature(reset)[1:]
            name, own = f"{path}.reset()", frozenset()
        for column in arguments:
            if column not in columns | always | own:
                why = "the data has none of that name"
                if column == "images":
                    why = "the policy reads text only"
                raise MistakeError(
                    place,
                    f"{name} reads the column {column!r}, and {why} "
                    f"(columns: {', '.join(sorted(columns)) or 'none'})",
                    value=path,
                )


_OF_AGENTS = frozenset({"base_url", "api_key", "model"})
"""What agents are given beside columns."""


def _needed_columns(rewards: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    """Go through the columns that reward functions need, each with who needs it."""
    if rewards.get("recipe"):
        yield str(rewards["label_column"]), "recipe"
    for entry in reward_entries(rewards).values():
        name = str(entry["class_path"] if isinstance(entry, Mapping) else entry)
        function = _function(entry, name)
        if function is None:
            continue
        for column in _of_signature(function):
            yield column, name
        if isinstance(function, type) and issubclass(function, RewardFunction):
            for column in function.columns_read(options_of(entry)):
                yield column, name


def _function(entry: Any, name: str) -> Any:
    if isinstance(entry, Mapping):
        return class_of(entry)
    try:
        return BUILTINS.get(name) or import_value("reward function", name, BUILTINS)
    except ValueError:
        return None  # which `Rewards` says


def _of_signature(function: Any) -> list[str]:
    """Return the arguments without a default that a function is called with, `self` left out."""
    called = function.__call__ if isinstance(function, type) else function
    try:
        parameters = list(inspect.signature(called).parameters.values())
    except (TypeError, ValueError):
        return []
    own = parameters[1:] if isinstance(function, type) else parameters
    by_keyword = (inspect.Parameter.KEYWORD_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
    return [each.name for each in own if each.kind in by_keyword and each.default is each.empty]


def _sources(entries: Any) -> list[Any]:
    """What an option of the data names, shares, added columns and names of sets left out."""
    if is_named(entries) and "class_path" not in entries:
        if set(entries) <= {"source", "options"}:  # one of the sets
            return _sources(entries["source"])
        return [source for each in entries.values() for source in _sources(each)]
    listed = entries if isinstance(entries, list) else [] if entries is None else [entries]
    return [
        options_of(entry)["source"]
        if isinstance(entry, Mapping)
        and "source" in options_of(entry)
        and ("class_path" not in entry or is_a(entry, Weighted))
        else entry
        for entry in listed
    ]


def _is_here(source: Any) -> bool:
    """Whether rows can be had at once: from files, or from a class of ours that makes them."""
    if isinstance(source, str):
        resolved: Sequence[Source] = resolve_source(source)
        return HF_HUB_OFFLINE or not any(isinstance(one, HubSource) for one in resolved)
    kind = class_of(source)
    makes_them = is_lrlhf(source) and kind is not None and issubclass(kind, Source)
    if not makes_them or getattr(kind, "prepare", None) is not Source.prepare:
        return False
    nested = [each for each in options_of(source).values() if isinstance(each, Mapping)]
    return all(map(is_lrlhf, (item for item in nested if "class_path" in item)))


def check_reward_templates(model: Any, seen: CheckedRows) -> None:
    """Refuse a reward model that is to read chats and has no chat template.

    Of the reward model only the tokenizer is loaded.
    """
    rewards = options_of(model).get("rewards")
    if not is_lrlhf(rewards):
        return
    rows = [row for split in seen.splits for row in split.rows]
    chats = any(isinstance(row, PromptRow) and not isinstance(row.prompt, str) for row in rows)
    for entry in reward_entries(rewards).values():
        if is_a(entry, GenerativeReward):
            _check_template(entry, "its questions are chats", open_turn=True)
        elif chats and (is_a(entry, LearnedReward) or is_a(entry, ProcessReward)):
            _check_template(entry, "the prompts are chats", open_turn=is_a(entry, ProcessReward))


def _check_template(entry: Any, reason: str, *, open_turn: bool) -> None:
    options = options_of(entry)
    if options.get("chat_template") is not None:
        return
    source = options["source"]
    tokenizer = load_tokenizer(
        options.get("tokenizer") or source,
        trust_remote_code=bool(options.get("trust_remote_code")),
    )
    if tokenizer.chat_template is None:
        raise MistakeError(
            ("model", "rewards", "functions", "source"),
            f"{reason}, and {no_template(tokenizer, source, open_turn)}",
            value=source,
        )


_MADE = "This is a made response."
_TRIAL_SECONDS = 10.0


def try_rewards(functions: Mapping[str, Any], seen: CheckedRows, count: int) -> list[str]:
    """Call reward functions on made responses to the first prompt, before there are others.

    What loads a model or asks a server is left out, what reads media, episodes or other rewards,
    and what is awaited, as it may keep the event loop of its first call. An exception of a function
    is only told: a made response may be none that it can score.

    Args:
        functions: By name.
        seen: The first rows.
        count: Responses to the prompt.

    Returns:
        Names of those that were left out.

    Raises:
        MistakeError: A function cannot be called with its arguments, or does not return one number
            or None per response.
    """
    row = next((one for one in seen.train.rows if isinstance(one, PromptRow)), None)
    if row is None:
        return [*functions]
    turns = [{"role": "assistant", "content": _MADE}]
    available = {
        **{name: [value] * count for name, value in row.columns.items()},
        **{"prompts": [row.prompt] * count, "completion_ids": [[*range(3)]] * count},
        "completions": [_MADE if isinstance(row.prompt, str) else turns] * count,
        **{"step": [0] * count, "max_steps": [1] * count, "truncated": [False] * count},
        **dict.fromkeys(("log_metric", "log_extra"), lambda *_: None),
    }
    left_out = []
    for name, function in functions.items():
        signature = inspect.signature(function)
        if _is_ours(function):
            continue  # whose values need no check
        awaited = any(map(inspect.iscoroutinefunction, (function, type(function).__call__)))
        if (
            awaited
            or not _is_local(function)
            or {*OF_EPISODES, *_MEDIA, OTHER_REWARDS} & {*signature.parameters}
        ):
            left_out.append(name)
            continue
        arguments = chosen_arguments(name, signature, available, filled_by_python(function))
        with isolate_rng():
            (outcome,) = Dispatcher(_TRIAL_SECONDS).run([Call(name, function, arguments)])
        if outcome.error is None:
            _check_returned(name, outcome.value, count)
        elif isinstance(outcome.error, TypeError) and _is_of_call(outcome.error):
            raise MistakeError(("model", "rewards"), f"reward function {name!r}: {outcome.error}")
        else:
            kind = type(outcome.error).__name__
            logger.warning(
                "the reward function %r cannot score a made response: %s: %s",
                *(name, kind, outcome.error),
            )
    return left_out


def _is_ours(function: Any) -> bool:
    """Whether a reward is one of this library that asks nobody else."""
    module = type(function).__module__
    return module.startswith("lrlhf.") and not getattr(function, "ends_by_itself", False)


def _is_local(function: Any) -> bool:
    """Whether a reward computes in this process, and at once."""
    if not isinstance(function, RewardFunction):
        return True
    loads = type(function).prepare is not RewardFunction.prepare
    return not (loads or function.ends_by_itself or function.sums_turns)


def _is_of_call(error: BaseException) -> bool:
    """Whether the call itself failed, and nothing inside of the function."""
    frames = [frame for frame, _ in traceback.walk_tb(error.__traceback__)]
    return bool(frames[-1].f_globals["__name__"] == Dispatcher.__module__)


def _check_returned(name: str, value: Any, count: int) -> None:
    try:
        checked = check_values(value, function=name, rows=[*range(count)])
    except RewardError as error:
        raise MistakeError(("model", "rewards"), str(error)) from error
    if checked.bad and not all(isinstance(each, Number | Tensor | None) for each in value):
        raise MistakeError(("model", "rewards"), f"reward function {name!r} {checked.malformed}")


_WIDTH = 150
"""Characters of a row that is shown in a line."""


def shown_rows(seen: CheckedRows, trained: TrainedModel | None, in_full: int) -> list[str]:
    """Show rows as the model reads them, with what of them is in the loss.

    Args:
        seen: The first rows.
        trained: The model.
        in_full: How many are shown token by token; 0: the first, in a line for each of its texts.
    """
    lines: list[str] = []
    if trained is None:
        return lines
    tokenizer = trained.tokenizer()
    for number, row in enumerate(seen.train.rows[: in_full or 1], 1):
        if not isinstance(row, HasTexts):
            break
        for text in row.texts:
            ids, mask = [*map(int, text.input_ids)], _in_loss(text)
            part = "a prompt" if isinstance(row, PromptRow) else f"{sum(mask)} in the loss"
            summary = "" if in_full else _summary(ids, mask, tokenizer)
            lines.append(f"row {number}    {len(ids)} tokens, {part}{summary}")
            for token, learnt in zip(ids, mask, strict=True) if in_full else ():
                piece = tokenizer.decode([token])
                lines.append(f"         {token:>7}  {'loss' if learnt else '    '}  {piece!r}")
    return lines


def _in_loss(text: Any) -> list[bool]:
    """Which tokens of a text the loss is on: the answer, an assistant's turns, ends of steps."""
    size = len(text.input_ids)
    if isinstance(text, StepRow):
        return [position in text.ends for position in range(size)]
    trained = getattr(text, "trained", None)
    start = getattr(text, "start", size if trained is None else 0)
    return [at >= start and (trained is None or bool(trained[at])) for at in range(size)]


def _summary(ids: list[int], mask: list[bool], tokenizer: PreTrainedTokenizerBase) -> str:
    """The text, with brackets around what is in the loss, its middle left out."""
    text = ""
    for learnt, run in itertools.groupby(zip(ids, mask, strict=True), key=lambda pair: pair[1]):
        piece = str(tokenizer.decode([token for token, _ in run]))
        text += f"⟦{piece}⟧" if learnt else piece
    if len(text) > _WIDTH:
        text = f"{text[: _WIDTH // 2]} … {text[-_WIDTH // 2 :]}"
    return f": {text!r}"
