"""What ``lrlhf validate`` and ``test`` add to Lightning's: exported models, and a table."""

from __future__ import annotations

import math
import sys
from collections.abc import Sequence
from typing import Any

import lightning as L
from jsonargparse import Namespace
from rich.table import Table

from lrlhf.callbacks import EvalJSONL
from lrlhf.callbacks.reports.run_report import short_path
from lrlhf.cli.config_entries import is_a
from lrlhf.cli.model_evaluation import MODEL_OPTIONS, export_folder, is_export
from lrlhf.modules import DPO
from lrlhf.modules.dpo import resolve_preference_loss
from lrlhf.modules.metrics.measurement import HasMeasurements, Measurement
from lrlhf.modules.policy.iteration import plain_text
from lrlhf.modules.referenced_policy import ReferencedPolicy
from lrlhf.options.errors import ConfigError
from lrlhf.secrets import safe

EVALUATIONS = ("validate", "test", "predict")
"""Commands that take a model as it is."""


def take_export(options: Any) -> None:
    """Have the folder of a model that ``ckpt_path`` names loaded in the place of the config's.

    What is written goes to ``validate/<name of the folder>`` in the run folder, where it takes the
    place of no evaluation of the training. `DPO` and `KTO` keep the model of the config as
    reference.

    Args:
        options: The parsed config of the command.

    Raises:
        ConfigError: The module has no option for a model.
    """
    path = options.get("ckpt_path")
    if path is None or not is_export(path):
        return
    arguments = options.model.get("init_args") or Namespace()  # type: ignore[no-untyped-call]
    option = next((name for name in MODEL_OPTIONS if name in arguments), None)
    if option is None:
        raise ConfigError(
            f"ckpt_path: {path} is an exported model, and {options.model.class_path} has none of "
            f"the options {' and '.join(MODEL_OPTIONS)} to load it with; give a checkpoint"
        )
    keep_reference(options, arguments[option])
    spec = arguments[option]
    spec = spec.get("init_args", spec) if isinstance(spec, Namespace) else {}
    if "source" in spec:
        spec["source"], spec["lora"] = str(path), None  # adapters are merged into an export
    else:
        arguments[option] = str(path)
    options.ckpt_path = None
    options.trainer.default_root_dir = str(export_folder(options.trainer.default_root_dir, path))


def keep_reference(options: Any, original: str | Namespace) -> None:
    """Have `DPO` or `KTO` ask the model it starts from, where another one is evaluated instead.

    A reference that is not named would be the evaluated model itself, and every margin 0.

    Args:
        options: The parsed config of the command.
        original: The policy of the config.

    Raises:
        ConfigError: There is no such loss.
    """
    arguments = options.model.get("init_args") or Namespace()  # type: ignore[no-untyped-call]
    if (
        not is_a(options.model.as_dict(), ReferencedPolicy)
        or arguments.get("reference") is not None
    ):
        return
    is_pairwise = is_a(options.model.as_dict(), DPO)
    if is_pairwise and not _has_reference(arguments.get("loss", "sigmoid")):
        return
    if isinstance(original, Namespace):
        original = original.clone()
        spec = original.get("init_args", original)
        lora = spec.get("lora")
        # new adapters add nothing to the reference, and those that are stored belong to it
        if lora is not None and lora.get("init_args", lora).get("source") is None:
            spec["lora"] = None
    arguments["reference"] = original


def _has_reference(loss: str | Namespace) -> bool:
    if isinstance(loss, Namespace):
        return bool(loss.get("init_args", loss)["reference"])
    try:
        return resolve_preference_loss(loss).reference
    except ValueError as error:
        raise ConfigError(f"model.loss: {error}") from error


def show_evaluation(trainer: L.Trainer) -> None:
    """Print what an evaluation has found, and where its examples are."""
    module = trainer.lightning_module
    if not isinstance(module, HasMeasurements) or not trainer.is_global_zero:
        return
    if not module.measurements:  # they stay in processes that were forked
        return
    sys.stdout.write(f"{measurement_table(module.measurements)}\n")
    callbacks: list[L.Callback] = trainer.callbacks  # type: ignore[attr-defined]
    for callback in callbacks:
        if isinstance(callback, EvalJSONL) and callback.paths:
            sys.stdout.write(safe(f"examples: {short_path(callback.paths[-1])}\n"))
    sys.stdout.flush()


def measurement_table(measurements: Sequence[Measurement]) -> str:
    """Return the metrics of an evaluation as a table."""
    table = Table(box=None, pad_edge=False)
    table.add_column("metric")
    for heading in ("value", "95 % interval", "n"):
        table.add_column(heading, justify="right")
    for measurement in measurements:
        known = not math.isnan(measurement.low)
        interval = f"{measurement.low:.4g} to {measurement.high:.4g}" if known else ""
        table.add_row(
            measurement.name, f"{measurement.value:.4g}", interval, str(measurement.number or "")
        )
    return plain_text(table)
