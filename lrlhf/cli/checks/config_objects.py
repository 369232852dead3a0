"""Parts of a run that load nothing, made of its config before the run makes them."""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from dataclasses import fields, is_dataclass
from typing import Any

import lightning as L
from jsonargparse import Namespace
from lightning.pytorch.loggers import Logger
from lightning.pytorch.strategies import Strategy, StrategyRegistry

from lrlhf.cli.config_entries import class_of, is_lrlhf, options_of, reward_entries
from lrlhf.modules.policy.settings import PolicySettings
from lrlhf.options.errors import MistakeError, RefusedError
from lrlhf.options.parser import Parser
from lrlhf.rewards import Rewards
from lrlhf.rewards.lookup import BUILTINS, bind_functions

_LOADED = {"policy", "model", "tokenizer", "processor", "engine", "rewards"}
"""Options of the modules that load something, and the rewards, which have a look of their own."""


class ConfigObjects:
    """Makes parts of a run as the run would; each method raises `RefusedError` where one refuses.

    Args:
        options: The parsed config: ``model``, ``data`` and ``trainer``.
    """

    def __init__(self, options: Namespace) -> None:
        self._options = options
        self._model = options.model.as_dict()

    def data(self) -> L.LightningDataModule:
        """Make the data module."""
        made: L.LightningDataModule = _made(L.LightningDataModule, self._options.data)
        return made

    def of_trainer(self) -> None:
        """Make the callbacks and loggers of this library."""
        for section, base in (("callbacks", L.Callback), ("logger", Logger)):
            part = self._options.trainer[section]
            for entry in part if isinstance(part, list) else [part]:
                if isinstance(entry, Namespace) and is_lrlhf(entry.as_dict()):
                    _made(base, entry)

    def strategy(self) -> Strategy | None:
        """Make the strategy if it is one of this library; else None."""
        entry = self._options.trainer.strategy
        if isinstance(entry, str) and entry in StrategyRegistry:
            kind = StrategyRegistry[entry]["strategy"]
            return StrategyRegistry.get(entry) if kind.__module__.startswith("lrlhf.") else None
        if isinstance(entry, Namespace) and is_lrlhf(entry.as_dict()):
            made: Strategy = _made(Strategy, entry)
            return made
        return None

    def rewards(self) -> Rewards | None:
        """Make the rewards where no function loads anything or is an object of the user's."""
        entry = options_of(self._model).get("rewards")
        if is_lrlhf(entry) and all(map(_loads_nothing, reward_entries(entry).values())):
            made: Rewards = _made(Rewards, self._options.model.init_args.rewards)
            return made
        return None

    def reward_functions(self) -> tuple[dict[str, Any], list[str]]:
        """Make reward functions that load nothing, by name, and name the others."""
        if (made := self.rewards()) is not None:
            return made.functions, []
        listed = [*reward_entries(options_of(self._model).get("rewards")).values()]
        imported = bind_functions([each for each in listed if isinstance(each, str)])
        others = [str(each["class_path"]) for each in listed if isinstance(each, Mapping)]
        return dict(imported), [path.rpartition(".")[2] for path in others]

    def all_rewards(self) -> Rewards:
        """Make the rewards, whatever their functions load, and let them fail as often as they do.

        Raises:
            MistakeError: The module has no rewards of this library's kind.
        """
        entry = options_of(self._model).get("rewards")
        if not is_lrlhf(entry):
            raise MistakeError(
                ("model", "rewards"), "there are no rewards to run; give lrlhf.rewards.Rewards"
            )
        options = self._options.model.init_args.rewards.clone()
        options.init_args.max_failures = None
        made: Rewards = _made(Rewards, options)
        return made

    def settings(self) -> PolicySettings | None:
        """Make the groups of options of a module, and complete those of a policy.

        Returns:
            The settings; None: the module has none, or some are of a user's class.
        """
        owner = class_of(self._model)
        if owner is None or not is_lrlhf(self._model):
            return None
        options = options_of(self._model)
        if evaluation := options.get("evaluation"):
            # metrics may load something, and say nothing of how evaluations sample
            options = {**options, "evaluation": _without_metrics(evaluation)}
        plain_options = {
            name: value
            for name, value in options.items()
            if name not in _LOADED and _is_plain(value)
        }
        defaults: dict[str, Any] = {
            "default_algorithm": getattr(owner, "default_algorithm", None),
            "default_minibatches": getattr(owner, "default_minibatches", None),
            "scored": options.get("rewards") is not None,
        }
        needed = {field.name for field in fields(PolicySettings)}
        parser = Parser()
        try:
            names = inspect.signature(owner).parameters
            skip: set[str | int] = {name for name in names if name not in plain_options}
            parser.add_class_arguments(owner, "it", skip=skip, instantiate=False)
            made = parser.instantiate(parser.parse_object({"it": plain_options})).it
            if defaults["default_algorithm"] is None or needed - {*plain_options, *defaults}:
                return None
            chosen = {name: made[name] for name in needed if name in plain_options}
            return PolicySettings.complete(**chosen, **defaults)
        except Exception as error:
            raise RefusedError from error


def _made(base: type, entry: Namespace) -> Any:
    parser = Parser()
    parser.add_subclass_arguments(base, "it")
    try:
        return parser.instantiate(Namespace(it=entry)).it  # type: ignore[no-untyped-call]
    except Exception as error:
        raise RefusedError from error


def _loads_nothing(function: Any) -> bool:
    """Whether a reward function can be made at once; those of this library load in `prepare`."""
    if isinstance(function, str):  # a function of the user's is imported in any case
        return function in BUILTINS or class_of(function) is None
    options = options_of(function)
    # one that is given a function may make an object of the user's
    return (
        is_lrlhf(function) and "function" not in options and all(map(_is_plain, options.values()))
    )


def _without_metrics(evaluation: Mapping[str, Any]) -> dict[str, Any]:
    if "class_path" in evaluation:
        return {**evaluation, "init_args": _without_metrics(options_of(evaluation))}
    return {name: value for name, value in evaluation.items() if name != "metrics"}


def _is_plain(value: Any) -> bool:
    """Whether an option holds no class but groups of options of this library's."""
    if isinstance(value, list):
        return all(map(_is_plain, value))
    if not isinstance(value, Mapping):
        return True
    kind = class_of(value)
    if "class_path" in value and not (is_lrlhf(value) and is_dataclass(kind)):
        return False
    return all(map(_is_plain, value.values()))
