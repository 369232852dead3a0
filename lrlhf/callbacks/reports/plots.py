"""What all pictures of curves have in common; matplotlib comes with the extra ``plots``."""

from __future__ import annotations

import functools
import importlib
from pathlib import Path
from typing import Any

from lightning.pytorch.utilities import rank_zero_warn

from lrlhf.callbacks.output_files import atomic_write

_MISSING = "drawing curves needs the package matplotlib: pip install 'lrlhf[plots]'"


@functools.cache
def can_draw() -> bool:
    """Tell whether matplotlib is installed; the first answer that it is not is a warning too."""
    # half a second of import that only the end of a run needs
    try:
        importlib.import_module("matplotlib.figure")
    except ImportError:
        rank_zero_warn(f"no pictures of curves are drawn: {_MISSING}")
        return False
    return True


def new_figure(width: float, height: float, *, dpi: int) -> Any:
    """Return a figure that needs no display.

    Raises:
        ImportError: matplotlib is not installed.
    """
    try:
        figure = importlib.import_module("matplotlib.figure").Figure
    except ImportError as error:
        raise ImportError(_MISSING) from error
    return figure(figsize=(width, height), dpi=dpi, layout="constrained")


def finish(axes: Any, title: str, *, fontsize: int, x_margin: float) -> None:
    """Give axes over training steps their title and the look of all of them."""
    axes.set_title(title, loc="left", fontsize=fontsize)
    axes.xaxis.get_major_locator().set_params(integer=True)
    axes.grid(axis="y", color="#e3e6ea", linewidth=0.8)
    axes.set_axisbelow(True)
    axes.spines[["top", "right"]].set_visible(False)
    axes.margins(x=x_margin, y=0.12)


def save(path: Path, figure: Any) -> None:
    """Write a figure as PNG, whole or not at all; the folder is created."""
    with atomic_write(path) as handle:
        figure.savefig(handle, format="png")
