"""A model that hears is given sounds, and computes what it computes by itself.

What is expected comes from the processor and the forward pass of ``transformers``, one row at a
time and without padding.
"""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open
from torch import Tensor
from torch.testing import assert_close
from transformers import Qwen2AudioForConditionalGeneration

from lrlhf.models import CausalLM, HeadConfig, RewardNetwork, save_model, sequence_logprobs
from lrlhf.models.backbone import allow_packing, packs
from lrlhf.models.media_inputs import media_modules
from lrlhf.models.scorers import HeadedBackbone
from lrlhf.rollout import Sampling, TransformersEngine
from lrlhf.types import Rollout
from tests.hearing import build_hearing, plain_logprobs, row, rows_of, save_hearing, tone
from tests.vlms import Row, Vlm, batch_of, prompts_of, sharing_media


@pytest.fixture(params=[False, True], ids=["padded", "packed"])
def hearing(request: pytest.FixtureRequest) -> Vlm:
    hearing = build_hearing()
    if request.param:
        assert allow_packing(hearing.model)
    return hearing


@torch.no_grad()
def logprobs_of(hearing: Vlm, rows: list[Row], **options: Any) -> list[Tensor]:
    batch = batch_of(rows, **options)
    logprobs = sequence_logprobs(hearing.model, batch)
    assert not logprobs[~batch.response_mask].any()
    return [found[mask] for found, mask in zip(logprobs, batch.response_mask, strict=True)]


@torch.no_grad()
def assert_plain(hearing: Vlm, rows: list[Row], **options: Any) -> None:
    plain = build_hearing()
    for found, entry in zip(logprobs_of(hearing, rows, **options), rows, strict=True):
        assert_close(found, plain_logprobs(plain, entry), rtol=0, atol=1e-5)


@pytest.mark.parametrize("left", [False, True])
def test_log_probabilities_are_those_of_the_plain_model(hearing: Vlm, left: bool) -> None:
    rows = rows_of(hearing)
    assert [len(entry.plain.get("input_features", ())) for entry in rows] == [0, 1, 3, 1]
    assert len({len(entry.input_ids) for entry in rows}) == 4
    assert_plain(hearing, rows, left=left)
    assert_plain(hearing, rows[::-1], left=left, extra=9)
    assert_plain(hearing, rows[:1], left=left)
    assert_plain(hearing, sharing_media(rows), left=left)


def test_the_shortest_sounds_are_heard_in_a_batch_of_their_own(hearing: Vlm) -> None:
    rows = [row(hearing, [tone(500, 0.1)], answer="a"), row(hearing, [tone(900, 0.1)], answer="bb")]
    assert [entry.media and entry.media.tokens for entry in rows] == [{"audio": 2}] * 2
    assert_plain(hearing, rows)
    assert_plain(hearing, rows[:1])


def test_it_matters_what_is_heard_and_in_which_order(hearing: Vlm) -> None:
    low, high = tone(300, 0.4), tone(3000, 0.4)
    orders = [row(hearing, sounds) for sounds in ([low, high], [high, low], [low, low])]
    found = logprobs_of(hearing, orders)
    assert (found[0] - found[1]).abs().max() > 1e-3
    assert (found[0] - found[2]).abs().max() > 1e-3


def test_gradients_are_those_of_the_plain_model(hearing: Vlm) -> None:
    rows = rows_of(hearing)
    batch = batch_of(rows)
    sequence_logprobs(hearing.model, batch)[batch.response_mask].sum().backward()
    plain = build_hearing()
    torch.cat([plain_logprobs(plain, entry) for entry in rows]).sum().backward()
    expected = dict(plain.model.named_parameters())
    heard = 0
    for name, weight in hearing.model.named_parameters():
        other = expected[name].grad
        if other is None:
            assert weight.grad is None
            continue
        assert weight.grad is not None
        assert_close(weight.grad, other, rtol=1e-4, atol=1e-4 * float(other.abs().max()) + 1e-7)
        heard += "audio_tower" in name and bool(weight.grad.any())
    assert heard > 10


def test_scores_of_a_reward_model_do_not_depend_on_padding_or_company(hearing: Vlm) -> None:
    network = RewardNetwork(HeadedBackbone(hearing.model.base_model, HeadConfig(pooling="mean")))
    rows = rows_of(hearing)
    with torch.no_grad():
        together = network(batch_of(rows))
        alone = torch.cat([network(batch_of([entry], extra=0)) for entry in rows])
    assert_close(together, alone, rtol=0, atol=1e-5)
    assert len(set(together[:, 0].tolist())) == len(rows)


def test_a_model_that_hears_is_loaded_from_its_folder(tmp_path: Path) -> None:
    save_hearing(tmp_path)
    spec = CausalLM(source=str(tmp_path), freeze=["audio_tower"])
    model = spec.load()
    assert isinstance(model, Qwen2AudioForConditionalGeneration)
    assert packs(model)
    processor = spec.load_processor()
    assert processor is not None
    assert type(processor).__name__ == "Qwen2AudioProcessor"
    frozen = {name for name, weight in model.named_parameters() if not weight.requires_grad}
    assert frozen == {name for name, _ in model.named_parameters() if "audio_tower" in name}
    assert [type(part).__name__ for part in media_modules(model)] == [
        "Qwen2AudioEncoder",
        "Qwen2AudioMultiModalProjector",
    ]
    with pytest.raises(ValueError, match="sees no images: it has no vision encoder"):
        CausalLM(source=str(tmp_path), freeze_vision=True).load()


def test_texts_and_sounds_that_do_not_belong_together_are_refused() -> None:
    hearing = build_hearing()
    one, two = row(hearing, [tone(440)]), row(hearing, [tone(440), tone(880)])
    mixed = batch_of([replace(one, media=two.media)])
    with pytest.raises(ValueError, match=r"\[12\] audio placeholders, and .* is for \[24\]"):
        sequence_logprobs(hearing.model, mixed)


def test_checkpoints_have_the_names_of_the_hub(tmp_path: Path) -> None:
    save_model(build_hearing().model, tmp_path / "model")
    save_model(build_hearing().model.base_model, tmp_path / "body")
    # as in Qwen/Qwen2-Audio-7B
    expected = {
        "language_model.model.embed_tokens.weight",
        "language_model.model.layers.1.self_attn.q_proj.bias",
        "audio_tower.layers.1.fc1.weight",
        "multi_modal_projector.linear.weight",
    }
    for part, more in (("model", {"language_model.lm_head.weight"}), ("body", set())):
        with safe_open(tmp_path / part / "model.safetensors", "pt") as file:
            names = set(file.keys())
        assert expected | more <= names
        starts = {".".join(name.split(".")[:3]) for name in names if name.startswith("language")}
        assert starts - {"language_model.lm_head.weight"} == {
            "language_model.model.embed_tokens",
            "language_model.model.layers",
            "language_model.model.norm",
        }
    again = CausalLM(source=str(tmp_path / "model")).load()
    for name, weight in build_hearing().model.state_dict().items():
        assert torch.equal(again.state_dict()[name], weight)


# ---- generation


def drawn(hearing: Vlm, rows: list[Row], num_generations: int) -> Rollout:
    engine = TransformersEngine()
    engine.attach(hearing.model, hearing.tokenizer, hearing.processor)
    return engine.generate(
        prompts_of(rows),
        Sampling(max_new_tokens=5),
        num_generations=num_generations,
        seeds=list(range(len(rows) * num_generations)),
    )


@pytest.mark.parametrize("num_generations", [1, 3])
def test_log_probabilities_of_drawn_tokens_are_those_of_the_plain_model(
    hearing: Vlm, num_generations: int
) -> None:
    rows = [
        row(hearing, answer=""),
        row(hearing, [tone(440)], question="and?", answer=""),
        row(hearing, [tone(300, 0.2), tone(700, 0.9)], answer=""),
    ]
    rollout = drawn(hearing, rows, num_generations)
    with torch.no_grad():
        trained = sequence_logprobs(hearing.model, rollout)
    assert_close(rollout.sampling_logprobs, trained, rtol=0, atol=1e-5)
    plain = build_hearing()
    for index, (ids, mask) in enumerate(zip(rollout.input_ids, rollout.response_mask, strict=True)):
        prompt, response = rows[index // num_generations], ids[mask].tolist()
        arguments = dict(prompt.plain)
        arguments["input_ids"] = torch.tensor([[*prompt.input_ids, *response]])
        arguments["attention_mask"] = torch.ones_like(arguments["input_ids"])
        answered = Row((*prompt.input_ids, *response), len(response), prompt.media, arguments)
        with torch.no_grad():
            expected = plain_logprobs(plain, answered)
        assert_close(rollout.sampling_logprobs[index, mask], expected, rtol=0, atol=1e-5)
