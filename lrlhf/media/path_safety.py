"""Which files of this machine the rows of a data set may name."""

from __future__ import annotations

import os
from pathlib import Path
from urllib.parse import unquote, urlsplit

from lrlhf.media.decode import BadRow
from lrlhf.media.refs import media_name

FOREIGN = Path("/nonexistent/hub")
"""Stands for the folder of rows that come from elsewhere: they name no file of this machine."""
_OUTSIDE = "file outside the data"


def local_path(named: str, folder: Path | None, *, root: Path | None) -> str:
    """Return the path of a file that a row names: absolute, where its folder is known.

    A relative path stays in the folder that it starts from, symbolic links followed. An absolute
    one may lead anywhere, unless ``root`` is given: then no path leads out of it, but for the
    links in it, which are the user's own. Rows of a hub data set, which somebody else wrote, name
    files only where ``root`` is given.

    Args:
        named: Path or ``file:`` address, as the row has it.
        folder: What relative paths start from unless ``root`` is given; None: the folder in which
            the command runs. `FOREIGN` for a hub data set.
        root: Folder that the user gave.

    Raises:
        BadRow: It leads outside.
    """
    if root is None and folder == FOREIGN:
        raise BadRow(
            _OUTSIDE,
            f"a row of a hub data set names the file {media_name(named)!r}",
            remedy="set media.root to the folder that holds the files of the data set",
        )
    path = _expanded(Path(unquote(urlsplit(named).path) if named.startswith("file:") else named))
    base = (root or folder or Path()).expanduser().absolute()
    absolute = path if path.is_absolute() else base / path
    if path.is_absolute() and root is None:
        return str(path)
    target = _target(absolute)
    if root is not None and Path(os.path.normpath(absolute)).is_relative_to(os.path.normpath(base)):
        return str(absolute)
    if not any(target.is_relative_to(_target(allowed)) for allowed in _allowed(base)):
        raise BadRow(
            _OUTSIDE,
            f"{media_name(named)!r} leads to {media_name(target)!r}, which is not in {str(base)!r}",
            remedy="set media.root to a folder that holds all files",
        )
    return str(path if root is None and folder is None else absolute)


def _expanded(path: Path) -> Path:
    try:
        return path.expanduser()
    except RuntimeError:  # ~name of nobody here: a file may be called so
        return path


def _target(path: Path) -> Path:
    """Return where a path leads, whether something is there or not."""
    try:
        return Path(os.path.realpath(path))
    except ValueError as error:  # a NUL in the name
        raise BadRow("missing file", f"{str(path)!r} is no name of a file: {error}") from error


def _allowed(base: Path) -> list[Path]:
    """List the folder itself and, in the hub's cache, where its snapshots' links lead."""
    for above in (base, *base.parents):
        if above.parent.name == "snapshots":
            return [base, above.parent.parent / "blobs"]
    return [base]
