"""Clients of LightRFT are answered as its own servers would."""

from __future__ import annotations

import io
import time
from typing import Any

import pytest

from lrlhf.apps.serve.app import read_lightrft_request
from lrlhf.apps.serve.score_request import RequestLimits
from lrlhf.rewards import LearnedReward
from lrlhf.rewards.learned import TextMarks
from tests.apps.serve.conftest import Scores, Serving, file_of, text_of
from tests.vlms import build_vlm, picture


@pytest.mark.parametrize("path", ["/get_reward", "/"])
def test_queries_are_scored_as_whole_texts(
    serving: Serving, text_reward: str, text_scores: Scores, path: str
) -> None:
    client = serving(LearnedReward(text_reward))
    queries = ["2 + 2 = 4", "<|pad|><|pad|>What? That!<|endoftext|><|pad|>", "another start"]
    answer = client.post(path, {"queries": queries, "prompts": ["2 + 2 =", "What?", "none"]})
    assert answer.status_code == 200
    assert answer.json() == {
        "rewards": text_scores([""] * 3, ["2 + 2 = 4", "What? That!", "another start"])
    }


def test_prompt_and_response_are_told_apart_where_it_can_be_known(serving: Serving) -> None:
    seen: dict[str, Any] = {}

    def noted(*, completions: list[str], prompts: list[str], **columns: Any) -> list[float]:
        seen.update(columns, prompts=prompts, completions=completions)
        return [1.5] * len(completions)

    columns = {"references": ["r", "s"], "labels": ["l", None]}
    body = {"queries": ["ab", "xy"], "prompts": ["a", "z"], **columns}
    assert serving(noted).post("/get_reward", body).json() == {"rewards": [1.5, 1.5]}
    expected = {"prompts": ["a", ""], "completions": ["b", "xy"], **columns}
    assert expected.items() <= seen.items()


def test_images_are_found_in_the_buffers_of_lightrft(serving: Serving, vision_reward: str) -> None:
    pictures = [picture(0), picture(1)]
    # its client writes every image of a row into one buffer, and sends all of it each time
    buffer, sent = io.BytesIO(), []
    for image in pictures:
        image.save(buffer, "JPEG")
        sent.append(text_of(buffer.getvalue()))
    right = [text_of(file_of(image, "JPEG")) for image in pictures]
    one = "<|vision_start|><|image_pad|><|vision_end|>"
    many = f"<|vision_start|>{'<|image_pad|>' * 7}<|vision_end|>"
    text = "<|im_start|>user\n{}what?<|im_end|>\n<|im_start|>assistant\nseven<|im_end|>"
    client = serving(LearnedReward(vision_reward))

    queries = [text.format(many * 2), text.format(one * 2), text.format(many), "blind"]
    images = [sent, right, right[:1], None]
    body = {"queries": queries, "prompts": ["?"] * 4, "images": images}
    answer = client.post("/get_reward", body)

    assert answer.status_code == 200, answer.text
    rewards = answer.json()["rewards"]
    assert rewards[0] == pytest.approx(rewards[1], abs=1e-6)
    assert len({round(value, 5) for value in rewards}) == 3
    marks = build_vlm("qwen2_5_vl").tokenizer.pad_token
    padded = {"queries": [marks * 3 + text.format(one * 2)], "prompts": ["?"], "images": [right]}
    assert client.post("/", padded).json()["rewards"][0] == pytest.approx(rewards[1], abs=1e-6)


@pytest.mark.parametrize(
    ("prompt", "turns", "images", "expected"),
    [
        ("look ", "I A", 1, ("look I A", "")),
        ("look ", "I A", 2, ("look ", "I A")),
        ("Ilook ", "I A", 1, ("Ilook ", "I A")),  # which the policy wrote
        ("Ilook ", "I A", 2, ("Ilook I A", "")),
        ("Ilook ", "V A", 2, ("Ilook ", "V A")),
        ("Ilook ", "V A", 1, ("Ilook ", "V A")),
        ("Ia", "IIb", 3, ("IaIIb", "")),  # as before a processor
        ("Ia", "II", 1, ("Ia", "II")),
        ("IIIIIIa", "I", 2, ("IIa", "I")),  # two in the prompt, side by side
        ("IIIIIIa", "IIIb", 3, ("IIaIb", "")),
        ("IIIa", "IIIb", 2, ("IaIb", "")),
        ("", "IIIIIIa", 2, ("IIa", "")),
    ],
)
def test_what_a_policy_writes_is_no_image(
    prompt: str, turns: str, images: int, expected: tuple[str, str]
) -> None:
    def text(short: str) -> str:
        return short.replace("I", "<image>").replace("V", "<video>")

    picture_text = text_of(file_of(picture(0)))
    body = {
        "queries": [text(prompt + turns)],
        "prompts": [text(prompt)],
        "images": [[picture_text] * images],
    }
    marks = TextMarks(media=("<image>", "<video>"))
    request = read_lightrft_request(body, RequestLimits(), marks)
    assert (*request.prompts, *request.completions) == tuple(map(text, expected))


def test_many_marks_that_a_policy_writes_take_no_time() -> None:
    prompt = "<image>" * 1024 + "look"
    body = {
        "queries": [prompt + "<image> " * 100_000],
        "prompts": [prompt],
        "images": [[text_of(file_of(picture(0)))] * 256],
    }
    start = time.monotonic()
    limits, marks = RequestLimits(max_chars=10**6), TextMarks(media=("<image>",))
    request = read_lightrft_request(body, limits, marks)
    assert time.monotonic() - start < 10
    assert request.prompts == ["<image>" * 256 + "look"]


def test_what_is_no_request_is_told_so_and_nothing_but_marks_takes_no_time(
    serving: Serving, text_reward: str
) -> None:
    client = serving(LearnedReward(text_reward), timeout_s=20)
    for body, detail in (
        ({}, "queries: is missing"),
        ({"queries": ["a"], "prompts": []}, "prompts: 0 entries for 1 responses"),
        ({"queries": ["a"], "prompts": ["a"], "labels": [1, 2]}, "labels: 2 entries"),
        ({"queries": ["a"], "images": [["?", "??????"]]}, "images: this is no base64"),
    ):
        answer = client.post("/get_reward", body)
        assert (answer.status_code, detail in answer.json()["detail"]) == (422, True)
    text = "x" + "<|pad|>" * 20_000 + "y"
    answer = client.post("/", {"queries": [text], "prompts": [""]})
    assert answer.json() == {"rewards": [None]}  # too long
