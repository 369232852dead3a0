"""What pages call by name: options, classes, metrics, commands, files and messages.

Pages write them as code. `wrong_names` reads such a span, and returns what in it does not exist.
"""

import ast
import inspect
import re
import typing
from collections.abc import Callable, Iterable, Iterator
from functools import cache
from importlib import import_module
from typing import Any

import yaml

from lrlhf import Trainer
from lrlhf.cli.command_table import COMMANDS
from lrlhf.datamodules import (
    PreferenceDataModule,
    PromptDataModule,
    ReplayDataModule,
    SupervisedDataModule,
    UnpairedPreferenceDataModule,
)
from lrlhf.functional import ALGORITHMS, ESTIMATORS, POLICY_LOSSES
from lrlhf.modules import DPO, KTO, PPO, RLOO, SFT, RewardModel
from lrlhf.modules.metrics.reward_metrics import METRICS
from tests.docs.public import PACKAGE, ROOT, public_names

OWNERS: dict[str, tuple[type, ...]] = {
    "model": (RLOO, PPO, RewardModel, SFT, DPO, KTO),
    "data": (
        PromptDataModule,
        PreferenceDataModule,
        ReplayDataModule,
        SupervisedDataModule,
        UnpairedPreferenceDataModule,
    ),
    "trainer": (Trainer,),
}
METRIC = re.compile(
    r"(train|eval|test|policy|value|rollout|rewards|reward_model|kl|mismatch|importance|sync|perf|guard)"
    r"/[a-z0-9_…]+(/[a-z0-9_]+)?"
)
OF_POLICIES = {"score", "response_length", "truncated_fraction"}
"""What every evaluation of a policy logs."""
PATH = re.compile(r"[a-z_0-9]+(\.[a-z_0-9]+)+")
NAMED_VALUES = {"algorithm": ALGORITHMS, "loss": POLICY_LOSSES, "estimator": ESTIMATORS}


def wrong_names(span: str) -> list[str]:
    """What a span of code names that does not exist; empty: it is right."""
    text = re.sub("<[a-z]+>", "…", span.strip())
    for pattern, look in KINDS:
        if re.fullmatch(pattern, text):
            return [*look(text)]
    if (ROOT / text).exists() or is_file(text):
        return []
    if PATH.fullmatch(text):
        return [] if is_path(text) or is_import(text) else [text]
    if re.match(r"\{|[\w.]+: ", text):
        return [*wrong_in_mapping(yaml.safe_load(text.replace("…", "null")), ())]
    if re.fullmatch(r"[\w-]+", text):
        return [] if text in words_of_source() else [text]
    return [part for part in text.split("…") if not is_said(part.strip())]


def wrong_in_command(text: str) -> Iterator[str]:
    command, *words = text.split()[1:]
    if command not in COMMANDS:
        yield command
    yield from (flag for flag in words if flag.startswith("--") and not is_flag(flag))


def wrong_flag(text: str) -> Iterator[str]:
    if not is_flag(text.split()[0]):
        yield text


def wrong_metric(text: str) -> Iterator[str]:
    if not is_metric(text):
        yield text


def wrong_argument(text: str) -> Iterator[str]:
    """An option beside its value, as Python has it."""
    yield from wrong_names(text.partition("=")[0])
    yield from wrong_in_expression(f"dict({text})")


# options


def is_path(path: str) -> bool:
    """Whether a dotted option exists; ``init_args`` and a leading ``model`` may be left out."""
    steps = [step for step in path.split(".") if step != "init_args"]
    if steps[0] not in OWNERS:
        steps = ["model", *steps]
    owners = OWNERS[steps[0]]
    for number, step in enumerate(steps[1:], 2):
        found = [options_of(owner)[step] for owner in owners if step in options_of(owner)]
        if not found:
            return False
        if step == "options" and number < len(steps):
            return steps[number] in keywords_of_algorithms()
        if steps[0] == "trainer":  # what is below is for other packages to say
            return True
        owners = tuple(cls for annotation in found for cls in classes_in(annotation))
        if not owners and number < len(steps):
            return False
    return True


def is_flag(flag: str) -> bool:
    name = flag.removeprefix("--")
    return is_path(name) if name.split(".")[0] in OWNERS else is_said(f"--{name}")


@cache
def options_of(cls: type) -> dict[str, Any]:
    """Options of a constructor and their types, with those of its parents that it passes on."""
    found: dict[str, Any] = {}
    for one in cls.__mro__:
        parameters = inspect.signature(one.__init__).parameters  # type: ignore[misc]
        try:
            hints = typing.get_type_hints(one.__init__)  # type: ignore[misc]
        except NameError:  # names that are imported for type checkers only
            hints = {}
        found = {name: hints.get(name) for name in parameters} | found
        if not any(one.kind is one.VAR_KEYWORD for one in parameters.values()):
            break
    return {name: hint for name, hint in found.items() if not name.startswith("_")}


def classes_in(annotation: Any) -> Iterator[type]:
    """The classes of lrlhf in a type, and all that derive from them."""
    for part in typing.get_args(annotation):
        yield from classes_in(part)
    if isinstance(annotation, type) and annotation.__module__.startswith("lrlhf."):
        yield annotation
        for below in type.__subclasses__(annotation):
            yield from classes_in(below)


def literals_in(annotation: Any) -> Iterator[Any]:
    if typing.get_origin(annotation) is typing.Literal:
        yield from typing.get_args(annotation)
    else:
        for part in typing.get_args(annotation):
            yield from literals_in(part)


@cache
def keywords_of_algorithms() -> frozenset[str]:
    functions = [one.function for one in (*POLICY_LOSSES.values(), *ESTIMATORS.values())]
    return frozenset(
        name
        for function in functions
        for name, parameter in inspect.signature(function).parameters.items()
        if parameter.kind is parameter.KEYWORD_ONLY
    )


def wrong_in_mapping(value: Any, above: tuple[str, ...]) -> Iterator[str]:
    """What does not exist in YAML, whose keys are options, bare or dotted."""
    for key, below in value.items() if isinstance(value, dict) else ():
        path = ".".join((*above, key))
        bare = not above and key in words_of_source()
        if key != "class_path" and not (bare or is_path(path)):
            yield path
        last = key.rpartition(".")[2]
        if isinstance(below, str) and last == "class_path":
            yield from () if "." in below else wrong_in_expression(below)
        elif isinstance(below, str) and below not in NAMED_VALUES.get(last, words_of_source()):
            yield f"{path}: {below}"
        if isinstance(below, dict) and key != "init_args":
            yield from wrong_in_mapping(below, (*above, key))


# classes


@cache
def public_classes() -> dict[str, Any]:
    return {
        name: getattr(import_module(module), name)
        for module, names in public_names().items()
        if module.count(".") < 2  # packages inside of these may need what is not installed
        for name in names
    }


def wrong_in_expression(text: str) -> Iterator[str]:
    """What does not exist in Python: classes, their arguments and attributes."""
    source = re.sub(r"=\s*(?=[,)])", "=...", text.replace("(…)", "()").replace("…", "..."))
    source = source.replace("true", "True").replace("false", "False")
    for node in ast.walk(ast.parse(source, mode="eval")):
        name = ast.unparse(node.func) if isinstance(node, ast.Call) else ""
        if name in public_classes():
            accepted = options_of(public_classes()[name])
            yield from (f"{name}({k.arg})" for k in node.keywords if k.arg not in accepted)  # type: ignore[attr-defined]
        match node:
            case ast.Attribute(value=ast.Name(id="trainer" | "module" as owner), attr=attribute):
                if not any(hasattr(cls, attribute) for cls in (Trainer, *OWNERS["model"])):
                    yield f"{owner}.{attribute}"
            case ast.Attribute(value=ast.Name(id=owner), attr=option):
                if option not in options_of(public_classes().get(owner, object)):
                    yield f"{owner}.{option}"
            case ast.Name(id=owner) if owner[0].isupper() and owner not in public_classes():
                yield owner


# what the source says


@cache
def source() -> tuple[frozenset[str], tuple[str, ...]]:
    """Texts and names of the source; texts with something filled in as regular expressions."""
    texts: set[str] = set()
    patterns: set[str] = set()
    for file in PACKAGE.rglob("*.py"):
        for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
            match node:
                case ast.Constant(value=str(text)):
                    texts.add(text)
                case ast.JoinedStr(values=parts):
                    patterns.add(
                        "".join(
                            re.escape(str(part.value)) if isinstance(part, ast.Constant) else "(.+)"
                            for part in parts
                        )
                    )
                case ast.arg(arg=name) | ast.keyword(arg=str(name)) | ast.Name(id=name):
                    texts.add(name)
    return frozenset(texts), tuple(sorted(patterns))


@cache
def words_of_source() -> frozenset[str]:
    texts, _ = source()
    options = {name for cls in public_classes().values() for name in dir(cls)}
    return texts | options | public_classes().keys() | ALGORITHMS.keys()


def is_said(part: str) -> bool:
    return any(part in text for text in source()[0])


def is_metric(name: str) -> bool:
    texts, patterns = source()
    if "…" in name:
        return name.replace("…", "(.+)") in patterns
    if {name, re.sub(r"_(p01|p50|p99|min|max)$", "", name)} & texts:
        return True
    of_evaluation, _, rest = name.partition("/")
    if of_evaluation == "eval" and re.sub(r"_(low|high)$", "", rest) in {*METRICS, *OF_POLICIES}:
        return True
    filled = (re.fullmatch(one, name) for one in patterns if "/" in one and one != "(.+)/(.+)")
    return any(match and set(match.groups()) <= texts for match in filled)


def is_file(name: str) -> bool:
    """Whether the source names a file or folder; ``…`` stands for what it fills in."""
    texts, patterns = source()
    plain = name.rstrip("/").rpartition("/")[2]
    if name.endswith("/"):
        return plain in texts
    if not re.fullmatch(r"[\w…*.-]+\.(jsonl|json|csv|png|txt|ckpt|pt|html|yaml)", plain):
        return False
    stem, _, ending = plain.rpartition(".")
    if plain in texts or {stem, f"*.{ending}"} <= texts:
        return True
    filled = ((one, re.fullmatch(one, plain)) for one in patterns if one.endswith(f"\\.{ending}"))
    # with nothing around what is filled in, that has to be a name itself
    return any(
        match and (set(match.groups()) <= texts or one.count("_") > 0) for one, match in filled
    )


def is_import(path: str) -> bool:
    module, _, name = path.rpartition(".")
    return path.startswith("lrlhf.") and hasattr(import_module(module), name)


KINDS: tuple[tuple[str, Callable[[str], Iterable[str]]], ...] = (
    (METRIC.pattern, wrong_metric),
    (r"lrlhf .*", wrong_in_command),
    (r"--.*", wrong_flag),
    (r"[A-Z][A-Z_0-9]+(=\S+)?", lambda _: ()),  # variables of the environment
    (r'"[\w.-]+"', lambda text: wrong_names(text.strip('"'))),
    (r"[a-z_]+=.*", wrong_argument),
    (r"([A-Z]\w+|trainer\.\w+(?=\()|module\.\w+(?=\())([(.].*)?", wrong_in_expression),
)
"""Patterns of spans, and what looks for wrong names in those that match."""
