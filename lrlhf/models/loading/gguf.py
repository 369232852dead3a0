"""GGUF files, dequantised once into ordinary model folders."""

from __future__ import annotations

import hashlib
import logging
import shutil
import time
from pathlib import Path
from typing import Any

import torch
from filelock import FileLock
from transformers import AutoModelForCausalLM, AutoTokenizer, GgufConfig

logger = logging.getLogger(__name__)

_LAYOUT = b"1"
"""Part of every folder's name: raise it when the conversion writes something else."""


def converted_folder(file: Path, parent: Path) -> Path:
    """Return the model folder made of a GGUF file, converting it if that was not done before.

    The folder holds bfloat16 safetensors, the tokenizer with its chat template, and a generation
    config. It appears by one rename, so it is complete or absent, and a lock keeps two processes
    from converting at the same time. Its name carries a hash of the file's content.

    Args:
        file: The ``.gguf`` file.
        parent: Folder that holds all converted models.

    Raises:
        ValueError: The file is no GGUF file, or does not fill every weight of its model.
    """
    folder = folder_of(file, parent)
    if folder.is_dir():
        return folder
    parent.mkdir(parents=True, exist_ok=True)
    with FileLock(parent / f".{folder.name}.lock"):
        if not folder.is_dir():  # another process may have made it while this one waited
            _convert_atomically(file, folder)
    return folder


def folder_of(file: Path, parent: Path) -> Path:
    """Return where `converted_folder` puts a GGUF file, whether or not it is there.

    Raises:
        ValueError: The file is no GGUF file.
    """
    _check_magic(file)
    with file.open("rb") as stream:
        digest = hashlib.file_digest(stream, "sha256")
    digest.update(_LAYOUT)
    return parent / f"{file.stem}-{digest.hexdigest()[:12]}"


def _check_magic(file: Path) -> None:
    with file.open("rb") as stream:
        if stream.read(4) != b"GGUF":
            raise ValueError(f"{file} is not a GGUF file: it does not start with 'GGUF'.")


def _convert_atomically(file: Path, folder: Path) -> None:
    logger.info("Dequantising %s into %s; this happens once.", file.name, folder)
    started = time.monotonic()
    partial = folder.with_name(f".{folder.name}.partial")
    shutil.rmtree(partial, ignore_errors=True)  # what a killed process may have left
    try:
        _convert(file, partial)
        partial.rename(folder)
    finally:
        shutil.rmtree(partial, ignore_errors=True)
    logger.info("Dequantised %s in %.0f s.", file.name, time.monotonic() - started)


def _convert(file: Path, target: Path) -> None:
    location = {"pretrained_model_name_or_path": str(file.parent), "gguf_file": file.name}
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
