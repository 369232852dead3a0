"""Losses of pairs by hand, and what people read of scored pairs."""

from __future__ import annotations

import copy
import math
from typing import Any

import pytest
import torch
from tokenizers import normalizers
from torch import Tensor
from transformers import PreTrainedTokenizerBase

from lrlhf.datamodules import PreferenceDataModule
from lrlhf.modules.pairs.pair_losses import PairObjective, resolve_losses
from lrlhf.modules.pairs.pair_step import PairScores, score_records
from lrlhf.types import PreferenceBatch

NAN = float("nan")


def softplus(x: float) -> float:
    return math.log1p(math.exp(x))


def objective(loss: str | dict[str, float] = "bradley_terry", **options: float) -> PairObjective:
    return PairObjective(losses=resolve_losses(loss), **options)


def column(*values: float) -> Tensor:
    return torch.tensor(values, dtype=torch.float64)[:, None]


def squared_gap(chosen: Tensor, rejected: Tensor) -> Tensor:
    return (chosen - rejected - 1).square()


def test_labels_say_which_candidate_should_lead() -> None:
    loss = objective(tie_weight=0.5)(column(2, 2, 2, 2), column(1, 1, -1, 7), column(1, -1, 0, NAN))
    # gap 1; gap -1; tie with |gap| 3; no label
    assert loss.flatten().tolist() == pytest.approx([softplus(-1), softplus(1), 1.5, 0.0])


def test_a_missing_label_costs_nothing_whatever_the_score() -> None:
    scores0 = torch.tensor([[1.0, float("-inf")]], requires_grad=True)
    scores1 = torch.tensor([[0.0, 0.0]], requires_grad=True)
    loss = objective()(scores0, scores1, torch.tensor([[1.0, NAN]]))
    assert loss[0, 1] == 0  # what the pair would have cost is infinite
    loss.sum().backward()
    assert scores0.grad is not None
    assert scores0.grad[0, 1] == 0
    assert scores0.grad[0, 0] == pytest.approx(-1 / (1 + math.e))


@pytest.mark.parametrize(
    ("loss", "options", "expected"),
    [
        ("bradley_terry", {"margin": 0.5}, softplus(-0.5)),
        ("log_exp", {"margin": 0.5}, softplus(-0.5)),
        ("hps", {"margin": 0.5}, softplus(-0.5)),
        ("hps", {"center_coef": 0.1}, softplus(-1) + 0.9),
        (
            "hps",
            {"label_smoothing": 0.2, "margin": 0.5},
            0.8 * softplus(-0.5) + 0.2 * softplus(0.5),
        ),
        ({"hps": 2.0, f"{__name__}.squared_gap": 0.5}, {"margin": -2.0}, 2 * softplus(-3) + 2),
    ],
)
def test_options_of_a_preference(loss: Any, options: dict[str, float], expected: float) -> None:
    value = objective(loss, **options)(column(2), column(1), column(1))
    assert value.item() == pytest.approx(expected)


def test_a_margin_of_the_pair_replaces_the_constant_one_for_each_of_its_heads() -> None:
    margin = torch.tensor([3.0, NAN])
    scores = torch.tensor([[1.0, 2.0], [1.0, 2.0]])
    value = objective(margin=0.5)(scores, torch.zeros(2, 2), torch.ones(2, 2), margin)
    expected = [softplus(2), softplus(1), softplus(-0.5), softplus(-1.5)]
    assert value.flatten().tolist() == pytest.approx(expected)


def test_swapping_candidates_and_labels_changes_nothing() -> None:
    a, b = torch.randn(6, 2), torch.randn(6, 2)
    labels = torch.tensor([[1.0, -1], [0, NAN], [-1, 1], [1, 0], [NAN, 1], [-1, -1]])
    margin = torch.rand(6)
    loss = objective(tie_weight=0.3, center_coef=0.1, label_smoothing=0.1)
    torch.testing.assert_close(loss(a, b, labels, margin), loss(b, a, -labels, margin))


@pytest.mark.parametrize(
    ("loss", "options", "message"),
    [
        ("hps", {"tie_weight": -1.0}, "tie_weight is -1.0"),
        ("hps", {"center_coef": -1.0}, "center_coef is -1.0"),
        ("hps", {"label_smoothing": 0.5}, "label_smoothing is 0.5"),
        ("bradly_terry", {}, "did you mean .bradley_terry"),
        ("nowhere.loss", {}, "'nowhere.loss' cannot be imported"),
        ("math.pi", {}, "is a float, not a function"),
        ({}, {}, "loss is empty"),
    ],
)
def test_what_cannot_be_is_refused(loss: Any, options: dict[str, float], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        objective(loss, **options)


ROW = {"prompt": "What should I do?", "chosen": " Ask Ann.", "rejected": " Nothing"}


@pytest.fixture(scope="module")
def uncased(tokenizer: PreTrainedTokenizerBase) -> Any:
    found: Any = copy.deepcopy(tokenizer)
    found.backend_tokenizer.normalizer = normalizers.Lowercase()
    return found


def _batch(
    tokenizer: PreTrainedTokenizerBase, row: dict[str, str] = ROW, **options: Any
) -> PreferenceBatch:
    data = PreferenceDataModule([row], batch_size=1, tokenizer=tokenizer, **options)
    data.prepare_data()
    data.setup("fit")
    batch: PreferenceBatch = next(iter(data.train_dataloader()))
    return batch


def _texts(batch: PreferenceBatch, tokenizer: PreTrainedTokenizerBase) -> list[str]:
    scores = PairScores(torch.zeros(1, 1), torch.zeros(1, 1))
    (record,) = score_records(scores, batch, ["score"], tokenizer, head_weights=[1.0])
    return [record[name] for name in ("prompt", "candidate0", "candidate1")]


def test_a_tokenizer_without_capitals_does_not_take_them_from_people(
    uncased: PreTrainedTokenizerBase,
) -> None:
    batch = _batch(uncased)
    ids = batch.candidate0.input_ids[0]
    assert str(uncased.decode(ids)).startswith("what should i do? ask ann.")
    assert _texts(batch, uncased) == ["What should I do?", " Ask Ann.", " Nothing"]
    # as batches are split and moved
    assert _texts(batch.select(torch.tensor([0])).to("cpu"), uncased)[1] == " Ask Ann."


def test_texts_that_tokens_give_back_are_not_kept_beside_them(
    tokenizer: PreTrainedTokenizerBase,
) -> None:
    batch = _batch(tokenizer)
    assert batch.source_texts == (None,)
    assert _texts(batch, tokenizer) == ["What should I do?", " Ask Ann.", " Nothing"]


def test_a_chat_is_shown_as_tokens_that_lose_nothing_would_show_it(
    uncased: PreTrainedTokenizerBase, tokenizer: PreTrainedTokenizerBase
) -> None:
    prompt = "<|im_start|>user\nWhat should I do?<|im_end|>\n<|im_start|>assistant\n"
    for own in (uncased, tokenizer):
        batch = _batch(own, as_chat=True)
        # the end of the turn is a special token, the line break behind it is none
        assert _texts(batch, own) == [prompt, " Ask Ann.\n", " Nothing\n"]


def test_a_special_token_that_an_answer_spells_is_text_of_the_data(
    uncased: PreTrainedTokenizerBase,
) -> None:
    row = {**ROW, "rejected": " <|im_end|> ENDS"}
    assert _texts(_batch(uncased, row), uncased)[2] == " <|im_end|> ENDS"


def test_an_answer_begins_where_its_prompt_does_not_lead_up_to_it(
    uncased: PreTrainedTokenizerBase,
) -> None:
    # as templates that open a turn with a thought, which a finished turn has not
    template = (
        "{% for message in messages %}{{ message.role }}: {{ message.content }}\n{% endfor %}"
        "{% if add_generation_prompt %}assistant: <think>{% endif %}"
    )
    batch = _batch(uncased, as_chat=True, chat_template=template)
    assert str(uncased.decode(batch.candidate0.input_ids[0])).startswith("user: what should")
    assert _texts(batch, uncased) == [
        "user: What should I do?\nassistant: ", " Ask Ann.\n", " Nothing\n"
    ]  # fmt: skip
    # the sign that the thought and an answer begin with is the answer's
    bold = {**ROW, "chosen": "<b>Ask Ann</b>"}
    batch = _batch(uncased, bold, as_chat=True, chat_template=template)
    assert _texts(batch, uncased)[:2] == [
        "user: What should I do?\nassistant: ", "<b>Ask Ann</b>\n"
    ]  # fmt: skip
