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
from lrlhf.cli.messages.errors import ConfigError
from lrlhf.cli.model_evaluation import MODEL_OPTIONS, export_folder, is_export
from lrlhf.modules.metrics.measurement import HasMeasurements, Measurement
from lrlhf.planning.plain_table import plain_text

EVALUATIONS = ("validate", "test", "predict")
"""Commands that take a model as it is."""


def take_export(options: Any) -> None:
    """Have the folder of a model that ``ckpt_path`` names loaded in the place of the config's.

    What is written goes to ``validate/<name of the folder>`` in the run folder, where it takes the
    place of no evaluation of the training.

    Args:
        options: The parsed config of the command.

    Raises:
        ConfigError: The module has no option for a model.
    """
    path = options.get("ckpt_path")
    if path is None or not is_export(path):
        return
    given = options.model.get("init_args") or Namespace()  # type: ignore[no-untyped-call]
    option = next((name for name in MODEL_OPTIONS if name in given), None)
    if option is None:
        raise ConfigError(
            f"ckpt_path: {path} is an exported model, and {options.model.class_path} has none of "
            f"the options {' and '.join(MODEL_OPTIONS)} to load it with; give a checkpoint"
        )
    spec = given[option]
    spec = spec.get("init_args", spec) if isinstance(spec, Namespace) else {}
    if "source" in spec:
        spec["source"], spec["lora"] = str(path), None  # adapters are merged into an export
    else:
        given[option] = str(path)
    options.ckpt_path = None
    options.trainer.default_root_dir = str(export_folder(options.trainer.default_root_dir, path))


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
            sys.stdout.write(f"examples: {short_path(callback.paths[-1])}\n")
    sys.stdout.flush()


def measurement_table(found: Sequence[Measurement]) -> str:
    """Return the metrics of an evaluation as a table."""
    table = Table(box=None, pad_edge=False)
    table.add_column("metric")
    for heading in ("value", "95 % interval", "n"):
        table.add_column(heading, justify="right")
    for one in found:
        known = not math.isnan(one.low)
        interval = f"{one.low:.4g} to {one.high:.4g}" if known else ""
        table.add_row(one.name, f"{one.value:.4g}", interval, str(one.number or ""))
    return plain_text(table)
