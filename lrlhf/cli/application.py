"""Commands that build what a config describes, or only read it."""

from __future__ import annotations

import logging
import sys
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Any

import lightning as L
from lightning.fabric.utilities.rank_zero import rank_zero_only
from lightning.pytorch.cli import ArgsType, LightningArgumentParser

from lrlhf import callbacks, datamodules, loggers, modules, rewards, rollout
from lrlhf.cli.checks.config_objects import ConfigObjects
from lrlhf.cli.checks.run_checks import check_run
from lrlhf.cli.config_entries import class_of
from lrlhf.cli.config_files import (
    config_arguments,
    is_inline,
    names_policy,
    read_config_files,
    without_policy,
)
from lrlhf.cli.evaluation import EVALUATIONS, keep_reference, show_evaluation, take_export
from lrlhf.cli.export_command import export_checkpoint, hub_repo
from lrlhf.cli.messages.exit_status import Progress, blaming_user, how_to_continue
from lrlhf.cli.replay_command import show_replay
from lrlhf.cli.saved_config import SaveConfig, hide_hyperparameters
from lrlhf.foreign_files import TRUST_FLAG
from lrlhf.modules.hyperparameters import refuse_other_module
from lrlhf.modules.metrics.measurement import HasMeasurements
from lrlhf.options.errors import ConfigError, MistakeError, RefusedError, UserError, hint
from lrlhf.options.parser import (
    Parser,
    check_values,
    read_whole_numbers_as_such,
    write_defaults_as_text,
)
from lrlhf.run.checkpoints.checkpoint_search import UNREADABLE, without_tensors
from lrlhf.run.collectives import LoadsShards
from lrlhf.run.lightning_internals import Commands
from lrlhf.run.supervision.signals import answering_sigterm
from lrlhf.secrets import safe
from lrlhf.trainer import Trainer

_CHECKPOINT_WORDS = {"last", "best", "hpc"}
"""What ``ckpt_path`` may be instead of a path."""


# classes that are imported can be named by their short names
for _package in (callbacks, datamodules, loggers, modules, rewards, rollout):
    for _name in _package.__all__:
        getattr(_package, _name)


logger = logging.getLogger(__name__)


class Application(Commands):
    """LightningCLI as this project sets it up.

    Args:
        arguments: The command and its options.
    """

    trains = True
    """Else there is a trainer of one process only, which does nothing."""

    def __init__(self, arguments: Sequence[str]) -> None:
        self._arguments = list(arguments)
        name = self._arguments[0]
        wanted = {name: self.subcommands()[name]}  # a parser takes long to build
        self.subcommands = lambda: wanted  # type: ignore[method-assign]
        read_whole_numbers_as_such()
        write_defaults_as_text()
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
        check_values(options)
        if options is not None and options.trainer.default_root_dir is None:
            options.trainer.default_root_dir = _run_folder(self._arguments)
        if options is not None and self._arguments[0] in EVALUATIONS:
            if options.get("ckpt_path") is None:
                self._keep_reference(parser, options)
            take_export(options)

    def _keep_reference(self, parser: LightningArgumentParser, options: Any) -> None:
        """Find the policy of the config files, where a flag has another one evaluated."""
        arguments = without_policy(self._arguments)
        if arguments != self._arguments and names_policy(read_config_files(arguments)):
            configured = parser.parse_args(arguments)[self._arguments[0]]
            keep_reference(options, configured.model.init_args.policy)

    def before_instantiate_classes(self) -> None:
        # the other processes of a run have the same config
        if rank_zero_only.rank == 0:  # type: ignore[attr-defined]  # Lightning puts it there
            for finding in [*self.findings()]:  # an error stands alone
                if finding.startswith("row "):
                    logger.info("%s", finding)

    def findings(self) -> Iterator[str]:
        """Check what is known before weights are loaded, and tell what was looked at.

        Raises:
            MistakeError: Something cannot work.
            RefusedError: A class refuses its options.
        """
        options = self.config[self.subcommand]
        check_checkpoint(options.get("ckpt_path"), class_of(options.model.as_dict()))
        trains = self.subcommand == "fit"
        show = options.get("show") or 0  # of check
        yield from check_run(options.as_dict(), ConfigObjects(options), trains=trains, show=show)

    def instantiate_classes(self) -> None:
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
        strategy = ConfigObjects(self.config[self.subcommand]).strategy() if self.trains else None
        return strategy.loading_shards() if isinstance(strategy, LoadsShards) else nullcontext()

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
        check_checkpoint(options["ckpt_path"], class_of(options.model.as_dict()))
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
        parser.usage = (
            f"lrlhf replay DUMP [{TRUST_FLAG}] [--config OVERLAY ...] [the options of lrlhf fit]"
        )
        parser.description = (
            "Repeat the step of a dump, and show where it goes wrong. The exit status is 0 when "
            "it goes wrong again, 3 when it does not. A dump whose config names code of yours, or "
            f"of a model, needs {TRUST_FLAG}: a dump may be a stranger's."
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


def _run_folder(arguments: Sequence[str]) -> str:
    """Name the folder of a run after its first config that is a file of this machine."""
    files = (value for value in config_arguments(arguments) if not is_inline(value))
    return str(Path("runs") / Path(next(files, "unnamed")).stem)


def check_checkpoint(path: str | None, module: type | None = None) -> None:
    """Refuse a checkpoint that is not there, or of another module, before anything is loaded."""
    if path is None or path in _CHECKPOINT_WORDS or "://" in path:
        return
    if not Path(path).exists():
        siblings = [entry.name for entry in Path(path).parent.glob("*.ckpt")]
        near = hint(Path(path).name, siblings, listed_as="there")
        raise MistakeError(("ckpt_path",), f"no file {path}{near}")
    if module is None:
        return
    try:
        content = without_tensors(Path(path))
    except UNREADABLE:
        return  # the run says what is damaged
    try:
        refuse_other_module(module, content if isinstance(content, dict) else {}, path)
    except ValueError as error:
        raise MistakeError(("ckpt_path",), str(error)) from error


class Reader(Application):
    """Reads the config of ``fit``, and builds nothing: the constructors would load weights."""

    def before_instantiate_classes(self) -> None:
        """Leave checks to the command itself, which says what it looks at."""

    def instantiate_classes(self) -> None:
        """Build nothing."""


class Checker(Reader):
    """Reads the config of ``fit`` and looks for mistakes; loads no weights and writes nothing.

    Args:
        arguments: Those of ``fit``, the command included.
    """

    def add_arguments_to_parser(self, parser: LightningArgumentParser) -> None:
        parser.usage = "lrlhf check [--show ROWS] [the options of lrlhf fit]"
        parser.description = (
            "Look for mistakes in a config, its files and the first rows of its data, as fit does "
            "before it loads weights. Reward functions are called on made responses."
        )
        parser.add_argument(
            "--show", type=int, default=0, help="show so many rows: each token, and the loss mask"
        )

    def run_command(self, subcommand: str) -> None:
        del subcommand
        for finding in self.findings():
            sys.stdout.write(f"{safe(finding)}\n")
            sys.stdout.flush()
        sys.stdout.write("found no mistake in what was looked at\n")
