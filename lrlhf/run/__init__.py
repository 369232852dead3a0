"""What a run needs whatever it trains: checkpoints, supervision, seeds, ranks, loops."""

from typing import TYPE_CHECKING

from lrlhf.lazy_exports import lazy_exports

if TYPE_CHECKING:
    from lrlhf.run.checkpoints.sharded_checkpoint import AtomicCheckpointIO, use_atomic_checkpoints
    from lrlhf.run.collectives import (
        Collectives,
        SplitsModels,
        minds_idle_parts,
        waits_for_every_parameter,
    )
    from lrlhf.run.gradient_updates import Updater, gradients_of
    from lrlhf.run.lightning_internals import trainer_of
    from lrlhf.run.lightning_loops import (
        NoProgressError,
        count_iterations_as_steps,
        log_without_copies,
        resume_where_it_stopped,
    )
    from lrlhf.run.seeding import run_seed, sample_seeds, seed_everything_for
    from lrlhf.run.supervision.signals import LostProcessError
    from lrlhf.run.supervision.watch import (
        DeadlineError,
        keep_host_memory,
        return_host_memory,
        watch_over,
    )
else:
    __getattr__ = lazy_exports(__name__)

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
    "log_without_copies",
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
