"""A tiny random Qwen2-Audio with tokenizer and processor, and tones for it to hear."""

import copy
import functools
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from transformers import (
    Qwen2AudioConfig,
    Qwen2AudioForConditionalGeneration,
    Qwen2AudioProcessor,
    WhisperFeatureExtractor,
)

from lrlhf.media import Audio, MediaProcessor
from lrlhf.models import save_model
from tests.conftest import byte_tokenizer
from tests.vlms import _TEXT, Row, Vlm

RATE = 16_000
"""Samples per second that the model is given."""
SECONDS = 1
"""Of the longest sound that it hears."""
_MARKS = ["<|AUDIO|>", "<|audio_bos|>", "<|audio_eos|>"]
_TEMPLATE = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n"
    "{% if m.content is string %}{{ m.content }}{% else %}{% for part in m.content %}"
    "{% if part.type == 'audio' %}<|audio_bos|><|AUDIO|><|audio_eos|>"
    "{% else %}{{ part.text }}{% endif %}{% endfor %}{% endif %}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


@functools.cache
def _built(seconds: int) -> Vlm:
    tokenizer = byte_tokenizer(["<|pad|>", "<|im_start|>", "<|im_end|>", *_MARKS], "<|im_end|>")
    tokenizer.chat_template = _TEMPLATE
    ids = {"pad_token_id": tokenizer.pad_token_id, "eos_token_id": tokenizer.eos_token_id}
    config = Qwen2AudioConfig(
        audio_config={
            "d_model": 32,
            "encoder_layers": 2,
            "encoder_attention_heads": 2,
            "encoder_ffn_dim": 48,
            "num_mel_bins": 32,
            "max_source_positions": 50 * seconds,
            "initializer_range": 0.2,
        },
        text_config={
            **_TEXT,
            "vocab_size": len(tokenizer),
            "bos_token_id": None,
            "tie_word_embeddings": False,
            **ids,
        },
        audio_token_index=tokenizer.convert_tokens_to_ids("<|AUDIO|>"),
        initializer_range=0.2,
        **ids,
    )
    processor = Qwen2AudioProcessor(
        feature_extractor=WhisperFeatureExtractor(
            feature_size=32, sampling_rate=RATE, chunk_length=seconds
        ),
        tokenizer=tokenizer,
        chat_template=_TEMPLATE,
    )
    with torch.random.fork_rng():
        torch.manual_seed(0)
        model = Qwen2AudioForConditionalGeneration(config).eval()
    return Vlm(model, tokenizer, MediaProcessor.of(processor, config))


def build_hearing(seconds: int = SECONDS) -> Vlm:
    """A model of its own; tokenizer and processor are shared with the other tests."""
    built = _built(seconds)
    return built._replace(model=copy.deepcopy(built.model))


def save_hearing(folder: str | Path, seconds: int = SECONDS) -> None:
    """Write what a hub user would have: model, tokenizer, processor."""
    built = _built(seconds)
    save_model(built.model, folder)
    built.processor.save(folder)


def tone(
    hertz: float, seconds: float = 0.5, phase: float = 0.0, rate: int = RATE
) -> NDArray[np.float32]:
    """A sine `[N]` of half the full amplitude."""
    times = np.arange(round(seconds * rate)) / rate
    return (0.5 * np.sin(2 * np.pi * hertz * times + phase)).astype(np.float32)


def row(
    hearing: Vlm,
    sounds: Sequence[NDArray[np.float32]] = (),
    *,
    question: str = "what?",
    answer: str = "seven",
) -> Row:
    """A question about some sounds and an answer, by the library and by the processor itself."""
    parts = [{"type": "audio"}] * len(sounds) + [{"type": "text", "text": question}]
    messages: Any = [{"role": "user", "content": parts}]
    text = hearing.tokenizer.apply_chat_template(
        messages, add_generation_prompt=True, tokenize=False
    )
    text = f"{text}{answer}"
    heard: dict[str, Any] = {"audio": list(sounds), "sampling_rate": RATE} if sounds else {}
    plain = dict(hearing.processor.processor(text=[text], return_tensors="pt", **heard))
    ids = tuple(plain["input_ids"][0].tolist())
    media = None
    if sounds:
        encoded = hearing.processor.encode(text, [], [], [Audio(one, RATE) for one in sounds])
        assert tuple(encoded.input_ids) == ids
        media = encoded.media
    return Row(ids, len(answer), media, plain)


def rows_of(hearing: Vlm) -> list[Row]:
    """Rows with no sound, one, three of different lengths, and one that fills the window."""
    return [
        row(hearing, question="which tone is it?", answer="zero"),
        row(hearing, [tone(440)], answer="one!"),
        row(hearing, [tone(300, 0.2), tone(700, 0.9), tone(1500, 0.13)], answer="three"),
        row(hearing, [tone(200, SECONDS)], question="and?", answer="4"),
    ]


def plain_logprobs(hearing: Vlm, entry: Row) -> torch.Tensor:
    """Log-probabilities of a row's answer `[response]`, by the model's own forward pass."""
    logits = hearing.model(**entry.plain).logits[0]
    never_said = torch.zeros(logits.shape[-1], dtype=torch.bool)
    never_said[hearing.tokenizer.convert_tokens_to_ids("<|AUDIO|>")] = True
    logprobs = logits.masked_fill(never_said, -torch.inf).log_softmax(-1)
    targets = torch.tensor(entry.input_ids)[-entry.response :]
    return logprobs[-entry.response - 1 : -1].gather(1, targets[:, None])[:, 0]
