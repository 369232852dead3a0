"""An argument parser that raises instead of printing pages of usage, and names near misses."""

from __future__ import annotations

import re
from typing import Any, NoReturn

from lightning.pytorch.cli import LightningArgumentParser

from lrlhf.cli.messages.errors import ValidationError, hint
from lrlhf.familiar_names import FAMILIAR_NAMES, RENAMED_KEYS

_UNKNOWN_OPTION = re.compile(r"Option '(?P<key>[^']+)' is not accepted$")
_UNKNOWN_IN_GROUP = re.compile(
    r"(?P<kind>Group|Subcommand) '(?P<group>[^']+)' does not accept option '(?P<key>[^']+)'$"
)
_UNKNOWN_FLAG = re.compile(r"unrecognized arguments: --(?P<key>[\w.]+)")


class Parser(LightningArgumentParser):
    """Parser of a command, and of each class that a config names.

    jsonargparse builds one parser per class with the type of the outer one, so each knows the
    options of its own class: the place to look for a near miss.

    A text given for an option of a class is never taken for the name of a config file: jsonargparse
    reads a file that is there, whatever it holds, wherever an option also takes an object
    (``train: str | Source``), so that rows of a data set could name classes to import. Nor is the
    beginning of an option taken for the option.
    """

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        # the parsers of classes are made by jsonargparse, whose default allows it
        super().__init__(*args, **{**kwargs, "allow_abbrev": False})

    def add_class_arguments(self, *args: Any, **kwargs: Any) -> list[str]:
        added: list[str] = super().add_class_arguments(*args, **{**kwargs, "sub_configs": False})
        return added

    def add_function_arguments(self, *args: Any, **kwargs: Any) -> list[str]:
        added: list[str] = super().add_function_arguments(*args, **{**kwargs, "sub_configs": False})
        return added

    def error(self, message: str, ex: Exception | None = None) -> NoReturn:
        """Raise: for the outermost parser a `ValidationError`, else what jsonargparse expects."""
        hinted = message + self._hint(message, ex)
        if self.exit_on_error:
            raise ValidationError(hinted) from ex
        super().error(hinted, ex)

    def _hint(self, message: str, error: Exception | None) -> str:
        if "; did you mean" in message:  # an inner parser knew better
            return ""
        patterns = (_UNKNOWN_OPTION, _UNKNOWN_FLAG, _UNKNOWN_IN_GROUP)
        match = next(filter(None, (pattern.match(message) for pattern in patterns)), None)
        if match is None:
            return ""
        group = match.groupdict().get("group")
        # as it was given, with as many of the keys around it as are known
        parts = f"{group}.{match['key']}".split(".")
        for start in range(len(parts)):
            renamed = RENAMED_KEYS.get(".".join(parts[start:]))
            if renamed and ("." in renamed or renamed in self._options("")):
                return f"; did you mean '{renamed}', which took its place?"
        if familiar := FAMILIAR_NAMES.get(parts[-1]):
            return f"; did you mean {familiar}?"
        if group is not None:
            return self._hint_in_group(match, error)
        return hint(
            match["key"], self._dotted() if match.re is _UNKNOWN_FLAG else self._options("")
        )

    def _hint_in_group(self, match: re.Match[str], error: Exception | None) -> str:
        if match["kind"] == "Group":
            return hint(match["key"], self._options(match["group"] + "."))
        parser: Any = vars(error).get("subcommand_parser", self) if error else self
        prefix, _, key = match["key"].rpartition(".")
        nearest = hint(key, parser._options(prefix + "." if prefix else ""))
        # a whole group is misspelt: `modle.class_path`
        return nearest or hint(prefix.split(".")[0], parser._options(""))

    def _dotted(self) -> set[str]:
        """Every option in full, without what only asks for help."""
        names = (name for action in self._actions for name in action.option_strings)
        skipped = ("help", "print_config", "print_shtab")
        dotted = {name[2:] for name in names if name.startswith("--")}
        return {name for name in dotted if not name.rpartition(".")[2].startswith(skipped)}

    def _options(self, prefix: str) -> set[str]:
        """Names of the level below ``prefix``."""
        inside = (name for name in self._dotted() if name.startswith(prefix))
        return {name.removeprefix(prefix).split(".")[0].rstrip("+") for name in inside}
