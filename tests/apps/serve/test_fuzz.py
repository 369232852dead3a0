"""Whatever is sent, a service answers in time, in words, and not with an error of its own."""

from __future__ import annotations

import json
import os
import time
from collections.abc import Iterator
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from PIL import Image

from lrlhf.apps.serve import RequestLimits, RewardService
from lrlhf.rewards import LearnedReward
from tests.apps.serve.conftest import Client, file_of, text_of, wait_until
from tests.vlms import picture

_SECONDS = 20.0
_EXAMPLES = int(os.environ.get("LRLHF_FUZZ_EXAMPLES", "25"))
fuzzed = settings(
    derandomize=True, max_examples=_EXAMPLES, deadline=None, suppress_health_check=list(HealthCheck)
)

PNG = text_of(file_of(Image.new("RGB", (30, 30))))
JPEG = text_of(file_of(picture(0), "JPEG"))
GIF = text_of(file_of(picture(0), "GIF", save_all=True, append_images=[picture(4)], duration=500))
TEXT = st.one_of(
    st.text(max_size=20),
    st.sampled_from(
        ["", "a", "<|image_pad|>", "<|pad|>", "\x00", "\ud800", "{{ 7 * 7 }}", "é" * 400, "\u202e"]
    ),
)
NUMBER = st.one_of(
    st.integers(),
    st.floats(),
    st.sampled_from([10**400, -(10**18), 1e308, -0.0, float("nan"), float("inf")]),
)
LEAF = st.one_of(st.none(), st.booleans(), NUMBER, TEXT)
ANYTHING = st.recursive(
    LEAF,
    lambda inner: st.one_of(st.lists(inner, max_size=4), st.dictionaries(TEXT, inner, max_size=4)),
    max_leaves=12,
)
FILE = st.one_of(
    st.sampled_from([PNG, JPEG, GIF, PNG[:40], JPEG[:-100], "AAAA", "data:image/png;base64,AAAA"]),
    st.builds(
        lambda text, place, letters: text[:place] + letters + text[place + len(letters) :],
        st.sampled_from([PNG, JPEG, GIF]),
        st.integers(0, 2000),
        st.text("ABCDabcd0123+/", min_size=1, max_size=8),
    ),
    st.binary(max_size=60).map(text_of),
    ANYTHING,
)
PART = st.one_of(
    st.sampled_from([{"type": "image"}, {"type": "video"}, {"type": "text", "text": "what?"}]),
    st.fixed_dictionaries({"type": st.just("text"), "text": TEXT}),
    ANYTHING,
)
MESSAGE = st.one_of(
    st.fixed_dictionaries(
        {"role": st.sampled_from(["user", "assistant", "system", "tool", "", "\ud800"])},
        optional={
            "content": st.one_of(TEXT, st.lists(PART, max_size=4), ANYTHING),
            "tool_calls": ANYTHING,
            "name": ANYTHING,
        },
    ),
    ANYTHING,
)
TURNS = st.one_of(TEXT, st.lists(MESSAGE, max_size=3), ANYTHING)
SHOWN = st.lists(st.one_of(st.none(), st.lists(FILE, max_size=3), ANYTHING), max_size=3)
BODY = st.fixed_dictionaries(
    {},
    optional={
        "prompts": st.one_of(st.lists(TURNS, max_size=3), ANYTHING),
        "completions": st.one_of(st.lists(TURNS, max_size=3), ANYTHING),
        "images": st.one_of(SHOWN, ANYTHING),
        "videos": st.one_of(SHOWN, ANYTHING),
        "columns": st.one_of(st.dictionaries(TEXT, st.lists(ANYTHING, max_size=3)), ANYTHING),
        "queries": st.one_of(st.lists(TEXT, max_size=3), ANYTHING),
        "references": ANYTHING,
    },
)


@st.composite
def nearly_right(draw: st.DrawFn) -> dict[str, Any]:
    """As many entries as there should be, so that what is inside them gets looked at."""
    count = draw(st.integers(1, 3))
    rows = {"min_size": count, "max_size": count}
    good = st.lists(
        st.fixed_dictionaries(
            {"role": st.sampled_from(["user", "assistant"])},
            optional={"content": st.one_of(TEXT, st.lists(PART, max_size=3))},
        ),
        min_size=1,
        max_size=2,
    )
    body: dict[str, Any] = {
        "prompts": draw(st.lists(st.one_of(TEXT, good), **rows)),
        "completions": draw(st.lists(st.one_of(TEXT, good), **rows)),
    }
    for key in ("images", "videos"):
        if draw(st.booleans()):
            body[key] = draw(st.lists(st.one_of(st.none(), st.lists(FILE, max_size=2)), **rows))
    return body


@pytest.fixture(scope="module")
def client(vision_reward: str) -> Iterator[Client]:
    service = RewardService(LearnedReward(vision_reward), limits=RequestLimits(max_megapixels=4.0))
    service.batcher.start()
    wait_until(lambda: service.batcher.served is not None)
    yield Client(service)
    service.close()


def check(client: Client, content: bytes, path: str, **headers: str) -> None:
    started = time.perf_counter()
    answer = client.raw(content, path, **headers)
    assert time.perf_counter() - started < _SECONDS
    assert answer.status_code in (200, 413, 415, 422), (answer.status_code, answer.text)
    read = answer.json()
    if answer.status_code == 200:
        key = "scores" if path == "/v1/score" else "rewards"
        assert all(score is None or abs(score) < 1e6 for score in read[key])
    else:
        assert read.keys() == {"detail"}
        assert len(read["detail"]) > 10
        assert "Traceback" not in read["detail"]


PATHS = st.sampled_from(["/v1/score", "/get_reward"])


@fuzzed
@given(
    content=st.one_of(
        st.binary(max_size=200),
        st.one_of(BODY, ANYTHING).map(lambda body: json.dumps(body).encode()),
    ),
    path=PATHS,
)
def test_any_bytes_and_any_json(client: Client, content: bytes, path: str) -> None:
    check(client, content, path)


@fuzzed
@given(body=nearly_right())
def test_nearly_right_requests(client: Client, body: dict[str, Any]) -> None:
    check(client, json.dumps(body).encode(), "/v1/score")
    texts = [text if isinstance(text, str) else "a" for text in body["completions"]]
    lightrft = {"queries": texts, "prompts": [text[:2] for text in texts]}
    lightrft["images"] = body.get("images")
    check(client, json.dumps(lightrft).encode(), "/get_reward")
