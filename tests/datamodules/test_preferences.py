import json
import math
from typing import Any

import pytest
import torch
from transformers import PreTrainedTokenizerBase

from lrlhf.datamodules import BadDataError, PreferenceCollator, PreferenceDataModule, Weighted
from lrlhf.datamodules.rows.collate import Candidate, PairRow
from lrlhf.types import PreferenceBatch, SequenceBatch
from tests.datamodules.conftest import WriteRows
from tests.datamodules.test_prompts import with_bos_and_eos

END = "<|endoftext|>"


def load(train: Any, tokenizer: PreTrainedTokenizerBase, **options: Any) -> PreferenceDataModule:
    data = PreferenceDataModule(train, tokenizer=tokenizer, **{"batch_size": 1, **options})
    data.prepare_data()
    data.setup("fit")
    return data


def first(train: Any, tokenizer: PreTrainedTokenizerBase, **options: Any) -> PreferenceBatch:
    return next(iter(load(train, tokenizer, **options).train_dataloader()))


def parts(side: SequenceBatch, tokenizer: PreTrainedTokenizerBase) -> tuple[str, str]:
    """The text before the answer, and the answer."""
    before = side.attention_mask[0] & ~side.response_mask[0]
    return (
        str(tokenizer.decode(side.input_ids[0][before])),
        str(tokenizer.decode(side.input_ids[0][side.response_mask[0]])),
    )


def both(batch: PreferenceBatch, tokenizer: PreTrainedTokenizerBase) -> list[tuple[str, str]]:
    return [parts(side, tokenizer) for side in (batch.candidate0, batch.candidate1)]


def test_prompt_and_answers_are_one_text_with_one_end(
    write_rows: WriteRows, tokenizer: PreTrainedTokenizerBase
) -> None:
    row = {"prompt": "Q: why? A:", "chosen": " because", "rejected": f" no{END}", "id": 3}
    path = write_rows([row])
    batch = first(path, tokenizer)
    assert both(batch, tokenizer) == [("Q: why? A:", f" because{END}"), ("Q: why? A:", f" no{END}")]
    assert batch.labels.tolist() == [[1.0]]
    assert batch.margin is None
    assert batch.info == ({"id": 3},)


def test_columns_are_configurable(
    write_rows: WriteRows, tokenizer: PreTrainedTokenizerBase
) -> None:
    path = write_rows([{"q": "Q", "good": " yes", "bad": " no"}])
    batch = first(path, tokenizer, prompt_column="q", chosen_column="good", rejected_column="bad")
    assert both(batch, tokenizer) == [("Q", f" yes{END}"), ("Q", f" no{END}")]


def test_plain_texts_part_at_the_last_space_that_they_share(
    write_rows: WriteRows, tokenizer: PreTrainedTokenizerBase
) -> None:
    path = write_rows([{"chosen": "The sky is blue", "rejected": "The sky is black"}])
    assert both(first(path, tokenizer), tokenizer) == [
        ("The sky is", f" blue{END}"),
        ("The sky is", f" black{END}"),
    ]


def test_an_answer_that_continues_the_other_keeps_something_on_both_sides(
    write_rows: WriteRows, tokenizer: PreTrainedTokenizerBase
) -> None:
    path = write_rows([{"chosen": "It is so", "rejected": "It is so good"}])
    assert both(first(path, tokenizer), tokenizer) == [
        ("It is", f" so{END}"),
        ("It is", f" so good{END}"),
    ]


HH_PROMPT = "\n\nHuman: Hi\n\nAssistant: Hello\n\nHuman: Bad word?\n\nAssistant:"


def test_transcripts_part_at_the_last_assistant_turn_that_they_share(
    write_rows: WriteRows, tokenizer: PreTrainedTokenizerBase
) -> None:
    rows = [{"chosen": f"{HH_PROMPT} I'd rather not", "rejected": f"{HH_PROMPT} I'd say damn"}]
    assert both(first(write_rows(rows), tokenizer), tokenizer) == [
        (HH_PROMPT, f" I'd rather not{END}"),
        (HH_PROMPT, f" I'd say damn{END}"),
    ]


def test_transcripts_can_be_rendered_as_chat_turns(
    write_rows: WriteRows, tokenizer: PreTrainedTokenizerBase
) -> None:
    rows = [{"chosen": f"{HH_PROMPT} No.", "rejected": f"{HH_PROMPT} Damn."}]
    chat = (
        "<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\nHello<|im_end|>\n"
        "<|im_start|>user\nBad word?<|im_end|>\n<|im_start|>assistant\n"
    )
    assert both(first(write_rows(rows), tokenizer, hh_as_chat=True), tokenizer) == [
        (chat, "No.<|im_end|>\n"),
        (chat, "Damn.<|im_end|>\n"),
    ]


CHAT = "<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\n"
USER = {"role": "user", "content": "hi"}


def said(text: str) -> dict[str, str]:
    return {"role": "assistant", "content": text}


@pytest.mark.parametrize(
    "row",
    [
        {"prompt": [USER], "chosen": [said("yes")], "rejected": [said("no")]},
        {"prompt": [USER], "chosen": "yes", "rejected": "no"},
        {"prompt": "hi", "chosen": [said("yes")], "rejected": [said("no")]},
        {"chosen": [USER, said("yes")], "rejected": [USER, said("no")]},
        {
            "chosen": [{"from": "human", "value": "hi"}, {"from": "gpt", "value": "yes"}],
            "rejected": [{"from": "human", "value": "hi"}, {"from": "gpt", "value": "no"}],
        },
    ],
    ids=["explicit", "text answers", "text prompt", "implicit", "sharegpt"],
)
def test_chats_are_rendered_with_the_template_and_get_no_further_end(
    write_rows: WriteRows, tokenizer: PreTrainedTokenizerBase, row: dict[str, Any]
) -> None:
    assert both(first(write_rows([row]), tokenizer), tokenizer) == [
        (CHAT, "yes<|im_end|>\n"),
        (CHAT, "no<|im_end|>\n"),
    ]


SYSTEM = {"role": "system", "content": "Be brief."}
PARTS = {"role": "user", "content": [{"type": "text", "text": "hi"}]}


@pytest.mark.parametrize(
    ("prompt", "before"),
    [
        ("hi", [USER]),
        ("hi\n", [USER]),
        ([USER], [USER]),
        ([PARTS], [USER]),
        ("", [USER]),
        ("hi", [SYSTEM, USER]),
        ([USER], [SYSTEM, USER]),
        ([SYSTEM, USER], [SYSTEM, USER]),
        ([SYSTEM, USER], [USER]),
        ("hi", [{"role": "user", "content": "a"}, said("b"), USER]),
    ],
)
def test_a_prompt_that_the_conversations_repeat_counts_once(
    write_rows: WriteRows, tokenizer: PreTrainedTokenizerBase, prompt: Any, before: list[Any]
) -> None:
    row = {"prompt": prompt} | {
        name: [*before, said(text)] for name, text in (("chosen", "yes"), ("rejected", "no"))
    }
    asked = [SYSTEM, *before] if SYSTEM in [*prompt] and SYSTEM not in before else before
    turns = [f"<|im_start|>{turn['role']}\n{turn['content']}<|im_end|>\n" for turn in asked]
    rendered = "".join(turns) + "<|im_start|>assistant\n"
    assert both(first(write_rows([row]), tokenizer), tokenizer) == [
        (rendered, "yes<|im_end|>\n"),
        (rendered, "no<|im_end|>\n"),
    ]


def test_the_answer_to_the_first_of_several_turns_begins_after_the_prompt(
    write_rows: WriteRows, tokenizer: PreTrainedTokenizerBase
) -> None:
    more = {"role": "user", "content": "why"}
    row = {
        "prompt": "hi",
        "chosen": [USER, said("yes"), more, said("so")],
        "rejected": [USER, said("yes"), more, said("no")],
    }
    (before, answer), _ = both(first(write_rows([row]), tokenizer), tokenizer)
    assert before == CHAT
    assert answer.startswith("yes<|im_end|>")


def test_conversations_with_another_prompt_are_bad_rows(
    write_rows: WriteRows, tokenizer: PreTrainedTokenizerBase
) -> None:
    good = {"prompt": "hi", "chosen": [USER, said("yes")], "rejected": [USER, said("no")]}
    path = write_rows(
        [good, {**good, "prompt": "bye"}, {**good, "chosen": [SYSTEM, *good["chosen"]]}]
    )
    with pytest.raises(BadDataError) as raised:
        load(path, tokenizer)
    for said_of_it in (
        "1  prompt not in the conversation",
        "rows.jsonl:2: column 'chosen' begins with user 'hi' and does not hold the prompt, which "
        "ends with user 'bye'",
        "1  different prompts",
        "rows.jsonl:3: what stands before the answer is not the same in 'chosen' and 'rejected'",
    ):
        assert said_of_it in str(raised.value)


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
    write_rows: WriteRows,
    tokenizer: PreTrainedTokenizerBase,
    prompt: str,
    options: dict[str, Any],
    stripped: bool,
) -> None:
    alone = {"prompt": prompt, "chosen": " yes", "rejected": " no"}
    whole = {"prompt": prompt, "chosen": f"{prompt} yes", "rejected": f"{prompt} no"}
    one = {**alone, "rejected": f"{prompt} no"}  # an answer may repeat the question
    found = [
        both(first(write_rows([row]), tokenizer, **options), tokenizer)
        for row in (alone, whole, one)
    ]
    assert (found[0] == found[1]) is stripped
    assert prompt in found[2][1][1]


def test_a_template_that_refuses_all_rows_gives_its_own_reason(
    write_rows: WriteRows, tokenizer: PreTrainedTokenizerBase
) -> None:
    template = (
        "{% if messages[0].role == 'system' %}{{ raise_exception('no system here') }}{% endif %}"
    )
    row = {"prompt": [SYSTEM, USER], "chosen": "yes", "rejected": "no"}
    with pytest.raises(BadDataError) as raised:
        load(write_rows([row, row]), tokenizer, chat_template=template)
    for part in (
        "2 of 2 rows of the train data cannot be used: refused by the chat template.",
        "no system here (the turns: system, user)",
    ):
        assert part in str(raised.value)


def test_plain_rows_can_be_made_chats(
    write_rows: WriteRows, tokenizer: PreTrainedTokenizerBase
) -> None:
    path = write_rows([{"prompt": "hi", "chosen": "yes", "rejected": "no"}])
    assert both(first(path, tokenizer, as_chat=True), tokenizer)[0] == (CHAT, "yes<|im_end|>\n")


def test_tools_and_template_arguments_of_a_row_reach_the_template(
    write_rows: WriteRows, tokenizer: PreTrainedTokenizerBase
) -> None:
    row = {
        "prompt": [USER],
        "chosen": "yes",
        "rejected": "no",
        "tools": [{"name": "clock"}],
        "chat_template_kwargs": json.dumps({"mode": "terse"}),
    }
    template = (
        "{{ mode }} {{ tools[0].name }}|{% for m in messages[1:] %}{{ m.content }}{% endfor %}"
    )
    batch = first(write_rows([row]), tokenizer, chat_template=template)
    assert both(batch, tokenizer) == [("terse clock|", "yes"), ("terse clock|", "no")]


@pytest.mark.parametrize(
    ("label", "value"), [("A", 1.0), ("B", -1.0), ("C", 0.0), (" b ", -1.0), ("Equal", 0.0)]
)
def test_labels_say_which_candidate_is_better(
    write_rows: WriteRows, tokenizer: PreTrainedTokenizerBase, label: str, value: float
) -> None:
    row = {"prompt": "Q", "candidate0": " x", "candidate1": " y", "preference": label}
    batch = first(write_rows([row]), tokenizer)
    assert batch.labels.tolist() == [[value]]
    assert both(batch, tokenizer) == [("Q", f" x{END}"), ("Q", f" y{END}")]
    assert batch.info[0]["preference"] == label


@pytest.mark.parametrize(
    ("row", "options"),
    [
        ({"labels": {"style": "B", "truth": "A"}}, {}),
        ({"labels": '{"style": "B", "truth": "A"}'}, {}),
        ({"truth": "A", "style_label": "B"}, {}),
        ({"t": "A", "s": "B"}, {"label_columns": {"truth": "t", "style": "s"}}),
    ],
    ids=["mapping", "json", "own columns", "named columns"],
)
def test_each_head_has_its_label(
    write_rows: WriteRows,
    tokenizer: PreTrainedTokenizerBase,
    row: dict[str, Any],
    options: dict[str, Any],
) -> None:
    path = write_rows([{"prompt": "Q", "candidate0": " x", "candidate1": " y", **row}])
    batch = first(path, tokenizer, head_names=["truth", "style"], **options)
    assert batch.labels.tolist() == [[1.0, -1.0]]


def test_a_head_that_a_row_does_not_label_is_masked_and_no_tie(
    write_rows: WriteRows, tokenizer: PreTrainedTokenizerBase
) -> None:
    pair = {"prompt": "Q", "candidate0": " x", "candidate1": " y"}
    rows = [{**pair, "truth": "A"}, {**pair, "truth": None, "style": "C"}]
    data = load(write_rows(rows), tokenizer, head_names=["truth", "style"], batch_size=2)
    labels = sorted(
        next(iter(data.train_dataloader())).labels.tolist(), key=lambda row: row[1] != 0
    )
    assert math.isnan(labels[0][0])
    assert labels[0][1] == 0.0
    assert labels[1][0] == 1.0
    assert math.isnan(labels[1][1])


def test_chosen_rows_name_the_head_they_were_judged_by(
    write_rows: WriteRows, tokenizer: PreTrainedTokenizerBase
) -> None:
    rows = [{"prompt": "Q", "chosen": " x", "rejected": " y"}]
    train = [
        Weighted(write_rows(rows, "a.jsonl"), columns={"head": "helpful"}),
        Weighted(write_rows(rows, "b.jsonl"), columns={"head": ["harmless", "helpful"]}),
    ]
    data = load(train, tokenizer, head_names=["helpful", "harmless"])
    labels = {str(batch.info[0]["head"]): batch.labels[0] for batch in data.train_dataloader()}
    assert labels["helpful"][0] == 1.0
    assert labels["helpful"][1].isnan()
    assert labels["['harmless', 'helpful']"].tolist() == [1.0, 1.0]


def test_a_head_that_no_row_labels_is_refused(
    write_rows: WriteRows, tokenizer: PreTrainedTokenizerBase
) -> None:
    path = write_rows([{"prompt": "Q", "candidate0": " x", "candidate1": " y", "coherence": "A"}])
    with pytest.raises(BadDataError, match=r"no train row has a label for the head 'style'"):
        load(path, tokenizer, head_names=["coherence", "style"])


def test_label_columns_of_an_unknown_head_are_refused(
    write_rows: WriteRows, tokenizer: PreTrainedTokenizerBase
) -> None:
    path = write_rows([{"prompt": "Q", "candidate0": " x", "candidate1": " y", "t": "A"}])
    with pytest.raises(ValueError, match=r"the head 'thruth'; did you mean 'truth'"):
        load(path, tokenizer, head_names=["truth"], label_columns={"thruth": "t"})


SCORES = {"score_columns": ("chosen_score", "rejected_score")}


@pytest.mark.parametrize(
    ("columns", "options", "margin"),
    [
        ({"margin": 0.5}, {}, 0.5),
        ({"margin": "0.5"}, {}, 0.5),
        ({"gap": 2}, {"margin_column": "gap"}, 2.0),
        ({"chosen_score": 3, "rejected_score": 1.5}, {}, None),
        ({"chosen_score": 3, "rejected_score": 1.5}, SCORES, 1.5),
        ({"chosen_score": 3, "rejected_score": 1.5, "margin": 0.5}, SCORES, 0.5),
        ({"up": 3, "down": "1"}, {"score_columns": ("up", "down"), "margin_column": None}, 2.0),
        ({"margin": 0.5}, {"margin_column": None}, None),
    ],
)
def test_margins_come_from_a_column_or_from_two_scores(
    write_rows: WriteRows,
    tokenizer: PreTrainedTokenizerBase,
    columns: dict[str, Any],
    options: dict[str, Any],
    margin: float | None,
) -> None:
    path = write_rows([{"prompt": "Q", "chosen": " x", "rejected": " y", **columns}])
    batch = first(path, tokenizer, **options)
    assert (None if batch.margin is None else batch.margin.tolist()) == (
        None if margin is None else [margin]
    )


def test_a_better_answer_with_the_lower_score_counts_only_where_scores_make_margins(
    write_rows: WriteRows, tokenizer: PreTrainedTokenizerBase
) -> None:
    scores = [(3, 1), (1, 2), (2, 2), (None, 1)]
    pair = {"prompt": "Q", "chosen": " x", "rejected": " y"}
    path = write_rows(
        {**pair, "chosen_score": better, "rejected_score": worse} for better, worse in scores
    )
    load(path, tokenizer)
    with pytest.raises(BadDataError) as raised:
        load(path, tokenizer, **SCORES)
    for said in (
        "2 of 4 rows",
        "1  negative margin",
        "rows.jsonl:2: chosen_score - rejected_score is -1",
        "1  wrong type",
        "rows.jsonl:4: column 'chosen_score' should be a number",
    ):
        assert said in str(raised.value)


def test_margins_are_given_for_all_rows_or_for_none(
    write_rows: WriteRows, tokenizer: PreTrainedTokenizerBase
) -> None:
    pair = {"prompt": "Q", "chosen": " x", "rejected": " y"}
    path = write_rows([{**pair, "margin": 1}, pair])
    with pytest.raises(BadDataError, match=r"1 of 2 rows .* have no margin, the first is .*:2"):
        load(path, tokenizer)


@pytest.mark.parametrize(
    "names", [("chosen_ids", "rejected_ids"), ("chosen_input_ids", "rejected_input_ids")]
)
def test_token_ids_are_taken_as_they_are(
    write_rows: WriteRows, tokenizer: PreTrainedTokenizerBase, names: tuple[str, str]
) -> None:
    path = write_rows([{names[0]: [9, 8, 7, 6], names[1]: [9, 8, 5]}])
    batch = first(path, tokenizer)
    assert batch.candidate0.input_ids.tolist() == [[9, 8, 7, 6]]
    assert batch.candidate1.input_ids.tolist() == [[9, 8, 5]]
    assert batch.candidate0.response_mask.tolist() == [[False, False, True, True]]
    assert batch.candidate1.response_mask.tolist() == [[False, False, True]]


def test_a_tokenizer_that_ends_texts_itself_gets_no_second_end(write_rows: WriteRows) -> None:
    path = write_rows([{"prompt": "a", "chosen": " b", "rejected": " a"}])
    batch = first(path, with_bos_and_eos(eos=True))
    assert batch.candidate0.input_ids.tolist() == [[0, 3, 4, 1]]  # <s> a b </s>
    assert batch.candidate0.response_mask.tolist() == [[False, False, True, True]]


def test_a_token_that_spans_prompt_and_answer_counts_as_answer(write_rows: WriteRows) -> None:
    # words are split at spaces only, so "a" + "x" is one unknown word, id 4
    path = write_rows([{"prompt": "b a", "chosen": "x", "rejected": " a"}])
    batch = first(path, with_bos_and_eos(eos=False))
    assert batch.candidate0.input_ids.tolist() == [[0, 4, 4, 1]]
    assert batch.candidate0.response_mask.tolist() == [[False, False, True, True]]
    assert batch.candidate1.response_mask.tolist() == [[False, False, False, True, True]]


def test_long_pairs_are_left_out_and_counted_never_cut(
    write_rows: WriteRows, tokenizer: PreTrainedTokenizerBase, caplog: pytest.LogCaptureFixture
) -> None:
    rows = [
        {"prompt": "Q", "chosen": "123", "rejected": "12"},  # 1 + 3 + end = 5 tokens
        {"prompt": "Q", "chosen": "12", "rejected": "1234"},
    ]
    data = load(write_rows(rows), tokenizer, max_tokens=5, max_bad_fraction=0.5)
    (batch,) = data.train_dataloader()
    assert parts(batch.candidate0, tokenizer) == ("Q", f"123{END}")
    assert "the second candidate has 6 tokens with its prompt, max_tokens=5" in caplog.text


def test_pairs_are_split_by_prompt(
    write_rows: WriteRows, tokenizer: PreTrainedTokenizerBase
) -> None:
    rows = [
        {"prompt": f"p{n % 6} ", "chosen": f"good {n}", "rejected": "bad", "p": n % 6}
        for n in range(24)
    ]
    data = load(write_rows(rows), tokenizer, val_size=8)
    train = {batch.info[0]["p"] for batch in data.train_dataloader()}
    val = [batch.info[0]["p"] for batch in data.val_dataloader()]
    assert len(val) == 8
    assert train.isdisjoint(val)


def test_pairs_without_a_prompt_are_split_by_text(
    write_rows: WriteRows, tokenizer: PreTrainedTokenizerBase
) -> None:
    # three rows share a text in a chain (0-1, 1-2), the others stand alone
    texts = [("a", "b"), ("b", "c"), ("c", "d"), *((f"x{n}", f"y{n}") for n in range(9))]
    rows = [{"prompt": "", "chosen": c, "rejected": r, "texts": [c, r]} for c, r in texts]
    for seed in range(5):
        data = load(write_rows(rows), tokenizer, val_size=5, seed=seed)
        sides = [
            {text for batch in loader for text in batch.info[0]["texts"]}
            for loader in (data.train_dataloader(), data.val_dataloader())
        ]
        assert sides[0].isdisjoint(sides[1])


def test_info_can_be_written_as_json(
    write_rows: WriteRows, tokenizer: PreTrainedTokenizerBase
) -> None:
    path = write_rows(['{"prompt": "Q", "chosen": " x", "rejected": " y", "score": NaN}'])
    info = first(path, tokenizer).info[0]
    assert json.loads(json.dumps(info, allow_nan=False))["score"] == "nan"


def test_batches_are_padded_at_the_right_each_side_by_itself() -> None:
    def ids(*values: int) -> Any:
        return torch.tensor(values, dtype=torch.int32).numpy()

    rows = [
        PairRow(Candidate(ids(5, 6, 7), 1), Candidate(ids(5, 8), 1), (1.0,), 0.5, (), {"n": 0}),
        PairRow(Candidate(ids(4, 3), 0), Candidate(ids(2), 0), (-1.0,), 1.5, (), {"n": 1}),
    ]
    batch = PreferenceCollator(pad_token_id=3)(rows)  # a pad id that is also a real token
    assert batch.candidate0.input_ids.tolist() == [[5, 6, 7], [4, 3, 3]]
    assert batch.candidate0.attention_mask.tolist() == [[True, True, True], [True, True, False]]
    assert batch.candidate0.response_mask.tolist() == [[False, True, True], [True, True, False]]
    assert batch.candidate1.input_ids.tolist() == [[5, 8], [2, 3]]
    assert batch.candidate1.response_mask.tolist() == [[False, True], [True, False]]
    assert batch.labels.dtype == torch.float32
    assert batch.labels.tolist() == [[1.0], [-1.0]]
    assert batch.margin is not None
    assert batch.margin.tolist() == [0.5, 1.5]
    assert batch.info == ({"n": 0}, {"n": 1})


@pytest.mark.parametrize("heads", [[], ["a", "a"]])
def test_impossible_head_names_are_refused(
    write_rows: WriteRows, tokenizer: PreTrainedTokenizerBase, heads: list[str]
) -> None:
    path = write_rows([{"prompt": "Q", "chosen": " x", "rejected": " y"}])
    with pytest.raises(ValueError, match="head_names="):
        load(path, tokenizer, head_names=heads)
