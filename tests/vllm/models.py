"""Models that vLLM's CPU kernels take, and what is compared with them."""

import re
import threading
import time
from functools import partial
from pathlib import Path
from typing import Any

import torch
from peft import LoraConfig, PeftModel, get_peft_model
from torch import Tensor, nn
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from lrlhf.process_guard import descendants, send_signal
from lrlhf.rollout import Sampling, SyncedEngine, VLLMServerEngine
from lrlhf.rollout.vllm.client import ServerClient
from lrlhf.rollout.vllm.servers import StartedServer
from lrlhf.types import PromptBatch, Rollout
from tests.conftest import build_language_model


def build_policy(
    tokenizer: PreTrainedTokenizerBase, *, tied: bool = True, seed: int = 0
) -> PreTrainedModel:
    """Heads have 32 numbers each: fewer are not supported."""
    return build_language_model(
        tokenizer,
        seed=seed,
        hidden_size=64,
        num_attention_heads=2,
        num_key_value_heads=1,
        tie_word_embeddings=tied,
    )


def build_adapted(tokenizer: PreTrainedTokenizerBase, *, seed: int = 0) -> PeftModel:
    """Tied, with an adapter that is not the identity, scaled by 4."""
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        config = LoraConfig(
            r=4, lora_alpha=16, target_modules="all-linear", init_lora_weights=False
        )
        return get_peft_model(build_policy(tokenizer, seed=seed), config)


def adapter_of(policy: PeftModel) -> torch.nn.ParameterList:
    return torch.nn.ParameterList(one for one in policy.parameters() if one.requires_grad)


@torch.no_grad()
def disturb(model: nn.Module, *, seed: int, scale: float = 0.05) -> None:
    """Change every weight, as a large update would."""
    generator = torch.Generator().manual_seed(seed)
    for weight in model.parameters():
        weight.add_(torch.randn(weight.shape, generator=generator), alpha=scale)


def prompts_of(*texts: str, tokenizer: PreTrainedTokenizerBase) -> PromptBatch:
    rows = [tokenizer(text).input_ids for text in texts]
    width = max(map(len, rows))
    padding = [width - len(row) for row in rows]
    return PromptBatch(
        input_ids=torch.tensor([[0] * gap + row for gap, row in zip(padding, rows, strict=True)]),
        attention_mask=torch.tensor([[False] * gap + [True] * (width - gap) for gap in padding]),
        prompts=texts,
        columns=({},) * len(texts),
    )


@torch.no_grad()
def logprobs_by_whole_logits(model: nn.Module, rollout: Rollout, temperature: float) -> Tensor:
    """`[B, T]`, row by row and without padding: slower, and by another way than the library's."""
    table = torch.zeros(rollout.input_ids.shape)
    for row, length in enumerate(rollout.lengths.tolist()):
        ids = rollout.input_ids[row, :length]
        logits = model(ids[None]).logits[0, :-1].float() / temperature
        table[row, 1:length] = logits.log_softmax(-1).gather(1, ids[1:, None])[:, 0]
    return table * rollout.response_mask


def largest_gap(model: nn.Module, rollout: Rollout, temperature: float = 1.0) -> float:
    own = logprobs_by_whole_logits(model, rollout, temperature)
    return float((own - rollout.sampling_logprobs).abs().max())


GENERATED = "vllm:generation_tokens_total"
"""What a server calls the count of its tokens."""
LONG = "a prompt that fills more than one block of the prefix cache"


def assert_pushes_arrive(
    engine: SyncedEngine, policy: nn.Module, tokenizer: PreTrainedTokenizerBase, count: int = 3
) -> None:
    """Change the policy and push it, again and again, and compare what is sampled with it."""
    prompts = prompts_of(LONG, "short", tokenizer=tokenizer)
    sampling = Sampling(max_new_tokens=12, temperature=0.8)
    for version in range(1, count + 1):
        disturb(policy, seed=version)
        before = {name: weight.clone() for name, weight in policy.state_dict().items()}
        engine.push(version)
        rollout = engine.generate(prompts, sampling, num_generations=2, seeds=range(4))
        assert largest_gap(policy, rollout, 0.8) < 1e-4
        assert rollout.weight_version is not None
        assert rollout.weight_version.tolist() == [version] * 4
        after = policy.state_dict()
        assert all(torch.equal(after[name], weight) for name, weight in before.items())


def assert_structured(engine: SyncedEngine, tokenizer: PreTrainedTokenizerBase) -> None:
    """Ask for formats that a random policy does not meet by itself."""
    schema = {"type": "object", "properties": {"a": {"type": "boolean"}}, "required": ["a"]}
    for structured, expected in (
        ({"regex": r"(yes|no), [0-9]{2}"}, r"(yes|no), [0-9]{2}"),
        ({"choice": ["left", "right"]}, "left|right"),
        ({"grammar": 'root ::= "a" | "b" "c"'}, "a|bc"),
        ({"json": schema}, r'\{\s*"a"\s*:\s*(true|false)\s*\}'),
    ):
        rollout = engine.generate(
            prompts_of(LONG, "short", tokenizer=tokenizer),
            Sampling(max_new_tokens=64, structured=structured),
            num_generations=2,
            seeds=range(4),
        )
        rows = zip(rollout.input_ids, rollout.response_mask, strict=True)
        texts = [tokenizer.decode(ids[mask], skip_special_tokens=True) for ids, mask in rows]
        assert all(re.fullmatch(expected, text) for text in texts), texts
        assert not rollout.truncated.any()


def new_server(folder: Path, **options: Any) -> VLLMServerEngine:
    return VLLMServerEngine(
        max_model_len=128,
        kv_cache_gib=0.05,
        log_file=str(folder / "vllm.log"),
        start_timeout=400,
        stall_timeout=120,
        **options,
    )


def guard_of(server: VLLMServerEngine, number: int = 0) -> int:
    """Return the number of the process that one of an engine's servers runs under."""
    assert server._fleet is not None
    started = server._fleet._servers[number]
    assert isinstance(started, StartedServer)
    assert started.process is not None
    assert started.process._guard is not None
    return started.process._guard.pid


def client_of(server: VLLMServerEngine, number: int = 0) -> ServerClient:
    """Return what talks to one of an engine's servers."""
    (client,) = [one.client for one in server._replicas if one.number == number]
    return client


def counted(engine: VLLMServerEngine, number: int, name: str = "vllm:request_success_total") -> int:
    """Responses that a server has finished, or another of its counters."""
    lines = client_of(engine, number)._http.get("/metrics").text.splitlines()
    found = [line for line in lines if line.startswith(name)]
    return int(sum(float(line.rpartition(" ")[2]) for line in found))


def signal_server(server: VLLMServerEngine, number: int, replica: int = 0) -> None:
    """Send a signal to the processes under the guard; SIGKILL is as a crash would be."""
    send_signal(descendants(guard_of(server, replica)), number)


def generated_across_a_push(
    server: VLLMServerEngine, prompts: PromptBatch, *, versions: tuple[int, int], copies: int
) -> Rollout:
    """Change the policy's weights, and push them while a server generates with those before."""
    policy, count = server._policy, copies * len(prompts)
    server.push(versions[0])
    server.allow_updates_in_flight(True)
    try:
        found: list[Rollout] = []

        def generate() -> None:
            rollout = server.generate(
                prompts,
                Sampling(max_new_tokens=100),
                num_generations=copies,
                seeds=range(count),
            )
            found.append(rollout)

        tokens = partial(counted, server, 0, GENERATED)
        client, before = client_of(server), tokens()
        thread = threading.Thread(target=generate)
        disturb(policy, seed=5)
        client.post("/pause?mode=keep&clear_cache=false")
        thread.start()
        time.sleep(1.0)  # until all wait there
        while tokens() < before + count:  # so many at once that none gets through
            client.post("/resume")
            time.sleep(0.01)
            client.post("/pause?mode=keep&clear_cache=false")
        server.push(versions[1])
        thread.join()
    finally:
        server.allow_updates_in_flight(False)
    (rollout,) = found
    return rollout
