"""Seconds of an update on conversations of several turns, by lrlhf and by TRL.

Eight samples of four turns behind one prompt; nothing is rewritten, so both train a row for each
sample, and no gradient reaches what was given between the turns. What is timed is the gradient of
a weighted sum of the log-probabilities: lrlhf's scorer against ``GRPOTrainer``'s. The two run in
processes of their own, which take turns.

    python benchmarks/trl_turns.py --lrlhf PYTHON --trl PYTHON [--rounds 5] [--samples 8]

Args:
    PYTHON: An interpreter where the one, or the other, is installed.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from typing import Any

import torch
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

TURNS, PROMPT, OWN, GIVEN, VOCABULARY = 4, 256, 128, 32, 8192


def rows(samples: int, turns: int = TURNS) -> tuple[torch.Tensor, torch.Tensor]:
    """Draw the tokens, and tell which of them the policy wrote, `[samples, T]` each."""
    numbers = torch.Generator().manual_seed(0)
    length = PROMPT + turns * OWN + (turns - 1) * GIVEN
    ids = torch.randint(10, VOCABULARY, (samples, length), generator=numbers)
    ids[:, :PROMPT] = ids[0, :PROMPT]
    place = torch.arange(length) - PROMPT
    return ids, ((place >= 0) & (place % (OWN + GIVEN) < OWN)).expand_as(ids)


def model() -> LlamaForCausalLM:
    """Build the policy."""
    torch.manual_seed(0)
    return LlamaForCausalLM(
        LlamaConfig(
            vocab_size=VOCABULARY,
            hidden_size=256,
            intermediate_size=1024,
            num_hidden_layers=6,
            num_attention_heads=4,
            max_position_embeddings=4096,
        )
    )


def lrlhf_update(policy: Any, ids: torch.Tensor, sampled: torch.Tensor) -> Callable[[], Any]:
    """Return what computes log-probabilities, `[B, T]`."""
    from lrlhf.models import allow_packing, sequence_logprobs  # noqa: PLC0415
    from lrlhf.types import SequenceBatch  # noqa: PLC0415

    allow_packing(policy)
    batch = SequenceBatch(
        input_ids=ids,
        attention_mask=torch.ones_like(sampled),
        response_mask=sampled,
        group_ids=torch.zeros(len(ids), dtype=torch.long),
    )
    return lambda: sequence_logprobs(policy, batch)


def trl_update(policy: Any, ids: torch.Tensor, sampled: torch.Tensor) -> Callable[[], Any]:
    """Return what computes log-probabilities, `[B, T]`, 0 in the prompt."""
    from datasets import Dataset  # noqa: PLC0415
    from trl import GRPOConfig, GRPOTrainer  # noqa: PLC0415

    words = Tokenizer(WordLevel({str(one): one for one in range(VOCABULARY)}, unk_token="0"))
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=words, pad_token="0", eos_token="1")
    trainer = GRPOTrainer(
        model=policy,
        reward_funcs=lambda completions, **_: [0.0] * len(completions),
        args=GRPOConfig(
            output_dir=tempfile.mkdtemp(),
            use_cpu=True,
            bf16=False,
            report_to=[],
            num_generations=2,
            per_device_train_batch_size=2,
            gradient_checkpointing=False,
        ),
        train_dataset=Dataset.from_list([{"prompt": "1"}] * 4),
        processing_class=tokenizer,
    )
    keep = ids.shape[1] - PROMPT
    mask = torch.ones_like(ids)

    def compute() -> torch.Tensor:
        found = trainer._get_per_token_logps_and_entropies(trainer.model, ids, mask, keep)[0]
        return torch.cat([torch.zeros(len(ids), PROMPT), found], dim=1) * sampled

    return compute


def measure(who: str, rounds: int, samples: int) -> None:
    """Compute the gradients when a line arrives, and print seconds and the result."""
    ids, sampled = rows(samples)
    policy = model().train()
    update = (lrlhf_update if who == "lrlhf" else trl_update)(policy, ids, sampled)
    weights = torch.randn(ids.shape, generator=torch.Generator().manual_seed(1)) * sampled
    for _ in range(rounds + 1):
        sys.stdin.readline()
        policy.zero_grad()
        started = time.perf_counter()
        total = (update() * weights).sum()
        total.backward()
        elapsed = time.perf_counter() - started
        norm = sum(float(p.grad.square().sum()) for p in policy.parameters() if p.grad is not None)
        print("=" + json.dumps([elapsed, float(total), norm**0.5]), flush=True)  # noqa: T201


def main() -> None:
    """Let the two take turns."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--lrlhf", default=sys.executable)
    parser.add_argument("--trl", default=sys.executable)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--samples", type=int, default=8)
    parser.add_argument("--who")
    chosen = parser.parse_args()
    if chosen.who:
        measure(chosen.who, chosen.rounds, chosen.samples)
        return
    options = ["--rounds", str(chosen.rounds), "--samples", str(chosen.samples)]
    running = {
        who: subprocess.Popen(
            [getattr(chosen, who), __file__, "--who", who, *options],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            text=True,
        )
        for who in ("lrlhf", "trl")
    }
    found: dict[str, list[list[float]]] = {who: [] for who in running}
    for _ in range(chosen.rounds + 1):
        for who, process in running.items():
            assert process.stdin is not None
            assert process.stdout is not None
            process.stdin.write("\n")
            process.stdin.flush()
            line = next(line for line in process.stdout if line.startswith("="))
            found[who].append(json.loads(line[1:]))
    medians = {who: statistics.median(one[0] for one in each[1:]) for who, each in found.items()}
    for who, each in found.items():
        print(  # noqa: T201
            f"{who:6} {medians[who]:6.2f} s  {medians['trl'] / medians[who]:5.2f} x TRL  "
            f"sum {each[-1][1]:.3f}  gradient norm {each[-1][2]:.4f}"
        )


if __name__ == "__main__":
    main()
