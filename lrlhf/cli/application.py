"""Runs a command, and ends it with one clear message whatever goes wrong."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from importlib import import_module
from pathlib import Path
from typing import Any

import lightning as L
from lightning.fabric.utilities.rank_zero import rank_zero_only
from lightning.pytorch.cli import ArgsType, LightningArgumentParser

import lrlhf.callbacks
import lrlhf.datamodules
import lrlhf.loggers
import lrlhf.modules
import lrlhf.rewards
import lrlhf.rollout  # noqa: F401  classes that are imported can be named by their short names
from lrlhf.cli.audit_command import add_audit_options, audit_data
from lrlhf.cli.batch_limits import read_whole_numbers_as_such
from lrlhf.cli.chat_command import chat
from lrlhf.cli.cheap_parts import CheapParts
from lrlhf.cli.config_files import (
    ConfigFile,
    config_arguments,
    folders_of_own_code,
    is_inline,
    read_config_files,
)
from lrlhf.cli.convert_command import convert
from lrlhf.cli.evaluation import EVALUATIONS, show_evaluation, take_export
from lrlhf.cli.export_command import export_checkpoint, hub_repo
from lrlhf.cli.generate_command import generate
from lrlhf.cli.messages.causes import Progress, blaming_user
from lrlhf.cli.messages.endings import end, how_to_continue
from lrlhf.cli.messages.errors import ConfigError, UserError, hint
from lrlhf.cli.messages.output import configure_output
from lrlhf.cli.messages.secrets import remember_secrets
from lrlhf.cli.model_flags import with_sources
from lrlhf.cli.null_values import refuse_nulls
from lrlhf.cli.parser import Parser
from lrlhf.cli.plan_command import add_plan_options, describe_run
from lrlhf.cli.replay_command import dump_and_options, show_replay
from lrlhf.cli.reward_command import add_reward_options, run_rewards
from lrlhf.cli.saved_config import SaveConfig, hide_hyperparameters
from lrlhf.cli.serve_command import serve_reward
from lrlhf.cli.serve_policy_command import serve_policy
from lrlhf.modules.metrics.measurement import HasMeasurements
from lrlhf.planning.checks.mistake import MistakeError, RefusedError
from lrlhf.planning.checks.run_checks import check_run
from lrlhf.planning.checks.trainer_options import check_strategy
from lrlhf.run.lightning_internals import Commands
from lrlhf.run.split_models import ReadsParts
from lrlhf.run.supervision.signals import answering_sigterm
from lrlhf.secrets import safe
from lrlhf.trainer import Trainer

_CHECKPOINT_WORDS = {"last", "best", "hpc"}


built = False
"""Whether this process has begun to build a run: then it is to end as Python ends."""


class Application(Commands):
    """LightningCLI as this project sets it up.

    Args:
        arguments: The command and its options.
    """

    trains = True
    """Else there is a trainer of one process only, which does nothing."""

    def __init__(self, arguments: Sequence[str]) -> None:
        self._arguments = list(arguments)
        read_whole_numbers_as_such()
        super().__init__(
            L.LightningModule,
            L.LightningDataModule,
            trainer_class=Trainer,
            subclass_mode_model=True,
            subclass_mode_data=True,
            auto_configure_optimizers=False,
            save_config_callback=SaveConfig,
            save_config_kwargs={"overwrite": True},
            seed_everything_default=0,
            trainer_defaults={"use_distributed_sampler": False},
            parser_class=Parser,
            parser_kwargs={"prog": "lrlhf", "allow_abbrev": False},
        )

    def parse_arguments(self, parser: LightningArgumentParser, args: ArgsType) -> None:
        self.config = parser.parse_args(self._arguments)
        options = self.config.get(self._arguments[0])
        refuse_nulls(options)
        if options is not None and options.trainer.default_root_dir is None:
            options.trainer.default_root_dir = _run_folder(self._arguments)
        if options is not None and self._arguments[0] in EVALUATIONS:
            take_export(options)

    def before_instantiate_classes(self) -> None:
        # the other processes of a run have the same config
        if rank_zero_only.rank == 0:  # type: ignore[attr-defined]  # Lightning puts it there
            for _ in self.findings():
                pass

    def findings(self) -> Iterator[str]:
        """Check what is known before weights are loaded, and tell what was looked at.

        Raises:
            MistakeError: Something cannot work.
            RefusedError: A class refuses its options.
        """
        options = self.config[self.subcommand]
        _check_checkpoint(options.get("ckpt_path"))
        trains = self.subcommand == "fit"
        yield from check_run(options.as_dict(), CheapParts(options), trains=trains)

    def instantiate_classes(self) -> None:
        global built
        built = True
        try:
            with self._reading_parts():
                super().instantiate_classes()
        except ConfigError:
            raise
        except Exception as error:
            raise RefusedError from error
        hide_hyperparameters(self.model, self.datamodule)

    def _reading_parts(self) -> AbstractContextManager[None]:
        """Build models as the strategy, which is made after them, wants to load them."""
        strategy = CheapParts(self.config[self.subcommand]).strategy() if self.trains else None
        return strategy.reading_parts() if isinstance(strategy, ReadsParts) else nullcontext()

    def run_command(self, subcommand: str) -> None:
        progress = Progress()
        self.trainer.callbacks.append(progress)  # type: ignore[attr-defined]
        evaluates = subcommand in ("validate", "test") and isinstance(self.model, HasMeasurements)
        if evaluates:
            self.config_init[subcommand]["verbose"] = False  # a table with intervals follows
        with answering_sigterm(self.trainer.strategy.launcher):
            try:
                super().run_command(subcommand)
            except BaseException as error:
                if subcommand == "fit" and (note := how_to_continue(self.trainer)):
                    error.add_note(note)
                if isinstance(error, Exception) and progress.blames_user(error):
                    raise UserError from error
                raise
        if evaluates:
            show_evaluation(self.trainer)

    def instantiate_trainer(self, **kwargs: Any) -> L.Trainer:
        if not self.trains:
            return L.Trainer(accelerator="cpu", devices=1, logger=False, enable_checkpointing=False)
        return super().instantiate_trainer(**kwargs)


class Reader(Application):
    """Reads the config of ``fit``, and builds nothing: the constructors would load weights."""

    def before_instantiate_classes(self) -> None:
        """Leave checks to the command itself, which says what it looks at."""

    def instantiate_classes(self) -> None:
        """Build nothing."""


class Planner(Reader):
    """Reads the config of ``fit`` and prints what it would do; builds and writes nothing.

    Args:
        arguments: Those of ``fit``, the command included.
    """

    def add_arguments_to_parser(self, parser: LightningArgumentParser) -> None:
        parser.usage = "lrlhf plan [--gpus N] [--gpu NAME] [the options of lrlhf fit]"
        parser.description = (
            "Print the batch sizes, the steps and the memory of fit, without training."
        )
        add_plan_options(parser)

    def before_instantiate_classes(self) -> None:
        # the run may be meant for another machine, with other devices and data
        options = self.config[self.subcommand]
        _check_checkpoint(options.ckpt_path)
        check_strategy(options.trainer)

    def run_command(self, subcommand: str) -> None:
        try:
            for number, paragraph in enumerate(describe_run(self.config[subcommand])):
                sys.stdout.write(f"\n{paragraph}\n" if number else f"{paragraph}\n")
                sys.stdout.flush()
        except ValueError as error:
            raise RefusedError from error


class Checker(Reader):
    """Reads the config of ``fit`` and looks for mistakes; loads no weights and writes nothing.

    Args:
        arguments: Those of ``fit``, the command included.
    """

    def add_arguments_to_parser(self, parser: LightningArgumentParser) -> None:
        parser.usage = "lrlhf check [the options of lrlhf fit]"
        parser.description = (
            "Look for mistakes in a config, its files and the first rows of its data, as fit does "
            "before it loads weights."
        )

    def run_command(self, subcommand: str) -> None:
        del subcommand
        for finding in self.findings():
            sys.stdout.write(f"{safe(finding)}\n")
            sys.stdout.flush()
        sys.stdout.write("found no mistake in what was looked at\n")


class Auditor(Reader):
    """Reads the config of ``fit`` and looks for faults in its data; loads no weights.

    Args:
        arguments: Those of ``fit``, the command included.
    """

    def add_arguments_to_parser(self, parser: LightningArgumentParser) -> None:
        parser.usage = "lrlhf audit [--json FILE] [--html FILE] [the options of lrlhf fit]"
        parser.description = "Look for faults in all rows of the training and validation data."
        add_audit_options(parser)

    def run_command(self, subcommand: str) -> None:
        options = self.config[subcommand]
        audit_data(options, CheapParts(options).data)


class RewardRunner(Reader):
    """Builds the rewards of a ``fit`` config, and runs them over given responses.

    Args:
        arguments: Those of ``fit``, the command included.
    """

    def add_arguments_to_parser(self, parser: LightningArgumentParser) -> None:
        parser.usage = (
            "lrlhf reward --config FILE RESPONSES [--json FILE] [--html FILE] "
            "[the options of lrlhf fit]"
        )
        parser.description = "Tell what the rewards of a config say of given responses."
        add_reward_options(parser)

    def run_command(self, subcommand: str) -> None:
        options = self.config[subcommand]
        run_rewards(options, CheapParts(options).all_rewards)


class Exporter(Application):
    """Builds the model of a ``fit`` config, fills it from a checkpoint and writes it out.

    Args:
        arguments: Those of ``fit``, the command included.
    """

    trains = False

    def add_arguments_to_parser(self, parser: LightningArgumentParser) -> None:
        parser.usage = (
            "lrlhf export --ckpt_path PATH --output DIR [--use_ema true] [--push_to_hub OWNER/NAME]"
            " [the options of lrlhf fit]"
        )
        parser.description = "Write the model of a checkpoint as a folder that transformers loads."
        parser.add_argument("--output", type=str | None, help="the folder, which must not exist")
        parser.add_argument("--use_ema", type=bool, default=False, help="export averaged weights")
        parser.add_argument("--license", type=str | None, help="identifier for the model card")
        parser.add_argument("--push_to_hub", type=str | None, help="owner/name on the hub")
        parser.add_argument("--private", type=bool | None, help="of a model new on the hub")
        parser.add_argument("--revision", type=str | None, help="branch on the hub")

    def before_instantiate_classes(self) -> None:
        options = self.config[self.subcommand]
        for name in ("ckpt_path", "output"):
            if options[name] is None:
                raise ConfigError(f"{name}: lrlhf export needs --{name}")
        if options["ckpt_path"] in _CHECKPOINT_WORDS:
            raise ConfigError(
                f"ckpt_path: {options['ckpt_path']} is a word of fit; lrlhf export needs the path "
                "of a checkpoint"
            )
        _check_checkpoint(options["ckpt_path"])
        try:
            if (repo := hub_repo(options)) is not None:
                repo.check()
        except ValueError as error:
            raise ConfigError(str(error)) from error

    def run_command(self, subcommand: str) -> None:
        with blaming_user():
            export_checkpoint(self.model, self.datamodule, self.config[subcommand])


class Replayer(Application):
    """Builds the module of a dump, and takes the step again that was left out.

    Args:
        folder: The dump.
        arguments: Those of ``fit``, the command included.
    """

    trains = False

    def __init__(self, folder: Path, arguments: Sequence[str]) -> None:
        self._folder = folder
        super().__init__(arguments)

    def add_arguments_to_parser(self, parser: LightningArgumentParser) -> None:
        parser.usage = "lrlhf replay DUMP [--config OVERLAY ...] [the options of lrlhf fit]"
        parser.description = (
            "Repeat the step of a dump, and show where it goes wrong. The exit status is 0 when "
            "it goes wrong again, 3 when it does not."
        )

    def before_instantiate_classes(self) -> None:
        # one process without loggers and callbacks repeats what any number of them did
        self.config[self.subcommand].ckpt_path = None
        alone = {"callbacks": None, "logger": False, "plugins": None, "strategy": "auto"}
        for name, value in alone.items():
            self.config[self.subcommand].trainer[name] = value

    def run_command(self, subcommand: str) -> None:
        del subcommand
        if not show_replay(self.model, self._folder):
            raise SystemExit(3)


def run(arguments: Sequence[str], *, debug: bool = False) -> int:
    """Run one command of ``lrlhf``.

    Args:
        arguments: The command and its options, without ``--debug``.
        debug: Show tracebacks, and what other libraries log.

    Returns:
        The exit status, see `lrlhf.__main__.main`.
    """
    configure_output(debug=debug)
    files: list[ConfigFile] = []
    try:
        application, arguments = _application(arguments, debug=debug)
        files = read_config_files(arguments)
        remember_secrets(files, arguments)
        # last, so that a file of the user's never takes the place of an installed module
        known = {str(Path(entry).absolute()) for entry in sys.path}
        sys.path += [folder for folder in folders_of_own_code(files) if folder not in known]
        application(with_sources(arguments, files))
    except BaseException as error:  # noqa: BLE001  the outermost frame: everything ends in one line
        return end(error, files, arguments, debug=debug)
    return 0


def _application(
    arguments: Sequence[str], *, debug: bool
) -> tuple[Callable[[Sequence[str]], object], Sequence[str]]:
    """What runs a command, and the arguments that it reads."""
    command, *options = arguments
    own = {
        "convert": convert,
        "chat": chat,
        "generate": generate,
        "serve-policy": serve_policy,
    }
    if command in own:
        return own[command], options
    if command == "serve-reward":
        return serve_reward, arguments
    if command == "launch":
        # which imports this file
        launcher = import_module("lrlhf.cli.launch_command").Launcher
        return partial(launcher, debug=debug), ["fit", *options]
    if command == "replay":
        folder, options = dump_and_options(options)
        return partial(Replayer, folder), ["fit", *options]
    readers = {
        "plan": Planner,
        "check": Checker,
        "audit": Auditor,
        "reward": RewardRunner,
        "export": Exporter,
    }
    if command in readers:
        return readers[command], ["fit", *options]
    return Application, arguments


def _run_folder(arguments: Sequence[str]) -> str:
    """Name the folder of a run after its first config that is a file of this machine."""
    files = (value for value in config_arguments(arguments) if not is_inline(value))
    return str(Path("runs") / Path(next(files, "unnamed")).stem)


def _check_checkpoint(path: str | None) -> None:
    """Refuse a checkpoint that is not there before anything is loaded."""
    if path is None or path in _CHECKPOINT_WORDS or "://" in path or Path(path).exists():
        return
    siblings = [entry.name for entry in Path(path).parent.glob("*.ckpt")]
    near = hint(Path(path).name, siblings, listed_as="there")
    raise MistakeError(("ckpt_path",), f"no file {path}{near}")
