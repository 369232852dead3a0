"""Evaluations of a policy: several responses to a prompt, and what they say together."""

from __future__ import annotations

import hashlib
import inspect
import math
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

from torch import Tensor

from lrlhf.functional.names import unknown_name
from lrlhf.modules.metrics.measurement import Measurement, measured_mean, measured_share
from lrlhf.modules.policy.iteration import Iteration
from lrlhf.modules.policy.sample import Sampler
from lrlhf.modules.policy.settings import PolicySettings
from lrlhf.modules.policy.teacher import EVALUATED
from lrlhf.modules.settings import Evaluation
from lrlhf.rewards import Rewards
from lrlhf.rewards.functions.one_by_one import UnscorableError
from lrlhf.rewards.lookup import ReadsAnswer, SumsUpAnswers
from lrlhf.rollout import Collected, Sampling
from lrlhf.rollout.records import written_text
from lrlhf.rollout.responses import prompt_token_ids
from lrlhf.run import Collectives, sample_seeds
from lrlhf.statistics.repeated_samples import joint_metrics, temperature_name
from lrlhf.types import PromptBatch

_STREAM = 1_000_003
"""Keeps the random numbers of an evaluation apart from those of any training step."""
_ROUNDED = 1e-6
"""Of a value that is a float32, where the threshold is not."""
_SCORE, _LENGTH, _TRUNCATED = "score", "response_length", "truncated_fraction"


class Pass(NamedTuple):
    """One way of answering all prompts."""

    label: str
    """What its metrics are called by, such as ``t0.7``; empty: it is the only one."""
    sampling: Sampling
    num_samples: int


class _Observed(NamedTuple):
    """What a function that sums up an evaluation keeps of a response."""

    name: str
    """Of the function."""
    groups: tuple[str, ...]
    value: Any


class PromptResult(NamedTuple):
    """What is kept of all responses to a prompt; its size does not depend on their number."""

    groups: tuple[str, ...]
    """Beginnings of the names of metrics that the prompt counts for, such as ``gsm8k/``."""
    values: dict[str, float]


def passes_of(settings: PolicySettings) -> list[Pass]:
    """Return the ways in which an evaluation answers its prompts, the main one first."""
    evaluation, sampling = settings.evaluation, settings.eval_sampling
    temperatures = evaluation.temperatures or (sampling.temperature,)
    return [
        Pass(
            temperature_name(temperature) if len(temperatures) > 1 else "",
            sampling.at_temperature(temperature),
            evaluation.num_samples if temperature > 0 else 1,
        )
        for temperature in temperatures
    ]


def metrics_of(evaluation: Evaluation, rewards: Rewards) -> Rewards | None:
    """Return the functions that evaluations ask beside the rewards; None: there are none.

    Raises:
        ValueError: One has the name of a reward, or ``correct`` names none of them.
    """
    metrics = None
    if evaluation.metrics:
        metrics = Rewards(evaluation.metrics, max_unscorable_fraction=1.0)
    own = () if metrics is None else metrics.names
    for name in own:
        if name in (*rewards.names, _SCORE, _LENGTH, _TRUNCATED):
            raise ValueError(
                f"evaluation.metrics has a function called {name!r}, as is a reward or a metric "
                "that is always there: write metrics as a mapping, which gives it another name"
            )
    known = [_SCORE, *rewards.names, *own]
    if evaluation.correct not in (None, *known):
        raise unknown_name("value in evaluation.correct", str(evaluation.correct), known)
    return metrics


class Evaluator:
    """Answers held-out prompts and measures the answers of all ranks.

    Args:
        sampler: Generates and scores.
        rewards: What the score is made of.
        metrics: What is measured beside it.
        settings: Of the run.
        seed: Seeds the responses, together with the prompt.
        distance: Measures how far policy and teacher are apart on each response, `[B]` by name;
            None: there is no teacher.
    """

    def __init__(
        self,
        sampler: Sampler,
        rewards: Rewards,
        metrics: Rewards | None,
        settings: PolicySettings,
        *,
        seed: int,
        distance: Callable[[Collected, Iteration], dict[str, Tensor]] | None = None,
    ) -> None:
        self._sampler = sampler
        self._distance = distance
        self._seed = seed
        self._passes = passes_of(settings)
        self._at_once = settings.num_generations
        evaluation = settings.evaluation
        self._correct = evaluation.correct or _SCORE
        self._threshold = evaluation.threshold - _ROUNDED * max(1.0, abs(evaluation.threshold))
        self._tried = evaluation.tried
        self._names = [*rewards.names, *(() if metrics is None else metrics.names)]
        self._names += () if distance is None else EVALUATED
        functions: dict[str, object] = {
            **rewards.functions,
            **({} if metrics is None else metrics.functions),
        }
        readers = {name: one for name, one in functions.items() if isinstance(one, ReadsAnswer)}
        self._reader: ReadsAnswer | None = readers.get(self._correct)
        if evaluation.correct is None:
            self._reader = next(iter(readers.values()), None)
        self._summaries = {
            name: one for name, one in functions.items() if isinstance(one, SumsUpAnswers)
        }
        self._results: list[PromptResult] = []
        self._observed: list[_Observed] = []

    def reset(self) -> None:
        """Forget what an evaluation that was broken off has measured."""
        self._results, self._observed = [], []

    def answer(self, batch: PromptBatch, batch_idx: int, it: Iteration) -> Collected:
        """Answer each prompt once, in the main way."""
        seeds = [own[0] for own in self._seeds(_numbers(batch, batch_idx, it), 1)]
        return self._sampler.answer(batch, self._passes[0].sampling, seeds, it)

    def evaluate(
        self, batch: PromptBatch, batch_idx: int, it: Iteration, *, name: str = ""
    ) -> list[dict[str, Any]]:
        """Answer prompts in every way, and keep what their responses say together.

        Args:
            batch: Prompts of this rank.
            batch_idx: Its number, which seeds prompts without a place in the data.
            it: Of the trainer and the ranks.
            name: Of the validation set.

        Returns:
            A readable line for each response.
        """
        records: list[dict[str, Any]] = []
        numbers = _numbers(batch, batch_idx, it)
        for setting in self._passes:
            seeds = self._seeds(numbers, setting.num_samples)
            prompts = [_Responses() for _ in range(len(batch))]
            groups = self._groups(setting, name)
            for first in range(0, setting.num_samples, self._at_once):
                chosen = [seed for own in seeds for seed in own[first : first + self._at_once]]
                collected = self._sampler.answer(batch, setting.sampling, chosen, it)
                if self._distance is not None:
                    collected = collected.with_extra_values(self._distance(collected, it))
                samples = [*self._taken(collected, prompts, setting, first)]
                records += samples
                self._observe(samples, collected.rollout.truncated.tolist(), numbers, groups)
            results = (self._measured(responses, setting) for responses in prompts)
            self._results += [PromptResult(groups, values) for values in results]
        return records

    def measure(self, ranks: Collectives) -> list[Measurement]:
        """Return the metrics of all prompts of all ranks, and forget these."""
        columns: defaultdict[str, list[float]] = defaultdict(list)
        results, self._results = self._results, []
        for result in (each for own in ranks.gather(results) for each in own):
            for group in result.groups:
                for name, value in result.values.items():
                    columns[f"eval/{group}{name}"].append(value)
        means = [measured_mean(name, values) for name, values in columns.items()]
        return [*means, *self._shares(ranks)]

    def _observe(
        self,
        records: Sequence[Mapping[str, Any]],
        truncated: Sequence[bool],
        numbers: Sequence[int],
        groups: tuple[str, ...],
    ) -> None:
        """Keep of responses what the functions want that sum them up."""
        size = len(records) // len(numbers)
        for name, function in self._summaries.items():
            for index, (record, cut) in enumerate(zip(records, truncated, strict=True)):
                observed = function.observed(
                    written_text(record),
                    record["columns"],
                    truncated=cut,
                    row=numbers[index // size],
                )
                self._observed.append(_Observed(name, groups, observed))

    def _shares(self, ranks: Collectives) -> Iterator[Measurement]:
        """Yield what functions say of the responses of all ranks, and forget these."""
        by_metric: defaultdict[tuple[str, str], list[Any]] = defaultdict(list)
        own, self._observed = self._observed, []
        gathered = ranks.gather(own) if self._summaries else []
        for each in (entry for of_rank in gathered for entry in of_rank):
            for group in each.groups:
                by_metric[group, each.name].append(each.value)
        for (group, name), values in by_metric.items():
            for share, outcomes in self._summaries[name].shares(values).items():
                yield measured_share(f"eval/{group}{name}/{share}", outcomes)

    def metric_names(self, sets: Sequence[str]) -> set[str]:
        """Return the names of all metrics that an evaluation of some validation sets can have."""
        names: set[str] = set()
        for setting in self._passes:
            values = {_SCORE, *self._names, _LENGTH, _TRUNCATED, *self._names_together(setting)}
            prefixes = {group for name in sets for group in self._groups(setting, name)}
            names |= {f"eval/{prefix}{value}" for prefix in prefixes for value in values}
            shares = [
                f"{name}/{share}"
                for name, function in self._summaries.items()
                for share in function.share_names
            ]
            names |= {
                f"eval/{prefix}{share}{end}"
                for prefix in prefixes
                for share in shares
                for end in ("", "_low", "_high")
            }
        heads = (_SCORE, "pass@", "maj@")
        of_answers = {name for name in names if name.rpartition("/")[2].startswith(heads)}
        return names | {f"{name}_{end}" for name in of_answers for end in ("low", "high")}

    def _names_together(self, one: Pass) -> list[str]:
        """Return the names of what several responses say together."""
        names = [f"pass@{k}" for k in self._tried if k <= one.num_samples]
        if self._reader is not None and one.num_samples > 1:
            names.append(f"maj@{one.num_samples}")
        return names

    def _groups(self, one: Pass, name: str) -> tuple[str, ...]:
        sets = ("", f"{name}/") if name else ("",)
        labels = [f"{one.label}/"] if one.label else [""]
        if one.label and one is self._passes[0]:
            labels.append("")
        return tuple(f"{own}{label}" for own in sets for label in labels)

    def _seeds(self, numbers: Sequence[int], count: int) -> list[list[int]]:
        """Return the seeds of each prompt's responses, which do not depend on its batch."""
        return [sample_seeds(self._seed, _STREAM, number, count=count) for number in numbers]

    def _taken(
        self, collected: Collected, prompts: Sequence[_Responses], one: Pass, first: int
    ) -> Iterator[dict[str, Any]]:
        """Count the responses of a round towards their prompts, and say more in their lines."""
        records, size = collected.records, len(collected.records) // len(prompts)
        judges = bool(self._names_together(one))
        for row, record in enumerate(records):
            responses = prompts[row // size]
            values = _values(collected, row)
            responses.add(values)
            entry = dict(record)
            if one.num_samples > 1:
                entry["sample"] = first + row % size
            if judges:
                value = values[self._correct]
                right = None if math.isnan(value) else value >= self._threshold
                responses.rights.append(right)
                entry["correct"] = right
                if self._reader is not None:
                    cut = bool(collected.rollout.truncated[row])
                    entry["answer"] = _answer(self._reader, written_text(record), truncated=cut)
                    responses.answers.append(entry["answer"])
            yield entry

    def _measured(self, responses: _Responses, one: Pass) -> dict[str, float]:
        values = {name: responses.mean(name) for name in (_SCORE, *self._names)}
        values |= responses.together(self._names_together(one))
        return values | {name: responses.mean(name) for name in (_LENGTH, _TRUNCATED)}


class _Responses:
    """What the responses to one prompt were worth so far."""

    def __init__(self) -> None:
        self._columns: defaultdict[str, list[float]] = defaultdict(list)
        self.rights: list[bool | None] = []
        """None: nobody could say."""
        self.answers: list[str | None] = []

    def add(self, values: Mapping[str, float]) -> None:
        for name, value in values.items():
            if not math.isnan(value):
                self._columns[name].append(value)

    def mean(self, name: str) -> float:
        """Return the mean of a value over the responses that have it; NaN: none has."""
        known = self._columns[name]
        return math.fsum(known) / len(known) if known else math.nan

    def together(self, names: Sequence[str]) -> dict[str, float]:
        """Return metrics such as ``pass@4``; NaN: too few responses could be judged."""
        return joint_metrics(names, self.rights, self.answers)


def _numbers(batch: PromptBatch, batch_idx: int, it: Iteration) -> list[int]:
    return prompt_numbers(batch, batch_idx * it.ranks.world_size + it.ranks.rank)


def prompt_numbers(batch: PromptBatch, position: int) -> list[int]:
    """Return a number for each prompt, the same in any batch, on any rank and machine.

    It is made of the prompt and its row in its file; where the data tells no place, of the place in
    the batches.

    Args:
        batch: Prompts.
        position: Of the batch among those of all ranks.
    """
    places = batch.places or ("",) * len(batch)
    numbers = []
    for row, (ids, place) in enumerate(zip(prompt_token_ids(batch), places, strict=True)):
        where = place.rpartition(":")[2] or f"{position}/{row}"
        content = f"{where} {ids.tolist()}".encode()
        numbers.append(int.from_bytes(hashlib.blake2b(content, digest_size=8).digest(), "big"))
    return numbers


def _values(collected: Collected, row: int) -> dict[str, float]:
    rewards, rollout = collected.rewards, collected.rollout
    per_function = zip(rewards.names, rewards.per_function[row].tolist(), strict=True)
    return {
        **dict(per_function),
        **{name: float(column[row]) for name, column in collected.extra_values.items()},
        _SCORE: float(rewards.scores[row]),
        _LENGTH: float(rollout.response_mask[row].sum()),
        _TRUNCATED: float(rollout.truncated[row]),
    }


def _answer(reader: ReadsAnswer, text: str, *, truncated: bool) -> str | None:
    """Return the answer in a response; none where it cannot be found in time."""
    read: Callable[..., str | None] = reader.answer_of
    takes_truncated = "truncated" in inspect.signature(read).parameters
    try:
        return read(text, truncated=truncated) if takes_truncated else read(text)
    except UnscorableError:
        return None
