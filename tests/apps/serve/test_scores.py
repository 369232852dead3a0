"""Scores that come through the service are those of the model, however requests are batched."""

from __future__ import annotations

import random
import threading
from typing import Any

import pytest
import torch
from PIL import Image

from lrlhf.apps.serve import Scorer
from lrlhf.media import Video
from lrlhf.rewards import LearnedReward
from tests.apps.serve.conftest import Scores, Serving, body_of, file_of, text_of
from tests.vlms import clip, picture

CHAT = [{"role": "user", "content": "Hi"}]
ROWS: list[tuple[Any, Any]] = [
    ("2 + 2 =", " 4"),
    ("Say something nice:", " you look well today"),
    ("x", ""),
    (CHAT, "Hello"),
    (CHAT, [{"role": "assistant", "content": "Hello"}]),
    ([{"role": "system", "content": "Be kind."}, *CHAT], "Ünïcödé ✓"),
]


def test_scores_are_those_of_the_model_to_the_last_bit(
    serving: Serving, text_reward: str, text_scores: Scores
) -> None:
    client = serving(LearnedReward(text_reward))
    prompts, completions = zip(*ROWS, strict=True)

    answer = client.post(body={"prompts": prompts, "completions": completions})

    assert answer.status_code == 200
    expected = text_scores(list(prompts), list(completions))
    assert answer.json()["scores"] == expected
    # the two ways to write a turn are one; their rows' sums may be taken in another order
    assert expected.pop(3) == pytest.approx(expected[3], abs=1e-5)
    assert len({round(score, 4) for score in expected if score is not None}) == 5
    assert answer.json()["model"] == text_reward
    assert answer.json()["version"] == client.get("/version").json()["version"]


def test_requests_at_once_get_the_scores_of_requests_alone(
    serving: Serving, text_reward: str
) -> None:
    draw = random.Random(0)
    texts = ["".join(draw.choices("abc 123é", k=draw.randint(1, 90))) for _ in range(40)]
    bodies = [{"prompts": [text[:3]] * 2, "completions": [text[3:], text]} for text in texts]
    alone = serving(LearnedReward(text_reward), max_batch_size=1)
    expected = [alone.post(body=body).json()["scores"] for body in bodies]
    assert alone.metrics()["lrlhf_reward_batch_items_count"] == 40

    client = serving(LearnedReward(text_reward))
    answers = client.together(bodies)

    found = [answer.json()["scores"] for answer in answers]
    torch.testing.assert_close(torch.tensor(found), torch.tensor(expected), rtol=0, atol=1e-5)
    metrics = client.metrics()
    assert metrics["lrlhf_reward_batch_items_count"] < 20  # they were together
    assert metrics["lrlhf_reward_batch_items_sum"] == 80
    assert metrics["lrlhf_reward_items_total"] == 80


def test_a_request_that_cannot_be_scored_is_refused_without_the_others(
    serving: Serving, text_reward: str, text_scores: Scores
) -> None:
    template = "{% for m in messages %}{{ m['content'] + 1 if m['role'] == 'odd' }}{% endfor %}x"
    client = serving(LearnedReward(text_reward, chat_template=template))
    odd = {"prompts": [[{"role": "odd", "content": "a"}]], "completions": ["b"]}

    first, broken, last = client.together([body_of(), odd, body_of()])

    assert broken.status_code == 422
    assert "refuses the messages" in broken.json()["detail"]
    expected = pytest.approx(text_scores(["2 + 2 ="], [" 4"]), abs=1e-5)
    assert first.json()["scores"] == expected
    assert last.json()["scores"] == expected


def _direct(folder: str, **columns: Any) -> list[float | None]:
    return LearnedReward(folder)(log_metric=lambda name, value: None, **columns)


def _question(*kinds: str) -> list[dict[str, Any]]:
    parts = [*({"type": kind} for kind in kinds), {"type": "text", "text": "what?"}]
    return [{"role": "user", "content": parts}]


def test_images_and_videos_are_shown_to_the_model(serving: Serving, vision_reward: str) -> None:
    kinds = [(), ("image",), ("image", "image"), ("video",), ("image",)]
    turns = [
        {"role": "assistant", "content": "closer"},
        {"role": "user", "content": [{"type": "image"}]},
        {"role": "assistant", "content": "eight"},
    ]
    rows: dict[str, Any] = {
        "prompts": [_question(*row) for row in kinds],
        "completions": ["seven", "one!", "three", "moves", turns],
    }
    pictures = [[], [picture(0)], [picture(1), picture(2)], [], [picture(0), picture(1)]]
    film = clip(1)
    frames = [Image.fromarray(frame) for frame in film.frames]
    apng = file_of(frames[0], save_all=True, append_images=frames[1:], duration=500)
    sent = [[text_of(file_of(image)) for image in row] or None for row in pictures]
    client = serving(LearnedReward(vision_reward))

    answer = client.post(
        body={**rows, "images": sent, "videos": [*[None] * 3, [text_of(apng)], None]}
    )

    assert answer.status_code == 200, answer.text
    expected = _direct(vision_reward, **rows, images=pictures, videos=[[], [], [], [film], []])
    # rows that are computed together, which the service decides, are rounded together
    assert answer.json()["scores"] == pytest.approx(expected, abs=1e-6)
    others = [[], [picture(3)], [picture(3), picture(2)], [], [picture(0), picture(5)]]
    backwards = Video(film.frames[::-1].copy(), 2.0)
    blind = _direct(vision_reward, **rows, images=others, videos=[[], [], [], [backwards], []])
    assert blind[0] == pytest.approx(expected[0], abs=1e-6)
    assert all(one != other for one, other in zip(blind[1:], expected[1:], strict=True))


def test_any_reward_function_can_be_served(serving: Serving) -> None:
    threads: set[str] = set()

    def longest(*, completions: list[str], goal: list[int]) -> list[float | None]:
        threads.add(threading.current_thread().name)
        return [
            len(text) - 1.0 * aim if aim >= 0 else float("nan")
            for text, aim in zip(completions, goal, strict=True)
        ]

    client = serving(longest)
    body = {"prompts": ["a", "b"], "completions": ["four", "12"], "columns": {"goal": [1, -1]}}
    assert client.post(body=body).json()["scores"] == [3.0, None]
    assert threads == {"reward-model"}
    assert client.get("/version").json()["model"] == "longest"
    missing = client.post(body=body_of())
    assert missing.status_code == 422
    assert "'goal'" in missing.json()["detail"]


def test_an_exception_of_a_reward_function_is_logged_without_what_was_scored(
    serving: Serving, caplog: pytest.LogCaptureFixture
) -> None:
    def broken(*, completions: list[str]) -> Any:
        raise KeyError(completions[0])

    answer = serving(broken).post(body=body_of(completions=["top secret"]))
    assert answer.status_code == 500
    assert "KeyError" in caplog.text
    assert "in broken" in caplog.text
    assert "secret" not in caplog.text + answer.text


def test_a_function_that_ends_the_process_ends_no_service(serving: Serving) -> None:
    def leaves(*, completions: list[str]) -> list[float]:
        if "leave" in completions:
            raise SystemExit(3)
        return [1.0] * len(completions)

    client = serving(leaves)
    assert client.post(body=body_of(completions=["leave"])).status_code == 500
    assert client.post(body=body_of(completions=["stay"])).json()["scores"] == [1.0]


def test_functions_that_read_token_ids_are_not_served() -> None:
    def by_ids(*, completion_ids: list[list[int]]) -> list[float]:
        return [float(len(ids)) for ids in completion_ids]

    with pytest.raises(ValueError, match="reads the token ids"):
        Scorer(by_ids)
