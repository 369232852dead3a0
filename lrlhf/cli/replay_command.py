"""``lrlhf replay``: the step of a dump again, and a short report of it."""

from __future__ import annotations

import sys
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import lightning as L
from rich.console import Console, RenderableType
from rich.table import Table
from rich.text import Text

from lrlhf.foreign_files import TRUST_FLAG, read_yaml, refuse_foreign_code
from lrlhf.guard.dump import CONFIG_FILE, read_about
from lrlhf.modules import DumpReplay, NotADumpError, replay_dump
from lrlhf.options.errors import ConfigError
from lrlhf.secrets import escaped

_MAX_ROWS = 16
_MAX_NAMES = 5
_COLUMNS = (
    "row", "score", "advantage", "kl", "log_ratio", "scores0", "scores1", "labels", "length",
    "prompt", "candidate0",
)  # fmt: skip


def dump_and_options(options: Sequence[str]) -> tuple[Path, list[str]]:
    """Split what follows the command: the dump, and options of ``fit``, the dump's config first.

    Raises:
        ConfigError: There is no such dump, or it has no config, or one that would run code of
            others without the user's consent.
    """
    if not options or options[0].startswith("-"):
        if {"-h", "--help"} & set(options):
            return Path(), list(options)
        raise ConfigError("lrlhf replay needs the folder of a dump: lrlhf replay DUMP [options]")
    folder = Path(options[0])
    try:
        read_about(folder)
    except NotADumpError as error:
        raise ConfigError(str(error)) from error
    config = folder / CONFIG_FILE
    if not config.is_file():
        raise ConfigError(
            f"{folder} has no {CONFIG_FILE}, as the run was not started by lrlhf fit: build the "
            "module in Python and call lrlhf.modules.replay_dump(module, folder)"
        )
    own = [option for option in options[1:] if option != TRUST_FLAG]
    try:
        refuse_foreign_code(read_yaml(config), config, trusted=TRUST_FLAG in options)
    except (ValueError, OSError) as error:
        raise ConfigError(str(error)) from error
    return folder, ["--config", str(config), *own]


def show_replay(module: L.LightningModule, folder: Path) -> bool:
    """Repeat the step of a dump, print what came of it, and tell whether it went wrong again.

    Raises:
        NotADumpError: The dump is damaged.
        ValueError: It is the dump of another kind of module.
    """
    replay = replay_dump(module, folder)
    console = Console(file=sys.stdout, highlight=False)
    for part in _report(replay):
        console.print(part)
    return replay.reproduced


def _report(replay: DumpReplay) -> Iterable[RenderableType]:
    dump = replay.dump
    yield _text(f"{dump.folder}: step {dump.step} ({dump.bundles[0].stage})")
    for when, anomalies in (("then", dump.anomalies), ("now", replay.anomalies)):
        for anomaly in anomalies:
            yield _text(f"{when}: {anomaly.kind}: {anomaly.text}")
        if not anomalies:
            yield _text(f"{when}: nothing")
    yield _text("reproduced" if replay.reproduced else "not reproduced", style="bold")
    if replay.weights:
        yield _text(f"weights that are not finite: {_listed(replay.weights)}")
    for rank in replay.ranks:
        who = f"rank {rank.rank}: " if len(dump.bundles) > 1 else ""
        yield _text(
            f"{who}first output that is not finite: {rank.first_module or 'none of any module'}"
        )
        if rank.gradients:
            yield _text(f"{who}gradients that are not finite: {_listed(rank.gradients)}")
        columns = [name for name in _COLUMNS if any(row.get(name) is not None for row in rank.rows)]
        table = Table(*columns)
        for row in rank.rows[:_MAX_ROWS]:
            table.add_row(*(_text(_cell(row.get(name))) for name in columns))
        yield table
        if len(rank.rows) > _MAX_ROWS:
            yield _text(f"… and {len(rank.rows) - _MAX_ROWS} more rows, see records.jsonl")
    for note in replay.notes:
        yield _text(f"note: {note}")


def _text(text: str, style: str = "") -> Text:
    """Return words without markup, and without what a terminal would act on."""
    return Text(escaped(text), style=style)


def _listed(names: Sequence[str]) -> str:
    more = len(names) - _MAX_NAMES
    return ", ".join(names[:_MAX_NAMES]) + (f" and {more} more" if more > 0 else "")


def _cell(value: Any) -> str:
    if isinstance(value, float):
        return f"{value:.4g}"
    if isinstance(value, Mapping):
        return " ".join(_cell(part) for part in value.values())
    text = "" if value is None else " ".join(str(value).split())
    return text if len(text) <= 40 else f"{text[:40]}…"
