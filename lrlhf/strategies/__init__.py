"""What lies between the modules and Lightning's strategies: steps, seeds, ranks, gradients."""

from lrlhf.strategies.checkpoint_io import AtomicCheckpointIO, use_atomic_checkpoints
from lrlhf.strategies.collectives import Collectives
from lrlhf.strategies.contracts import SplitsModels
from lrlhf.strategies.deadlines import DeadlineError
from lrlhf.strategies.deepspeed import DeepSpeed
from lrlhf.strategies.fsdp import FSDP2
from lrlhf.strategies.host_memory import keep_host_memory, return_host_memory
from lrlhf.strategies.registry import register_strategies
from lrlhf.strategies.resumed_loop import resume_where_it_stopped
from lrlhf.strategies.rl_loop import count_iterations_as_steps
from lrlhf.strategies.seeding import run_seed, sample_seeds, seed_everything_for
from lrlhf.strategies.signals import LostProcessError
from lrlhf.strategies.unused import minds_idle_parts, waits_for_every_parameter
from lrlhf.strategies.update import Updater, gradients_of
from lrlhf.strategies.watch import watch_over

__all__ = [
    "FSDP2",
    "AtomicCheckpointIO",
    "Collectives",
    "DeadlineError",
    "DeepSpeed",
    "LostProcessError",
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
    "use_atomic_checkpoints",
    "waits_for_every_parameter",
    "watch_over",
]

register_strategies()
