"""The configs that come with lrlhf: ``lrlhf:NAME`` in place of a file, and ``lrlhf configs``."""

from __future__ import annotations

import argparse
import shutil
import sys
from collections.abc import Sequence
from pathlib import Path

from lrlhf.cli.command_parser import command_parser
from lrlhf.options.errors import ConfigError, hint
from lrlhf.secrets import safe

FOLDER = Path(__file__).parents[1] / "configs"
PREFIX = "lrlhf:"
_FLAGS = ("-c", "--config", "--cluster")
_EPILOG = """\
examples:
  lrlhf configs                             their names, and what each is for
  lrlhf fit --config lrlhf:quickstart       run one where it is
  lrlhf configs quickstart engine/vllm      copy two into the working folder, to change them
"""


def names() -> list[str]:
    """Return the names of all shipped configs, such as ``quickstart`` and ``engine/vllm``."""
    files = FOLDER.resolve().rglob("*.yaml")
    return sorted(
        (file.relative_to(FOLDER.resolve()).with_suffix("").as_posix() for file in files),
        key=lambda name: (name.count("/"), name),
    )


def with_files(arguments: Sequence[str]) -> list[str]:
    """Put the file in the place of each ``lrlhf:NAME`` that a flag for configs has.

    Raises:
        ConfigError: There is no config of that name; names the nearest.
    """
    changed = []
    for before, argument in zip(["", *arguments], arguments, strict=False):
        flag, equals, value = argument.partition("=") if argument[:1] == "-" else ("", "", argument)
        if value.startswith(PREFIX) and (flag or before) in _FLAGS:
            argument = f"{flag}{equals}{_file(value.removeprefix(PREFIX))}"
        changed.append(argument)
    return changed


def _file(name: str) -> Path:
    known = names()
    plain = name.removesuffix(".yaml")
    if plain not in known:
        # of an overlay, people remember the last part
        overlays = [each for each in known if each.rpartition("/")[2] == plain.rpartition("/")[2]]
        nearest = f"; did you mean {overlays[0]!r}?" if overlays else hint(plain, known)
        raise ConfigError(f"no config {name!r} in `lrlhf configs`{nearest}")
    return FOLDER / f"{plain}.yaml"


def parser() -> argparse.ArgumentParser:
    """Return what reads the options."""
    parser = command_parser("configs", "List the configs that come with lrlhf, or copy.", _EPILOG)
    parser.add_argument("names", metavar="NAME", nargs="*", help="of a config to copy")
    parser.add_argument(
        "--output", type=Path, default=Path(), help="folder for the copies; default: this one"
    )
    return parser


def configs(arguments: Sequence[str]) -> None:
    """Run the command.

    Raises:
        ConfigError: There is no such config, or a file of its name is there already.
    """
    options = parser().parse_args(arguments)
    sources = [_file(name.removeprefix(PREFIX)) for name in options.names]
    targets = [options.output / source.name for source in sources]
    for number, target in enumerate(targets):
        if target.exists() or target in targets[:number]:
            raise ConfigError(f"{target} is there already; move it, or give another --output")
    if not sources:
        sys.stdout.write("".join(f"{name:<26} {_title(_file(name))}\n" for name in names()))
    for source, target in zip(sources, targets, strict=True):
        try:
            target.parent.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(source, target)
        except OSError as error:
            raise ConfigError(f"{target}: cannot be written: {error.strerror}") from error
        sys.stdout.write(safe(f"wrote {target}\n"))


def _title(file: Path) -> str:
    """Return the sentence that a config begins with."""
    with file.open(encoding="utf-8") as lines:
        return next(lines).removeprefix("# ").rstrip(".\n")
