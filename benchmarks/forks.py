"""Seconds of an update on conversations whose history is rewritten, and how exact it is.

Eight samples of four turns behind one prompt: each turn reasons, and later turns see its answer
without the reasoning. ``rows``: a row for each turn, with all that it saw. ``shared``: the same,
the tokens that all rows of the prompt begin with computed once. ``forks``: a row for each sample,
which goes on from an earlier place where its history was rewritten. The ways take turns.

    python benchmarks/forks.py [--rounds 5] [--hidden 256] [--layers 6]
"""

from __future__ import annotations

import argparse
import statistics
import time

import torch
from torch.nn.utils.rnn import pad_sequence
from transformers import LlamaConfig, LlamaForCausalLM

from lrlhf.models import allow_packing, sequence_logprobs
from lrlhf.rollout.minibatches import plan_micro_batches
from lrlhf.types import SequenceBatch

SAMPLES, TURNS = 8, 4
PROMPT, REASONING, ANSWER, GIVEN = 256, 96, 32, 32
VOCABULARY = 8192


def conversations() -> tuple[SequenceBatch, SequenceBatch]:
    """Make the batch with a row per sample, and the one with a row per turn."""
    numbers = torch.Generator().manual_seed(0)

    def draw(length: int) -> list[int]:
        return torch.randint(VOCABULARY, (length,), generator=numbers).tolist()

    prompt = draw(PROMPT)
    forked, separate = [], []
    for _ in range(SAMPLES):
        seen, ids, sampled, forks = list(prompt), list(prompt), [0] * PROMPT, [0] * PROMPT
        for turn in range(TURNS):
            reasoning, answer, given = draw(REASONING), draw(ANSWER), draw(GIVEN)
            own = [*reasoning, *answer]
            ids += own
            sampled += [1] * len(own)
            forks += [0] * len(own)
            separate.append(([*seen, *own], [0] * len(seen) + [1] * len(own)))
            seen += [*answer, *given]
            if turn < TURNS - 1:
                ids += [*answer, *given]
                sampled += [0] * (ANSWER + GIVEN)
                forks += [len(own), *[0] * (ANSWER + GIVEN - 1)]
        forked.append((ids, sampled, forks))
    return _batch(forked), _batch([(*row, [0] * len(row[0])) for row in separate])


def _batch(rows: list[tuple[list[int], list[int], list[int]]]) -> SequenceBatch:
    ids, sampled, forks = (
        pad_sequence([torch.tensor(row[part]) for row in rows], batch_first=True)
        for part in range(3)
    )
    lengths = torch.tensor([len(row[0]) for row in rows])
    return SequenceBatch(
        input_ids=ids,
        attention_mask=torch.arange(ids.shape[1]) < lengths[:, None],
        response_mask=sampled.bool(),
        group_ids=torch.zeros(len(rows), dtype=torch.long),
        forks=forks if forks.any() else None,
    )


def update(
    model: LlamaForCausalLM, batch: SequenceBatch, weights: torch.Tensor, *, share: bool
) -> tuple[float, int]:
    """Compute the gradient of a weighted sum of the log-probabilities.

    Returns:
        Seconds, and tokens that went through the model.
    """
    if not share:
        batch = SequenceBatch(
            input_ids=batch.input_ids,
            attention_mask=batch.attention_mask,
            response_mask=batch.response_mask,
        )
    of_rows = torch.zeros_like(batch.input_ids, dtype=torch.float32)
    of_rows[batch.response_mask] = weights
    model.zero_grad()
    started, tokens = time.perf_counter(), 0
    for part in plan_micro_batches(batch, max_tokens=4096, packed=True, shared=share):
        logprobs = sequence_logprobs(model, batch.select(part.rows))
        (logprobs * of_rows[part.rows]).sum().backward()
        tokens += part.computed
    return time.perf_counter() - started, tokens


def main() -> None:
    """Time the ways in turn, and compare their gradients."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--hidden", type=int, default=256)
    parser.add_argument("--layers", type=int, default=6)
    chosen = parser.parse_args()
    torch.manual_seed(0)
    model = LlamaForCausalLM(
        LlamaConfig(
            vocab_size=VOCABULARY,
            hidden_size=chosen.hidden,
            intermediate_size=4 * chosen.hidden,
            num_hidden_layers=chosen.layers,
            num_attention_heads=chosen.hidden // 64,
            max_position_embeddings=4096,
        )
    )
    allow_packing(model)
    forked, separate = conversations()
    weights = torch.randn(int(separate.response_mask.sum()))
    ways = {
        "rows": (separate, False),
        "shared": (separate, True),
        "forks": (forked, True),
    }
    seconds: dict[str, list[float]] = {name: [] for name in ways}
    computed: dict[str, int] = {}
    gradients: dict[str, list[torch.Tensor]] = {}
    for _ in range(chosen.rounds + 1):
        for name, (batch, share) in ways.items():
            elapsed, computed[name] = update(model, batch, weights, share=share)
            seconds[name].append(elapsed)
            gradients[name] = [p.grad.clone() for p in model.parameters() if p.grad is not None]
    medians = {name: statistics.median(each[1:]) for name, each in seconds.items()}
    for name, median in medians.items():
        gap = max(
            float((own - plain).abs().max() / plain.abs().max())
            for own, plain in zip(gradients[name], gradients["rows"], strict=True)
        )
        print(  # noqa: T201
            f"{name:7} {median:7.2f} s  {medians['rows'] / median:5.2f} x  "
            f"{computed[name]:6} tokens  gradients within {gap:.1e}"
        )


if __name__ == "__main__":
    main()
