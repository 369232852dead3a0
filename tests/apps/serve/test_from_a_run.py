"""`RemoteReward` against the service itself, over a real connection."""

import base64
import io
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from torch.testing import assert_close

from lrlhf.datamodules import PromptDataModule
from lrlhf.environments import Episodes, TextEnvironment
from lrlhf.media import Video
from lrlhf.modules import RLOO
from lrlhf.rewards import (
    IsolatedReward,
    JudgeReward,
    LearnedReward,
    RemoteReward,
    RewardError,
    Rewards,
)
from lrlhf.rollout import GenerativeReward, Sampling, generative_reward
from lrlhf.types import PromptBatch
from tests.apps.serve.conftest import Listening
from tests.modules.policy_runs import Watcher, fit
from tests.rewards.isolated_functions import brightness
from tests.rewards.reward_server import Handler, serving
from tests.rollout.scripted_engine import ScriptedEngine
from tests.vlms import build_vlm, save_vlm

PROMPTS = ["2 + 2 =", "Say something nice:", "x", "y"]
TEXTS = [" 4", " you look well today", " ", " z"]


def scores(function: Any, prompts: Any = PROMPTS, texts: Any = TEXTS, **columns: Any) -> Any:
    rows = range(len(prompts))
    own = [{name: values[row] for name, values in columns.items()} for row in rows]
    return Rewards([function], timeout=None).score(prompts, texts, [[0]] * len(rows), own).scores


def test_a_run_gets_the_scores_of_the_model_itself(
    listening: Listening, text_reward: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("LRLHF_REWARD_TOKEN", "some-token")
    expected = scores(LearnedReward(text_reward))
    url = listening(LearnedReward(text_reward), token="some-token").url
    for batch_size in (1, 3, 32):
        # what is scored together is rounded together
        remote = RemoteReward(url, batch_size=batch_size, columns=["answer"])
        assert_close(scores(remote, answer=TEXTS), expected, rtol=0, atol=1e-5)
    chat = [({"role": "user", "content": "hi"},)] * 2
    replies = [[{"role": "assistant", "content": text}] for text in TEXTS[:2]]
    expected = scores(LearnedReward(text_reward), chat, replies)
    assert_close(scores(RemoteReward(url), chat, replies), expected, rtol=0, atol=1e-6)
    monkeypatch.setenv("LRLHF_REWARD_TOKEN", "another")
    with pytest.raises(RewardError, match=r"HTTP 401: a token is needed.*token_env"):
        scores(RemoteReward(url))


def test_a_run_gets_the_same_scores_over_the_protocol_of_lightrft(
    listening: Listening, text_reward: str
) -> None:
    expected = scores(LearnedReward(text_reward))
    url = listening(LearnedReward(text_reward)).url
    found = scores(RemoteReward(url, protocol="lightrft", batch_size=3))
    assert_close(found, expected, rtol=0, atol=1e-5)


def test_a_run_shows_its_images_and_videos(listening: Listening, vision_reward: str) -> None:
    generator = np.random.default_rng(0)
    image = Image.fromarray(generator.integers(0, 256, (28, 28, 3), dtype=np.uint8))
    video = Video(generator.integers(0, 256, (4, 28, 28, 3), dtype=np.uint8), 2.0)
    parts = [{"type": "image"}, {"type": "text", "text": "what?"}], [{"type": "video"}]
    chats = [({"role": "user", "content": part},) for part in parts]
    replies = [[{"role": "assistant", "content": text}] for text in TEXTS[:2]]
    media = {"images": [[image], []], "videos": [[], [video]]}
    expected = scores(LearnedReward(vision_reward), chats, replies, **media)
    url = listening(LearnedReward(vision_reward)).url
    found = scores(RemoteReward(url), chats, replies, **media)
    assert_close(found, expected, rtol=0, atol=1e-5)


class Brighter(TextEnvironment):
    """Shows a square 30 levels brighter than the one before, behind each of the first two turns."""

    def reset(self, images: list[Image.Image]) -> None:
        self.level, self.steps = images[0].getpixel((0, 0))[0], 0

    def step(self, action: str) -> Any:
        self.steps += 1
        return ["now", square(self.level + 30 * self.steps)] if self.steps < 3 else None


def square(level: int) -> Image.Image:
    return Image.new("RGB", (56, 56), (level,) * 3)


def rates_brightness(handler: Handler) -> None:
    """Rate what a judge is shown by its images."""
    urls = [part["image_url"]["url"] for part in handler.body["messages"][-1]["content"][:-1]]
    files = [base64.b64decode(url.partition("base64,")[2]) for url in urls]
    (value,) = brightness([[Image.open(io.BytesIO(file)) for file in files]])
    handler.reply(
        {"choices": [{"message": {"content": f"Verdict: {value}"}, "finish_reason": "stop"}]}
    )


def test_every_kind_of_reward_gets_the_images_of_an_episode_in_order(
    listening: Listening, vision_reward: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    vlm, source = build_vlm("qwen2_5_vl"), tmp_path / "generative"
    save_vlm("qwen2_5_vl", source)
    compared: list[list[float]] = []

    class Compares(ScriptedEngine):
        """A generative reward's model, which notes what it is shown."""

        def generate(self, prompts: PromptBatch, *arguments: Any, **options: Any) -> Any:
            compared.extend(brightness([media.images]) for media in prompts.media or () if media)
            return super().generate(prompts, *arguments, **options)

    judging = Compares(lambda _: "Verdict: A")
    monkeypatch.setattr(generative_reward, "TransformersEngine", lambda: judging)
    question = {"role": "user", "content": [{"type": "image"}, {"type": "text", "text": "what?"}]}
    rows = [{"prompt": [question], "images": [square(level)], "best": "no"} for level in (10, 20)]
    lightrft = {"protocol": "lightrft", "chat_template": str(vlm.tokenizer.chat_template)}
    address, model = listening(brightness).url, listening(LearnedReward(vision_reward)).url
    with serving() as judge:
        judge.models, judge.always = ["wise"], rates_brightness
        rewards = Rewards(
            {
                "local": brightness,
                "isolated": IsolatedReward("tests.rewards.isolated_functions.brightness"),
                "remote": RemoteReward(address),
                "lightrft": RemoteReward(address, **lightrft),
                "judge": JudgeReward(f"{judge.url}/v1", scale=(0, 2**24)),
                "generative": GenerativeReward(
                    str(source),
                    template="{{ responses }}?",
                    max_new_tokens=40,
                    reference_column="best",
                ),
                "learned": LearnedReward(vision_reward),
                "remote_learned": RemoteReward(model),
                "lightrft_learned": RemoteReward(model, **lightrft),
            },
            weights=[1.0] + 8 * [0.0],
        )
        module = RLOO(
            vlm.model,
            rewards,
            tokenizer=vlm.tokenizer,
            processor=vlm.processor.processor,
            engine=ScriptedEngine(lambda _: "ok<|im_end|>"),
            episodes=Episodes(environment=Brighter),
            sampling=Sampling(max_new_tokens=200),
            num_generations=2,
        )
        watcher = Watcher()
        data = PromptDataModule(rows, batch_size=2)
        fit(module, tmp_path, tmp_path, steps=1, callbacks=[watcher], data=data)
    (records,) = watcher.records
    levels = [record["score"] // 2**16 for record in records]
    assert sorted(levels) == [10, 10, 20, 20]
    # (10, 40, 70) and (20, 50, 80) in base 256
    by_hand = {10: 10 * 65536 + 40 * 256 + 70, 20: 20 * 65536 + 50 * 256 + 80}
    expected = [by_hand[int(level)] for level in levels]
    for name in ("local", "isolated", "remote", "lightrft"):
        assert [record["rewards"][name] for record in records] == expected
    assert [record["rewards"]["judge"] * 2**24 for record in records] == expected
    assert {value for (value,) in compared} == {*expected}
    turn = {"role": "assistant", "content": "ok"}
    shown = {"role": "user", "content": [{"type": "text", "text": "now"}, {"type": "image"}]}
    chats = [(question,)] * 4
    replies = [[turn, shown, turn, shown, turn]] * 4
    images = [[square(int(level) + 30 * turn) for turn in range(3)] for level in levels]
    learned = scores(LearnedReward(vision_reward), chats, replies, images=images)
    assert learned[levels.index(10)] != learned[levels.index(20)]
    # as one text, without the end of the last turn
    mark, own = (
        "<|vision_start|><|image_pad|><|vision_end|>",
        "<|im_end|>\n<|im_start|>assistant\nok",
    )
    first, now = (f"<|im_start|>user\n{text}" for text in (f"{mark}what?", f"now{mark}"))
    text = f"{first}{own}<|im_end|>\n{now}{own}<|im_end|>\n{now}{own}"
    as_text = scores(LearnedReward(vision_reward), [text] * 4, [""] * 4, images=images)
    names = {"learned": learned, "remote_learned": learned, "lightrft_learned": as_text}
    for name, values in names.items():
        found = torch.tensor([record["rewards"][name] for record in records])
        assert_close(found, values, rtol=0, atol=1e-5)
