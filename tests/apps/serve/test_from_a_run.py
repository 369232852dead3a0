"""`RemoteReward` against the service itself, over a real connection."""

from typing import Any

import numpy as np
import pytest
from PIL import Image
from torch.testing import assert_close

from lrlhf.media import Video
from lrlhf.rewards import LearnedReward, RemoteReward, RewardError, Rewards
from tests.apps.serve.conftest import Listening

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
