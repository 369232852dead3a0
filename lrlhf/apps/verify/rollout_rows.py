"""Rollouts of any trainer as rows of one kind, with whatever their files hold."""

from __future__ import annotations

import math
import pickle
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
from lrlhf.types import Experience, Media, Rollout

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
    "parts": ("rewards", "scores", "reward_parts"),
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
    "prompt_length": ("prompt_length",),
}
"""Columns by the names that plain files, TRL, verl, OpenRLHF and prime-rl have for them."""
_KNOWN = {name for names in COLUMNS.values() for name in names}
_MEASURED = ("sampling", "old", "ref", "kl", "advantages")
_OPTIONS = ("temperature", "top_p", "top_k", "min_p")
_EXPECTED = {".safetensors", ".jsonl", ".json", ".parquet", ".pt", ".gz", ".zst"}
_DISTINCT = 16
"""Numbers that show by themselves how a column was rounded."""


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
    written: Tensor | None = None
    """The same, or what follows from other columns, see `lrlhf.apps.verify.token_checks`."""
    tokens: dict[str, Tensor] = field(default_factory=dict)
    """`[T]` float64 each: ``sampling``, ``old`` and ``ref`` log-probabilities, ``kl``,
    ``advantages``, ``losses``, ``versions``."""
    rounding: Mapping[str, tuple[float, float]] = field(default_factory=dict)
    """By column, the absolute and the relative error that its numbers were written with."""
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
    micro_batch: int = 0
    step_loss: float = math.nan
    media: Media | None = None
    flaws: list[str] = field(default_factory=list)
    """What is wrong with columns per token."""

    @property
    def policy(self) -> str:
        """The column of the policy's log-probabilities, the trainer's if there are any."""
        return "old" if "old" in self.tokens else "sampling"

    @property
    def response(self) -> Tensor:
        """`[T]` bool: all that stands behind the prompt."""
        assert self.ids is not None, "of rows with token ids"
        return torch.arange(len(self.ids)) >= self.start

    @property
    def sum_of_parts(self) -> float:
        """The weighted sum of the rewards; NaN counts nothing."""
        parts = ((self.weights.get(name, 1.0), value) for name, value in self.parts.items())
        return math.fsum(weight * value for weight, value in parts if not math.isnan(value))

    def written_error(self, name: str, values: Tensor) -> float:
        """Return the error that numbers of a column were written with, that of float32 at least."""
        size = float(values.abs().nan_to_num(0.0, posinf=0.0).amax().clamp(min=1.0))
        absolute, relative = self.rounding.get(name, (0.0, 0.0))
        return max(absolute, size * max(relative, 2.0**-23))


class Padding(NamedTuple):
    """What tensors are padded with."""

    token: int | None = None
    ends: frozenset[int] = frozenset()
    """Tokens that end responses."""

    def flags(self, ids: Sequence[int], *, left: bool = False) -> list[bool]:
        """Tell which ids are no padding.

        Where the padding token ends responses too, the first one behind a response that nothing
        else ended is its end: one that was cut off is as long as any, and has no padding.
        """
        order = list(ids) if left else list(ids)[::-1]
        count = next((at for at, token in enumerate(order) if token != self.token), len(order))
        ended = count < len(order) and order[count] in self.ends
        if not left and count and self.token in self.ends and not ended:
            count -= 1
        flags = [at >= count for at in range(len(order))]
        return flags if left else flags[::-1]


def read_rollouts(path: Path, padding: Padding | None = None) -> list[Row]:
    """Read a file, or all files of a folder that hold rollouts.

    Args:
        path: A run of lrlhf, a dump, a folder that another trainer wrote, or one file.
        padding: Of tensors whose masks do not tell it; None: there is none.

    Raises:
        ValueError: There is none, or one of them cannot be read; names file and row.
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
    # step 10 comes after step 9
    return sorted(
        found,
        key=lambda file: [(int(n or 0), t) for t, n in re.findall(r"(\D*)(\d*)", str(file))],
    )


def _of_file(path: Path, padding: Padding) -> list[Row]:
    if path.suffix == ".safetensors":
        stored = load_rollout(path)
        return [*rows_of_batch(stored.rollout, path.name, stored.records, stored.scores)]
    rows: Iterable[Any]
    if path.suffix == ".pt":
        rows = _rows_of_tensors(path)
    elif is_data_file(path):
        rows = read_rows_of_file(path)
    else:
        raise ValueError(f"{path}: rollouts are read from {', '.join(sorted(_EXPECTED))}")
    # trainers write a file for each step, or a folder with a file for each rank
    digits = re.findall(r"step\D?(\d+)", str(path)) or re.findall(r"\d+", path.stem)
    made, step = [], int(digits[-1]) if digits else 0
    try:
        for number, record in enumerate(rows, start=1):
            if isinstance(record, BadRow):
                raise ValueError(str(record))
            made.append(_of_record(record, f"{path.name}:{number}", padding, step))
    except BadDataError as error:
        raise ValueError(str(error)) from error
    except ValueError as error:
        raise ValueError(f"{path}:{len(made) + 1}: {error}") from error
    columns = {name: [r.tokens[name] for r in made if name in r.tokens] for name in _MEASURED}
    columns["advantages"].append(torch.tensor([row.advantage for row in made]).double())
    rounding = {name: _rounding(torch.cat(held)) for name, held in columns.items() if held}
    for row in made:
        row.rounding = rounding
    return made


def _rounding(values: Tensor) -> tuple[float, float]:
    """Return the absolute and the relative rounding error that numbers show, 0 where they do not.

    They may all be numbers of a 16-bit type, or have so many decimals, or significant digits.
    """
    values = torch.unique(values[values.isfinite() & (values != 0)].abs())
    if len(values) < _DISTINCT:
        return 0.0, 0.0
    for dtype, error in ((torch.bfloat16, 2.0**-9), (torch.float16, 2.0**-12)):
        if torch.equal(values.to(dtype).double(), values):
            return 0.0, error

    def fewest(exponents: Tensor | float) -> float:
        for count in range(8):
            scaled = values * 10.0 ** (count - exponents)
            if bool(((scaled - scaled.round()).abs() < 1e-6).all()):
                return 0.5 * 10.0**-count
        return 0.0

    return fewest(0.0), fewest(values.log10().floor())


def rows_of_batch(
    rollout: Rollout,
    name: str,
    records: Sequence[Mapping[str, Any]] = (),
    scores: Tensor | None = None,
) -> Iterator[Row]:
    """Return the rows of a rollout or an experience of lrlhf, numbered from 1.

    Args:
        rollout: A batch.
        name: What the places begin with.
        records: The lines of stored responses; empty: there are none.
        scores: `[B]`; None: those of an experience.
    """
    held = rollout if isinstance(rollout, Experience) else None
    columns = {
        "token_ids": rollout.input_ids,
        "attention_mask": rollout.attention_mask,
        "loss_mask": held.loss_mask if held else rollout.response_mask,
        "sampled": rollout.response_mask if held else None,
        # what top-p and the like cut off is no part of the ratio
        "sampling_logprobs": torch.where(rollout.response_mask, rollout.engine_logprobs, 0.0),
        "versions": rollout.versions,
        "old_logprobs": held.old_logprobs if held else None,
        "ref_logprobs": held.ref_logprobs if held else None,
        "advantages": held.advantages if held else None,
        "score": held.scores if held else scores,
        "truncated": rollout.truncated,
        "prompt_length": rollout.prompt_lengths,
    }
    named = ("step", "rewards", "weights", "messages", "prompt", "advantage", *_OPTIONS)
    for index in range(len(rollout)):
        line = records[index] if records else {}
        record: dict[str, Any] = {}
        record |= {key: c[index].tolist() for key, c in columns.items() if c is not None}
        record |= {key: line[key] for key in named if key in line}
        record["group"] = (name, int(rollout.group_ids[index]))
        mask = rollout.response_mask[index].cpu()
        record.setdefault("prompt_length", int(mask.int().argmax()) if mask.any() else len(mask))
        if "given_tokens" in line:
            record["sampled"] = [True] * len(mask)
            for start, end in line["given_tokens"]:
                begin, count = record["prompt_length"] + start, end - start
                record["sampled"][begin : begin + count] = [False] * count
        row = _of_record(record, f"{name}:{index + 1}", Padding(), 0)
        row.media = None if rollout.media is None else rollout.media[index]
        yield row


def _rows_of_tensors(path: Path) -> Iterator[dict[str, Any]]:
    """Read the rows of a dict of tensors ``[B, …]`` and lists, or of a list of such dicts."""
    try:
        value = torch.load(path, map_location="cpu", weights_only=True)
    except (pickle.UnpicklingError, RuntimeError, EOFError, IndexError, KeyError) as error:
        raise ValueError(
            f"{path} is damaged, or holds more than tensors, lists, numbers and texts: save a dict "
            "of those with torch.save"
        ) from error
    parts = value if isinstance(value, list | tuple) else [value]
    if not all(isinstance(part, Mapping) for part in parts):
        raise ValueError(f"{path} holds no dict of tensors; save dict(batch) or vars(experience)")
    for part in parts:
        columns = {
            name: column
            for name, column in part.items()
            if name in _KNOWN
            and (column.dim() if isinstance(column, Tensor) else isinstance(column, list | tuple))
        }
        sizes = {name: len(column) for name, column in columns.items()}
        if len({*sizes.values()}) > 1:
            raise ValueError(f"{path} has columns with different numbers of rows: {sizes}")
        for values in zip(*columns.values(), strict=True):
            yield {
                name: value.tolist() if isinstance(value, Tensor) else value
                for name, value in zip(columns, values, strict=True)
            }


def _of_record(record: Mapping[str, Any], place: str, padding: Padding, step: int) -> Row:
    def get(name: str, *kinds: type) -> Any:
        values = (record[key] for key in COLUMNS[name] if record.get(key) is not None)
        return next((value for value in values if not kinds or isinstance(value, kinds)), None)

    score, parts = get("score", int, float, list), _numbers(get("parts", Mapping))
    if not parts and score is None:  # TRL's tables have a column for each reward function
        own = {k: v for k, v in record.items() if k.endswith(("_reward", "_func", "_rewards"))}
        parts = _numbers(own)
    own_step, flag, weights = get("step", int, float), get("truncated", int), get("weights")
    conversation = get("conversation", Hashable)
    row = Row(
        place=place,
        step=step if own_step is None else int(own_step),
        parts=parts,
        weights=_numbers(weights),
        prompt=get("prompt"),
        completion=get("completion"),
        group=get("group", Hashable),
        truncated=None if flag is None else bool(flag),
        micro_batch=int(_number(get("micro_batch") or 0, "micro_batch")),
        step_loss=_number(get("step_loss"), "step_loss"),
    )
    for name in _OPTIONS:  # prime-rl has one per token
        option = get(name)
        if isinstance(option, list) and len({*option}) == 1:
            option = option[0]
        if isinstance(option, int | float):
            row.options[name] = float(option)
    row.conversation = None if conversation is None else (row.step, conversation)
    if row.truncated is None and (reason := get("finish_reason")) is not None:
        row.truncated = str(reason).lower() in {"length", "max_tokens", "truncated"}
    if isinstance(score, list) and score and score.count(score[0]) == len(score):
        score = score[0]  # prime-rl repeats it for each token
    elif score is None or isinstance(score, list):
        score = score or get("token_scores", list)
        score = score and math.fsum(_number(value or 0.0, "score") for value in score)
    row.score = row.sum_of_parts if score is None and parts else _number(score, "score")
    _read_ids(row, get, padding)
    if row.loss_mask is not None and row.sampled is not None and "completion_mask" in record:
        row.loss_mask &= row.sampled  # TRL multiplies the two
    return row


def _read_ids(row: Row, get: Any, padding: Padding) -> None:  # noqa: C901  likewise
    """Read token ids and what is recorded for each of them; padding is left out."""
    ids, prompt, completion = (get(name) for name in ("ids", "prompt_ids", "completion_ids"))
    attended, advantage, mask = (get(n) for n in ("attention_mask", "advantages", "loss_mask"))
    split = _is_ids(prompt) and _is_ids(completion)
    if not split and not _is_ids(ids):
        row.advantage = advantage if isinstance(advantage, int | float) else math.nan
        return
    if split:
        ids, start = [*prompt, *completion], len(prompt)
        if attended is None or len(attended) != len(ids):
            shown = get("prompt_mask")
            shown = shown if shown and not all(shown) else padding.flags(prompt, left=True)
            attended = [*shown, *padding.flags(completion)]
    else:
        attended = attended or padding.flags(ids)
        start = get("prompt_length", int)
        if start is None:
            start = len(ids) - len(mask) if mask else 0
            if mask and start <= 1:  # of all tokens, or of all but the first
                start += mask.index(True) if True in mask else len(mask)
    there = torch.tensor(attended, dtype=torch.bool)
    row.ids = torch.tensor(ids, dtype=torch.int64)[there]
    row.start = int(there[:start].sum())
    total, alone = len(there), int(there[start:].sum())
    # a list without padding may come with ids that have it
    starts = {alone: start, total - 1: 1, total - start: start, total: 0}

    def placed(name: str) -> Tensor | None:
        """Return `[T]`, of a column for all tokens, the response's, or all but the first."""
        values = get(name)
        if not isinstance(values, list):
            return None
        if (first := starts.get(len(values))) is None:
            size = "longer" if len(values) > alone else "shorter"
            row.flaws.append(
                f"ids and {COLUMNS[name][0]} are not of the same tokens: that is {size} than the "
                "response"
            )
            return None
        full = torch.full((total,), math.nan, dtype=torch.float64)
        numbers = [_number(value, name) for value in values]
        full[first : first + len(values)] = torch.tensor(numbers, dtype=torch.float64)
        return full[there]

    for name in (*_MEASURED, "losses", "versions"):
        if (column := placed(name)) is not None:
            row.tokens[name] = column
    if isinstance(advantage, int | float):
        row.tokens["advantages"] = torch.full((len(row.ids),), advantage, dtype=torch.float64)
    flags, sampled = placed("loss_mask"), placed("sampled")
    row.sampled = None if sampled is None else (sampled == 1) & row.response
    if flags is None:
        return
    row.loss_mask = flags == 1
    trained = row.loss_mask & row.response
    if "sampling" in row.tokens and not row.tokens["sampling"][trained].isfinite().all():
        row.flaws.append("sampling_logprobs of trained tokens are NaN or infinite")


def _is_ids(value: Any) -> bool:
    return isinstance(value, list) and all(isinstance(token, int) for token in value)


def _number(value: Any, name: str) -> float:
    """Return a number; NaN: there is none.

    Raises:
        ValueError: It is something else.
    """
    if value is not None and not isinstance(value, int | float):
        raise ValueError(f"{name} holds {value!r:.60}, which is no number")
    return math.nan if value is None else float(value)


def _numbers(value: Any) -> dict[str, float]:
    """Return the entries of an object that are numbers, or null."""
    entries = value.items() if isinstance(value, Mapping) else ()
    kept = {str(name): v for name, v in entries if v is None or isinstance(v, int | float)}
    return {name: _number(v, name) for name, v in kept.items()}
