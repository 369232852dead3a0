"""A model is given images and videos so that each is looked at once and nothing else changes.

What is expected comes from the processor and the forward pass of ``transformers`` itself, one row
at a time and without padding.
"""

import functools
import inspect
from dataclasses import replace
from typing import Any

import peft
import pytest
import torch
from torch import Tensor, nn
from torch.testing import assert_close
from transformers import PreTrainedModel

from lrlhf.models import (
    cached_vision_features,
    frozen_reference,
    placeholder_ids,
    ruled_out_ids,
    sequence_logprobs,
)
from lrlhf.models.media_inputs import media_modules, vision_encoder
from tests.conftest import build_language_model, build_tokenizer
from tests.matrices import few_of
from tests.vlms import (
    FAMILY_PARAMS,
    QWEN_FAMILIES,
    VIDEO_FAMILIES,
    Row,
    Vlm,
    batch_of,
    build_vlm,
    never_said,
    plain_logprobs,
    row,
    rows_of,
    sharing_media,
)

NESTED = ("smolvlm", "idefics3")
"""Their pixels come as `[rows, images, ...]`."""


@pytest.fixture(params=FAMILY_PARAMS)
def vlm(request: pytest.FixtureRequest) -> Vlm:
    return build_vlm(request.param)


@torch.no_grad()
def expected(vlm: Vlm, rows: list[Row]) -> list[Tensor]:
    return [plain_logprobs(vlm.model, vlm, entry) for entry in rows]


@torch.no_grad()
def assert_plain(vlm: Vlm, rows: list[Row], *, left: bool = False) -> None:
    batch = batch_of(rows, left=left)
    logprobs = sequence_logprobs(vlm.model, batch)
    assert not logprobs[~batch.response_mask].any()
    for index, plain in enumerate(expected(vlm, rows)):
        found = logprobs[index, batch.response_mask[index]]
        assert_close(found, plain, rtol=0, atol=1e-5)


class Looks:
    """How often the encoder was called, and how many images it saw."""

    def __init__(self, model: PreTrainedModel, monkeypatch: pytest.MonkeyPatch) -> None:
        self.calls = 0
        self.images = 0
        body = model.base_model
        encoder = body.get_image_features

        signature = inspect.signature(encoder)

        @functools.wraps(encoder)
        def counting(*args: Any, **options: Any) -> Any:
            self.calls += 1
            arguments = signature.bind(*args, **options).arguments
            pixels, grids = arguments["pixel_values"], arguments.get("image_grid_thw")
            if grids is not None:
                self.images += len(grids)
            else:
                self.images += pixels.shape[1 if model.config.model_type in NESTED else 0]
            return encoder(*args, **options)

        monkeypatch.setattr(body, "get_image_features", counting)


def test_placeholders_are_known_by_their_kind(vlm: Vlm) -> None:
    family, token = vlm.model.config.model_type, vlm.tokenizer.convert_tokens_to_ids
    images = {"gemma3": "<image_soft_token>"} | dict.fromkeys(QWEN_FAMILIES, "<|image_pad|>")
    known = {"image": token(images.get(family, "<image>"))}
    videos = {"llava_onevision": "<video>"} | dict.fromkeys(QWEN_FAMILIES, "<|video_pad|>")
    if family in videos:
        known["video"] = token(videos[family])
    assert placeholder_ids(vlm.model.config) == known
    assert list(ruled_out_ids(vlm.model.config)) == never_said(vlm)


@pytest.mark.parametrize("left", [False, True])
def test_log_probabilities_are_those_of_the_plain_forward_pass(vlm: Vlm, left: bool) -> None:
    assert_plain(vlm, rows_of(vlm), left=left)


def test_neither_order_nor_batch_mates_nor_what_rows_share_matter(vlm: Vlm) -> None:
    rows = rows_of(vlm)
    assert_plain(vlm, [rows[2], rows[0], rows[1]], left=True)
    assert_plain(vlm, rows[2:3])
    rows = sharing_media(rows_of(vlm))
    order = torch.randperm(len(rows)).tolist()
    assert_plain(vlm, [rows[index] for index in order])


@pytest.mark.parametrize("family", few_of(VIDEO_FAMILIES, ("qwen3_vl", "smolvlm")))
def test_clips_of_several_lengths_stand_in_one_batch(family: str) -> None:
    vlm = build_vlm(family)
    rows = [row(vlm, videos=[0]), row(vlm, videos=[1], question="why?"), row(vlm, [0])]
    rows.append(row(vlm, videos=[2, 4], answer="both"))
    if family != "smolvlm":  # which reads a clip as images, and cannot tell them apart
        rows.append(row(vlm, [1, 0], [1], question="beside?"))
    assert len(rows[0].input_ids) != len(rows[1].input_ids)
    for left in (False, True):
        assert_plain(vlm, rows, left=left)


def weights_of(modules: list[nn.Module]) -> list[nn.Parameter]:
    return [weight for module in modules for weight in module.parameters()]


def gradients(model: PreTrainedModel) -> dict[str, Tensor | None]:
    found = {name: weight.grad for name, weight in model.named_parameters()}
    model.zero_grad()
    return found


def assert_same_gradients(vlm: Vlm, rows: list[Row]) -> None:
    model = vlm.model
    for entry in rows:
        plain_logprobs(model, vlm, entry).sum().backward()
    plain = gradients(model)
    sequence_logprobs(model, batch_of(rows)).sum().backward()
    found = gradients(model)
    seen = {id(weight) for weight in vision_encoder(model).parameters()}
    inside = [name for name, weight in model.named_parameters() if id(weight) in seen]
    moved = [name for name in inside if plain[name] is not None and plain[name].abs().max() > 1e-3]
    assert len(moved) > len(inside) / 2
    for name, gradient in plain.items():
        if gradient is None:
            assert found[name] is None or not found[name].any(), name
        else:
            assert_close(found[name], gradient, rtol=1e-4, atol=1e-6, msg=name)


def test_shared_media_are_encoded_once_and_get_the_gradient_of_every_row(
    vlm: Vlm, monkeypatch: pytest.MonkeyPatch
) -> None:
    vlm.model.double()
    rows = sharing_media(rows_of(vlm)[:3])
    assert_same_gradients(vlm, rows)
    looks = Looks(vlm.model, monkeypatch)
    sequence_logprobs(vlm.model, batch_of(rows)).sum().backward()
    assert (looks.calls, looks.images) == (1, 4)  # one picture, and three in the other row


@torch.no_grad()
def test_what_was_seen_is_remembered_only_inside_the_block(
    vlm: Vlm, monkeypatch: pytest.MonkeyPatch
) -> None:
    rows = rows_of(vlm)[:3]
    batch, looks = batch_of(rows), Looks(vlm.model, monkeypatch)
    with cached_vision_features():
        first = sequence_logprobs(vlm.model, batch)
        assert (looks.calls, looks.images) == (1, 4)
        assert_close(sequence_logprobs(vlm.model, batch), first, rtol=0, atol=0)
        # of a part of the rows, and beside one that is new
        entry = row(vlm, [3])
        sequence_logprobs(vlm.model, batch_of([rows[2], entry, rows[1]]))
        assert (looks.calls, looks.images) == (2, 5)
    found = sequence_logprobs(vlm.model, batch)
    assert (looks.calls, looks.images) == (3, 9)
    assert_close(found, first, rtol=0, atol=0)


def test_two_models_do_not_remember_for_each_other() -> None:
    policy, other = build_vlm("llava"), build_vlm("llava")
    with torch.no_grad():
        for weight in vision_encoder(other.model).parameters():
            weight.mul_(1.5)
    rows = rows_of(policy)
    with cached_vision_features():
        assert_plain(policy, rows)
        assert_plain(other, rows)
        assert_plain(policy, rows)


@torch.no_grad()
def test_a_reference_below_adapters_does_not_remember_what_the_policy_saw(vlm: Vlm) -> None:
    batch = batch_of(rows_of(vlm))
    reference = sequence_logprobs(vlm.model, batch)
    policy = peft.get_peft_model(vlm.model, peft.LoraConfig(target_modules="all-linear"))
    below = frozen_reference(policy)
    for name, weight in policy.named_parameters():
        if "lora_B" in name:
            torch.nn.init.normal_(weight)
    with cached_vision_features():
        adapted = sequence_logprobs(policy, batch)
        assert_close(below.logprobs(batch), reference, rtol=0, atol=1e-5)
        assert_close(sequence_logprobs(policy, batch), adapted, rtol=0, atol=1e-5)
    assert (adapted - reference).abs().max() > 0.1


def test_an_encoder_that_learns_is_called_in_every_pass(
    vlm: Vlm, monkeypatch: pytest.MonkeyPatch
) -> None:
    batch, looks = batch_of(rows_of(vlm)[:3]), Looks(vlm.model, monkeypatch)
    with cached_vision_features():
        for calls in (1, 2):
            sequence_logprobs(vlm.model, batch).sum().backward()
            assert looks.calls == calls


def test_what_was_seen_without_gradients_is_looked_at_again_with_them(vlm: Vlm) -> None:
    batch = batch_of(rows_of(vlm))
    sequence_logprobs(vlm.model, batch).sum().backward()
    alone = gradients(vlm.model)
    with cached_vision_features():
        with torch.no_grad():
            sequence_logprobs(vlm.model, batch)
        sequence_logprobs(vlm.model, batch).sum().backward()
    for name, gradient in gradients(vlm.model).items():
        assert (gradient is None) == (alone[name] is None), name
        if gradient is not None:
            assert_close(gradient, alone[name], msg=name)


def test_a_frozen_encoder_is_called_once_for_several_updates(
    vlm: Vlm, monkeypatch: pytest.MonkeyPatch
) -> None:
    body = vlm.model.base_model
    for weight in [*body.parameters(recurse=False), *weights_of(media_modules(vlm.model))]:
        weight.requires_grad_(False)
    batch, looks = batch_of(rows_of(vlm)[:3]), Looks(vlm.model, monkeypatch)
    with cached_vision_features():
        for _ in range(2):
            sequence_logprobs(vlm.model, batch).sum().backward()
    assert looks.calls == 1


def without_encoder_outputs(model: PreTrainedModel, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Give a model the forward pass of an older one; returns a list that its calls are noted in."""
    body, calls = model.base_model, []
    forward = body.forward
    signature = inspect.signature(forward)
    known = [p for name, p in signature.parameters.items() if name != "mm_encoder_outputs"]
    assert len(known) == len(signature.parameters) - 1

    def older(*args: Any, **arguments: Any) -> Any:
        assert "mm_encoder_outputs" not in arguments
        calls.append("pixel_values" if "pixel_values" in arguments else "text")
        return forward(*args, **arguments)

    older.__signature__ = signature.replace(parameters=known)  # type: ignore[attr-defined]
    monkeypatch.setattr(body, "forward", older)
    return calls


@pytest.mark.parametrize("family", ["llava", "smolvlm"])
def test_a_model_that_takes_no_encoder_outputs_takes_pixels(
    family: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    vlm = build_vlm(family)
    rows = rows_of(vlm)
    plain = expected(vlm, rows)
    calls = without_encoder_outputs(vlm.model, monkeypatch)
    batch = batch_of(rows, left=True)
    with torch.no_grad():
        logprobs = sequence_logprobs(vlm.model, batch)
        sequence_logprobs(vlm.model, batch_of(rows[:1]))
    assert_close(logprobs[batch.response_mask], torch.cat(plain), rtol=0, atol=1e-5)
    assert calls == ["pixel_values", "text"]


@pytest.mark.parametrize("family", few_of(QWEN_FAMILIES, ("qwen2_vl", "qwen3_vl")))
def test_a_text_is_not_moved_by_the_images_of_an_earlier_batch(family: str) -> None:
    vlm = build_vlm(family)
    rows = rows_of(vlm)
    texts = [rows[0], row(vlm, question="and this?"), row(vlm, question="no?")]
    fresh = expected(build_vlm(family), texts)
    with torch.no_grad():
        vlm.model(**rows[2].plain)  # the plain forward pass leaves its offset behind
        sequence_logprobs(vlm.model, batch_of(rows))
        batch = batch_of(texts)
        logprobs = sequence_logprobs(vlm.model, replace(batch, media=None))
    assert_close(logprobs[batch.response_mask], torch.cat(fresh), rtol=0, atol=1e-5)


def test_a_text_model_takes_no_media() -> None:
    model = build_language_model(build_tokenizer())
    vlm = build_vlm("llava")
    batch = batch_of([row(vlm, [0])])
    with pytest.raises(ValueError, match="LlamaForCausalLM is a text model: it takes no images"):
        sequence_logprobs(model, replace(batch, input_ids=batch.input_ids.clamp(max=200)))
    assert media_modules(model) == []
    assert ruled_out_ids(model.config) == ()
    with pytest.raises(ValueError, match="is a text model: it has no vision encoder"):
        vision_encoder(model)
    # rows that show nothing are rows of text
    logprobs = sequence_logprobs(
        model, replace(batch, input_ids=batch.input_ids.clamp(max=200), media=(None,))
    )
    assert logprobs[batch.response_mask].isfinite().all()


def test_the_media_of_another_row_are_refused(vlm: Vlm) -> None:
    _, one, three, *_ = rows_of(vlm)
    assert one.media is not None
    assert three.media is not None
    # as many in all as there should be
    swapped = [replace(one, media=three.media), replace(three, media=one.media)]
    with pytest.raises(ValueError, match="do not belong together"):
        sequence_logprobs(vlm.model, batch_of(swapped))


def test_a_model_without_videos_refuses_a_row_that_has_one() -> None:
    vlm, other = build_vlm("llava"), build_vlm("llava_onevision")
    shown = row(other, videos=[0])
    with pytest.raises(ValueError, match="video"):
        sequence_logprobs(vlm.model, batch_of([shown]))
