"""What lies between the modules and Lightning's strategies: steps, seeds, ranks, gradients."""

from lrlhf.strategies.collectives import Collectives
from lrlhf.strategies.rl_loop import count_iterations_as_steps
from lrlhf.strategies.seeding import run_seed, sample_seeds, seed_everything_for
from lrlhf.strategies.unused import waits_for_every_parameter
from lrlhf.strategies.update import PlainUpdater, Updater

__all__ = [
    "Collectives",
    "PlainUpdater",
    "Updater",
    "count_iterations_as_steps",
    "run_seed",
    "sample_seeds",
    "seed_everything_for",
    "waits_for_every_parameter",
]
