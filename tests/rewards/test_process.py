"""`ProcessReward`: how responses are cut, what each step is worth, and how that adds up."""

from collections.abc import Sequence
from typing import Any

import pytest
import torch
from transformers import (
    AutoModelForTokenClassification,
    LlamaForTokenClassification,
    PreTrainedTokenizerBase,
)

from lrlhf.rewards import (
    CompletionText,
    CompletionTurns,
    ProcessReward,
    RewardResult,
    Rewards,
    TextSegment,
)
from lrlhf.rewards.process import Piece, split_steps
from tests.conftest import build_language_model

PROMPTS = ["2+3+4?", "why", "x"]
TEXTS = ["2+3=5\n5+4=10", "as\n\nso it is\n", "z"]
STEPS = [["2+3=5", "5+4=10"], ["as", "so it is"], ["z"]]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory, tokenizer: PreTrainedTokenizerBase) -> str:
    """A token classifier as others save it."""
    place = tmp_path_factory.mktemp("prm")
    with torch.random.fork_rng():
        torch.manual_seed(4)
        model = LlamaForTokenClassification(build_language_model(tokenizer).config)
    model.save_pretrained(place)
    tokenizer.save_pretrained(place)
    return str(place)


def reference(folder: str, tokenizer: Any, prompt: str, steps: Sequence[str]) -> list[float]:
    """What transformers' own classifier says of all text up to each step."""
    model = AutoModelForTokenClassification.from_pretrained(folder).eval()
    found, said = [], prompt
    for step in steps:
        said += f"{step}\n"
        with torch.no_grad():
            logits = model(torch.tensor([tokenizer(said)["input_ids"]])).logits
        found.append(float(logits[0, -1].softmax(dim=-1)[1]))
    return found


def score(
    function: Any, prompts: Sequence[Any] = PROMPTS, texts: Sequence[Any] = TEXTS, **options: Any
) -> RewardResult:
    rewards = Rewards([function], max_unscorable_fraction=1.0, **options)
    return rewards.score(prompts, texts, [[1]] * len(texts), [{}] * len(texts))


def given(scores: Sequence[float], **options: Any) -> ProcessReward:
    """A reward whose model gives every answer these scores."""
    reward = ProcessReward("none", split_at="\n", **options)
    reward.prepare = lambda: None  # type: ignore[method-assign]
    reward.judge = (
        lambda prompts, answers: [  # type: ignore[method-assign]
            list(scores[: len(steps)]) for steps in answers
        ]
    )
    return reward


# ---- scores


@pytest.mark.parametrize("batch_size", [1, 3])
def test_steps_are_scored_as_transformers_scores_them(
    folder: str, tokenizer: PreTrainedTokenizerBase, batch_size: int
) -> None:
    result = score(ProcessReward(folder, batch_size=batch_size))
    expected = [
        reference(folder, tokenizer, prompt, steps)
        for prompt, steps in zip(PROMPTS, STEPS, strict=True)
    ]
    assert len({round(one, 3) for own in expected for one in own}) == 5
    for found, own in zip(result.extras["step_scores"], expected, strict=True):
        assert found == pytest.approx(own, rel=1e-5)
    assert result.scores.tolist() == pytest.approx([min(own) for own in expected], rel=1e-5)
    assert result.metrics["process/steps"] == pytest.approx(5 / 3)


def test_order_and_repetition_do_not_matter(folder: str) -> None:
    function = ProcessReward(folder)
    expected = score(function).scores
    found = score(function, PROMPTS[::-1] * 2, TEXTS[::-1] * 2).scores
    torch.testing.assert_close(found, expected.flip(0).repeat(2))


def test_a_chat_is_rendered_up_to_the_assistants_turn(
    folder: str, tokenizer: PreTrainedTokenizerBase
) -> None:
    chat = ({"role": "user", "content": "why"},)
    rendered = "<|im_start|>user\nwhy<|im_end|>\n<|im_start|>assistant\n"
    answer = CompletionTurns(CompletionText([TextSegment("as\nso", sampled=True)]))
    (found,) = score(ProcessReward(folder), [chat], [answer]).extras["step_scores"]
    assert found == pytest.approx(reference(folder, tokenizer, rendered, ["as", "so"]), rel=1e-5)
    bare = "{% for m in messages %}{{ m.content }}{% endfor %}"
    (found,) = score(ProcessReward(folder, chat_template=bare), [chat], [answer]).extras[
        "step_scores"
    ]
    assert found == pytest.approx(reference(folder, tokenizer, "why", ["as", "so"]), rel=1e-5)


def test_what_an_environment_said_is_read_and_not_judged(
    folder: str, tokenizer: PreTrainedTokenizerBase
) -> None:
    segments = [("ask", True), ("told", False), ("a\nb", True)]
    said = CompletionText([TextSegment(text, sampled) for text, sampled in segments])
    steps = ["ask", "told", "a", "b"]
    expected = reference(folder, tokenizer, "why", steps)
    (found,) = score(ProcessReward(folder), ["why"], [said]).extras["step_scores"]
    assert found == pytest.approx([expected[0], *expected[2:]], rel=1e-5)
    by_turn = score(ProcessReward(folder, steps="turn"), ["why"], [said])
    first, last = by_turn.extras["step_scores"][0]
    assert first == pytest.approx(expected[0], rel=1e-5)
    whole = reference(folder, tokenizer, "why", ["ask", "told", "a\nb"])
    assert last == pytest.approx(whole[2], rel=1e-5)
    assert by_turn.step_rewards is not None
    assert [step.end for step in by_turn.step_rewards[0]] == [3, 10]  # ask|told|a.b


def test_what_is_too_long_has_no_value_and_what_is_empty_is_worth_nothing(folder: str) -> None:
    result = score(ProcessReward(folder, max_tokens=10), ["x", "x", "x"], ["ab", "", "y" * 10])
    assert result.scores.isnan().tolist() == [False, False, True]
    assert float(result.scores[1]) == 0
    assert result.metrics["process/too_long"] == pytest.approx(1 / 3)
    assert result.step_rewards is not None
    assert [len(steps) for steps in result.step_rewards] == [1, 0, 0]


def test_an_offloaded_model_gives_the_same(folder: str) -> None:
    torch.testing.assert_close(
        score(ProcessReward(folder, offload=True)).scores, score(ProcessReward(folder)).scores
    )


def test_the_separator_is_that_of_the_model(
    folder: str, tokenizer: PreTrainedTokenizerBase
) -> None:
    model = AutoModelForTokenClassification.from_pretrained(folder)
    expected = ProcessReward(folder, step_separator=";", batch_size=1).judge(PROMPTS, STEPS)
    assert expected[0] != pytest.approx(ProcessReward(folder).judge(PROMPTS, STEPS)[0])
    model.config.step_separator = ";"
    own = ProcessReward.of_model(model.eval(), tokenizer, batch_size=1)
    assert own.judge(PROMPTS, STEPS) == expected
    texts = [text.replace("\n", ";") for text in TEXTS]
    assert score(own, texts=texts).extras["step_scores"] == expected


# ---- cutting


@pytest.mark.parametrize(
    ("text", "pieces"),
    [
        ("a\nb", [("a", 2), ("b", 3)]),
        ("a\n", [("a", 2)]),
        (" a \n\n\nb \n \n", [("a", 6), ("b", 11)]),
        ("\na", [("a", 2)]),
        ("\n \n", []),
        ("", []),
    ],
)
def test_steps_go_up_to_what_follows_them(text: str, pieces: list[tuple[str, int]]) -> None:
    assert split_steps(text, "\n") == [Piece(*piece, True) for piece in pieces]


def test_a_step_does_not_reach_into_what_was_given() -> None:
    parts = [("a\n", True), ("\nseen\n", False), ("\n", True), ("b", True)]
    text = CompletionText([TextSegment(*part) for part in parts])
    assert split_steps(text, "\n") == [
        Piece("a", 2, True),
        Piece("seen", 8, False),
        Piece("b", 10, True),
    ]
    assert split_steps(text, None) == [
        Piece("a", 2, True),
        Piece("seen", 8, False),
        Piece("b", 10, True),
    ]


# ---- values


@pytest.mark.parametrize(
    ("aggregate", "value", "added"),
    [
        ("min", 0.25, [0.5, 0.0, -0.25]),
        ("product", 0.125, [0.5, 0.0, -0.375]),
        ("mean", 1.75 / 3, [0.5 / 3, 1 / 3, 0.25 / 3]),
        ("last", 0.25, [0.5, 0.5, -0.75]),
        ("sum", 1.75, [0.5, 1.0, 0.25]),
    ],
)
def test_what_steps_add_is_their_aggregate(
    aggregate: Any, value: float, added: list[float]
) -> None:
    result = score(given([0.5, 1.0, 0.25], aggregate=aggregate), ["x"], ["a\nb\nc"], weights=[2.0])
    assert result.step_rewards is not None
    (steps,) = result.step_rewards
    assert [step.end for step in steps] == [2, 4, 5]
    assert float(result.per_function[0, 0]) == pytest.approx(value)
    assert float(result.scores[0]) == pytest.approx(2 * value)  # weighted, as its parts are
    assert [step.value for step in steps] == pytest.approx([2 * one for one in added])


def test_rewards_of_steps_of_several_functions_stand_side_by_side() -> None:
    functions = {"a": given([0.5], aggregate="sum"), "b": given([1.0], aggregate="sum")}
    rewards = Rewards(functions, weights={"a": 1.0, "b": 0.0}, optional=["b"])
    result = rewards.score(["x"], ["y"], [[1]], [{}])
    assert result.step_rewards == (((1, 0.5),),)  # weight 0 adds nothing
    plain = Rewards([lambda completions: [1.0]]).score(["x"], ["y"], [[1]], [{}])
    assert plain.step_rewards is None


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"aggregate": "max"}, "aggregate: expected one of .* got 'max'"),
        ({"steps": "line"}, "steps: expected one of .* got 'line'"),
        ({"split_at": ""}, "must be text"),
        ({"batch_size": 0}, "batch_size is 0"),
        ({"max_tokens": 0}, "max_tokens is 0"),
    ],
)
def test_options_out_of_range_are_refused(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        ProcessReward("x", **options)


def test_a_model_that_judges_no_steps_is_refused(model_folder: str) -> None:
    with pytest.raises(ValueError, match="it is no token classifier"):
        ProcessReward(model_folder).prepare()
