"""Builds a vision-language model of 0.26 million random parameters, to try things out on a CPU.

    python -m lrlhf.examples.tiny_vlm runs/tiny_vlm
    python -m lrlhf.examples.tiny_vlm runs/tiny_vlm_digits --digits 100

The second line also teaches it, by 100 steps of supervised learning, to answer the question about
handwritten digits in about half of the cases: reinforcement learning needs a start from which it is
sometimes right. It is a Qwen2-VL in all but size, so that everything that works with it works with
the real one: the configs `configs/*_vl.yaml` are for that.
"""

from __future__ import annotations

import argparse
import importlib
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import (
    AutoModelForImageTextToText,
    PreTrainedTokenizerBase,
    PreTrainedTokenizerFast,
    Qwen2VLConfig,
    Qwen2VLImageProcessor,
    Qwen2VLProcessor,
    Qwen2VLVideoProcessor,
)

from lrlhf.datamodules.rows.collate import Candidate, right_padded
from lrlhf.media import MediaOptions, MediaProcessor, MediaRefs
from lrlhf.models import CausalLM, sequence_logprobs

SIDE = 64
"""Pixels of an image along each side: 8 x 8 patches, 16 tokens."""
WORDS = ("system user assistant what digit? picture 0 1 2 3 4 5 6 7 8 9",)
_IMAGE = "<|vision_start|><|image_pad|><|vision_end|>"
_VIDEO = "<|vision_start|><|video_pad|><|vision_end|>"
TEMPLATE = (
    "{%- for message in messages -%}<|im_start|>{{ message.role }}\n"
    "{%- if message.content is string -%}{{ message.content }}{%- else -%}"
    "{%- for part in message.content -%}"
    "{%- if part.type == 'image' -%}" + _IMAGE + "{%- elif part.type == 'video' -%}" + _VIDEO +
    "{%- else -%}{{ part.text }}{%- endif -%}{%- endfor -%}{%- endif -%}<|im_end|>\n"
    "{%- endfor -%}{%- if add_generation_prompt -%}<|im_start|>assistant\n{%- endif -%}"
)  # fmt: skip


def build(folder: Path, *, seed: int = 0, words: Sequence[str] = WORDS) -> None:
    """Write the model, its tokenizer and its processor.

    Args:
        folder: Created where it does not exist.
        seed: Of the weights.
        words: Texts whose words become a token each.
    """
    tokenizer = build_tokenizer(words)
    ids = tokenizer.convert_tokens_to_ids
    config = Qwen2VLConfig(
        text_config={
            "hidden_size": 64,
            "intermediate_size": 128,
            "num_hidden_layers": 2,
            "num_attention_heads": 2,
            "num_key_value_heads": 1,
            "max_position_embeddings": 512,
            "vocab_size": len(tokenizer),
            "rope_parameters": {
                "rope_type": "default",
                "rope_theta": 1e4,
                "mrope_section": [4, 6, 6],
            },
            "tie_word_embeddings": True,
            "pad_token_id": tokenizer.pad_token_id,
            "bos_token_id": tokenizer.pad_token_id,
            "eos_token_id": tokenizer.eos_token_id,
        },
        vision_config={
            "depth": 2,
            "embed_dim": 64,
            "hidden_size": 64,
            "num_heads": 4,
            "mlp_ratio": 2,
            # as large as the blocks of JPEG, and the pixels of an enlarged digit
            "patch_size": 8,
            "temporal_patch_size": 1,
            "spatial_merge_size": 2,
        },
        image_token_id=ids("<|image_pad|>"),
        video_token_id=ids("<|video_pad|>"),
        vision_start_token_id=ids("<|vision_start|>"),
        vision_end_token_id=ids("<|vision_end|>"),
        tie_word_embeddings=True,
    )
    torch.manual_seed(seed)
    model = AutoModelForImageTextToText.from_config(config)
    model.generation_config.eos_token_id = tokenizer.eos_token_id
    model.save_pretrained(folder)
    patches = {
        "patch_size": 8,
        "temporal_patch_size": 1,
        "merge_size": 2,
        "size": {"shortest_edge": 16**2, "longest_edge": SIDE**2},
        "image_mean": [0.5] * 3,
        "image_std": [0.25] * 3,
    }
    Qwen2VLProcessor(
        image_processor=Qwen2VLImageProcessor(**patches),
        video_processor=Qwen2VLVideoProcessor(**patches),
        tokenizer=tokenizer,
        chat_template=TEMPLATE,
    ).save_pretrained(folder)


def build_tokenizer(words: Sequence[str] = WORDS) -> PreTrainedTokenizerFast:
    """Train a byte-pair tokenizer on some texts."""
    special = ["<pad>", "<|im_start|>", "<|im_end|>"]
    special += ["<|vision_start|>", "<|vision_end|>", "<|image_pad|>", "<|video_pad|>"]
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.train_from_iterator(
        words,
        trainers.BpeTrainer(
            vocab_size=330,
            special_tokens=special,
            initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
            show_progress=False,
        ),
    )
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        pad_token="<pad>",
        eos_token="<|im_end|>",
        additional_special_tokens=special[1:2] + special[3:],
        chat_template=TEMPLATE,
        padding_side="left",
    )


def begin(folder: Path, *, steps: int, seed: int = 0) -> None:
    """Teach the model to answer about digits, and write it back.

    Args:
        folder: Of the model.
        steps: Of AdamW, 32 digits each.
        seed: Of the order.
    """
    spec = CausalLM(source=str(folder))
    model, tokenizer = spec.load().train(), spec.load_tokenizer()
    processor = MediaProcessor.for_model(spec.load_processor(), model.config)
    assert processor is not None
    digits = importlib.import_module("lrlhf.examples.pictures").Digits("train", size=600, pixels=32)
    rows = [dialogue(row, tokenizer, processor) for row in digits.rows()]
    optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3)
    order = torch.Generator().manual_seed(seed)
    losses = []
    for _ in range(steps):
        chosen = torch.randint(len(rows), (32,), generator=order).tolist()
        batch = right_padded([rows[row] for row in chosen], 0)
        loss = -sequence_logprobs(model, batch).sum() / batch.response_mask.sum()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    model.save_pretrained(folder)
    print(f"{steps} supervised steps: loss {losses[0]:.2f} at first, {losses[-1]:.2f} at last")  # noqa: T201


def dialogue(
    row: Mapping[str, Any], tokenizer: PreTrainedTokenizerBase, processor: MediaProcessor
) -> Candidate:
    """Encode a question with its answer, which alone is trained on."""
    asked = tokenizer.apply_chat_template(row["prompt"], tokenize=False, add_generation_prompt=True)
    prompt = processor.read(str(asked), MediaRefs((row["image"],)), MediaOptions())
    answer = tokenizer(row["answer"] + tokenizer.eos_token)["input_ids"]
    ids = np.array([*prompt.input_ids, *answer], dtype=np.int32)
    return Candidate(input_ids=ids, start=len(prompt.input_ids), media=prompt.media)


def main() -> None:
    """Read the command line."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("folder", type=Path, help="where the model goes")
    parser.add_argument("--digits", type=int, default=0, help="supervised steps on digits")
    parser.add_argument("--seed", type=int, default=0, help="of the weights")
    options = parser.parse_args()
    build(options.folder, seed=options.seed)
    if options.digits:
        begin(options.folder, steps=options.digits, seed=options.seed)
    print(f"written to {options.folder}")  # noqa: T201


if __name__ == "__main__":
    main()
