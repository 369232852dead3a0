"""The model card of an export: where the model comes from, and what the run measured."""

from __future__ import annotations

import csv
import json
import math
import platform
import re
from collections import defaultdict
from collections.abc import Hashable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path
from typing import Any, NamedTuple

import lightning as L
import torch
import yaml
from huggingface_hub import EvalResult, ModelCard, ModelCardData
from lightning.pytorch.utilities import rank_zero_info

from lrlhf.callbacks.reports.curves import Curve, draw_panels
from lrlhf.callbacks.reports.markdown import fenced, inert, table
from lrlhf.datamodules import RowDataModule
from lrlhf.datamodules.loading.sources import HubSource, Source
from lrlhf.foreign_files import read_yaml
from lrlhf.models.loading.reward_files import HEAD_CONFIG
from lrlhf.modules.contracts import Measured
from lrlhf.modules.metrics.reward_metrics import accuracy_metrics
from lrlhf.run.log_rows import without_secrets
from lrlhf.statistics import mean_interval
from lrlhf.statistics.intervals import likely_bounds
from lrlhf.statistics.repeated_samples import temperature_prefix


class Usage(NamedTuple):
    """How a model is loaded, which its files tell."""

    task: str
    """As the hub calls it."""
    library: str
    code: str
    """An example in Python."""

    @classmethod
    def of(cls, folder: Path, repo: str | None) -> Usage:
        """Read how the model of an export is used; ``repo`` is its name on the hub."""
        config = folder / "config.json"
        stored = json.loads(config.read_text()) if config.exists() else {}
        architecture = next(iter(stored.get("architectures") or ()), "")
        source = repr(repo or "path/to/this/folder")
        if architecture.endswith("ForSequenceClassification"):
            return cls("text-classification", "transformers", _CLASSIFIER.format(place=source))
        if architecture.endswith("ForTokenClassification"):
            return cls("token-classification", "transformers", _STEPS.format(place=source))
        if (folder / HEAD_CONFIG).exists():
            return cls("text-classification", "lrlhf", _reward(folder, source))
        if architecture.endswith("ForConditionalGeneration"):
            return cls("image-text-to-text", "transformers", _VISION.format(place=source))
        chats = (folder / "chat_template.jinja").exists()
        prompt = '[{"role": "user", "content": "…"}]' if chats else '"…"'
        return cls("text-generation", "transformers", _POLICY.format(place=source, asked=prompt))


_POLICY = """\
from transformers import pipeline

generate = pipeline("text-generation", model={place})
print(generate({asked}, max_new_tokens=128, return_full_text=False)[0]["generated_text"])"""
_VISION = """\
from transformers import pipeline

generate = pipeline("image-text-to-text", model={place})
parts = [{{"type": "image", "path": "picture.png"}}, {{"type": "text", "text": "…"}}]
print(generate(text=[{{"role": "user", "content": parts}}], max_new_tokens=128))"""
_CLASSIFIER = """\
from transformers import AutoModelForSequenceClassification, AutoTokenizer

tokenizer = AutoTokenizer.from_pretrained({place})
model = AutoModelForSequenceClassification.from_pretrained({place})
text = "…" + tokenizer.eos_token  # prompt and response; a chat goes through the chat template
print(model(**tokenizer(text, return_tensors="pt")).logits)"""
_STEPS = """\
from lrlhf.modules import ProcessRewardModel

# or AutoModelForTokenClassification: class 1 says that the step which ends at a token is correct
reward = ProcessRewardModel({place})
print(reward.score("prompt", ["first step", "second step"]))"""
_REWARD = """\
from lrlhf.modules import RewardModel

reward = RewardModel({place}){told}
print(reward.score("prompt", ["one response", "another"]{head}))"""


def _reward(folder: Path, repo: str) -> str:
    """Return the example of a reward model, which of several heads has to be asked for one."""
    names = json.loads((folder / HEAD_CONFIG).read_text(encoding="utf-8"))["names"]
    if len(names) == 1:
        return _REWARD.format(place=repo, told="", head="")
    comment = f"  # its heads: {', '.join(names)}"
    return _REWARD.format(place=repo, told=comment, head=f", head={names[0]!r}")


CURVES = "training_curves.png"
_CARD = "README.md"
_EVALUATION = re.compile(r"eval_scores_(\d+)\.jsonl")
_HUB_ID = re.compile(r"[\w.-]+/[\w.-]+")
_SHOWN = ("kl/sequence", "rollout/response_length", "policy/entropy", "train/loss")
"""Metrics that are drawn after the two that the module names."""
_PACKAGES = ("lrlhf", "torch", "transformers", "lightning", "peft")


@dataclass(frozen=True, kw_only=True)
class Origin:
    """What a model card tells of a model besides what is in its folder.

    Args:
        module: That was trained.
        data: Its data module, if there was one.
        step: How many steps are behind the weights; None: nobody knows.
        run: The run folder, whose config is read where it exists, and metrics and evaluations up
            to the step.
        license: Identifier of a licence as the hub knows it, such as ``apache-2.0``.
        repo: Name of the model on the hub.
    """

    module: L.LightningModule
    data: L.LightningDataModule | None
    step: int | None
    run: Path | None = None
    license: str | None = None
    repo: str | None = None


def write_model_card(folder: Path, origin: Origin) -> None:
    """Write ``README.md``, and ``training_curves.png`` where matplotlib is installed.

    Args:
        folder: An export.
        origin: What to tell of it.
    """
    usage = Usage.of(folder, origin.repo)
    sources = _sources(origin.data)
    figures = list(_figures(origin))
    base = _base_model(origin.module)
    kind = type(origin.module).__name__
    data = ModelCardData(
        base_model=base,
        datasets=list(
            dict.fromkeys(each.dataset_id for each in sources if isinstance(each, HubSource))
        )
        or None,
        library_name=usage.library,
        license=origin.license,
        pipeline_tag=usage.task,
        tags=["lrlhf", *_tags(origin.module)],
        model_name=origin.repo.rpartition("/")[2] if origin.repo else kind,
        eval_results=[_result(figure, usage.task) for figure in figures] or None,
    )
    title = inert(origin.repo or kind)
    sections = [
        f"# {title}",
        _introduction(origin, base),
        f"## Use\n\n{fenced(usage.code, 'python')}",
        _training(origin, sources),
        _curves_section(folder, origin),
        _evaluation(figures),
        f"## Licence\n\n{_licence(origin.license)}",
        _versions(),
    ]
    body = "\n\n".join(filter(None, sections))
    ModelCard(f"---\n{data.to_yaml()}\n---\n\n{body}\n").save(folder / _CARD)


# ---- what the model is


def _base_model(module: L.LightningModule) -> str | None:
    """Return the hub id of what was trained; None: it came from elsewhere."""
    source = module.hparams.get("policy", module.hparams.get("model"))
    while isinstance(source, Mapping):
        source = source.get("source", source.get("init_args"))
    is_id = isinstance(source, str) and _HUB_ID.fullmatch(source) and not Path(source).exists()
    return source if is_id else None


def _tags(module: L.LightningModule) -> list[str]:
    names = [type(module).__name__, module.hparams.get("algorithm")]
    words = re.sub(r"(?<=[a-z])(?=[A-Z])", "-", "|".join(str(name) for name in names if name))
    tags = words.lower().replace("_", "-").split("|")
    return list(dict.fromkeys(tag for tag in tags if re.fullmatch(r"[a-z0-9-]+", tag)))


def _introduction(origin: Origin, base: str | None) -> str:
    algorithm = origin.module.hparams.get("algorithm")
    how = type(origin.module).__name__
    if isinstance(algorithm, str) and algorithm.lower() != how.lower():
        how += f" (algorithm {algorithm})"
    start = f", starting from [{inert(base)}](https://huggingface.co/{base})" if base else ""
    steps = "" if origin.step is None else f" for {origin.step} steps"
    return f"Trained with lrlhf by {inert(how)}{steps}{start}."


# ---- how it was trained


def _sources(data: L.LightningDataModule | None) -> list[Source]:
    parts = data.train_components if isinstance(data, RowDataModule) else []
    return [source for part in parts for source in part.sources]


def _training(origin: Origin, sources: Sequence[Source]) -> str:
    data = ", ".join(inert(_without_place(source.name)) for source in sources)
    heading = "## Training" + (f"\n\nTrained on {data}." if data else "")
    options = yaml.safe_dump(_config(origin), sort_keys=False, allow_unicode=True)
    details = f"<details><summary>All options</summary>\n\n{fenced(options, 'yaml')}\n\n</details>"
    return f"{heading}\n\n{details}"


def _config(origin: Origin) -> Any:
    """Return the merged config of the run, without secrets and folders of the machine.

    A run that was continued has that of one that went through.
    """
    saved = origin.run / "config.yaml" if origin.run is not None else None
    if saved is not None and saved.exists():
        config = read_yaml(saved)
        for way_of_starting in ("ckpt_path", "weights_only"):
            config.pop(way_of_starting, None)
    else:
        config = {"model": json.loads(json.dumps(dict(origin.module.hparams), default=str))}
    return _everywhere(without_secrets(config))


def _everywhere(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {key: _everywhere(part) for key, part in value.items()}
    if isinstance(value, list | tuple):
        return [_everywhere(part) for part in value]
    return _without_place(value) if isinstance(value, str) else value


def _without_place(text: str) -> str:
    """Leave of a path from the root only its name: the folders are nobody else's business."""
    is_place = text.startswith(("/", "~")) and "\n" not in text
    return Path(text).name if is_place else text


def _curves_section(folder: Path, origin: Origin) -> str | None:
    curves = _curves(origin)
    if not curves:
        return None
    try:
        draw_panels(folder / CURVES, {"run": curves})
    except ImportError as error:
        rank_zero_info(f"the model card has no curves: {error}")
        return None
    return f"## Curves\n\n![Metrics by training step]({CURVES})"


def _curves(origin: Origin) -> list[Curve]:
    """Read the curves of the run up to the exported step."""
    if origin.run is None or origin.step is None:
        return []
    path = origin.run / "metrics.csv"
    if not path.exists():
        return []
    module = origin.module
    first = (module.train_metric, module.eval_metric) if isinstance(module, Measured) else ()
    curves = {name: Curve(name, [], []) for name in (*first, *_SHOWN)}
    with path.open(newline="") as lines:
        for row in csv.DictReader(lines):
            if int(row["step"]) > origin.step:
                continue
            for name, curve in curves.items():
                if text := row.get(name):
                    curve.record(int(row["step"]), float(text))
    return [curve for curve in curves.values() if curve.finite().steps]


# ---- what was measured


class _Figure(NamedTuple):
    """A mean over the rows of an evaluation, with its 95 % confidence interval."""

    subset: str
    metric: str
    value: float
    low: float | None
    high: float | None
    samples: int


def _figures(origin: Origin) -> Iterator[_Figure]:
    """Sum up the last evaluation at or before the exported step."""
    if origin.run is None or origin.step is None or not origin.run.is_dir():
        return
    matches = ((_EVALUATION.fullmatch(path.name), path) for path in origin.run.iterdir())
    steps = {int(match[1]): path for match, path in matches if match}
    step = max((step for step in steps if step <= origin.step), default=None)
    if step is None:
        return
    subsets: dict[str, list[dict[str, Any]]] = defaultdict(list)
    with steps[step].open(encoding="utf-8") as lines:
        for line in lines:
            record = json.loads(line)
            subsets[str(record.get("set", record.get("dataloader", "")))].append(record)
    for subset, records in subsets.items():
        yield from _of_policy(subset, [record for record in records if "score" in record])
        yield from _of_reward_model(subset, [record for record in records if "labels" in record])
        yield from _of_texts(subset, [record for record in records if "logprob" in record])


def _of_policy(subset: str, records: Sequence[Mapping[str, Any]]) -> Iterator[_Figure]:
    """Mean scores; several responses to one prompt are one cluster.

    The temperature that comes first has plain names, others are ``t0.7/score``.
    """
    main = records[0].get("temperature") if records else None
    columns: dict[str, list[tuple[Any, float]]] = defaultdict(list)
    for number, record in enumerate(records):
        prompt = (record.get("source"), record.get("row", number))
        parts = record.get("rewards") or {}
        rewards = parts if len(parts) > 1 else {}
        label = temperature_prefix(record.get("temperature"), main)
        for name, value in {"score": record["score"], **rewards}.items():
            if value is not None:
                columns[label + name].append((prompt, float(value)))
    for name, values in columns.items():
        yield _mean(subset, name, [value for _, value in values], [prompt for prompt, _ in values])


def _of_texts(subset: str, records: Sequence[Mapping[str, Any]]) -> Iterator[_Figure]:
    """Mean over given texts of the log-probability of their tokens."""
    known = [record for record in records if record["tokens"] and record["logprob"] is not None]
    if learnt := [each["logprob"] / each["tokens"] for each in known]:
        yield _mean(subset, "mean_logprob", learnt, range(len(learnt)))


def _mean(subset: str, name: str, values: Sequence[float], clusters: Sequence[Hashable]) -> _Figure:
    interval = mean_interval(values, clusters, bounds=likely_bounds(values))
    low, high = (None, None) if math.isnan(interval.low) else (interval.low, interval.high)
    return _Figure(subset, name, interval.mean, low, high, interval.number)


def _of_reward_model(subset: str, records: Sequence[Mapping[str, Any]]) -> Iterator[_Figure]:
    """Accuracy of each head on the pairs that have a preference."""
    gaps: dict[str, list[tuple[float, int | str]]] = defaultdict(list)
    for index, record in enumerate(records):
        known = record.get("prompt_id")
        prompt = f"pair {index}" if known is None else known
        for head, label in record["labels"].items():
            first, second = record["scores0"].get(head), record["scores1"].get(head)
            if label and first is not None and second is not None:
                gaps[head].append(((first - second) * label, prompt))
    for head, head_gaps in gaps.items():
        values, prompts = zip(*head_gaps, strict=True)
        metrics = accuracy_metrics(torch.tensor(values), prompts)
        name = f"accuracy of {head}" if len(gaps) > 1 else "accuracy"
        low, high = metrics["accuracy_low"], metrics["accuracy_high"]
        yield _Figure(subset, name, metrics["accuracy"], low, high, len(head_gaps))


def _evaluation(figures: Sequence[_Figure]) -> str | None:
    if not figures:
        return None
    several = len({figure.subset for figure in figures}) > 1
    head = [*(["set"] if several else []), "metric", "mean", "95 % interval", "samples"]
    rows = [
        [
            *([inert(figure.subset)] if several else []),
            inert(figure.metric),
            f"{figure.value:.4g}",
            "" if figure.low is None else f"{figure.low:.4g} to {figure.high:.4g}",
            str(figure.samples),
        ]
        for figure in figures
    ]
    caveat = (
        "The interval is about other rows of the same kind, for these weights; it says nothing "
        "about another seed of the training."
    )
    return f"## Evaluation\n\nOn the validation set of the run.\n\n{table(head, rows)}\n\n{caveat}"


def _result(figure: _Figure, task: str) -> EvalResult:
    return EvalResult(
        task_type=task,
        dataset_type="validation",  # the hub wants one; which data these are, a run may not know
        dataset_name=figure.subset or "validation set of the run",
        metric_type=figure.metric,
        metric_value=round(figure.value, 4),
    )


# ---- the rest


def _licence(identifier: str | None) -> str:
    if identifier is not None:
        return f"This model is under {inert(identifier)}. Mind the licences of base model and data."
    return "None was given with this export. Those of the base model and of the data apply."


def _versions() -> str:
    rows = [(name, inert(version(name))) for name in _PACKAGES]
    shown = table(("package", "version"), [("python", platform.python_version()), *rows])
    return f"## Versions\n\n{shown}"
