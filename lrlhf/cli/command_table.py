"""The commands of ``lrlhf``, each with what runs it. The only place that names the apps.

Nothing that imports more than the standard library may be imported here: ``lrlhf --help`` reads
this table.
"""

from __future__ import annotations

from enum import Enum
from importlib import import_module
from typing import Any, Final, NamedTuple

LAUNCHED: Final = "LRLHF_RAY_NAMESPACE"
"""Environment variable of the trainers of ``launch``: where the actors of their run have names."""


class CommandKind(Enum):
    """The arguments that a command is called with."""

    FIT = "the command and the options of fit"
    """A class of `lrlhf.cli.application` or below it, whose instance runs the command."""
    OPTIONS = "its own options"
    """A function. Its module has a ``parser()``, whose help needs no torch."""
    FILES = "its own options, without torch"
    """A function that only reads files of runs."""


class Command(NamedTuple):
    """One command of the command line."""

    summary: str
    target: str
    """``module:name``, imported when the command is run."""
    kind: CommandKind = CommandKind.FIT

    @property
    def module(self) -> str:
        return self.target.partition(":")[0]

    def load(self) -> Any:
        """Import what runs the command."""
        return getattr(import_module(self.module), self.target.partition(":")[2])


_FIT = "lrlhf.cli.application:Application"
COMMANDS = {
    "fit": Command("train a reward model or a policy", _FIT),
    "init": Command(
        "write a config for a file of yours", "lrlhf.cli.init_command:init", CommandKind.FILES
    ),
    "configs": Command(
        "list the configs that come with lrlhf, or copy them",
        "lrlhf.cli.shipped_configs:configs",
        CommandKind.FILES,
    ),
    "launch": Command(
        "run fit on a Ray cluster, with rollout replicas and reward workers",
        "lrlhf.apps.cluster.launch:Launcher",
    ),
    "check": Command(
        "look for mistakes in a config and its data, without loading weights",
        "lrlhf.cli.application:Checker",
    ),
    "audit": Command(
        "look for faults in all rows of the data", "lrlhf.apps.lab.config_commands:Auditor"
    ),
    "plan": Command(
        "print batch sizes, steps and memory of fit, without training",
        "lrlhf.apps.plan.plan_command:Planner",
    ),
    "validate": Command("run the validation set once", _FIT),
    "test": Command("run the test set once", _FIT),
    "predict": Command("run the prediction set once", _FIT),
    "generate": Command(
        "answer a file of prompts with a checkpoint or model",
        "lrlhf.cli.generate_command:generate",
        CommandKind.OPTIONS,
    ),
    "chat": Command(
        "talk with a checkpoint or model in the terminal",
        "lrlhf.apps.serve.chat_command:chat",
        CommandKind.OPTIONS,
    ),
    "compare": Command(
        "tell whether a run is better than another, by how much, or not",
        "lrlhf.apps.lab.compare_command:compare",
        CommandKind.FILES,
    ),
    "inspect": Command(
        "write a page with the curves and the responses of runs",
        "lrlhf.apps.lab.inspect_command:inspect",
        CommandKind.FILES,
    ),
    "diagnose": Command(
        "say why a policy does not learn, and what to change first",
        "lrlhf.apps.lab.diagnose_command:diagnose",
        CommandKind.FILES,
    ),
    "reward": Command(
        "what the rewards of a config say of given responses, or said in a run",
        "lrlhf.apps.lab.config_commands:RewardRunner",
    ),
    "verify": Command(
        "check rollouts of any trainer: which weights, which tokens, which formulas",
        "lrlhf.apps.verify.verify_command:run_verify",
        CommandKind.OPTIONS,
    ),
    "export": Command(
        "write a checkpoint's model as a folder that transformers loads",
        "lrlhf.cli.application:Exporter",
    ),
    "replay": Command(
        "repeat a step that was left out, and show where it goes wrong",
        "lrlhf.cli.application:Replayer",
    ),
    "convert": Command(
        "turn a checkpoint's folder into one file, or the other way round",
        "lrlhf.cli.convert_command:convert",
        CommandKind.OPTIONS,
    ),
    "serve-reward": Command(
        "serve a trained reward model over HTTP",
        "lrlhf.apps.serve.serve_reward_command:serve_reward",
        CommandKind.OPTIONS,
    ),
}
REWARDS_OF_RUN = Command(
    "what the rewards said in a run", "lrlhf.apps.lab.reward_command:report_run", CommandKind.FILES
)
"""The command ``reward`` where it has no config."""
HELP_OF_CLASS = Command(
    "what a class accepts", "lrlhf.cli.class_help:help_of_class", CommandKind.OPTIONS
)
"""The command ``help`` with the name of a class."""
