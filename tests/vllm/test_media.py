"""vLLM shown the policy's images: what it samples has the policy's own probabilities."""

import copy
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from peft import LoraConfig, get_peft_model
from torch import nn

from lrlhf.media import MediaProcessor
from lrlhf.models import load_processor, ruled_out_ids, sequence_logprobs
from lrlhf.rollout import Sampling, VLLMEngine, VLLMServerEngine
from lrlhf.rollout.vllm.vllm_base import EngineStartError
from lrlhf.types import PromptBatch, Rollout
from tests.rollout.test_media_episodes import Album, play
from tests.rollout.test_media_episodes import prompts_of as image_prompts
from tests.vllm.models import disturb, generated_across_a_push
from tests.vlms import Row, Vlm, build_vlm, prompts_of, row, save_vlm

FAMILIES = ("qwen2_vl", "qwen2_5_vl", "qwen3_vl", "idefics3")


ENGINES: dict[str, type[VLLMEngine | VLLMServerEngine]] = {
    "inside": VLLMEngine,
    "server": VLLMServerEngine,
}


@pytest.fixture(
    scope="module",
    params=[
        pytest.param((family, engine), marks=[pytest.mark.exhaustive] if number else [])
        for engine in ENGINES
        for number, family in enumerate(FAMILIES)
    ],
    ids="-".join,
)
def shown(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[tuple[VLLMEngine | VLLMServerEngine, Vlm]]:
    family, kind = request.param
    vlm = as_loaded(family, tmp_path_factory.mktemp("vlm"))
    engine = ENGINES[kind](max_model_len=512, kv_cache_gib=0.1)
    engine.attach(vlm.model, vlm.tokenizer, vlm.processor)
    engine.push(0)
    yield engine, vlm
    engine.close()


def as_loaded(family: str, folder: Path) -> Vlm:
    """With the processor that ``AutoProcessor`` picks, as vLLM does: others scale differently."""
    save_vlm(family, folder)
    vlm = build_vlm(family)
    processor = load_processor(str(folder))
    assert processor is not None
    return vlm._replace(processor=MediaProcessor.of(processor, vlm.model.config))


def asked(vlm: Vlm, images: Sequence[int] = (), videos: Sequence[int] = ()) -> Row:
    """A prompt, with its tokens as vLLM wants them: one placeholder per image or video."""
    parts = [{"type": "image"}] * len(images) + [{"type": "video"}] * len(videos)
    messages = [{"role": "user", "content": [*parts, {"type": "text", "text": "what?"}]}]
    text = vlm.tokenizer.apply_chat_template(messages, add_generation_prompt=True, tokenize=False)
    short = vlm.tokenizer(text, add_special_tokens=False)["input_ids"]
    prompt = row(vlm, images, videos, question="what?", answer="")
    if prompt.media is None:
        return prompt
    return replace(prompt, media=replace(prompt.media, prompt_ids=tuple(short)))


def mixed_prompts(vlm: Vlm) -> PromptBatch:
    """One without an image, two that differ in their images alone, and one with several."""
    return prompts_of([asked(vlm), asked(vlm, [0]), asked(vlm, [1]), asked(vlm, [1, 2, 3])])


@torch.no_grad()
def gap(vlm: Vlm, rollout: Rollout, temperature: float) -> float:
    own = sequence_logprobs(vlm.model, rollout, temperature=temperature)
    return float((own - rollout.sampling_logprobs).abs()[rollout.response_mask].max())


def test_log_probabilities_with_images_agree_after_every_push(
    shown: tuple[VLLMEngine | VLLMServerEngine, Vlm],
) -> None:
    engine, vlm = shown
    prompts = mixed_prompts(vlm)
    sampling = Sampling(max_new_tokens=8, temperature=0.8)
    for version in range(1, 11):
        disturb(vlm.model, seed=version, scale=0.02)
        engine.push(version)
        rollout = engine.generate(prompts, sampling, num_generations=3, seeds=range(12))
        # float32 alone puts trainer and engine up to 1.7e-5 away from the same pass in float64
        assert gap(vlm, rollout, 0.8) < 5e-5
    assert rollout.media is not None
    assert prompts.media is not None
    for position, entry in enumerate(rollout.media):
        assert entry is prompts.media[position // 3]


def test_turns_of_episodes_are_about_all_images_before_them(
    shown: tuple[VLLMEngine | VLLMServerEngine, Vlm],
) -> None:
    engine, vlm = shown
    engine.push(5)
    rollout = play(
        vlm,
        engine,
        image_prompts(vlm, [0], [], [1, 2]),
        sampling=Sampling(max_new_tokens=300, temperature=0.8),
        num_generations=2,
        environment=Album,
        max_turns=4,
        max_turn_tokens=6,
    )
    episodes = rollout.episodes or ()
    assert [(one.finish_reason, one.failure) for one in episodes] == [("max_turns", "")] * 6
    assert [len(one.images) for one in episodes] == [6, 6, 5, 5, 7, 7]
    assert gap(vlm, rollout, 0.8) < 1e-4


def test_the_probe_sees_encoders_weights_that_did_not_arrive(
    shown: tuple[VLLMEngine | VLLMServerEngine, Vlm],
) -> None:
    engine, vlm = shown
    engine.push(10)
    assert engine.probe().max < 1e-4
    encoder = vlm.model.base_model.get_encoder("image")
    disturb(encoder, seed=7, scale=0.2)
    assert engine.probe().max > 1e-3
    engine.push(11)
    assert engine.probe().max < 1e-4


def test_responses_about_images_go_on_with_new_weights(
    shown: tuple[VLLMEngine | VLLMServerEngine, Vlm],
) -> None:
    """Features of the old weights' encoder would be as wrong as their keys and values."""
    engine, vlm = shown
    if not isinstance(engine, VLLMServerEngine):
        pytest.skip("it generates while nothing else computes")
    old = copy.deepcopy(vlm.model)
    rollout = generated_across_a_push(engine, mixed_prompts(vlm), versions=(30, 31), copies=24)
    assert rollout.token_versions is not None
    for model, version in ((old, 30), (vlm.model, 31)):
        own = sequence_logprobs(model, rollout).detach()
        mine = rollout.response_mask & (rollout.token_versions == version)
        gaps = (own - rollout.sampling_logprobs).abs()
        assert int(mine.sum()) > 100
        assert float(gaps[mine].max()) < 1e-4
        assert float(gaps[rollout.response_mask & ~mine].max()) > 1e-2


def test_requests_with_images_arrive_in_the_middle_of_pushes(
    shown: tuple[VLLMEngine | VLLMServerEngine, Vlm],
) -> None:
    """A push must not forget what vLLM relies on: processed images, and those of cached prompts."""
    engine, vlm = shown
    if not isinstance(engine, VLLMServerEngine):
        pytest.skip("it generates while nothing else computes")
    prompts, sampling, restarts = mixed_prompts(vlm), Sampling(max_new_tokens=4), engine.restarts
    engine.push(40)
    engine.allow_updates_in_flight(True)
    with ThreadPoolExecutor(1) as thread:

        def generate() -> None:
            options = {"num_generations": 8, "seeds": range(32)}
            for _ in range(24):
                engine.generate(prompts, sampling, **options)

        generating, version = thread.submit(generate), 40
        while not generating.done():
            version += 1
            disturb(vlm.model, seed=version, scale=0.002)
            engine.push(version)
        generating.result()
    engine.allow_updates_in_flight(False)
    assert version > 44
    assert engine.restarts == restarts


def test_no_placeholder_is_ever_drawn(shown: tuple[VLLMEngine | VLLMServerEngine, Vlm]) -> None:
    engine, vlm = shown
    ruled_out = torch.tensor(ruled_out_ids(vlm.model.config))
    # hot enough for all tokens to be about equally likely, as they are for a random model
    rollout = engine.generate(
        mixed_prompts(vlm),
        Sampling(max_new_tokens=32, temperature=2.0),
        num_generations=12,
        seeds=range(48),
    )
    drawn = rollout.input_ids[rollout.response_mask]
    assert len(drawn) > 500
    assert not torch.isin(drawn, ruled_out).any()
    assert gap(vlm, rollout, 2.0) < 1e-4


def test_videos_are_refused_unless_a_mismatch_is_accepted(
    shown: tuple[VLLMEngine | VLLMServerEngine, Vlm],
) -> None:
    engine, vlm = shown
    if vlm.model.config.model_type == "idefics3":
        pytest.skip("it takes no videos")
    engine.push(20)
    prompts = prompts_of([asked(vlm, videos=[0])])
    with pytest.raises(ValueError, match=r"inexact_video"):
        engine.generate(prompts, Sampling(max_new_tokens=4), num_generations=1, seeds=[0])
    if isinstance(engine, VLLMServerEngine):
        return
    engine.inexact_video = True
    rollout = engine.generate(prompts, Sampling(max_new_tokens=4), num_generations=1, seeds=[0])
    engine.inexact_video = False
    assert rollout.response_mask.sum() > 0


@pytest.mark.parametrize(
    "family", [FAMILIES[0], *(pytest.param(f, marks=pytest.mark.exhaustive) for f in FAMILIES[1:])]
)
def test_an_adapter_of_the_decoder_is_pushed_alone_and_one_of_the_encoder_merged(
    family: str, tmp_path: Path
) -> None:
    vlm = as_loaded(family, tmp_path)
    decoder = vlm.model.get_decoder()
    inside = next(name for name, module in vlm.model.named_modules() if module is decoder)
    options = {"r": 4, "lora_alpha": 16, "init_lora_weights": False}
    config = LoraConfig(target_modules=rf"{inside}\..*_proj", **options)
    policy = get_peft_model(vlm.model, config)
    engine = VLLMEngine(max_model_len=512, kv_cache_gib=0.1, lora="adapter")
    engine.attach(policy, vlm.tokenizer, vlm.processor)
    engine.push(0)
    adapter = nn.ParameterList(one for one in policy.parameters() if one.requires_grad)
    for version in range(1, 3):
        disturb(adapter, seed=version, scale=0.02)
        engine.push(version)
        rollout = engine.generate(
            mixed_prompts(vlm), Sampling(max_new_tokens=8), num_generations=3, seeds=range(12)
        )
        assert gap(vlm, rollout, 1.0) < 1e-4
        assert engine.probe().mean < 1e-4
    engine.close()
    encoder = get_peft_model(
        build_vlm(family).model, LoraConfig(target_modules="all-linear", **options)
    )
    with pytest.raises(EngineStartError, match=r"a part of the adapter is outside of the decoder"):
        engine.attach(encoder, vlm.tokenizer, vlm.processor)
