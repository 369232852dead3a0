"""Reward models behind vLLM's classification endpoint, which a stand-in plays."""

import copy
import pickle
import re
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.testing import assert_close
from transformers import LlamaForSequenceClassification, PreTrainedTokenizerBase

from lrlhf.rewards import (
    LearnedReward,
    RewardError,
    RewardFunction,
    RewardResult,
    Rewards,
    VLLMReward,
)
from lrlhf.rewards.remote import service_client
from tests.conftest import build_language_model
from tests.rewards.reward_server import Behaviour, Handler, Server, says, serving
from tests.vlms import save_vlm

CHAT = ({"role": "user", "content": [{"type": "text", "text": "Say something nice."}]},)
PROMPTS = ["2 + 2 =", "Say something nice:", "x", CHAT, CHAT]
TEXTS = [
    " 4",
    " you look well today",
    "",
    "Hello.",
    [
        {"role": "assistant", "content": "Hm."},
        {"role": "user", "content": "Well?"},
        {"role": "assistant", "content": "Hello."},
    ],
]


@pytest.fixture(autouse=True)
def _little_patience(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(service_client, "_FIRST_PAUSE_S", 0.01)


def save_classifier(folder: Path, tokenizer: PreTrainedTokenizerBase, labels: int) -> str:
    config = build_language_model(tokenizer).config
    config.num_labels = labels
    torch.manual_seed(3)
    LlamaForSequenceClassification(config).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return str(folder)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory, tokenizer: PreTrainedTokenizerBase) -> str:
    return save_classifier(tmp_path_factory.mktemp("served"), tokenizer, 1)


def classifies(folder: str) -> Behaviour:
    """What vLLM does: each text by itself, and a sigmoid or softmax unless told otherwise."""
    model = LlamaForSequenceClassification.from_pretrained(folder).eval()

    @torch.no_grad()
    def act(handler: Handler) -> None:
        assert handler.path == "/classify"
        assert handler.body["model"] == "judge"
        entries = []
        for index, ids in enumerate(handler.body["input"]):
            logits = model(input_ids=torch.tensor([ids])).logits[0]
            if handler.body.get("use_activation", True):
                logits = logits.sigmoid() if len(logits) == 1 else logits.softmax(0)
            entries.append({"index": index, "label": "LABEL_0", "probs": logits.tolist()})
        handler.reply({"object": "list", "model": "judge", "data": entries[::-1]})

    return act


@pytest.fixture
def server(folder: str) -> Iterator[Server]:
    with serving() as started:
        started.models = ["judge"]
        started.card = {"root": folder, "max_model_len": 100}
        started.always = classifies(folder)
        yield started


def reward(server: Server, **options: Any) -> VLLMReward:
    return VLLMReward(server.url, **{"timeout": 5.0, "startup_timeout": 1.0} | options)


def score(
    function: RewardFunction, prompts: list[Any] = PROMPTS, texts: list[Any] = TEXTS
) -> RewardResult:
    rewards = Rewards([function], max_unscorable_fraction=1.0)
    return rewards.score(prompts, texts, [[1]] * len(texts), [{}] * len(texts))


def test_scores_are_those_of_the_model_in_this_process(server: Server, folder: str) -> None:
    expected = score(LearnedReward(folder)).scores
    assert len({*expected.tolist()}) == 5
    asked = reward(server)
    for function in (asked, pickle.loads(pickle.dumps(asked)), copy.deepcopy(asked)):
        assert_close(score(function).scores, expected, rtol=1e-4, atol=1e-5)
    for size in (1, 2):
        server.requests.clear()
        found = score(reward(server, batch_size=size)).scores
        assert_close(found, expected, rtol=1e-4, atol=1e-5)
        assert sorted(len(body["input"]) for body in server.requests) == [1] * (5 % size) + [
            size
        ] * (5 // size)


def test_the_address_may_end_in_the_version(server: Server) -> None:
    function = VLLMReward(f"{server.url}/v1")
    assert torch.equal(score(function).scores, score(reward(server)).scores)


def test_a_template_of_ones_own_counts(server: Server, folder: str) -> None:
    template = "{% for turn in messages %}<{{ turn.content }}>{% endfor %}"
    found = score(reward(server, chat_template=template)).scores
    expected = score(LearnedReward(folder, chat_template=template)).scores
    assert_close(found, expected, rtol=1e-4, atol=1e-5)
    assert not torch.allclose(found[3:], score(reward(server)).scores[3:])


def test_a_label_is_chosen_where_there_are_several(
    server: Server, tmp_path: Path, tokenizer: PreTrainedTokenizerBase
) -> None:
    folder = save_classifier(tmp_path, tokenizer, 3)
    server.always, server.card = classifies(folder), {"root": folder}
    model = LlamaForSequenceClassification.from_pretrained(folder).eval()
    ids = [*tokenizer("x")["input_ids"], tokenizer.eos_token_id]
    with torch.no_grad():
        expected = model(input_ids=torch.tensor([ids])).logits[0]
    for label in range(3):
        found = score(reward(server, label=label), ["x"], [""]).scores
        assert_close(found, expected[label : label + 1])
    with pytest.raises(RewardError, match="gives 3 numbers for a response: choose one with label"):
        score(reward(server), ["x"], [""])
    with pytest.raises(RewardError, match="label is 3, and the served model gives 3 number"):
        score(reward(server, label=3), ["x"], [""])


def test_what_is_too_long_has_no_score_and_is_not_sent(server: Server) -> None:
    # one token for each letter, and the end
    texts = ["a" * 99, "a" * 100, "a" * 30]
    result = score(reward(server), [""] * 3, texts)
    assert result.scores.isnan().tolist() == [False, True, False]
    assert result.metrics["vllm/too_long"] == pytest.approx(1 / 3)
    assert result.names == ("vllm_reward",)
    assert not result.failures
    assert [[len(ids) for ids in body["input"]] for body in server.requests] == [[31, 100]]
    result = score(reward(server, max_tokens=30), [""] * 3, texts)
    assert result.scores.isnan().all()
    assert len(server.requests) == 1


def test_a_request_that_fails_is_repeated_and_one_that_fails_for_good_is_told(
    server: Server,
) -> None:
    expected = score(reward(server)).scores
    server.script = [says({"detail": "busy"}, 503), says({"data": []}), says({"object": "list"})]
    result = score(reward(server))
    assert_close(result.scores, expected)
    assert result.metrics["vllm/retries"] == 3
    broken = [
        ({"data": [{"index": 0, "probs": [1.0]}]}, "1 entries for 5 responses"),
        ({"data": [{"index": 0, "probs": 1.0}]}, "is no classification"),
        (
            {"data": [{"index": row, "probs": [None]} for row in range(5)]},
            r"score \[None\] is no finite",
        ),
    ]
    for reply, reason in broken:
        server.script = [says(reply)] * 5
        (failure,) = score(reward(server, retries=4)).failures
        assert "no reward service scored 5 of 5 responses" in failure
        assert re.search(reason, failure)
    # the second of two requests
    server.script = [says({"data": []})] * 2
    partly = score(reward(server, batch_size=3, retries=1, max_concurrency=1))
    assert sorted(partly.scores.isnan().tolist()) == [False] * 2 + [True] * 3
    assert "scored 3 of 5 responses" in partly.failures[0]


def test_a_request_that_is_refused_stops_the_run(server: Server) -> None:
    server.script = [says({"error": {"message": "no such model"}}, 404)]
    with pytest.raises(RewardError, match="refuses the request: HTTP 404: no such model"):
        score(reward(server))


def test_the_model_is_chosen_among_those_that_are_served(server: Server) -> None:
    server.models = ["other", "judge"]
    assert score(reward(server, model="judge")).scores.isfinite().all()
    with pytest.raises(RewardError, match=r"serves other, judge; set model to one"):
        score(reward(server))
    with pytest.raises(RewardError, match=r"serves other, judge; set model to one"):
        score(reward(server, model="third"))
    server.models = None
    with pytest.raises(RewardError, match="HTTP 404"):
        score(reward(server))


def test_servers_of_different_models_are_refused(server: Server) -> None:
    with serving() as second:
        second.models, second.card = ["other"], server.card
        with pytest.raises(RewardError, match="have different models"):
            VLLMReward([server.url, second.url]).prepare()
        second.models, second.always = ["judge"], server.always
        second.card = {**server.card, "max_model_len": 40}
        both = VLLMReward([server.url, second.url], batch_size=1)
        texts = ["a" * 10, "a" * 50, "a" * 20]
        # the lowest of their limits holds, as any of them may be asked
        assert score(both, [""] * 3, texts).scores.isnan().tolist() == [False, True, False]


def test_a_tokenizer_that_lies_elsewhere_is_named(
    server: Server, folder: str, tmp_path: Path, tokenizer: PreTrainedTokenizerBase
) -> None:
    server.card = {"root": "/only/there"}
    with pytest.raises(RewardError, match=r"cannot be loaded: .*/only/there.*with tokenizer"):
        reward(server).prepare()
    shutil.copy(Path(folder) / "config.json", tmp_path)
    tokenizer.save_pretrained(tmp_path)  # no weights
    expected = score(LearnedReward(folder)).scores
    found = score(reward(server, tokenizer=str(tmp_path))).scores
    assert_close(found, expected, rtol=1e-4, atol=1e-5)


def test_a_model_that_sees_is_refused(server: Server, tmp_path: Path) -> None:
    save_vlm("qwen2_5_vl", tmp_path)
    with pytest.raises(RewardError, match=r"is a vision-language model, .* take LearnedReward"):
        reward(server, tokenizer=str(tmp_path)).prepare()


def test_a_chat_without_a_template_is_explained(
    server: Server, folder: str, tmp_path: Path, tokenizer: PreTrainedTokenizerBase
) -> None:
    bare = copy.deepcopy(tokenizer)
    bare.chat_template = None
    shutil.copy(Path(folder) / "config.json", tmp_path)
    bare.save_pretrained(tmp_path)
    with pytest.raises(RewardError, match="has no chat template: give chat_template"):
        score(reward(server, tokenizer=str(tmp_path)))


def test_other_rewards_see_its_values(server: Server, folder: str) -> None:
    def squared(rewards: dict[str, list[float]]) -> list[float]:
        return [value * value for value in rewards["model"]]

    rewards = Rewards({"model": reward(server), "squared": squared}, weights=[0, 1])
    result = rewards.score(PROMPTS, TEXTS, [[1]] * 5, [{}] * 5)
    expected = score(LearnedReward(folder)).scores
    assert_close(result.scores, expected.square(), rtol=1e-3, atol=1e-5)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"label": -1}, "label is -1"),
        ({"batch_size": 0}, "batch_size is 0"),
        ({"max_tokens": 0}, "max_tokens is 0"),
        ({"urls": []}, "urls must name at least one"),
        ({"retries": -1}, "retries is -1"),
    ],
)
def test_wrong_options_are_explained(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        VLLMReward(**{"urls": "http://127.0.0.1:1", **options})
