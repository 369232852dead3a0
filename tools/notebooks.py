"""Executes the notebooks, and keeps their outputs.

python tools/notebooks.py              # all of notebooks/
python tools/notebooks.py ppo_by_hand  # some of them
"""

from __future__ import annotations

import argparse
import os
import re
import sys
import time
from pathlib import Path
from typing import Any

import nbformat
from nbclient import NotebookClient

FOLDER = Path(__file__).parents[1] / "notebooks"
_FOR_OTHERS = re.compile(
    # what packages that are, or are not, beside lrlhf say when they are imported
    r".*(IProgress not found|notebook_tqdm|gemm_4bit_forward|real_accelerator\.py).*\n?"
)
_CLOCK = re.compile(r"^\d\d:\d\d:\d\d ", re.MULTILINE)


def execute(path: Path, folder: Path = FOLDER) -> nbformat.NotebookNode:
    """Run the cells of a notebook in a kernel of their own.

    Args:
        path: The notebook, which stays as it is.
        folder: In which the kernel runs, beside ``tiny_model.py``.

    Returns:
        The notebook with its outputs, without times and versions, so that it changes only where
        something else comes out.

    Raises:
        CellExecutionError: A cell raised.
    """
    notebook = nbformat.read(path, as_version=4)
    os.environ["MPLBACKEND"] = "module://matplotlib_inline.backend_inline"
    client = NotebookClient(
        notebook,
        timeout=600,
        kernel_name="python3",
        resources={"metadata": {"path": str(folder)}},
        record_timing=False,
        coalesce_streams=True,
    )
    client.execute()
    for cell in notebook.cells:
        cell.pop("execution", None)
        if cell.cell_type == "code":
            cell.outputs = [output for output in map(_cleaned, cell.outputs) if output is not None]
    notebook.metadata = {
        "kernelspec": {"display_name": "Python 3", "language": "python", "name": "python3"},
        "language_info": {"name": "python"},
    }
    return notebook


def _cleaned(output: Any) -> Any | None:
    if output.output_type != "stream":
        return output
    output.text = _CLOCK.sub("", _FOR_OTHERS.sub("", output.text))
    return output if output.text.strip() else None


def main() -> None:
    """Read the command line."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("names", nargs="*", metavar="NAME", help="of a notebook; default: all")
    names = parser.parse_args().names
    paths = [FOLDER / f"{Path(name).stem}.ipynb" for name in names]
    for path in paths or sorted(FOLDER.glob("*.ipynb")):
        began = time.monotonic(), sum(os.times()[2:4])
        nbformat.write(execute(path), path)
        seconds, cpu = time.monotonic() - began[0], sum(os.times()[2:4]) - began[1]
        sys.stdout.write(f"{path.name}: {seconds:.0f} s, {cpu:.0f} s of CPU\n")


if __name__ == "__main__":
    main()
