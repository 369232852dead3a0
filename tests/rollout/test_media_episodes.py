"""Episodes that show images: rows are what processor and model make of the whole conversation.

What is expected comes from one call of the model's own processor on the rendered conversation with
all its images, and the model's own forward pass.
"""

import base64
import copy
import io
import json
import re
from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from openai import BadRequestError, OpenAI
from PIL import Image, ImageDraw
from torch import Tensor
from torch.nn.functional import pad

from lrlhf.datamodules.rows.chat import ChatFormat
from lrlhf.datamodules.rows.collate import collate_prompts
from lrlhf.environments import Episodes, TextEnvironment, agents
from lrlhf.environments.session import TurnPrompt
from lrlhf.guard.dump import StepBundle, read_bundle, write_bundle
from lrlhf.media import MediaOptions, MediaProcessor, read_image, refs
from lrlhf.media.decode import MediaError
from lrlhf.media.parts import read_parts, without_images
from lrlhf.models import allow_packing, sequence_logprobs
from lrlhf.models.packed.packing import compact, find_trees
from lrlhf.modules.policy.generate import PromptReader
from lrlhf.modules.policy.load_policy import LoadedPolicy
from lrlhf.rewards import Rewards
from lrlhf.rollout import Collector, RolloutQueue, Sampling, TransformersEngine, plan_micro_batches
from lrlhf.rollout.engines.engine import RolloutEngine
from lrlhf.rollout.episodes.episode_engine import EpisodeEngine
from lrlhf.rollout.responses import left_padded
from lrlhf.rollout.storage import load_rollout, save_rollout
from lrlhf.types import Media, PromptBatch, Rollout
from tests.matrices import few_of
from tests.models.test_packing import assert_same_gradients, gradients
from tests.rollout.scripted_engine import ScriptedEngine
from tests.rollout.test_forks import Agent, contexts
from tests.vlms import Vlm, build_vlm, never_said, picture

ALONE = (
    "qwen2_vl",
    "qwen2_5_vl",
    "idefics3",
    "qwen3_vl",
    "llava",
    "smolvlm",
    "llava_onevision",
    "gemma3",
)
"""Families that encode an image alone as beside others."""
LONG = Sampling(max_new_tokens=400)


@pytest.fixture(params=few_of(ALONE, ("qwen2_vl", "qwen2_5_vl", "idefics3")))
def vlm(request: pytest.FixtureRequest) -> Vlm:
    return build_vlm(request.param)


def prompts_of(vlm: Vlm, *shown: Sequence[int]) -> PromptBatch:
    """A question about the pictures of some seeds each, as the data module reads it."""
    reader = PromptReader(LoadedPolicy(*vlm))
    rows = [
        {"prompt": [{"role": "user", "content": "look"}], "images": [picture(s) for s in seeds]}
        for seeds in shown
    ]
    return collate_prompts([reader.read(row) for row in rows], int(vlm.tokenizer.pad_token_id))


def play(
    vlm: Vlm,
    engine: RolloutEngine,
    prompts: PromptBatch,
    *,
    sampling: Sampling = LONG,
    num_generations: int = 1,
    media: MediaOptions | None = None,
    **options: Any,
) -> Rollout:
    episodes = EpisodeEngine(engine, Episodes(**options))
    episodes.attach(*vlm)
    episodes.use_chat(ChatFormat(vlm.tokenizer), media or MediaOptions())
    seeds = range(len(prompts) * num_generations)
    return episodes.generate(prompts, sampling, num_generations=num_generations, seeds=seeds)


def data_url(image: Image.Image) -> str:
    file = io.BytesIO()
    image.save(file, "PNG")
    return f"data:image/png;base64,{base64.b64encode(file.getvalue()).decode()}"


class Album(TextEnvironment):
    """Shows the pictures 10, 11 and 12, and twice 13, in all forms."""

    def reset(self, images: list[Image.Image]) -> Any:
        self.steps = 0
        self.told = [image.size for image in images]
        return ["first", picture(10)]

    def step(self, action: str) -> Any:
        self.steps += 1
        return [
            None,
            picture(11),
            [{"type": "text", "text": "<image> two:"}, {"type": "image", "image": array(12)}],
            [
                {"type": "image_url", "image_url": {"url": data_url(picture(13))}},
                "and",
                picture(13),
            ],
            "only text",
            None,
        ][self.steps]


def array(seed: int) -> np.ndarray:
    return np.asarray(picture(seed))


SHOWN = ([10], [11], [12], [13, 13], [])


def conversation(prompt: Sequence[int], turns: int, say: str) -> tuple[list[Any], list[int]]:
    """The messages of an episode with `Album`, and the seeds of its pictures."""
    image: dict[str, Any] = {"type": "image"}

    def text(value: str) -> dict[str, Any]:
        return {"type": "text", "text": value}

    messages: list[Any] = [
        {"role": "user", "content": [*[image] * len(prompt), text("look"), text("first"), image]}
    ]
    observed = [[image], [text("<image> two:"), image], [image, text("and"), image]]
    for turn in range(turns):
        messages.append({"role": "assistant", "content": say})
        if turn < turns - 1:
            content = observed[turn] if turn < 3 else "only text"
            messages.append({"role": "user", "content": content})
    return messages, [*prompt, *(seed for seeds in SHOWN[:turns] for seed in seeds)]


def plain(vlm: Vlm, ids: Sequence[int], seeds: Sequence[int]) -> Tensor:
    """Log-probabilities of a row's tokens `[L]`, by the model itself with all pictures at once."""
    marks = vlm.processor.markers["image"] * len(seeds)
    shown = dict(
        vlm.processor.processor(text=[marks or "a"], return_tensors="pt", **images_of(seeds))
    )
    row = torch.tensor([list(ids)])
    inputs = {key: value for key, value in shown.items() if "ids" not in key and "mask" not in key}
    if "pixel_attention_mask" in shown:
        inputs["pixel_attention_mask"] = shown["pixel_attention_mask"]
    for name in {"mm_token_type_ids", "token_type_ids"} & shown.keys():
        inputs[name] = (row == vlm.processor.placeholders["image"]).long()
    with torch.no_grad():
        logits = vlm.model(input_ids=row, attention_mask=torch.ones_like(row), **inputs).logits[0]
    logits[:, never_said(vlm)] = -torch.inf
    logprobs = logits.log_softmax(-1)[:-1].gather(1, row[0, 1:, None])[:, 0]
    return torch.cat([torch.zeros(1), logprobs])


def images_of(seeds: Sequence[int]) -> dict[str, Any]:
    return {"images": [picture(seed) for seed in seeds]} if seeds else {}


def rows_of(rollout: Rollout) -> list[list[int]]:
    pairs = zip(rollout.input_ids, rollout.attention_mask, strict=True)
    return [ids[mask].tolist() for ids, mask in pairs]


def test_a_row_is_what_the_processor_makes_of_the_conversation_at_once(vlm: Vlm) -> None:
    engine = ScriptedEngine(lambda _: "ok<|im_end|>")
    # of different numbers of pictures, and none
    prompts = [[0], [], [1, 2]]
    rollout = play(vlm, engine, prompts_of(vlm, *prompts), environment=Album, max_turns=5)
    for row, seeds in enumerate(prompts):
        messages, shown = conversation(seeds, 5, "ok")
        text = ChatFormat(vlm.tokenizer).render(messages, {}, prompt=False)
        processor = vlm.processor._reader_of(text)
        expected = processor(text=[text], return_tensors="pt", **images_of(shown))["input_ids"][0]
        ids = rows_of(rollout)[row]
        assert ids == expected.tolist()[: len(ids)]
        assert expected.tolist()[len(ids) :] in ([], vlm.tokenizer("\n")["input_ids"])
        assert rollout.episodes is not None
        assert rollout.episodes[row].environment.told == [picture(seed).size for seed in seeds]
    assert_plain(vlm, rollout, [conversation(seeds, 5, "")[1] for seeds in prompts])


def assert_plain(vlm: Vlm, rollout: Rollout, seeds: Sequence[Sequence[int]]) -> None:
    """Compare the trainer's log-probabilities, padded and packed, with the model's own."""
    for packed in (False, True):
        if packed and not allow_packing(vlm.model):
            pytest.skip("not packed")
        with torch.no_grad():
            trained = sequence_logprobs(vlm.model, rollout)
        for row, shown in enumerate(seeds):
            expected, mask = plain(vlm, rows_of(rollout)[row], shown), rollout.response_mask[row]
            torch.testing.assert_close(
                trained[row][mask], expected[mask[: len(expected)]], rtol=0, atol=1e-5
            )


def test_turns_are_sampled_with_the_policys_probabilities(vlm: Vlm) -> None:
    sampling = Sampling(max_new_tokens=300)
    prompts = prompts_of(vlm, [0], [1, 2])
    rollout = play(
        vlm,
        TransformersEngine(),
        prompts,
        sampling=sampling,
        num_generations=2,
        environment=Album,
        max_turns=4,
        max_turn_tokens=3,
    )
    shown = [[*seeds, 10, 11, 12, 13, 13] for seeds in ([0], [0], [1, 2], [1, 2])]
    assert [one.finish_reason for one in rollout.episodes or ()] == ["max_turns"] * 4
    assert_plain(vlm, rollout, shown)
    with torch.no_grad():
        trained = sequence_logprobs(vlm.model, rollout)
    torch.testing.assert_close(
        rollout.sampling_logprobs[rollout.response_mask],
        trained[rollout.response_mask],
        rtol=0,
        atol=1e-5,
    )


def request(*contents: Any) -> TurnPrompt:
    """Messages of user and policy in turn; a number is the picture of that seed."""
    messages: list[Any] = []
    for place, content in enumerate(contents):
        parts = [
            {"type": "text", "text": part}
            if isinstance(part, str)
            else {"type": "image", "image": picture(part)}
            for part in ([content] if isinstance(content, str) else content)
        ]
        role = ("user", "assistant")[place % 2]
        messages.append({"role": role, "content": content if isinstance(content, str) else parts})
    return TurnPrompt(tuple(messages))


REQUESTS: list[tuple[Any, ...]] = [
    ([0, "one"],),
    ([0, "one"], "w", [1, "two"]),  # goes on
    ([0, "one"], "w", [5, "two"]),  # another picture of the same size
    ([4, "one"], "w", [1, "two"]),
    ([0, "one"], "rewritten", [1, 2, "three"]),
    ("nothing",),
    ([0, "one"], "w", [1, "two"], "w", [3]),
]


def branching(vlm: Vlm, monkeypatch: pytest.MonkeyPatch, *, num_generations: int = 1) -> Rollout:
    session = "lrlhf.rollout.episodes.episode_engine.Session"
    scripts = iter([REQUESTS, [*REQUESTS[:2], *REQUESTS[4:]], REQUESTS[2:4]])

    def agent(*_: Any, **__: Any) -> Agent:
        return Agent(*(request(*contents) for contents in next(scripts)))

    monkeypatch.setattr(session, agent)
    return play(
        vlm,
        ScriptedEngine(lambda _: "w<|im_end|>"),
        prompts_of(vlm, []),
        num_generations=num_generations,
        environment=Album,
        history="template",
        sampling=Sampling(max_new_tokens=2000),
    )


@pytest.mark.parametrize("sent", [4, 0, None])
def test_an_agents_first_turn_sees_what_the_agent_sends(
    vlm: Vlm, monkeypatch: pytest.MonkeyPatch, sent: int | None
) -> None:
    first = request("look") if sent is None else request([sent, "look"])
    session = "lrlhf.rollout.episodes.episode_engine.Session"
    monkeypatch.setattr(session, lambda *_, **__: Agent(first))
    # the data show picture 0: another one of the same size has the same tokens
    rollout = play(
        vlm,
        TransformersEngine(),
        prompts_of(vlm, [0]),
        sampling=Sampling(max_new_tokens=12),
        environment=Album,
        history="template",
    )
    assert_plain(vlm, rollout, [[] if sent is None else [sent]])
    with torch.no_grad():
        trained = sequence_logprobs(vlm.model, rollout)
    mask = rollout.response_mask
    torch.testing.assert_close(rollout.sampling_logprobs[mask], trained[mask], rtol=0, atol=1e-5)


def test_an_environment_may_draw_on_its_images(vlm: Vlm) -> None:
    class Draws(Shows):
        def reset(self, images: list[Image.Image]) -> None:
            images[0].paste((0, 0, 0), (0, 0, 40, 40))

    prompts = prompts_of(vlm, [0])
    engine = ScriptedEngine(lambda _: "ok<|im_end|>")
    rollout = play(vlm, engine, prompts, environment=Draws)
    (episode,) = rollout.episodes or ()
    assert episode.images[0] == picture(0)


def test_prompts_that_begin_with_an_image_are_padded_with_something_else() -> None:
    image = 7
    ids, mask = left_padded([torch.tensor([image, image, 3, 4]), torch.tensor([image, 5])])
    assert int((ids == image).sum()) == 3
    assert mask.sum(dim=1).tolist() == [4, 2]


def test_names_of_joined_media_are_kind_by_kind() -> None:
    first = Media(tensors={}, tokens={}, images=("a",), videos=("f",), names=("image a", "film f"))
    second = Media(tensors={}, tokens={}, images=("b",), names=("image b",))
    assert Media.joined([first, second], []).names == ("image a", "image b", "film f")


def test_each_turn_follows_what_its_prompt_shows(vlm: Vlm, monkeypatch: pytest.MonkeyPatch) -> None:
    rollout = branching(vlm, monkeypatch)
    assert rollout.forks is not None
    (episode,) = rollout.episodes or ()
    assert (episode.finish_reason, episode.failure) == ("stop", "")
    turns = list(zip(*[iter(contexts(rollout, 0))] * 2, strict=True))  # "w" and its end
    assert len(turns) == len(REQUESTS)
    with torch.no_grad():
        padded = sequence_logprobs(vlm.model, rollout)[rollout.response_mask].view(-1, 2)
        assert allow_packing(vlm.model)
        packed = sequence_logprobs(vlm.model, rollout)[rollout.response_mask].view(-1, 2)
    for contents, ((before, first), (_, second)), *trained in zip(
        REQUESTS, turns, padded, packed, strict=True
    ):
        seeds = [part for own in contents for part in own if isinstance(part, int)]
        messages = [
            {
                **message,
                "content": [
                    {"type": part["type"], **({"text": part["text"]} if "text" in part else {})}
                    for part in message["content"]
                ]
                if isinstance(message["content"], list)
                else message["content"],
            }
            for message in request(*contents).messages
        ]
        text = ChatFormat(vlm.tokenizer).render(messages, {}, prompt=True)
        expected = vlm.processor.processor(text=[text], **images_of(seeds))["input_ids"][0]
        assert before == list(expected)
        own = plain(vlm, [*before, *first, *second], seeds)[-2:]
        for values in trained:
            torch.testing.assert_close(values, own, rtol=0, atol=1e-5)


def test_padding_order_packing_and_micro_batches_change_no_gradient(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    vlm = build_vlm("qwen2_vl")
    rollout = branching(vlm, monkeypatch, num_generations=3)
    assert len(rollout) == 3

    def logprobs(*parts: Rollout) -> Tensor:
        values = [sequence_logprobs(vlm.model, part)[part.response_mask] for part in parts]
        return torch.cat(values)

    rows = [rollout.select(torch.tensor([row])) for row in range(3)]
    expected = gradients(vlm.model, lambda: logprobs(*rows))
    names = ("input_ids", "forks", "attention_mask", "response_mask")
    padded = replace(rollout, **{name: pad(getattr(rollout, name), (0, 3)) for name in names})
    order = torch.tensor([2, 0, 1])

    def reordered() -> Tensor:
        batch = rollout.select(order)
        values = sequence_logprobs(vlm.model, batch)
        return torch.cat([values[row][batch.response_mask[row]] for row in order.argsort()])

    for packed in (False, True):
        if packed:
            assert allow_packing(vlm.model)
        for compute in (lambda: logprobs(padded), reordered, lambda: logprobs(*rows)):
            assert_same_gradients(gradients(vlm.model, compute), expected, atol=2e-5)
    # what the rows begin with is computed once, pictures included
    (tree,) = find_trees(
        compact(rollout.input_ids, rollout.attention_mask, rollout.forks),
        rollout.group_ids,
        rollout.media,
        vlm.processor.placeholders,
    )
    assert len(tree.rows) == 3
    _, marks = vlm.processor.encode(vlm.processor.written["image"], [picture(0)], [])
    shared = rollout.input_ids[0, : tree.prefix] == vlm.processor.placeholders["image"]
    assert int(shared.sum()) == marks.tokens["image"]
    assert tree.tokens < int(rollout.attention_mask.sum())
    options = {"max_tokens": None, "packed": True, "placeholders": vlm.processor.placeholders}
    (micro,) = plan_micro_batches(rollout, **options)
    assert micro.computed == tree.tokens


class Shows(TextEnvironment):
    """Shows what a test wants behind the first turn."""

    def __init__(self, value: Any = None) -> None:
        self.value = value

    def step(self, action: str) -> Any:
        value, self.value = self.value, None
        return value


class Twice(Shows):
    """Shows it behind the second turn too."""

    def step(self, action: str) -> Any:
        self.steps = vars(self).get("steps", 0) + 1
        return self.value if self.steps < 3 else None


def film() -> dict[str, Any]:
    return {"type": "video", "video": [picture(0)]}


SMALL = Image.new("1", (9000, 9000))  # 81 million pixels in few bytes
UNUSABLE: list[tuple[Any, str]] = [
    ([{"type": "image", "image": b"no picture"}], "broken image"),
    ([{"type": "image_url", "image_url": {"url": "https://example.org/a.png"}}], "remote file"),
    ([{"type": "image", "path": "/etc/hostname"}], "there is no media.root"),
    ([{"type": "image", "path": "file:///etc/hostname"}], "there is no media.root"),
    ([film()], "episodes show images, and no videos"),
    ([{"type": "image"}], "a part of type 'image' has no image"),
    ([SMALL, SMALL], "is the most that one message shows"),
    ({"type": "image", "image": {"bytes": "/etc/hostname"}}, "file outside the data"),
    ({"type": "image", "image": {"array": [1], "path": "/etc/hostname"}}, "wrong type"),
    ([picture(0), 3], "Image that JSON has no form for|Image.*, which JSON has no form for"),
    ({"type": "image", "image": np.zeros((4, 4))}, "an image is a uint8 array"),
    ([picture(0), {"type": "image", "image": None}], "a part of type 'image' has no image"),
    ({"type": "image", "image": None}, "a part of type 'image' has no image"),
    ([picture(0), {"type": "text", "text": "x", "image": "a.png"}], "'text' has an image too"),
    (
        {"type": "image", "source": {"type": "url", "url": "https://example.org/a.png"}},
        "remote file",
    ),
]


@pytest.mark.parametrize(("value", "problem"), UNUSABLE)
def test_what_cannot_be_shown_fails_its_episode_by_name(value: Any, problem: str) -> None:
    vlm = build_vlm("qwen2_vl")
    engine = ScriptedEngine(lambda _: "ok<|im_end|>")
    rollout = play(vlm, engine, prompts_of(vlm, [0]), environment=Shows, options={"value": value})
    (episode,) = rollout.episodes or ()
    assert episode.finish_reason == "failed"
    assert re.search(problem, episode.failure), episode.failure


def test_images_are_counted_as_large_as_they_are_made(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Image, "MAX_IMAGE_PIXELS", 15_000)
    part = {"type": "image", "image": picture(0), "min_pixels": 10_000}
    assert len(read_parts([part], MediaOptions())) == 1
    with pytest.raises(MediaError, match="that one message shows"):
        read_parts([part, part], MediaOptions())


def sent(*messages: Sequence[Any]) -> dict[str, Any]:
    return {"messages": [{"role": "user", "content": [*parts]} for parts in messages]}


def images_sent(body: Any, media: MediaOptions) -> list[Image.Image]:
    request = agents.read_chat_request(body, media)
    return [*without_images(request.prompt.messages)[1]]


def url_part(image: Image.Image) -> dict[str, Any]:
    return {"type": "image_url", "image_url": {"url": data_url(image)}}


def test_a_file_that_an_agent_overwrites_is_read_again(tmp_path: Path) -> None:
    media = MediaOptions(root=str(tmp_path))
    body = sent([{"type": "image_url", "image_url": {"url": "shot.png"}}])
    shown = []
    for seed in range(3):
        picture(seed).save(tmp_path / "shot.png")
        shown += images_sent(body, media)
    assert all(map(np.array_equal, shown, map(picture, range(3))))


def test_the_limits_of_a_request_depend_on_nothing_that_was_read_before(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(Image, "MAX_IMAGE_PIXELS", 3000)
    one, other = (url_part(Image.new("RGB", (40, 50), shade)) for shade in ("red", "blue"))
    held = []
    for _ in range(2):
        with pytest.raises(agents.RefusedError, match="that one message shows"):
            agents.read_chat_request(sent([one, other]), MediaOptions())
        held += images_sent(sent([one]), MediaOptions())
    assert held[0] is held[1]
    # distinct images of all messages, as they are scaled
    monkeypatch.setattr(agents, "_MAX_PIXELS", 3000)
    assert len(images_sent(sent([one], [one]), MediaOptions())) == 2
    assert len(images_sent(sent([one], [other]), MediaOptions(max_pixels=1400))) == 2
    with pytest.raises(agents.RefusedError, match="have 4000 pixels, and 3000 is the most of one"):
        agents.read_chat_request(sent([one], [other]), MediaOptions())


def test_parts_are_read_as_other_programs_write_them() -> None:
    content = data_url(picture(1)).partition(",")[2]
    source = {"type": "base64", "media_type": "image/png", "data": content}
    image, text, original = read_parts(
        [
            {"type": "image", "source": source},
            {"type": "text", "text": "half \ud800"},
            {"type": "input_image", "image_url": data_url(picture(2)), "detail": "original"},
        ],
        MediaOptions(),
    )
    assert np.array_equal(image["image"], picture(1))
    assert np.array_equal(original["image"], picture(2))
    assert text["text"] == "half ?"


def test_a_template_of_the_newest_image_goes_with_the_history_of_tokens() -> None:
    own = build_vlm("qwen2_vl")
    tokenizer = copy.deepcopy(own.tokenizer)
    mark = "{% if part.type == 'image' %}"
    newest = mark.replace("' %}", "' and loop.last and m is sameas messages[-1] %}")
    # else branches of parts without text
    template = str(tokenizer.chat_template).replace(mark, newest)
    tokenizer.chat_template = template.replace("part.text", "part.text or ''")
    vlm = own._replace(tokenizer=tokenizer)

    def ends(**options: Any) -> list[tuple[str | None, str]]:
        engine = ScriptedEngine(lambda _: "ok<|im_end|>")
        value = [picture(1)]
        rollout = play(
            vlm, engine, prompts_of(own, []), environment=Twice, options={"value": value}, **options
        )
        if not options:
            assert_plain(own, rollout, [[1, 1]])
        return [(each.finish_reason, each.failure) for each in rollout.episodes or ()]

    assert ends() == [("done", "")]
    ((reason, failure),) = ends(history="template")
    assert reason == "failed"
    assert "1 marks of media for 2 images" in failure
    assert "goes with episodes.history: tokens" in failure


def test_files_are_shown_below_the_root_alone(tmp_path: Path) -> None:
    vlm = build_vlm("qwen2_vl")
    (tmp_path / "root").mkdir()
    picture(11).save(tmp_path / "root" / "in.png")
    picture(12).save(tmp_path / "out.png")
    media = MediaOptions(root=str(tmp_path / "root"), max_pixels=900)
    reasons = []
    for name in ("in.png", "../out.png", str(tmp_path / "out.png")):
        value = {"type": "image", "image": name}
        rollout = play(
            vlm,
            ScriptedEngine(lambda _: "ok<|im_end|>"),
            prompts_of(vlm, []),
            media=media,
            environment=Shows,
            options={"value": value},
        )
        (episode,) = rollout.episodes or ()
        reasons.append((episode.finish_reason, "leads to" in episode.failure))
        if name == "in.png":
            (shown,) = episode.images
            assert shown.width * shown.height <= 900
    assert reasons == [("done", False), ("failed", True), ("failed", True)]


def test_a_processor_that_writes_letters_around_images_shows_those_of_the_data_only() -> None:
    own = build_vlm("gemma3")
    assert own.processor.encodes_images_alone
    processor = copy.deepcopy(own.processor.processor)
    # as in Gemma's vocabulary: two line ends around an image may become one token with a third
    vars(processor)["tokenizer"].add_tokens(["\n\n\n"])
    vlm = own._replace(processor=MediaProcessor.of(processor, own.model.config))
    assert not vlm.processor.encodes_images_alone
    engine = ScriptedEngine(lambda _: "ok<|im_end|>")
    values = (picture(1), "text")
    image, text = (
        play(vlm, engine, prompts_of(vlm, [0]), environment=Shows, options={"value": value})
        for value in values
    )
    (episode,) = image.episodes or ()
    assert "encodes an image by itself otherwise than beside others" in episode.failure
    assert [one.finish_reason for one in text.episodes or ()] == ["done"]


def test_a_text_model_is_shown_no_image_and_plain_text_none_behind_it() -> None:
    vlm = build_vlm("qwen2_vl")
    engine = ScriptedEngine(lambda _: "ok<|im_end|>")
    options: dict[str, Any] = {"environment": Shows, "options": {"value": [picture(0)]}}
    blind = play(Vlm(vlm.model, vlm.tokenizer, None), engine, prompts_of(vlm, []), **options)  # type: ignore[arg-type]
    plain_text = replace(prompts_of(vlm, []), prompts=("look",))
    behind = play(vlm, engine, plain_text, **options)
    failures = [episode.failure for one in (blind, behind) for episode in one.episodes or ()]
    assert failures[0] == "step() returned a list, not text or None"
    assert "behind a prompt that is plain text" in failures[1]


def test_rewards_get_all_images_in_order_and_records_name_them() -> None:
    vlm = build_vlm("qwen2_vl")
    seen: list[Any] = []

    def judge(images: Any, prompts: Any, completions: Any, **_: Any) -> list[float]:
        seen.extend(zip(images, prompts, completions, strict=True))
        return [1.0] * len(images)

    episodes = EpisodeEngine(
        ScriptedEngine(lambda _: "ok<|im_end|>"), Episodes(environment=Album, max_turns=4)
    )
    episodes.attach(*vlm)
    episodes.use_chat(ChatFormat(vlm.tokenizer))
    collector = Collector(episodes, Rewards([judge]), vlm.tokenizer, shows_media=True)
    collected = collector.collect(
        prompts_of(vlm, [0], [1, 2]), LONG, seeds=range(4), step=0, phase=lambda _: nullcontext()
    )
    expected = [[*seeds, 10, 11, 12, 13, 13] for seeds in ([0], [0], [1, 2], [1, 2])]
    for (images, prompt, completion), seeds, record in zip(
        seen, expected, collected.records, strict=True
    ):
        assert [np.array_equal(one, picture(seed)) for one, seed in zip(images, seeds, strict=True)]
        parts = [
            part
            for turn in (*prompt, *completion)
            if isinstance(turn["content"], list)
            for part in turn["content"]
        ]
        assert parts.count({"type": "image"}) == len(seeds)
        assert json.loads(json.dumps(record)) == record
        assert len(record["media"]) == len(seeds)


def shown_in(*messages: Any) -> list[Any]:
    contents = [each["content"] for each in messages if isinstance(each["content"], list)]
    return [part for content in contents for part in content if part["type"] == "image"]


def test_what_a_reward_does_to_its_images_is_seen_nowhere_else() -> None:
    vlm = build_vlm("qwen2_vl")
    sizes: list[Any] = []
    held: list[Any] = []

    def draws(images: Any, episodes: Any, prompts: Any, completions: Any) -> list[float]:
        for own, prompt, completion in zip(images, prompts, completions, strict=True):
            waiting = iter(own)
            for part in shown_in(*prompt, *completion):
                part["image"] = next(waiting)  # as an API takes them
        for own in (*images, *(one.images for one in episodes)):
            for image in own:
                image.info["drawn"] = True
                image.putpixel((0, 0), (1, 2, 3))
                ImageDraw.Draw(image).line((0, 0, 9, 9), fill="red")
                image.thumbnail((8, 8))
        return [1.0] * len(images)

    def looks(images: Any, episodes: Any, prompts: Any, completions: Any) -> list[float]:
        everything = [own for one in (*images, *(e.images for e in episodes)) for own in one]
        sizes.extend(own.size for own in everything)
        held.extend(own.im for own in everything)
        for prompt, completion in zip(prompts, completions, strict=True):
            assert shown_in(*prompt, *completion) == [{"type": "image"}] * 3
        return [1.0] * len(images)

    episodes = EpisodeEngine(
        ScriptedEngine(lambda _: "ok<|im_end|>"), Episodes(environment=Album, max_turns=2)
    )
    episodes.attach(*vlm)
    episodes.use_chat(ChatFormat(vlm.tokenizer))
    collector = Collector(episodes, Rewards([draws, looks]), vlm.tokenizer, shows_media=True)
    collected = collector.collect(
        prompts_of(vlm, [0]), LONG, seeds=range(2), step=0, phase=lambda _: nullcontext()
    )
    shown = [picture(seed) for seed in (0, 10, 11)]
    assert sizes == [image.size for image in shown] * 4
    pixels = set[int]()
    for one in collected.rollout.episodes or ():
        assert all(map(np.array_equal, one.images, shown))
        assert shown_in(*one.prompt, *one.messages) == [{"type": "image"}] * 3
        assert not any(image.info for image in one.images)
        pixels |= {id(image.im) for image in one.images}
    assert {id(each) for each in held} == pixels  # which are not copied to be looked at
    for record, media in zip(collected.records, collected.rollout.media or (), strict=True):
        assert media is not None
        assert record["media"] == list(media.names)
        assert shown_in(*record["messages"], *record["episode"]) == [{"type": "image"}] * 3


def test_stored_rollouts_and_checkpoints_hold_what_episodes_show(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    vlm = build_vlm("qwen2_vl")
    rollout = replace(branching(vlm, monkeypatch, num_generations=3), episodes=None)
    with torch.no_grad():
        expected = sequence_logprobs(vlm.model, rollout)
    path = tmp_path / "rollout.safetensors"
    save_rollout(path, rollout, torch.zeros(3), [{}] * 3)
    bundle = StepBundle(stage="policy", batches={"rows": rollout}, seeds=[], context={})
    write_bundle(tmp_path, 0, bundle)
    for again in (load_rollout(path).rollout, read_bundle(tmp_path, 0).batches["rows"]):
        with torch.no_grad():
            assert torch.equal(sequence_logprobs(vlm.model, again), expected)
        first = [entry.pieces[0] for entry in again.media]
        assert first[0] is first[1]  # an image is stored once


@pytest.mark.parametrize("like", ["the hub", "two files of one name"])
def test_images_of_responses_generated_ahead_are_in_a_checkpoint(like: str) -> None:
    vlm = build_vlm("qwen2_vl")
    reader = PromptReader(LoadedPolicy(*vlm))
    rows: list[Any] = []
    for shown in ([0], [1], []):
        own = []
        for seed in shown:
            file = io.BytesIO()
            picture(seed).save(file, "PNG")
            own.append({"bytes": file.getvalue(), "path": "image.png"})
        rows.append(reader.read({"prompt": [{"role": "user", "content": "look"}], "images": own}))
    prompts = collate_prompts(rows, int(vlm.tokenizer.pad_token_id))
    first, second, _ = prompts.media or ()
    assert first is not None
    assert second is not None
    assert first.names != second.names  # what stands beside content is no name
    if like != "the hub":
        named = (replace(first, names=("a.png",)), replace(second, names=("a.png",)), None)
        prompts = replace(prompts, media=named)
    shows = Episodes(environment=Album)
    if like != "the hub":  # whose prompts stay as the data have them
        shows = Episodes(environment=Shows, options={"value": [picture(7)]})
    engine = EpisodeEngine(ScriptedEngine(lambda _: "ok<|im_end|>"), shows)
    engine.attach(*vlm)
    engine.use_chat(ChatFormat(vlm.tokenizer))

    def queue() -> RolloutQueue:
        return RolloutQueue(engine, 1)

    ahead = queue()
    ahead.start(1, prompts, LONG, num_generations=2, seeds=range(6))
    file = io.BytesIO()
    torch.save(ahead.state_dict(), file)
    file.seek(0)
    resumed = queue()
    resumed.load_state_dict(torch.load(file, weights_only=True), torch.device("cpu"))
    before, after = (
        each.take(1, prompts, num_generations=2, any_rank=bool) for each in (ahead, resumed)
    )
    assert before is not None
    assert after is not None
    with torch.no_grad():
        values = [sequence_logprobs(vlm.model, each) for each in (before, after)]
    assert torch.equal(*values)
    for one, other in zip(before.media or (), after.media or (), strict=True):
        assert one is not None
        assert other is not None
        # logs show them
        assert all(map(np.array_equal, one.images, other.images))
        assert [*map(len, (other.images, other.names))] == [len(one.names)] * 2
    for one, other in zip(before.episodes or (), after.episodes or (), strict=True):
        assert len(one.images) >= (5 if like == "the hub" else 1)
        assert all(map(np.array_equal, one.images, other.images))


class Noting(ScriptedEngine):
    """Notes the prompts that it is given."""

    def __init__(self, script: Any) -> None:
        super().__init__(script)
        self.prompts: list[PromptBatch] = []

    def generate(self, prompts: PromptBatch, *arguments: Any, **options: Any) -> Rollout:
        self.prompts.append(prompts)
        return super().generate(prompts, *arguments, **options)


def test_engines_that_count_for_themselves_get_one_token_for_each_image(
    vlm: Vlm, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = Noting(lambda _: "w<|im_end|>")
    monkeypatch.setattr(f"{__name__}.ScriptedEngine", lambda _: engine)
    branching(vlm, monkeypatch)
    assert len(engine.prompts) == len(REQUESTS)
    for prompts, contents in zip(engine.prompts, REQUESTS, strict=True):
        messages = without_images(request(*contents).messages)[0]
        text = ChatFormat(vlm.tokenizer).render(messages, {}, prompt=True)
        short = vlm.tokenizer(text, add_special_tokens=False)["input_ids"]
        seeds = [part for own in contents for part in own if isinstance(part, int)]
        (media,) = prompts.media or (None,)
        if not seeds:
            assert media is None
            continue
        assert media is not None
        assert list(media.prompt_ids) == short
        assert all(map(np.array_equal, media.images, map(picture, seeds)))
        assert len(media.images) == len(seeds)


def test_an_agent_shows_images_in_its_requests(monkeypatch: pytest.MonkeyPatch) -> None:
    vlm = build_vlm("qwen2_vl")
    refused: list[str] = []
    read: list[Any] = []
    monkeypatch.setattr(agents, "read_image", lambda *own: read.append(own[0]) or read_image(*own))
    # of 40 x 48 and 48 x 48 pixels: each message has room for one
    monkeypatch.setattr(Image, "MAX_IMAGE_PIXELS", 3000)

    def solve(images: Any, base_url: str, api_key: str, model: str) -> float:
        def part(url: str) -> dict[str, Any]:
            return {"type": "image_url", "image_url": {"url": url, "detail": "auto"}}

        with OpenAI(base_url=base_url, api_key=api_key, max_retries=0) as client:
            ask = partial(client.chat.completions.create, model=model)
            text = {"type": "text", "text": "one"}
            messages: list[Any] = [{"role": "user", "content": [part(data_url(images[0])), text]}]
            reply = ask(messages=messages).choices[0].message
            messages.append({"role": "assistant", "content": reply.content})
            messages.append({"role": "user", "content": [part(data_url(picture(1)))]})
            ask(messages=messages)
            for url in ("https://example.org/a.png", "file:///etc/hostname", "data:image/png,x"):
                try:
                    ask(messages=[{"role": "user", "content": [part(url)]}])
                except BadRequestError as error:
                    refused.append(error.body["message"])  # type: ignore[index]
            return 1.0

    rollout = play(vlm, ScriptedEngine(lambda _: "w<|im_end|>"), prompts_of(vlm, [0]), agent=solve)
    (episode,) = rollout.episodes or ()
    assert (episode.failure, episode.turns, rollout.forks) == ("", 2, None)
    assert all(map(np.array_equal, episode.images, map(picture, [0, 1])))
    assert len(read) == 2  # what a request repeats is read once
    assert_plain(vlm, rollout, [[0, 1]])
    for told, expected in zip(
        refused, ("remote file", "there is no media.root", "not base64"), strict=True
    ):
        assert expected in told


@pytest.mark.parametrize("newest", [1, 2])
def test_screenshots_that_an_agent_leaves_out_stay_where_they_were_seen(
    newest: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    vlm = build_vlm("qwen2_vl")
    told = ["one", "two", "three", "four"]
    digested: list[Any] = []
    feed = refs._feed

    def counted(digest: Any, value: Any) -> None:
        digested.extend([value] if isinstance(value, Image.Image) else [])
        feed(digest, value)

    monkeypatch.setattr(refs, "_feed", counted)

    def solve(base_url: str, api_key: str, model: str) -> None:
        messages: list[Any] = []
        with OpenAI(base_url=base_url, api_key=api_key, max_retries=0) as client:
            for turn, word in enumerate(told):
                picture_part = {"type": "image_url", "image_url": {"url": data_url(picture(turn))}}
                content = [{"type": "text", "text": word}, picture_part]
                messages.append({"role": "user", "content": content})
                for old in messages[: 1 - 2 * newest : 2]:
                    old["content"] = old["content"][:1]
                first = {"role": "system", "content": f"turn {turn}"}
                reply = client.chat.completions.create(model=model, messages=[first, *messages])
                messages.append({"role": "assistant", "content": reply.choices[0].message.content})

    episodes = EpisodeEngine(ScriptedEngine(lambda _: "w<|im_end|>"), Episodes(agent=solve))
    episodes.attach(*vlm)
    episodes.use_chat(ChatFormat(vlm.tokenizer))
    sampling = Sampling(max_new_tokens=4000)
    collected = Collector(
        episodes,
        Rewards([lambda images: [*map(float, map(len, images))]]),
        vlm.tokenizer,
        shows_media=True,
    ).collect(prompts_of(vlm, []), sampling, seeds=[0], step=0, phase=lambda _: nullcontext())
    (episode,) = collected.rollout.episodes or ()
    assert (episode.failure, episode.turns) == ("", 4)

    def user(word: str) -> dict[str, Any]:
        return {"role": "user", "content": [{"type": "text", "text": word}, {"type": "image"}]}

    wrote = {"role": "assistant", "content": "w"}
    assert episode.prompt == ({"role": "system", "content": "turn 0"}, user("one"))
    expected: list[Any] = [wrote]
    for turn in range(1, 4):
        expected += [{"role": "system", "content": f"turn {turn}"}, user(told[turn]), wrote]
    assert list(episode.messages) == expected
    assert all(map(np.array_equal, episode.images, map(picture, range(4))))
    assert len(episode.images) == len(collected.records[0]["media"]) == 4
    assert collected.rewards.scores.tolist() == [4.0]
    # each turn is sampled behind what its request shows
    (media,) = collected.rollout.media or ()
    assert media is not None
    seen = [seed for turn in range(4) for seed in range(max(0, turn + 1 - newest), turn + 1)]
    assert len(media.images) == len(seen)
    assert all(map(np.array_equal, media.images, map(picture, seen)))
    assert len(digested) == 4  # once, however often it is shown
