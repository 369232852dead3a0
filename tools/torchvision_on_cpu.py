"""Makes a torchvision that was built for CUDA import beside a torch for CPUs.

Its compiled operators cannot be loaded there, and the import fails where it describes two of them.
Declared beforehand, they stay without an implementation, and the rest works: the transforms, which
are all that processors of images and videos use. Nobody needs this who has a torchvision for CPUs.

Run as a script it puts itself into the environment, if that is needed: `make setup` does it.
"""

from __future__ import annotations

import importlib.abc
import importlib.machinery
import shutil
import subprocess
import sys
import sysconfig
from collections.abc import Sequence
from pathlib import Path
from types import ModuleType

NAME = Path(__file__).stem
PACKAGE = "torchvision"
SCHEMA = "(Tensor dets, Tensor scores, float iou_threshold) -> Tensor"


class Loader(importlib.abc.Loader):
    """Declares the operators, then loads the package as usual."""

    def __init__(self, inner: importlib.abc.Loader) -> None:
        self.inner = inner

    def create_module(self, spec: importlib.machinery.ModuleSpec) -> ModuleType | None:
        return self.inner.create_module(spec)

    def exec_module(self, module: ModuleType) -> None:
        import torch  # noqa: PLC0415  this file is imported at every start of Python

        library = torch.library.Library(PACKAGE, "DEF")
        for operator in ("nms", "qnms"):
            library.define(f"{operator}{SCHEMA}")
        # they are gone again with the object
        vars(module)["_operators"] = library
        self.inner.exec_module(module)


class Finder(importlib.abc.MetaPathFinder):
    """Puts the loader in front of the one that Python finds."""

    def find_spec(
        self, name: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        if name != PACKAGE:
            return None
        spec = importlib.machinery.PathFinder.find_spec(name, path, target)
        if spec is not None and spec.loader is not None:
            spec.loader = Loader(spec.loader)
        return spec


def main() -> None:
    """Install this file, unless torchvision can be imported, or is not there at all."""
    attempt = [sys.executable, "-c", f"import {PACKAGE}"]
    tried = subprocess.run(attempt, capture_output=True, text=True, check=False)
    if tried.returncode == 0 or f"operator {PACKAGE}::" not in tried.stderr:
        return
    folder = Path(sysconfig.get_paths()["purelib"])
    shutil.copyfile(__file__, folder / f"{NAME}.py")
    (folder / f"{NAME}.pth").write_text(f"import {NAME}\n", encoding="utf-8")
    subprocess.run(attempt, check=True)


if __name__ == "__main__":
    main()
else:
    sys.meta_path.insert(0, Finder())
