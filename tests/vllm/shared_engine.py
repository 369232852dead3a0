"""One of two ranks that share an engine of vLLM, as a program: vLLM and a fork do not go together.

python -m tests.vllm.shared_engine FOLDER RANK whole|adapter|fails
"""

import os
import sys
import warnings
from pathlib import Path
from typing import Any

import torch
from peft import PeftModel
from torch import distributed, nn
from transformers import PreTrainedTokenizerBase

from lrlhf.rollout import EngineFailure, Sampling, VLLMEngine
from lrlhf.types import Rollout
from tests.conftest import build_tokenizer
from tests.vllm.models import (
    LONG,
    adapter_of,
    build_adapted,
    build_policy,
    disturb,
    largest_gap,
    prompts_of,
)

TEXTS = ((LONG, "short", "another one"), ("of the other rank",))
"""Of each rank."""
SAMPLING = Sampling(max_new_tokens=12, temperature=0.8)
PUSHES = 2


def respond(engine: VLLMEngine, rank: int, tokenizer: PreTrainedTokenizerBase) -> Rollout:
    """Have the prompts of a rank answered, twice each."""
    prompts = prompts_of(*TEXTS[rank], tokenizer=tokenizer)
    seeds = range(100 * rank, 100 * rank + 2 * len(prompts))
    return engine.generate(prompts, SAMPLING, num_generations=2, seeds=seeds)


def refusal(engine: VLLMEngine, rank: int, tokenizer: PreTrainedTokenizerBase) -> str:
    """What this rank is told where rank 1 asks for more than there is room for."""
    texts = ("x" * 200,) if rank == 1 else TEXTS[rank]
    prompts = prompts_of(*texts, tokenizer=tokenizer)
    try:
        engine.generate(prompts, SAMPLING, num_generations=1, seeds=range(len(prompts)))
    except (ValueError, EngineFailure) as error:
        return f"{type(error).__name__}: {error}"
    return ""


def pushes(
    engine: VLLMEngine, policy: nn.Module, rank: int, tokenizer: PreTrainedTokenizerBase
) -> dict[str, Any]:
    """Push changed weights, and say how far from the policy what is sampled with them is."""
    found: dict[str, Any] = {"gaps": [], "probes": []}
    for version in range(1, PUSHES + 1):
        disturb(adapter_of(policy) if isinstance(policy, PeftModel) else policy, seed=version)
        engine.push(version)
        found["rollout"] = respond(engine, rank, tokenizer)
        found["gaps"].append(largest_gap(policy, found["rollout"], SAMPLING.temperature))
        found["probes"].append(engine.probe().max)
    found["refusal"] = refusal(engine, rank, tokenizer)
    found["after"] = respond(engine, rank, tokenizer)
    ones = torch.ones(1)
    distributed.all_reduce(ones)  # of the trainer's own group
    return {**found, "ranks": int(ones)}


def failure(engine: VLLMEngine, rank: int, tokenizer: PreTrainedTokenizerBase) -> dict[str, Any]:
    """Have vLLM fail on rank 1, while rank 0 waits for it in a step."""

    def fail(*_: object, **__: object) -> None:
        raise IndexError("a kernel went wrong")

    if rank == 1:
        engine._llm.generate = fail
    try:
        respond(engine, rank, tokenizer)
    except EngineFailure as error:
        return {"failure": str(error)}
    return {}


def main(folder: Path, rank: int, what: str) -> None:
    os.environ["LOCAL_RANK"] = str(rank)
    file = folder / "group"
    distributed.init_process_group("gloo", init_method=f"file://{file}", rank=rank, world_size=2)
    tokenizer = build_tokenizer()
    policy: nn.Module = build_adapted(tokenizer) if what == "adapter" else build_policy(tokenizer)
    engine = VLLMEngine(
        tensor_parallel_size=2,
        max_model_len=128,
        kv_cache_gib=0.05,
        lora="adapter" if what == "adapter" else "auto",
    )
    engine.attach(policy.eval(), tokenizer)
    engine.push(0)
    if what == "fails":
        found = failure(engine, rank, tokenizer)
    else:
        found = pushes(engine, policy, rank, tokenizer)
    torch.save(found, folder / f"rank{rank}.pt")


if __name__ == "__main__":
    warnings.simplefilter("ignore")
    main(Path(sys.argv[1]), int(sys.argv[2]), sys.argv[3])
    os._exit(0)  # a rank that is left alone would wait for the other at the end
