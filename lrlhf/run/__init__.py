"""What a run needs whatever it trains: checkpoints, supervision, seeds, ranks, loops."""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from lrlhf.run.checkpoints.checkpoint_io import AtomicCheckpointIO, use_atomic_checkpoints
    from lrlhf.run.collectives import Collectives
    from lrlhf.run.gradient_updates import Updater, gradients_of
    from lrlhf.run.host_memory import keep_host_memory, return_host_memory
    from lrlhf.run.lightning_internals import trainer_of
    from lrlhf.run.lightning_loops import (
        NoProgressError,
        count_iterations_as_steps,
        resume_where_it_stopped,
    )
    from lrlhf.run.seeding import run_seed, sample_seeds, seed_everything_for
    from lrlhf.run.split_models import SplitsModels, minds_idle_parts, waits_for_every_parameter
    from lrlhf.run.supervision.deadlines import DeadlineError
    from lrlhf.run.supervision.signals import LostProcessError
    from lrlhf.run.supervision.watch import watch_over

_MODULES = {
    "checkpoints.checkpoint_io": ("AtomicCheckpointIO", "use_atomic_checkpoints"),
    "collectives": ("Collectives",),
    "gradient_updates": ("Updater", "gradients_of"),
    "host_memory": ("keep_host_memory", "return_host_memory"),
    "lightning_internals": ("trainer_of",),
    "lightning_loops": (
        "NoProgressError",
        "count_iterations_as_steps",
        "resume_where_it_stopped",
    ),
    "seeding": ("run_seed", "sample_seeds", "seed_everything_for"),
    "split_models": ("SplitsModels", "minds_idle_parts", "waits_for_every_parameter"),
    "supervision.deadlines": ("DeadlineError",),
    "supervision.signals": ("LostProcessError",),
    "supervision.watch": ("watch_over",),
}
_PLACES = {name: module for module, names in _MODULES.items() for name in names}

__all__ = [
    "AtomicCheckpointIO",
    "Collectives",
    "DeadlineError",
    "LostProcessError",
    "NoProgressError",
    "SplitsModels",
    "Updater",
    "count_iterations_as_steps",
    "gradients_of",
    "keep_host_memory",
    "minds_idle_parts",
    "resume_where_it_stopped",
    "return_host_memory",
    "run_seed",
    "sample_seeds",
    "seed_everything_for",
    "trainer_of",
    "use_atomic_checkpoints",
    "waits_for_every_parameter",
    "watch_over",
]


def __getattr__(name: str) -> Any:
    # on demand: whoever only writes files whole (`atomic.py`) needs no torch
    if name in _PLACES:
        return getattr(import_module(f"lrlhf.run.{_PLACES[name]}"), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
