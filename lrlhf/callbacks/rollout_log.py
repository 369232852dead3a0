"""What the policy says, while it learns."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import lightning as L
from lightning.pytorch.utilities import rank_zero_info

from lrlhf.arguments import KeepsArguments
from lrlhf.callbacks.output_files import (
    atomic_write,
    gather_on_zero,
    hold_output_folder,
    json_line,
    output_folder,
)
from lrlhf.callbacks.reports.rollout_table import render, send, spread
from lrlhf.media.decode import small_jpeg
from lrlhf.media.refs import UNNAMED
from lrlhf.modules.contracts import Exportable, ScoresResponses
from lrlhf.rollout.listener import RolloutListener
from lrlhf.rollout.records import token_values
from lrlhf.rollout.storage import rollout_files, rollout_path, save_rollout
from lrlhf.run.atomic import naming
from lrlhf.run.numbered_files import move_to_numbered
from lrlhf.run.seeding import running_step
from lrlhf.types import Experience, Media

_TABLE = "rollout/samples"
_SIDE = 256
"""Longer side of images in records."""


class RolloutLog(KeepsArguments, L.Callback, RolloutListener):
    """Writes every response of training to ``rollouts.jsonl`` and shows some of them.

    The responses of all ranks are gathered to rank zero, which appends them to one file, each
    with the ``rank`` it came from; groups are numbered per rank. A resumed run first removes the
    lines of the steps it is going to repeat, so no step is in the file twice. A run that starts
    from the beginning where an earlier one has written keeps that file as ``rollouts.1.jsonl``
    (``.2``, …).

    With ``save_tensors`` each rank also writes its rollouts as tensors, one file
    ``rollouts/step_000012.rank_0.safetensors`` per iteration, from which `ReplayDataModule` trains
    without an engine. What holds for ``rollouts.jsonl`` after a resume and at a new start holds
    for the folder ``rollouts`` too.

    With ``token_values`` some lines have ``tokens``, which `lrlhf inspect` shows in colour: lists
    with an entry for each of ``token_ids``, see `lrlhf.rollout.records`.

    Args:
        dirpath: Folder of the file; None: the run folder.
        print_every: Print a table of responses in the first iteration and each so many; None:
            never.
        samples: Rows of the printed table, spread over the iteration's responses.
        table_every: Send a table to W&B and TensorBoard, where such a logger is attached, in the
            first iteration and each so many; None: never.
        table_rows: Rows of that table.
        max_chars: Characters of a prompt or completion in the printed table; the file has all.
        save_tensors: Also keep token ids, masks, log-probabilities and scores. On several machines
            they must share the folder.
        keep_tensors: Keep the tensors of only so many iterations, the newest; None: of all.
        token_values: Responses of each iteration that are written with the values of their tokens,
            and with small copies of images that episodes showed, spread over the iteration's
            responses; 0: none.

    Raises:
        ValueError: If an option is out of range, or a line of an earlier file cannot be read.
    """

    def __init__(  # noqa: PLR0913  the constructor is the config schema
        self,
        dirpath: str | Path | None = None,
        print_every: int | None = 10,
        samples: int = 3,
        table_every: int | None = 10,
        table_rows: int = 32,
        max_chars: int = 400,
        save_tensors: bool = False,
        keep_tensors: int | None = None,
        token_values: int = 4,
    ) -> None:
        if token_values < 0:
            raise ValueError(f"RolloutLog token_values is {token_values}; it must be at least 0")
        for name, value in {
            "print_every": print_every,
            "samples": samples,
            "table_every": table_every,
            "table_rows": table_rows,
            "max_chars": max_chars,
            "keep_tensors": keep_tensors,
        }.items():
            if value is not None and value < 1:
                raise ValueError(f"RolloutLog {name} is {value}; it must be at least 1")
        self.dirpath = dirpath
        self.print_every = print_every
        self.samples = samples
        self.table_every = table_every
        self.table_rows = table_rows
        self.max_chars = max_chars
        self.save_tensors = save_tensors
        self.keep_tensors = keep_tensors
        self.token_values = token_values
        self.path: Path | None = None
        """The file, once training has started."""

    def setup(self, trainer: L.Trainer, pl_module: L.LightningModule, stage: str) -> None:
        hold_output_folder(trainer, self.dirpath, stage)

    def on_train_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        self.path = output_folder(trainer, self.dirpath) / "rollouts.jsonl"
        if trainer.is_global_zero:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            done, folder = trainer.global_step, self._folder
            if done:
                _forget_steps_after(self.path, done)
                _remove(folder, first=done + 1)
            else:
                # a folder of that name which holds something else is not ours to move
                old = [self.path] if self.path.exists() else []
                old += [folder] if rollout_files(folder) else []
                move_to_numbered("RolloutLog", [self.path, folder], old)
        # the other ranks write into the folder only when it is clean
        trainer.strategy.barrier("RolloutLog")

    @property
    def _folder(self) -> Path:
        assert self.path is not None, "the folder is known when training has started"
        return self.path.with_suffix("")

    def on_rollout(
        self,
        trainer: L.Trainer,
        module: L.LightningModule,
        experience: Experience,
        records: Sequence[dict[str, Any]],
    ) -> None:
        ranked = [{**record, "rank": trainer.global_rank} for record in records]
        self._add_token_values(trainer, module, experience, ranked)
        everything = gather_on_zero(trainer, ranked)
        if self.save_tensors:
            self._save(trainer, experience, ranked)
        if not trainer.is_global_zero or not everything:
            return
        assert self.path is not None, "a rollout before training has started"
        lines = "".join(f"{json_line(record)}\n" for record in everything)
        # closed each time: a killed run has every iteration on file
        with naming(self.path), self.path.open("ab") as handle:
            handle.write(lines.encode())
        step = running_step(trainer)
        answers = module.rewards.answer_columns if isinstance(module, ScoresResponses) else {}
        if _is_due(step, self.print_every):
            shown = spread(everything, self.samples)
            title = f"step {step}: {len(shown)} of {len(everything)} responses"
            table = render(shown, title=title, max_chars=self.max_chars, answers=answers)
            module.print(f"\n{table}")
        if _is_due(step, self.table_every):
            indices = spread(range(len(everything)), self.table_rows)
            rows = [everything[index] for index in indices]
            own = experience.media or ()  # the first rows; what others show is on their ranks
            pictured = [own[index] if index < len(own) else None for index in indices]
            send(trainer, rows, key=_TABLE, step=step, answers=answers, media=pictured)

    def _add_token_values(
        self,
        trainer: L.Trainer,
        module: L.LightningModule,
        experience: Experience,
        records: Sequence[dict[str, Any]],
    ) -> None:
        """Add its tokens to this rank's share of the responses that are written with them."""
        for record in records:
            for name in ("tokens", "pictures"):
                record.pop(name, None)  # a stored rollout has those of the earlier run
        tokenizer = module.tokenizer if isinstance(module, Exportable) else None
        if tokenizer is None:
            return
        share, rest = divmod(self.token_values, trainer.world_size)
        count = min(share + (trainer.global_rank < rest), len(records))
        for row in (index * len(records) // count for index in range(count)):
            ids = records[row]["token_ids"]
            records[row]["tokens"] = token_values(experience, row, ids, tokenizer)
            shown = experience.media[row] if experience.media else None
            if shown is not None and (pictures := _pictures(shown)):
                records[row]["pictures"] = pictures

    def _save(
        self, trainer: L.Trainer, experience: Experience, records: Sequence[dict[str, Any]]
    ) -> None:
        path = rollout_path(self._folder, running_step(trainer), trainer.global_rank)
        plain = [json.loads(json_line(record)) for record in records]
        with atomic_write(path) as handle:
            save_rollout(handle, experience, experience.scores, plain)
        if self.keep_tensors is not None and trainer.is_global_zero:
            # for all ranks: they have written the iterations before this one, as their records of
            # this one are here; and a run on more ranks may have left some behind
            steps = sorted({file.step for file in rollout_files(self._folder)})
            for step in steps[: -self.keep_tensors]:
                _remove(self._folder, first=step, last=step)


def _pictures(media: Media) -> dict[str, str]:
    """Return the images that are in no file, small, by name; a stored rollout has none."""
    images = zip(media.names, media.images, strict=False)
    return {name: small_jpeg(own, _SIDE) for name, own in images if name.startswith(UNNAMED)}


def _is_due(step: int, every: int | None) -> bool:
    """Tell whether a step is the first or one of every so many."""
    return every is not None and (step == 1 or step % every == 0)


def _forget_steps_after(path: Path, step: int) -> None:
    """Remove the lines of later steps, and a last line that a kill has cut short."""
    if not path.exists():
        return
    with atomic_write(path) as output, path.open("rb") as lines:
        for number, line in enumerate(lines, start=1):
            if not line.endswith(b"\n"):
                rank_zero_info(f"RolloutLog: line {number} of {path} is cut short; removed")
            elif _step_of(line, path, number) <= step:
                output.write(line)


def _remove(folder: Path, *, first: int, last: int | None = None) -> None:
    """Remove the stored rollouts of the steps from ``first`` on, up to ``last`` if given."""
    for file in rollout_files(folder):
        if file.step >= first and (last is None or file.step <= last):
            file.path.unlink()


def _step_of(line: bytes, path: Path, number: int) -> int:
    try:
        return int(json.loads(line)["step"])
    except (ValueError, KeyError, TypeError, OverflowError, RecursionError) as error:
        raise ValueError(
            f"{path}, line {number} is no rollout record ({error}); move the file away, or choose "
            "another dirpath for RolloutLog"
        ) from error
