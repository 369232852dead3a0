"""vLLM is given the policy's sounds: what it samples has the policy's own probabilities."""

from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from lrlhf.media import MediaProcessor
from lrlhf.models import load_processor, sequence_logprobs
from lrlhf.rollout import Sampling, VLLMEngine, VLLMServerEngine
from tests.hearing import build_hearing, row, save_hearing, tone
from tests.vllm.models import disturb
from tests.vlms import Row, Vlm, prompts_of

WINDOW = 30
"""Seconds that the model hears: vLLM takes none with another window."""


@pytest.fixture(scope="module", params=[VLLMEngine, VLLMServerEngine])
def heard(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[tuple[VLLMEngine | VLLMServerEngine, Vlm]]:
    folder: Path = tmp_path_factory.mktemp("hearing")
    save_hearing(folder, WINDOW)
    hearing = build_hearing(WINDOW)
    processor = load_processor(str(folder))
    assert processor is not None
    hearing = hearing._replace(processor=MediaProcessor.of(processor, hearing.model.config))
    engine = request.param(max_model_len=512, kv_cache_gib=0.1)
    engine.attach(hearing.model, hearing.tokenizer, hearing.processor)
    engine.push(0)
    yield engine, hearing
    engine.close()


def asked(hearing: Vlm, sounds: Sequence[Any] = ()) -> Row:
    """A prompt, with its tokens as vLLM wants them: one placeholder per sound."""
    parts = [{"type": "audio"}] * len(sounds)
    messages: Any = [{"role": "user", "content": [*parts, {"type": "text", "text": "what?"}]}]
    text = hearing.tokenizer.apply_chat_template(
        messages, add_generation_prompt=True, tokenize=False
    )
    short = hearing.tokenizer(text, add_special_tokens=False)["input_ids"]
    prompt = row(hearing, sounds, answer="")
    if prompt.media is None:
        return prompt
    return replace(prompt, media=replace(prompt.media, prompt_ids=tuple(short)))


def test_log_probabilities_with_sounds_agree_after_every_push(
    heard: tuple[VLLMEngine | VLLMServerEngine, Vlm],
) -> None:
    engine, hearing = heard
    prompts = prompts_of(
        [
            asked(hearing),
            asked(hearing, [tone(440)]),
            asked(hearing, [tone(300, 0.2), tone(700, 0.9), tone(1500, 0.13)]),
        ]
    )
    sampling = Sampling(max_new_tokens=8, temperature=0.8)
    for version in range(1, 3):
        disturb(hearing.model, seed=version, scale=0.02)
        engine.push(version)
        rollout = engine.generate(prompts, sampling, num_generations=3, seeds=list(range(9)))
        with torch.no_grad():
            own = sequence_logprobs(hearing.model, rollout, temperature=0.8)
        gap = (own - rollout.sampling_logprobs).abs()[rollout.response_mask]
        assert gap.max() < 1e-4
        assert engine.probe().mean < 1e-4
