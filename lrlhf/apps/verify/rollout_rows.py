"""Rollouts of any trainer as rows of one kind, with whatever their files hold."""

from __future__ import annotations

import math
import re
from collections.abc import Hashable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from lrlhf.datamodules.loading.files import is_data_file, read_rows_of_file
from lrlhf.datamodules.rows.bad_rows import BadDataError, BadRow
from lrlhf.guard.dump import read_dump
from lrlhf.rollout.storage import load_rollout, rollout_files
from lrlhf.types import Experience, Rollout

COLUMNS: dict[str, tuple[str, ...]] = {
    "ids": ("token_ids", "input_ids", "sequences"),
    "prompt_ids": ("prompt_ids", "prompts_ids", "prompt_token_ids", "prompts"),
    "completion_ids": ("completion_ids", "responses", "response_ids", "completion_token_ids"),
    "attention_mask": ("attention_mask",),
    "prompt_mask": ("prompt_mask",),
    "loss_mask": ("loss_mask", "response_mask", "action_mask", "completion_mask", "mask"),
    "sampled": ("sampled", "tool_mask"),
    "sampling": (
        *("sampling_logprobs", "inference_logprobs", "completion_logprobs"),
        *("sampling_per_token_logps", "rollout_log_probs", "logprobs"),
    ),
    "old": (
        *("old_logprobs", "trainer_logprobs", "old_per_token_logps"),
        *("old_log_probs", "action_log_probs"),
    ),
    "ref": (
        *("ref_logprobs", "ref_per_token_logps", "ref_log_prob"),
        *("ref_log_probs", "base_action_log_probs"),
    ),
    "kl": ("kl", "kls"),
    "advantages": ("advantages", "advantage"),
    "losses": ("losses", "token_losses"),
    "versions": ("versions", "token_versions"),
    "score": ("score", "scores", "reward", "rewards"),
    "token_scores": ("token_level_scores",),
    "parts": ("rewards", "reward_parts"),
    "weights": ("reward_weights", "weights"),
    "group": ("group", "group_id", "group_ids", "uid", "index", "example_id"),
    "step": ("step", "export_step", "global_step"),
    "truncated": ("truncated", "is_truncated"),
    "finish_reason": ("finish_reason", "stop_reason"),
    "temperature": ("temperature", "temperatures", "completion_temperatures"),
    "top_p": ("top_p",),
    "top_k": ("top_k",),
    "min_p": ("min_p",),
    "prompt": ("messages", "prompt", "input"),
    "completion": ("completion", "output", "response"),
    "conversation": ("conversation", "trajectory_id", "rollout_id"),
    "micro_batch": ("micro_batch", "micro_step"),
    "step_loss": ("step_loss",),
}
"""Columns by the names that plain files, TRL, verl, OpenRLHF and prime-rl have for them."""
PER_TOKEN = ("sampling", "old", "ref", "kl", "advantages", "losses", "versions")
_OPTIONS = ("temperature", "top_p", "top_k", "min_p")
_EXPECTED = {".safetensors", ".jsonl", ".json", ".parquet", ".pt", ".gz", ".zst"}


@dataclass(slots=True, kw_only=True)
class Row:
    """One response with its prompt, without padding; None and NaN: not recorded."""

    place: str
    """File and number of the row, such as ``rollouts.jsonl:17``."""
    ids: Tensor | None = None
    """`[T]`, prompt and response; None: the file has only texts."""
    start: int = 0
    """Position of the first response token."""
    loss_mask: Tensor | None = None
    """`[T]` bool: the tokens that were trained on."""
    sampled: Tensor | None = None
    """`[T]` bool: the tokens that the policy wrote, where that is recorded by itself."""
    tokens: dict[str, Tensor] = field(default_factory=dict)
    """`[T]` float64 each, by the names of `PER_TOKEN`."""
    score: float = math.nan
    parts: dict[str, float] = field(default_factory=dict)
    """Rewards by name."""
    weights: dict[str, float] = field(default_factory=dict)
    advantage: float = math.nan
    """Of a row whose tokens are not known."""
    group: Hashable = None
    step: int = 0
    truncated: bool | None = None
    options: dict[str, float] = field(default_factory=dict)
    """``temperature``, ``top_p``, ``top_k`` and ``min_p`` of the sampling."""
    prompt: Any = None
    """Text or messages."""
    completion: Any = None
    conversation: Hashable = None
    micro_batch: int | None = None
    step_loss: float = math.nan
    digits: int = 16
    """Significant digits that log-probabilities were written with."""
    flaws: list[str] = field(default_factory=list)
    """Columns that do not have an entry for each token."""
    written: Tensor | None = None
    """`[T]` bool: the tokens that the policy wrote, see `lrlhf.apps.verify.token_checks`."""

    @property
    def policy(self) -> Tensor | None:
        """`[T]`: log-probabilities of the policy, the trainer's if there are any."""
        return self.tokens.get("old", self.tokens.get("sampling"))

    @property
    def response(self) -> Tensor:
        """`[T]` bool: all that stands behind the prompt."""
        assert self.ids is not None, "of rows with token ids"
        return torch.arange(len(self.ids)) >= self.start


class Padding(NamedTuple):
    """What tensors are padded with."""

    token: int | None = None
    ends: bool = False
    """Whether the same token ends responses."""


def read_rollouts(path: Path, padding: Padding | None = None) -> list[Row]:
    """Read a file, or all files of a folder that hold rollouts.

    Args:
        path: A run of lrlhf, a dump, a folder that another trainer wrote, or one file.
        padding: Of tensors whose masks do not tell it; None: there is none.

    Raises:
        ValueError: There is none, or one of them cannot be read; names it.
    """
    padding = padding or Padding()
    if (path / "anomaly.json").is_file():
        held = [batch for bundle in read_dump(path).bundles for batch in bundle.batches.values()]
        return [row for b in held if isinstance(b, Rollout) for row in rows_of_batch(b, path.name)]
    rows = [row for file in _files(path) for row in _of_file(file, padding)]
    if not rows:
        raise ValueError(f"{path} holds no rollouts")
    return rows


def _files(path: Path) -> list[Path]:
    if path.is_file():
        return [path]
    for folder in (path, path / "rollouts"):
        if stored := rollout_files(folder):
            return [file.path for file in stored]
    if (path / "rollouts.jsonl").is_file():
        return [path / "rollouts.jsonl"]
    found = [file for file in path.rglob("*") if file.suffix in _EXPECTED and file.is_file()]
    if not found:
        raise ValueError(
            f"{path} has no rollouts: no {', '.join(sorted(_EXPECTED))} lies in it; give the file "
            "or the folder that the trainer wrote them to"
        )
    # step 10 stands behind step 9
    return sorted(
        found,
        key=lambda file: [(int(n or 0), t) for t, n in re.findall(r"(\D*)(\d*)", str(file))],
    )


def _of_file(path: Path, padding: Padding) -> Iterator[Row]:
    if path.suffix == ".safetensors":
        stored = load_rollout(path)
        own = rows_of_batch(stored.rollout, path.name)
        for row, *line in zip(own, stored.records, stored.scores.tolist(), strict=True):
            yield _with_record(row, *line)
        return
    rows: Iterable[Any]
    if path.suffix == ".pt":
        rows = _of_tensors(torch.load(path, map_location="cpu", weights_only=True), path)
    elif is_data_file(path):
        rows = read_rows_of_file(path)
    else:
        raise ValueError(f"{path}: rollouts are read from {', '.join(sorted(_EXPECTED))}")
    # verl writes a file for each step, named after it
    step = int(digits[-1]) if (digits := re.findall(r"\d+", path.stem)) else 0
    try:
        for number, record in enumerate(rows, start=1):
            if isinstance(record, BadRow):
                raise ValueError(f"{path}:{number}: {record}")
            yield _of_record(record, f"{path.name}:{number}", padding, step)
    except BadDataError as error:
        raise ValueError(str(error)) from error


def rows_of_batch(rollout: Rollout, name: str) -> Iterator[Row]:
    """Return the rows of a rollout or an experience of lrlhf, numbered from 1."""
    held = rollout if isinstance(rollout, Experience) else None
    columns = {
        "sampling": rollout.sampling_logprobs,
        "versions": rollout.versions,
        "old": held.old_logprobs if held else None,
        "ref": held.ref_logprobs if held else None,
        "advantages": held.advantages if held else None,
    }
    for index in range(len(rollout)):
        there = rollout.attention_mask[index].cpu()
        mask = rollout.response_mask[index].cpu()[there]
        lengths = rollout.prompt_lengths
        first = int(mask.int().argmax()) if mask.any() else len(mask)
        yield Row(
            place=f"{name}:{index + 1}",
            ids=rollout.input_ids[index].cpu()[there],
            start=first if lengths is None else int(lengths[index]),
            loss_mask=held.loss_mask[index].cpu()[there] if held else mask,
            sampled=mask if held else None,
            tokens={
                name: column[index].detach().cpu()[there].double()
                for name, column in columns.items()
                if column is not None
            },
            score=float(held.scores[index]) if held else math.nan,
            group=(name, int(rollout.group_ids[index])),
            truncated=bool(rollout.truncated[index]),
        )


def _with_record(row: Row, record: Mapping[str, Any], score: float) -> Row:
    """Add what the line of a stored response says; its advantage is that of the first token."""
    assert row.loss_mask is not None, "of stored tensors"
    advantage = record.get("advantage")
    if advantage is not None:
        row.tokens["advantages"] = torch.where(row.loss_mask, float(advantage), 0.0).double()
    row.score, row.step, row.options = score, int(record.get("step", 0)), _options(record)
    row.parts, row.weights = _numbers(record.get("rewards")), _numbers(record.get("weights"))
    row.prompt = record.get("messages", record.get("prompt"))
    if "given_tokens" in record:
        row.sampled = row.response.clone()
        for start, end in record["given_tokens"]:
            row.sampled[row.start + start : row.start + end] = False
    return row


def _of_tensors(value: Any, path: Path) -> Iterator[dict[str, Any]]:
    """Return the rows of a dict of tensors ``[B, …]`` and lists, or of a list of such dicts."""
    parts = value if isinstance(value, list | tuple) else [value]
    if not all(isinstance(part, Mapping) for part in parts):
        raise ValueError(f"{path} holds no dict of tensors; save dict(batch) or vars(experience)")
    for part in parts:
        sized = {
            str(name): column.tolist() if isinstance(column, Tensor) else list(column)
            for name, column in part.items()
            if (isinstance(column, Tensor) and column.dim()) or isinstance(column, list | tuple)
        }
        count = max(map(len, sized.values()), default=0)
        for index in range(count):
            yield {name: c[index] for name, c in sized.items() if len(c) == count}


def _of_record(record: Mapping[str, Any], place: str, padding: Padding, step: int) -> Row:
    def get(name: str, *kinds: type) -> Any:
        values = (record[key] for key in COLUMNS[name] if record.get(key) is not None)
        return next((value for value in values if not kinds or isinstance(value, kinds)), None)

    reason, micro, loss = (get(name) for name in ("finish_reason", "micro_batch", "step_loss"))
    own_step, flag = get("step", int, float), get("truncated")
    row = Row(
        place=place,
        step=step if own_step is None else int(own_step),
        # TRL's tables have a column for each reward function
        parts=_numbers(get("parts", Mapping))
        or {
            key: float(value)
            for key, value in record.items()
            if isinstance(value, int | float) and key.endswith(("_reward", "_func", "_rewards"))
        },
        weights=_numbers(get("weights")),
        prompt=get("prompt"),
        completion=get("completion"),
        group=get("group", Hashable),
        conversation=get("conversation", Hashable),
        truncated=None if flag is None else bool(flag),
        options=_options({name: get(name) for name in _OPTIONS}),
        micro_batch=None if micro is None else int(micro),
        step_loss=math.nan if loss is None else float(loss),
    )
    if row.truncated is None and reason is not None:
        row.truncated = str(reason).lower() in {"length", "max_tokens", "truncated"}
    score = get("score", int, float, list)
    if isinstance(score, list):  # prime-rl repeats it for each token
        score = next((value for value in reversed(score) if value is not None), None)
    if score is None and (tokens := get("token_scores", list)) is not None:
        score = sum(tokens)
    if score is None:
        score = sum(row.parts.values()) if row.parts else math.nan
    row.score = float(score)
    _read_ids(row, record, get, padding)
    return row


def _read_ids(  # noqa: C901  the layouts of six libraries
    row: Row, record: Mapping[str, Any], get: Any, padding: Padding
) -> None:
    """Read token ids and what is recorded for each of them; padding is left out."""
    ids, prompt, completion = (get(name) for name in ("ids", "prompt_ids", "completion_ids"))
    given, advantage = get("attention_mask"), get("advantages")
    number = float(advantage) if isinstance(advantage, int | float) else math.nan
    if not _is_ids(ids) and not (_is_ids(prompt) and _is_ids(completion)):
        row.advantage = number
        return
    if _is_ids(prompt) and _is_ids(completion):
        shown = get("prompt_mask")
        if shown is None and given is not None and len(given) == len(prompt) + len(completion):
            shown = given[: len(prompt)]
        shown = shown if shown and not all(shown) else _unpadded(prompt, padding, left=True)
        kept = [*map(bool, shown), *_unpadded(completion, padding)]
        ids, start = [*prompt, *completion], len(prompt)
    else:
        kept = [*map(bool, given)] if given else _unpadded(ids, padding)
        start = _first(record, get("loss_mask"), len(ids))
    there = torch.tensor(kept)
    row.ids = torch.tensor(ids, dtype=torch.int64)[there]
    row.start = int(there[:start].sum())

    def placed(values: Any, name: str) -> Tensor | None:
        """Return `[T]`, of a column for all tokens, the response's, or all but the first."""
        if not isinstance(values, list):
            return None
        numbers = torch.tensor(
            [math.nan if value is None else float(value) for value in values], dtype=torch.float64
        )
        # a list without padding may stand beside ids that have it
        total, alone = len(there), int(there[start:].sum())
        starts = {alone: start, total - 1: 1, total - start: start, total: 0}
        if (first := starts.get(len(numbers))) is None:
            row.flaws.append(f"{name} has {len(numbers)} entries for {alone} response tokens")
            return None
        full = torch.full((total,), math.nan, dtype=torch.float64)
        full[first : first + len(numbers)] = numbers
        return full[there]

    for name in PER_TOKEN:
        if (column := placed(get(name), name)) is not None:
            row.tokens[name] = column
    mask, sampled = placed(get("loss_mask"), "loss_mask"), placed(get("sampled"), "sampled")
    row.sampled = None if sampled is None else (sampled == 1) & row.response
    if mask is not None:
        row.loss_mask = mask == 1
        if "completion_mask" in record and sampled is not None:
            row.loss_mask &= sampled == 1  # TRL multiplies the two
    if not math.isnan(number):
        row.tokens["advantages"] = torch.full((len(row.ids),), number, dtype=torch.float64)
    row.digits = _digits(get("sampling") or get("old") or ())


def _is_ids(value: Any) -> bool:
    return isinstance(value, list) and all(isinstance(token, int) for token in value)


def _unpadded(ids: Sequence[int], padding: Padding, *, left: bool = False) -> list[bool]:
    """Tell which ids are no padding.

    Where a response ends with the token that pads, its first padding token is its end: a response
    that was cut off is as long as any, and has no padding.
    """
    order = list(ids) if left else list(ids)[::-1]
    count = next((at for at, token in enumerate(order) if token != padding.token), len(order))
    if not left and padding.ends and count:
        count -= 1
    flags = [at >= count for at in range(len(order))]
    return flags if left else flags[::-1]


def _first(record: Mapping[str, Any], mask: Any, length: int) -> int:
    """Return where the response begins in a row that is one list of ids."""
    if isinstance(record.get("prompt_length"), int):
        return int(record["prompt_length"])
    if not isinstance(mask, list):
        return 0
    if len(mask) < length - 1:
        return length - len(mask)
    first = next((place for place, flag in enumerate(mask) if flag), len(mask))
    return first + (length - len(mask))


def _digits(values: Iterable[Any]) -> int:
    """Significant digits of the number that was written with most of them."""
    texts = [f"{value!r}".partition("e")[0] for value in values if isinstance(value, float)]
    return max((len(text.strip("-0.").replace(".", "").lstrip("0")) for text in texts), default=16)


def _options(values: Mapping[str, Any]) -> dict[str, float]:
    """Return the sampling options that one number stands for; prime-rl has one per token."""
    found: dict[str, float] = {}
    for name in _OPTIONS:
        value = values.get(name)
        if isinstance(value, list) and len({*value}) == 1:
            value = value[0]
        if isinstance(value, int | float):
            found[name] = float(value)
    return found


def _numbers(value: Any) -> dict[str, float]:
    if not isinstance(value, Mapping):
        return {}
    return {
        str(name): math.nan if number is None else float(number)
        for name, number in value.items()
        if number is None or isinstance(number, int | float)
    }
