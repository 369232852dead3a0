"""Where a model comes from: a folder, a hub id, or a package that carries weights."""

from __future__ import annotations

import contextlib
import difflib
import functools
import hashlib
import importlib.util
import logging
import os
import pickle
import re
import shutil
import time
import traceback
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from filelock import FileLock
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoTokenizer,
    GgufConfig,
    PreTrainedConfig,
)

from lrlhf.foreign_files import TRUST_FLAG
from lrlhf.options.errors import no_package
from lrlhf.torch_internals import READERS_OF_PICKLES

_logger = logging.getLogger(__name__)

_PACKAGE_PREFIX = "package:"
_HUB_ID = re.compile(r"[\w.-]+(/[\w.-]+)?")
_GGUF_LAYOUT = b"1"
"""Part of the names of converted folders: raise it when the conversion writes something else."""


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
            - a local ``.gguf`` file (``pip install 'lrlhf[gguf]'``),
            - ``package:<module>[/<path>]``: a folder or a ``.gguf`` file inside an installed
              package; without a path the package's root folder or its only ``.gguf`` file,
            - a hub id, ``name`` or ``owner/name``.

    Returns:
        A folder, or the hub id as it is. A ``.gguf`` file is dequantised once into
        ``cache_dir()/models`` (10 to 60 s for a small model) and found there afterwards.

    Raises:
        SourceError: Nothing usable is there.
        ValueError: The file is no GGUF file, or does not fill every weight of its model.
    """
    location = locate(source)
    if isinstance(location, Path) and location.suffix == ".gguf":
        location = _converted(location)
    return str(location)


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
    """Turn the error of a source that cannot be had into one that says what to do.

    Raises:
        SourceError: The body raised ``OSError``, wanted to run code that comes with the model, or
            read pickled weights that are damaged.
    """
    try:
        yield
    except ValueError as error:
        if "trust_remote_code" not in str(error):
            raise
        raise SourceError(
            f"source {source!r} comes with Python code of its own, which does not run here unless "
            "you say so: read it, and set trust_remote_code (generate and chat: "
            f"{TRUST_FLAG})"
        ) from error
    except (pickle.UnpicklingError, KeyError, EOFError, RuntimeError) as error:
        if not _is_of_pickle(error):
            raise
        raise SourceError(
            f"source {source!r}: its pickled weights are damaged, or would run code "
            f"({type(error).__name__}); give a model with .safetensors files"
        ) from error
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


def _is_of_pickle(error: Exception) -> bool:
    """Whether what reads pickled weights has raised an error: garbage makes it raise any."""
    frames = [frame for frame, _ in traceback.walk_tb(error.__traceback__)]
    return frames[-1].f_globals.get("__name__") in READERS_OF_PICKLES


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
    # of the outermost package only: to find one inside it would run its code
    outermost, *within = module.split(".")
    spec = importlib.util.find_spec(outermost) if outermost else None
    root = None
    if spec is not None and spec.submodule_search_locations:
        root = Path(next(iter(spec.submodule_search_locations)), *within)
    if root is None or not root.is_dir():
        raise SourceError(no_package(source, outermost))
    path = root / inner
    if not path.exists():
        raise SourceError(
            f"source {source!r}: package {module!r} holds no {inner!r}.{_nearest_sibling(path)}"
        )
    return path


def _model_at(path: Path, source: str) -> Path:
    if path.suffix == ".gguf":
        if importlib.util.find_spec("gguf") is None:
            raise SourceError(
                f"source {source!r} is a .gguf file; reading it needs the package gguf: "
                "pip install 'lrlhf[gguf]'"
            )
        return path
    if not path.is_dir():
        raise SourceError(f"source {source!r} is a file; give its folder, or a .gguf file.")
    if (path / "config.json").is_file():
        return path
    if (path / "adapter_config.json").is_file():
        raise SourceError(
            f"source {source!r} holds a LoRA adapter without its base model. To train it further, "
            "give the base model as source and this folder as lora.source; else merge it into the "
            "model first (peft: merge_and_unload), and give that folder."
        )
    return _model_at(_only_gguf(path, source), source)


def _only_gguf(folder: Path, source: str) -> Path:
    files = sorted(folder.glob("*.gguf"))
    if len(files) == 1:
        return files[0]
    if files:
        names = ", ".join(file.name for file in files)
        raise SourceError(f"source {source!r} holds {len(files)} .gguf files ({names}); name one")
    raise SourceError(f"source {source!r} holds neither config.json nor a .gguf file.")


def _nearest_sibling(path: Path) -> str:
    names = [entry.name for entry in path.parent.iterdir()] if path.parent.is_dir() else []
    near = difflib.get_close_matches(path.name, names, n=3)
    return f" Near matches in {path.parent}: {', '.join(near)}." if near else ""


def converted_folder(file: Path) -> Path:
    """Return where the model folder of a GGUF file is, or will be once it is converted.

    Raises:
        ValueError: The file is no GGUF file.
    """
    with file.open("rb") as stream:
        if stream.read(4) != b"GGUF":
            raise ValueError(f"{file} is not a GGUF file: it does not start with 'GGUF'.")
        stream.seek(0)
        digest = hashlib.file_digest(stream, "sha256")
    digest.update(_GGUF_LAYOUT)
    return cache_dir() / "models" / f"{file.stem}-{digest.hexdigest()[:12]}"


def _converted(file: Path) -> Path:
    """Return the model folder made of a GGUF file, converting it if that was not done before.

    The folder holds bfloat16 safetensors, the tokenizer with its chat template, and a generation
    config. It appears by one rename, so it is complete or absent, and a lock keeps two processes
    from converting at the same time. Its name carries a hash of the file's content.
    """
    folder = converted_folder(file)
    if folder.is_dir():
        return folder
    folder.parent.mkdir(parents=True, exist_ok=True)
    with FileLock(folder.parent / f".{folder.name}.lock"):
        if not folder.is_dir():  # another process may have made it while this one waited
            _convert_atomically(file, folder)
    return folder


def _convert_atomically(file: Path, folder: Path) -> None:
    _logger.info("Dequantising %s into %s; this happens once.", file.name, folder)
    started = time.monotonic()
    partial = folder.with_name(f".{folder.name}.partial")
    shutil.rmtree(partial, ignore_errors=True)  # what a killed process may have left
    try:
        _convert(file, partial)
        partial.rename(folder)
    finally:
        shutil.rmtree(partial, ignore_errors=True)
    _logger.info("Dequantised %s in %.0f s.", file.name, time.monotonic() - started)


def _convert(file: Path, target: Path) -> None:
    location: dict[str, Any] = {
        "pretrained_model_name_or_path": str(file.parent),
        "gguf_file": file.name,
        "trust_remote_code": False,  # or a config.json beside it may have the terminal asked
    }
    tokenizer = AutoTokenizer.from_pretrained(**location)
    auto_class: Any = AutoModelForCausalLM  # its annotations leave the report out
    model, report = auto_class.from_pretrained(
        **location,
        dtype=torch.bfloat16,
        quantization_config=GgufConfig(dequantize=True),
        output_loading_info=True,
    )
    if report["missing_keys"] or report["mismatched_keys"]:
        lacking = sorted(report["missing_keys"]) + sorted(map(str, report["mismatched_keys"]))
        raise ValueError(f"{file} does not fill the weights {', '.join(lacking[:5])} of its model.")
    # transformers reads the end token from the file's header into the tokenizer only in some cases
    if model.generation_config.eos_token_id is None:
        model.generation_config.eos_token_id = tokenizer.eos_token_id
    model.save_pretrained(target)
    tokenizer.save_pretrained(target)
