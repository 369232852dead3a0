"""A callback that ends its own process, as ``kill -9`` would, at an instant that can be named.

``LRLHF_KILL`` names the instant:

- ``start@5``: before the first batch, when so many steps are done already
- ``generate@5``, ``reward@5``, ``logprob@5``, ``update@5``, ``sync@5``: that phase begins, with so
  many steps done (a phase that is repeated within a step: the first time)
- ``turn2@5``: the first of the environments is given the second turn of its episode, with so many
  steps done
- ``optimizer@5``: an optimizer is about to step, with so many steps done
- ``trained@5``: step 5 is done and no checkpoint of it is saved yet
- ``validating@4``, ``validated@4``: between two batches of the validation, and after its last
- ``ending@11``: training is over, and nothing of its end is written yet
- ``open:*.ckpt*@2``: for the second time a file of that name has been opened for writing
- ``torn:*.jsonl@2``: as before, and the first bytes of what follows are written
- ``rename:*.ckpt@2``: a file or folder is about to be given that name for the second time
- ``renamed:*.ckpt@2``: it has been given that name

Whatever happens is also written to the file ``LRLHF_MARKS``, from which the harness learns when
training begins and how far a killed run had come.
"""

import fnmatch
import os
import resource
import signal
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any, ClassVar

import lightning as L

from lrlhf.rollout import RolloutListener

_TORN_BYTES = 60
"""Shorter than any line."""
_TORN_CHECKPOINT = 100_000
"""Shorter than any checkpoint, and long enough to look like one."""


def die() -> None:
    """End this process and its children at once, without a chance to clean up."""
    os.killpg(0, signal.SIGKILL)


class KillPoint(RolloutListener, L.Callback):
    """Dies at the instant that the environment names, and leaves marks on the way there."""

    _last: ClassVar["KillPoint | None"] = None

    def __init__(self) -> None:
        KillPoint._last = self
        self._instant = os.environ.get("LRLHF_KILL", "")
        self._marks = os.environ.get("LRLHF_MARKS")
        self._trainer: L.Trainer | None = None
        if ":" in self._instant:
            what, _, rest = self._instant.partition(":")
            pattern, _, count = rest.rpartition("@")
            sys.addaudithook(FileWatch(what, pattern, int(count)))

    def _reach(self, point: str, step: int) -> None:
        if self._marks is not None:
            with Path(self._marks).open("a") as marks:
                marks.write(f"{point}@{step}\n")
        if self._instant == f"{point}@{step}":
            die()

    @classmethod
    def turn(cls, number: int) -> None:
        """Hear of a turn from an environment, which knows no callback."""
        if cls._last is not None:
            cls._last.on_phase(f"turn{number}")

    def on_sanity_check_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        self._reach("sanity", trainer.global_step)

    def on_train_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        self._trainer = trainer
        self._reach("start", trainer.global_step)

    def on_phase(self, phase: str) -> None:
        if phase and self._trainer is not None and self._trainer.training:
            self._reach(phase, self._trainer.global_step)

    def on_before_optimizer_step(self, trainer: L.Trainer, *_: Any) -> None:
        self._reach("optimizer", trainer.global_step)

    def on_train_batch_end(self, trainer: L.Trainer, *_: Any) -> None:
        self._reach("trained", trainer.global_step)

    def on_validation_batch_end(self, trainer: L.Trainer, *_: Any) -> None:
        if not trainer.sanity_checking:
            self._reach("validating", trainer.global_step)

    def on_validation_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        if not trainer.sanity_checking:
            self._reach("validated", trainer.global_step)

    def on_train_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        self._reach("ending", trainer.global_step)


class FileWatch:
    """Dies when the process does something with a file of a given name for the n-th time.

    Args:
        what: ``open``, ``torn``, ``rename`` or ``renamed``.
        pattern: Of the file's name, as a shell has it.
        count: The n-th time.
    """

    def __init__(self, what: str, pattern: str, count: int) -> None:
        watched = {"open": self._opened, "torn": self._opened}
        self._watch: Callable[[str, tuple[Any, ...]], None]
        self._watch = watched.get(what, self._renamed)
        if what not in ("open", "torn", "rename", "renamed"):
            raise ValueError(f"LRLHF_KILL={what}:…: there is open, torn, rename and renamed")
        self._what, self._pattern, self._left = what, pattern, count
        self._over = False

    def __call__(self, event: str, arguments: tuple[Any, ...]) -> None:
        if self._over:
            # the operation itself makes no second event, so that this is the next one's; the kill
            # makes one too
            self._over = False
            die()
        self._watch(event, arguments)

    def _opened(self, event: str, arguments: tuple[Any, ...]) -> None:
        if event != "open" or not self._writes(arguments) or not self._is_the_one(arguments[0]):
            return
        if self._what == "open":
            # opened before it dies: whatever opening does to the file is done
            self._over = True
            return
        _write_no_more_than(arguments)

    def _renamed(self, event: str, arguments: tuple[Any, ...]) -> None:
        # of a link too, which is how a second name of a checkpoint appears
        if event not in ("os.rename", "os.symlink") or not self._is_the_one(arguments[1]):
            return
        if self._what == "rename":
            die()
        self._over = True

    def _is_the_one(self, path: Any) -> bool:
        if not isinstance(path, str | bytes | os.PathLike):
            return False
        if not fnmatch.fnmatch(Path(os.fsdecode(path)).name, self._pattern):
            return False
        self._left -= 1
        return self._left == 0

    @staticmethod
    def _writes(arguments: tuple[Any, ...]) -> bool:
        return bool(arguments[2] & (os.O_WRONLY | os.O_RDWR))


def _write_no_more_than(arguments: tuple[Any, ...]) -> None:
    """Have the kernel end this process in the middle of its next long write to a file."""
    path = Path(os.fsdecode(arguments[0]))
    kept = 0 if arguments[2] & os.O_TRUNC or not path.exists() else path.stat().st_size
    limit = kept + (_TORN_CHECKPOINT if ".ckpt" in path.name else _TORN_BYTES)
    signal.signal(signal.SIGXFSZ, signal.SIG_DFL)
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    resource.setrlimit(resource.RLIMIT_FSIZE, (limit, limit))
