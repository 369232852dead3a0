"""Pairs of tones, of which the higher one is preferred, and a tiny model that hears them.

    pip install 'lrlhf[audio]'
    python -m lrlhf.examples.tones runs/tiny_audio

It trains with `configs/reward_audio.yaml` and `configs/cpu/reward_audio.yaml`, in half a minute.
The model has 0.12 million random parameters and is a Qwen2-Audio in all but size, so that what
works with it works with the real one.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterable
from pathlib import Path
from typing import Any, Literal, get_args

import numpy as np
import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import (
    PreTrainedTokenizerFast,
    Qwen2AudioConfig,
    Qwen2AudioForConditionalGeneration,
    Qwen2AudioProcessor,
    WhisperFeatureExtractor,
)

from lrlhf.datamodules import Source
from lrlhf.models import save_model

Part = Literal["train", "validation"]

RATES = (16_000, 22_050, 44_100)
"""Samples per second that tones are recorded with; the model is given 16,000 of each."""
_PITCHES = np.geomspace(200.0, 6000.0, 120)
"""Hz. Training has every second one, and validation those between."""
_TEMPLATE = (
    "{%- for message in messages -%}<|im_start|>{{ message.role }}\n"
    "{%- if message.content is string -%}{{ message.content }}{%- else -%}"
    "{%- for part in message.content -%}"
    "{%- if part.type == 'audio' -%}<|audio_bos|><|AUDIO|><|audio_eos|>"
    "{%- else -%}{{ part.text }}{%- endif -%}{%- endfor -%}{%- endif -%}<|im_end|>\n"
    "{%- endfor -%}{%- if add_generation_prompt -%}<|im_start|>assistant\n{%- endif -%}"
)


class Tones(Source):
    """Pairs of noisy tones of random loudness, length, phase and sampling rate.

    Args:
        part: ``train``, or ``validation``, whose pitches no training pair has.
        pairs: Number of them.
        noise: Standard deviation of the noise; tones have amplitudes from 0.2 to 0.8.
        seed: Another seed gives other pairs.
    """

    def __init__(
        self, part: Part = "train", *, pairs: int = 1000, noise: float = 0.02, seed: int = 0
    ) -> None:
        if pairs < 1 or noise < 0:
            raise ValueError(f"pairs={pairs}, noise={noise}: give at least 1 pair, and no negative")
        self._part = get_args(Part).index(part)
        self._pairs = pairs
        self._noise = noise
        self._seed = seed

    @property
    def name(self) -> str:
        return "tones"

    def rows(self) -> Iterable[dict[str, Any]]:
        for number in range(self._pairs):
            random = np.random.default_rng([self._seed, self._part, number])
            first, second = random.choice(_PITCHES[self._part :: 2], 2, replace=False)
            yield {
                "prompt": "tone",
                "audio_0": self._tone(first, random),
                "audio_1": self._tone(second, random),
                "preference": "A" if first > second else "B",
                "hertz_0": round(float(first)),
                "hertz_1": round(float(second)),
            }

    def _tone(self, hertz: float, random: np.random.Generator) -> dict[str, Any]:
        rate = int(random.choice(RATES))
        times = np.arange(int(random.uniform(0.2, 0.6) * rate)) / rate
        wave = np.sin(2 * np.pi * hertz * times + random.uniform(0, 2 * np.pi))
        samples = random.uniform(0.2, 0.8) * wave + self._noise * random.standard_normal(len(times))
        return {"array": samples.astype(np.float32), "sampling_rate": rate}


def build(folder: Path, *, seed: int = 0) -> None:
    """Write the model, its tokenizer and its processor.

    Args:
        folder: Created where it does not exist.
        seed: Of the weights.
    """
    tokenizer = _tokenizer()
    ids = {"pad_token_id": tokenizer.pad_token_id, "eos_token_id": tokenizer.eos_token_id}
    config = Qwen2AudioConfig(
        audio_config={
            "d_model": 32,
            "encoder_layers": 2,
            "encoder_attention_heads": 2,
            "encoder_ffn_dim": 64,
            "num_mel_bins": 32,
            "max_source_positions": 50,
        },
        text_config={
            "hidden_size": 64,
            "intermediate_size": 128,
            "num_hidden_layers": 2,
            "num_attention_heads": 2,
            "num_key_value_heads": 1,
            "max_position_embeddings": 512,
            "vocab_size": len(tokenizer),
            "bos_token_id": None,
            **ids,
        },
        audio_token_index=tokenizer.convert_tokens_to_ids("<|AUDIO|>"),
        **ids,
    )
    torch.manual_seed(seed)
    save_model(Qwen2AudioForConditionalGeneration(config), folder)
    # a second of sound, where Qwen2-Audio hears half a minute
    extractor = WhisperFeatureExtractor(feature_size=32, sampling_rate=16_000, chunk_length=1)
    Qwen2AudioProcessor(
        feature_extractor=extractor, tokenizer=tokenizer, chat_template=_TEMPLATE
    ).save_pretrained(folder)


def _tokenizer() -> PreTrainedTokenizerFast:
    """Build a tokenizer with a token for every byte."""
    special = ["<pad>", "<|im_start|>", "<|im_end|>"]
    special += ["<|AUDIO|>", "<|audio_bos|>", "<|audio_eos|>"]
    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    ids = {token: number for number, token in enumerate([*special, *letters])}
    tokenizer = Tokenizer(models.BPE(vocab=ids, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        pad_token="<pad>",
        eos_token="<|im_end|>",
        additional_special_tokens=special[1:2] + special[3:],
        chat_template=_TEMPLATE,
    )


def main() -> None:
    """Read the command line."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("folder", type=Path, help="where the model goes")
    parser.add_argument("--seed", type=int, default=0, help="of the weights")
    options = parser.parse_args()
    build(options.folder, seed=options.seed)
    print(f"written to {options.folder}")  # noqa: T201


if __name__ == "__main__":
    main()
