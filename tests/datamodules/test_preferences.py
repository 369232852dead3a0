import json
import math
from typing import Any

import numpy as np
import pytest
import torch

from lrlhf.datamodules import BadDataError, PreferenceDataModule, Weighted, preferences
from lrlhf.datamodules.rows.collate import Candidate, PairRow, collate_pairs
from lrlhf.types import PreferenceBatch, SequenceBatch
from tests.datamodules.conftest import TOKENIZER, Rows
from tests.datamodules.test_prompts import turn, with_bos_and_eos

END = "<|endoftext|>"
PAIR = {"prompt": "Q", "chosen": " x", "rejected": " y"}
CANDIDATES = {"prompt": "Q", "candidate0": " x", "candidate1": " y"}


def load(train: Any, **options: Any) -> PreferenceDataModule:
    data = PreferenceDataModule(train, **{"batch_size": 1, "tokenizer": TOKENIZER, **options})
    data.prepare_data()
    data.setup("fit")
    return data


def first(*rows: Any, **options: Any) -> PreferenceBatch:
    return next(iter(load(Rows(rows), **options).train_dataloader()))


def parts(side: SequenceBatch) -> tuple[str, str]:
    """The text before the answer, and the answer."""
    before = side.attention_mask[0] & ~side.response_mask[0]
    return (
        str(TOKENIZER.decode(side.input_ids[0][before])),
        str(TOKENIZER.decode(side.input_ids[0][side.response_mask[0]])),
    )


def both(*rows: Any, **options: Any) -> list[tuple[str, str]]:
    batch = first(*rows, **options)
    return [parts(side) for side in (batch.candidate0, batch.candidate1)]


def refused(*rows: Any, **options: Any) -> str:
    with pytest.raises(BadDataError) as raised:
        load(Rows(rows), **options)
    return str(raised.value)


HH_PROMPT = "\n\nHuman: Hi\n\nAssistant: Hello\n\nHuman: Bad word?\n\nAssistant:"
HH = {"chosen": f"{HH_PROMPT} I'd rather not", "rejected": f"{HH_PROMPT} I'd say damn"}
HH_CHAT = (
    "<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\nHello<|im_end|>\n"
    "<|im_start|>user\nBad word?<|im_end|>\n<|im_start|>assistant\n"
)
CHAT = "<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\n"
USER, SYSTEM = turn("user", "hi"), turn("system", "Be brief.")
YES, NO = turn("assistant", "yes"), turn("assistant", "no")
SHAREGPT = [{"from": "human", "value": "hi"}, {"from": "gpt", "value": "yes"}]


@pytest.mark.parametrize(
    ("row", "options", "before", "answers"),
    [
        (
            {"q": "Q", "good": " yes", "bad": f" no{END}"},
            {"prompt_column": "q", "chosen_column": "good", "rejected_column": "bad"},
            "Q",
            (f" yes{END}", f" no{END}"),
        ),
        # plain texts part at the last space that they share, and neither answer is empty
        (
            {"chosen": "The sky is blue", "rejected": "The sky is black"},
            {},
            "The sky is",
            (f" blue{END}", f" black{END}"),
        ),
        # transcripts part at the last turn of the assistant that they share
        (HH, {}, HH_PROMPT, (f" I'd rather not{END}", f" I'd say damn{END}")),
        (
            HH,
            {"hh_as_chat": True},
            HH_CHAT,
            ("I'd rather not<|im_end|>\n", "I'd say damn<|im_end|>\n"),
        ),
    ],
)
def test_texts_are_prompt_and_answer_with_one_end(
    row: Any, options: dict[str, Any], before: str, answers: tuple[str, str]
) -> None:
    assert both(row, **options) == [(before, answer) for answer in answers]


@pytest.mark.parametrize(
    ("row", "options"),
    [
        ({"prompt": [USER], "chosen": [YES], "rejected": [NO]}, {}),
        ({"prompt": "hi", "chosen": [YES], "rejected": "no"}, {}),
        ({"prompt": "hi", "chosen": "yes", "rejected": "no"}, {"as_chat": True}),
        ({"chosen": [USER, YES], "rejected": [USER, NO]}, {}),
        ({"chosen": SHAREGPT, "rejected": [SHAREGPT[0], {"from": "gpt", "value": "no"}]}, {}),
    ],
)
def test_chats_are_rendered_with_the_template_and_get_no_further_end(
    row: Any, options: dict[str, Any]
) -> None:
    assert both(row, **options) == [(CHAT, "yes<|im_end|>\n"), (CHAT, "no<|im_end|>\n")]


@pytest.mark.parametrize(
    ("prompt", "before"),
    [
        ("hi", [USER]),
        ("hi\n", [USER]),
        ([turn("user", [{"type": "text", "text": "hi"}])], [USER]),
        ("", [USER]),
        ([USER], [SYSTEM, USER]),
        ([SYSTEM, USER], [SYSTEM, USER]),
        ([SYSTEM, USER], [USER]),
        ("hi", [turn("user", "a"), turn("assistant", "b"), USER]),
    ],
)
def test_a_prompt_that_the_conversations_repeat_counts_once(prompt: Any, before: Any) -> None:
    asked = [SYSTEM, *before] if SYSTEM in [*prompt] and SYSTEM not in before else before
    turns = [f"<|im_start|>{turn['role']}\n{turn['content']}<|im_end|>\n" for turn in asked]
    rendered = "".join(turns) + "<|im_start|>assistant\n"
    row = {"prompt": prompt, "chosen": [*before, YES], "rejected": [*before, NO]}
    assert both(row) == [(rendered, "yes<|im_end|>\n"), (rendered, "no<|im_end|>\n")]


def test_conversations_with_another_prompt_are_bad_rows() -> None:
    good = {"prompt": "hi", "chosen": [USER, YES], "rejected": [USER, NO]}
    message = refused(good, {**good, "prompt": "bye"}, {**good, "chosen": [SYSTEM, USER, YES]})
    for said in (
        "1  prompt not in the conversation",
        "rows.jsonl:2: column 'chosen' begins with user 'hi' and does not hold the prompt, which "
        "ends with user 'bye'",
        "1  different prompts",
        "rows.jsonl:3: what stands before the answer is not the same in 'chosen' and 'rejected'",
    ):
        assert said in message


@pytest.mark.parametrize(
    ("prompt", "options", "stripped"),
    [
        ("Q: why? A:", {}, True),
        ("Q", {}, True),
        ("What is one plus one?", {"as_chat": True}, True),
        ("Hi there", {"as_chat": True}, False),
    ],
)
def test_texts_that_begin_with_their_prompt_have_it_once(
    prompt: str, options: dict[str, Any], stripped: bool
) -> None:
    alone = {"prompt": prompt, "chosen": " yes", "rejected": " no"}
    whole = {"prompt": prompt, "chosen": f"{prompt} yes", "rejected": f"{prompt} no"}
    assert (both(alone, **options) == both(whole, **options)) is stripped
    # an answer may repeat the question
    assert prompt in both({**alone, "rejected": f"{prompt} no"}, **options)[1][1]


@pytest.mark.parametrize(
    ("label", "value"),
    [("A", 1.0), ("B", -1.0), (" b ", -1.0), *((t, 0.0) for t in ("C", "equal", "Tie", " same "))],
)
def test_labels_say_which_candidate_is_better(label: str, value: float) -> None:
    for name in ("labels", "label"):
        assert first({**CANDIDATES, name: label}).labels.tolist() == [[value]]
    batch = first({**CANDIDATES, "preference": label, "id": 3})
    assert batch.labels.tolist() == [[value]]
    assert parts(batch.candidate0) == ("Q", f" x{END}")
    assert parts(batch.candidate1) == ("Q", f" y{END}")
    assert batch.margin is None
    assert batch.info == ({"preference": label, "id": 3},)


@pytest.mark.parametrize(
    ("row", "options"),
    [
        ({"labels": {"style": "B", "truth": "A"}}, {}),
        ({"labels": '{"style": "B", "truth": "A"}'}, {}),
        ({"truth": "A", "style_label": "B"}, {}),
        ({"t": "A", "s": "B"}, {"label_columns": {"truth": "t", "style": "s"}}),
    ],
)
def test_each_head_has_its_label(row: dict[str, Any], options: dict[str, Any]) -> None:
    batch = first({**CANDIDATES, **row}, head_names=["truth", "style"], **options)
    assert batch.labels.tolist() == [[1.0, -1.0]]


def test_a_head_that_a_row_does_not_label_is_masked_and_no_tie() -> None:
    rows = [{**CANDIDATES, "truth": "A"}, {**CANDIDATES, "truth": None, "style": "C"}]
    data = load(Rows(rows), head_names=["truth", "style"], batch_size=2)
    labels = next(iter(data.train_dataloader())).labels.tolist()
    second, one = sorted(labels, key=lambda row: row[1] != 0)
    assert math.isnan(second[0])
    assert second[1] == 0.0
    assert one[0] == 1.0
    assert math.isnan(one[1])


def test_chosen_rows_name_the_head_they_were_judged_by() -> None:
    train = [
        Weighted(Rows([PAIR]), columns={"head": "helpful"}),
        Weighted(Rows([PAIR]), columns={"head": ["harmless", "helpful"]}),
    ]
    data = load(train, head_names=["helpful", "harmless"])
    labels = {str(batch.info[0]["head"]): batch.labels[0] for batch in data.train_dataloader()}
    assert labels["helpful"][0] == 1.0
    assert labels["helpful"][1].isnan()
    assert labels["['harmless', 'helpful']"].tolist() == [1.0, 1.0]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"head_names": ["t", "style"]}, "no train row has a label for the head 'style'"),
        (
            {"head_names": ["truth"], "label_columns": {"thruth": "t"}},
            r"the head 'thruth'; did you mean 'truth'",
        ),
        ({"head_names": []}, "head_names="),
        ({"head_names": ["a", "a"]}, "head_names="),
    ],
)
def test_impossible_heads_are_refused(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        load(Rows([{**CANDIDATES, "t": "A"}]), **options)


SCORES = {"score_columns": ("chosen_score", "rejected_score")}


@pytest.mark.parametrize(
    ("columns", "options", "margin"),
    [
        ({"margin": "0.5"}, {}, 0.5),
        ({"gap": 2}, {"margin_column": "gap"}, 2.0),
        ({"chosen_score": 3, "rejected_score": 1.5}, {}, None),
        ({"chosen_score": 3, "rejected_score": 1.5}, SCORES, 1.5),
        ({"chosen_score": 3, "rejected_score": 1.5, "margin": 0.5}, SCORES, 0.5),
        ({"up": 3, "down": "1"}, {"score_columns": ("up", "down"), "margin_column": None}, 2.0),
    ],
)
def test_margins_come_from_a_column_or_from_two_scores(
    columns: dict[str, Any], options: dict[str, Any], margin: float | None
) -> None:
    found = first({**PAIR, **columns}, **options).margin
    assert (None if found is None else found.tolist()) == (None if margin is None else [margin])


def test_margins_are_given_for_all_rows_or_for_none() -> None:
    said = "1 of 2 rows of the train data have no margin, the first is rows.jsonl:2"
    assert said in refused({**PAIR, "margin": 1}, PAIR)


def test_a_tokenizer_that_ends_texts_itself_gets_no_second_end() -> None:
    row = {"prompt": "a", "chosen": " b", "rejected": " a"}
    batch = first(row, tokenizer=with_bos_and_eos(eos=True))
    assert batch.candidate0.input_ids.tolist() == [[0, 3, 4, 1]]  # <s> a b </s>
    assert batch.candidate0.response_mask.tolist() == [[False, False, True, True]]


def test_a_token_that_spans_prompt_and_answer_counts_as_answer() -> None:
    # words are split at spaces only, so "a" + "x" is one unknown word, id 4
    row = {"prompt": "b a", "chosen": "x", "rejected": " a"}
    batch = first(row, tokenizer=with_bos_and_eos(eos=False))
    assert batch.candidate0.input_ids.tolist() == [[0, 4, 4, 1]]
    assert batch.candidate0.response_mask.tolist() == [[False, False, True, True]]
    assert batch.candidate1.response_mask.tolist() == [[False, False, False, True, True]]


def test_long_pairs_are_left_out_and_counted_never_cut(caplog: pytest.LogCaptureFixture) -> None:
    rows = [
        {"prompt": "Q", "chosen": "123", "rejected": "12"},  # 1 + 3 + end = 5 tokens
        {"prompt": "Q", "chosen": "12", "rejected": "1234"},
    ]
    (batch,) = load(Rows(rows), max_tokens=5, max_bad_fraction=0.5).train_dataloader()
    assert parts(batch.candidate0) == ("Q", f"123{END}")
    assert "candidate 1 with its prompt has 6 tokens, max_tokens=5" in caplog.text


def test_pairs_without_a_prompt_are_split_by_text() -> None:
    # the third row shares a text with each of the first two, the others stand alone
    texts = [("a", "b"), ("c", "d"), ("b", "c"), *((f"x{n}", f"y{n}") for n in range(9))]
    rows = [{"prompt": "", "chosen": c, "rejected": r, "texts": [c, r]} for c, r in texts]
    for seed in range(5):
        data = load(Rows(rows), val_size=5, seed=seed)
        train, held = (
            {text for batch in loader for text in batch.info[0]["texts"]}
            for loader in (data.train_dataloader(), data.val_dataloader())
        )
        assert train.isdisjoint(held)


def test_info_can_be_written_as_json() -> None:
    info = first({**PAIR, "score": math.inf, "missing": math.nan}).info[0]
    assert json.loads(json.dumps(info, allow_nan=False)) == {"score": None}


def test_batches_are_padded_at_the_right_each_candidate_by_itself() -> None:
    def row(label: float, margin: float, start: int, *both: list[int]) -> PairRow:
        texts = [Candidate(input_ids=np.array(ids, np.int32), start=start) for ids in both]
        info = {"n": start}
        return PairRow(
            texts=(texts[0], texts[1]), labels=(label,), margin=margin, keys=(), info=info
        )

    rows = [row(1.0, 0.5, 1, [5, 6, 7], [5, 8]), row(-1.0, 1.5, 0, [4, 3], [2])]
    batch = collate_pairs(rows, pad_token_id=3)  # a pad id that is also a real token
    assert batch.candidate0.input_ids.tolist() == [[5, 6, 7], [4, 3, 3]]
    assert batch.candidate0.attention_mask.tolist() == [[True, True, True], [True, True, False]]
    assert batch.candidate0.response_mask.tolist() == [[False, True, True], [True, True, False]]
    assert batch.candidate1.input_ids.tolist() == [[5, 8], [2, 3]]
    assert batch.candidate1.response_mask.tolist() == [[False, True], [True, False]]
    assert batch.labels.dtype == torch.float32
    assert batch.labels.tolist() == [[1.0], [-1.0]]
    assert batch.margin is not None
    assert batch.margin.tolist() == [0.5, 1.5]
    assert batch.info == ({"n": 1}, {"n": 0})


@pytest.mark.parametrize("learns", [True, False])
def test_answers_of_a_policy_learn_no_header_and_an_end(
    learns: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(
        preferences, "of_module", lambda _, name: learns if name == "answers_only" else None
    )
    pair = {"prompt": [USER, YES], "chosen": [YES, NO, USER, YES], "rejected": [NO]}
    header = "<|im_start|>assistant\n"
    end, asked = "<|im_end|>\n", f"<|im_start|>user\nhi<|im_end|>\n{header}"
    (_, chosen), (before, rejected) = both(pair)
    assert chosen == f"yes{end}{'' if learns else header}no{end}{asked}yes{end}"
    assert before == f"{CHAT}yes{end}{header}"
    assert rejected == f"no{end}"
    endless = "{% for m in messages %}# {{ m.role }}\n{{ m.content }}\n\n{% endfor %}"
    opened = f"{endless}{{% if add_generation_prompt %}}# assistant\n{{% endif %}}"
    pair = {"prompt": [USER], "chosen": [YES], "rejected": [NO]}
    (_, chosen), (_, rejected) = both(pair, chat_template=opened)
    assert (chosen, rejected) == ("yes\n\n" + END * learns, "no\n\n" + END * learns)
