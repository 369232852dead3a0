r"""Compares the models that both scripts have saved: greedy answers to the held-out sums.

    python score.py HuggingFaceTB/SmolLM2-135M-Instruct \
        "runs/rloo_trl_*/final" "runs/rloo_lrlhf_*/export/final"

Each argument is one side, its models those of its seeds, and is compared with the one before.
"""

import sys
from glob import glob

import torch
from rloo_lrlhf import right, sums
from transformers import AutoModelForCausalLM, AutoTokenizer

from lrlhf.statistics import paired_difference


def scores(folder):
    rows = sums()["test"]
    tokenizer = AutoTokenizer.from_pretrained(folder, padding_side="left")
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    prompts = tokenizer(list(rows["prompt"]), return_tensors="pt", padding=True)
    ids = model.generate(**prompts, max_new_tokens=3, do_sample=False)
    texts = tokenizer.batch_decode(ids[:, prompts["input_ids"].shape[1] :])
    return right(completions=texts, answer=rows["answer"])


if __name__ == "__main__":
    # Path.glob takes no absolute pattern
    folders = [sorted(glob(side)) or [side] for side in sys.argv[1:]]  # noqa: PTH207  see above
    sides = [[*map(scores, side)] for side in folders]
    for before, side in zip([None, *sides], sides):
        sys.stdout.write(f"{[sum(own) / len(own) for own in side]}\n")
        if before:
            found = paired_difference(before, side)
            sys.stdout.write(
                f"difference {found.value:.3f} ({found.low:.3f} to {found.high:.3f})\n"
            )
