"""An argument parser that raises instead of printing pages of usage, and names near misses."""

from __future__ import annotations

import inspect
import json
import re
from collections.abc import Collection, Mapping, Sequence
from contextlib import suppress
from dataclasses import is_dataclass
from importlib import import_module
from pydoc import locate as import_by_path
from types import MappingProxyType
from typing import Any, NoReturn

import lightning as L
import yaml
from jsonargparse import Namespace, get_loader, set_loader
from jsonargparse.typing import register_type
from lightning.pytorch.callbacks import Timer
from lightning.pytorch.cli import LightningArgumentParser

from lrlhf.familiar_names import FAMILIAR_NAMES, RENAMED_KEYS
from lrlhf.foreign_files import check_text
from lrlhf.options.conversion import PLAIN, QuotedText, fits, no_group, parameters_of, plain
from lrlhf.options.errors import ValidationError, hint

_UNKNOWN_OPTION = re.compile(r"Option '(?P<key>[^']+)' is not accepted$")
_UNKNOWN_IN_GROUP = re.compile(
    r"(?P<kind>Group|Subcommand) '(?P<group>[^']+)' does not accept option '(?P<key>[^']+)'$"
)
_UNKNOWN_FLAG = re.compile(r"unrecognized arguments: --(?P<key>[\w.]+)")
_NOT_TEXT = (bool, int, float, type(None))
_load_yaml = get_loader("yaml")
_typehints: Any = import_module("jsonargparse._typehints")
_sort_subtypes, _load_value = _typehints.sort_subtypes_for_union, _typehints.load_value
_spec_of = _typehints.subclass_spec_as_namespace
_resolvers: Any = import_module("jsonargparse._parameter_resolvers")


def constructor_options(kind: type) -> list[str]:
    """Name the options of a class, those included that its constructor passes on to its base."""
    return [one.name for one in _resolvers.get_signature_parameters(kind, "__init__")]


def mark_quoted(value: Any) -> Any:
    """Return a value of a config with `QuotedText` for texts that YAML reads as something else."""
    if type(value) is str:
        with suppress(yaml.YAMLError, RecursionError, ValueError):
            if _typehints.basic_json_or_yaml_load(value) == value:
                return value
        return QuotedText(value)
    if type(value) is dict:
        return {key: mark_quoted(part) for key, part in value.items()}
    if type(value) in (list, tuple):
        return type(value)(map(mark_quoted, value))
    return value


def _load_once(text: str) -> Any:
    """Read YAML as jsonargparse does, of configs and of texts in them, see `check_text`."""
    check_text(text)
    return mark_quoted(_load_yaml(text))


def _text_first(subtypes: Any, value: Any, *args: Any) -> Any:
    """Sort the types of a union: a quoted text is a number only where it can be no text."""
    kinds = _sort_subtypes(subtypes, value, *args)
    if isinstance(value, QuotedText):
        return sorted(kinds, key=lambda kind: kind in _NOT_TEXT)
    return kinds


def _load_unquoted(value: str, **options: Any) -> Any:
    """Read a text of ``dict_kwargs``, which have no types."""
    return value if isinstance(value, QuotedText) else _load_value(value, **options)


def _spec_with_text(value: Any, *args: Any) -> Any:
    """Write the value of an option of an option as text: jsonargparse reads ``str(None)`` again."""
    nested = isinstance(value, _typehints.NestedArg) and not isinstance(value.val, str)
    if nested and "." in value.key and not value.key.startswith("dict_kwargs."):
        value = value._replace(val=json.dumps(value.val, default=str))
    return _spec_of(value, *args)


def _represent(dumper: yaml.SafeDumper, text: QuotedText) -> yaml.Node:
    """Write a text in quotes: PyYAML thinks that ``1e3`` needs none."""
    return dumper.represent_scalar("tag:yaml.org,2002:str", text, style="'")


set_loader("yaml", _load_once, exceptions=(yaml.YAMLError, RecursionError))
register_type(QuotedText, serializer=lambda text: text)
yaml.SafeDumper.add_representer(QuotedText, _represent)
_typehints.sort_subtypes_for_union = _text_first
_typehints.load_value = _load_unquoted
_typehints.subclass_spec_as_namespace = _spec_with_text


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

    def instantiate(self, *args: Any, **kwargs: Any) -> Namespace:
        """Make the objects of a config; they receive plain text."""
        made: Namespace = super().instantiate(*args, **kwargs)
        for name, value in vars(made).items():
            made[name] = plain(value)
        return made

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
        if near := near_miss(parts, self._options("")):
            return near
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


def near_miss(keys: Sequence[str], accepted: Collection[str]) -> str:
    """Say what an option of another library, or a former one, is called here; empty: it is none.

    Args:
        keys: The option behind the groups that it stands in.
        accepted: Options of the class.
    """
    for start in range(len(keys)):
        renamed = RENAMED_KEYS.get(".".join(keys[start:]))
        if renamed and ("." in renamed or renamed in accepted):
            return f"; did you mean '{renamed}', which took its place?"
    familiar = FAMILIAR_NAMES.get(keys[-1])
    return f"; did you mean {familiar}?" if familiar else ""


LIMITS = tuple(f"limit_{stage}_batches" for stage in ("train", "val", "test", "predict"))


def read_whole_numbers_as_such() -> None:
    """Have jsonargparse read ``limit_val_batches: 1`` as 1, one batch, and not as 1.0, all of them.

    It takes the first type that fits, and which one that is depends on what was imported before:
    to typing, ``Optional[Union[int, float]]`` and ``Optional[Union[float, int]]`` are one object.
    """
    for name in LIMITS:
        L.Trainer.__init__.__annotations__[name] = int | float | None


def write_defaults_as_text() -> None:
    """Have the interval of `Timer` be text, which it accepts: its default cannot be written."""
    defaults = Timer.__init__.__defaults__ or ()
    Timer.__init__.__defaults__ = tuple(getattr(value, "value", value) for value in defaults)


def check_values(
    value: Any, path: tuple[str, ...] = (), *, strict: Mapping[str, Any] = MappingProxyType({})
) -> None:
    """Check that no option is null that must not be, and that groups of options are mappings.

    Args:
        value: A parsed config, or a part of one.
        path: Keys that lead to it.
        strict: Options of ``value`` itself that must not be null, see `options_without_null`.

    Raises:
        ValidationError: One is; names it.
    """
    if isinstance(value, list):
        for item in value:
            check_values(item, path)
    if not isinstance(value, Namespace):
        return
    children = vars(value)
    class_path, options = children.get("class_path"), children.get("init_args")
    if isinstance(class_path, str) and isinstance(options, Namespace):
        strict = options_without_null(import_by_path(class_path))
        children = vars(options)
    for name, given in children.items():
        problem = ""
        if given is None and name in strict:
            problem = "null is not accepted here; leave the line out to get the default"
        elif is_dataclass(strict.get(name)) and isinstance(given, PLAIN | list):
            problem = no_group(strict[name], given)
        if problem:
            raise ValidationError(f'Parser key "{".".join((*path, name))}": {problem}')
        check_values(given, (*path, name))


def options_without_null(cls: object) -> dict[str, Any]:
    """Return the types of a class's options that have a default, and can neither be None."""
    known = parameters_of(cls)[0] if isinstance(cls, type) else {}
    return {
        name: kind
        for name, (kind, default) in known.items()
        if default not in (None, inspect.Parameter.empty) and not fits(None, kind)
    }
