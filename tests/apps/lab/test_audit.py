"""Faults are planted in a clean data set: the audit finds these rows, and no others."""

import json
import math
import random
from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from lrlhf.apps.lab.audit import Audit, as_json, as_page, as_text, audit
from lrlhf.datamodules import PreferenceDataModule, PromptDataModule, SupervisedDataModule
from tests.apps.lab.texts import clean_pairs, question, sentences
from tests.conftest import build_tokenizer
from tests.datamodules.conftest import Rows

BESIDE = SimpleNamespace(tokenizer=build_tokenizer(), processor=None, head_names=None)
CONTEXT = 1500
MAX_TOKENS = 2000
GERMAN = (
    "Der alte Kapitän hat gestern am Hafen erzählt, dass die Fischer wegen des Sturms nicht auf "
    "das Meer fahren konnten und deshalb den ganzen Tag zu Hause geblieben sind."
)
Row = dict[str, Any]


def audited(train: Sequence[Row], val: Sequence[Row] | None = None, **options: Any) -> Audit:
    data = PreferenceDataModule(
        train=Rows(train, "train.jsonl"),
        val=None if val is None else Rows(val, "val.jsonl"),
        max_tokens=MAX_TOKENS,
    )
    return audit(data, BESIDE, context=CONTEXT, **options)


def tags(found: Audit, train: Sequence[Row], val: Sequence[Row] = ()) -> dict[str, set[str]]:
    """Return the tags of the rows of each finding."""
    rows = {"train.jsonl": train, "val.jsonl": val}
    tagged: dict[str, set[str]] = {}
    for finding in found.findings:
        places = [row.place.rpartition(":") for row in finding.rows]
        tagged[finding.name] = {rows[name][int(number) - 1]["tag"] for name, _, number in places}
        assert finding.count == len(finding.rows)
    return tagged


def chat(*turns: tuple[str, str]) -> list[dict[str, str]]:
    return [{"role": role, "content": content} for role, content in turns]


def planted() -> tuple[list[Row], list[Row], dict[str, set[str]]]:
    """Return train rows, validation rows, and which tags each finding must have."""
    train, val = clean_pairs(120), clean_pairs(40, seed=1)
    draw = random.Random(9)

    def pair(tag: str, **columns: Any) -> Row:
        row = {"prompt": question(draw), "chosen": sentences(draw, 2), "tag": tag}
        return {**row, "rejected": sentences(draw, 2), **columns}

    once, like = pair("original"), pair("resembled")
    asked, reworded = pair("asked in training"), pair("asked likewise in training")
    judged = pair("judged")
    said = sentences(draw, 2)
    user, assistant = ("user", question(draw)), ("assistant", sentences(draw, 2))
    other = chat(("assistant", sentences(draw, 2)))
    cut = [pair(f"cut {number}", chosen=sentences(draw, 12)[:700]) for number in range(8)]
    train += [
        once, like, asked, reworded, judged, *cut,
        {**once, "tag": "duplicate"},
        {**like, "tag": "near-duplicate", "prompt": like["prompt"].replace("number", "no.", 1)},
        {**judged, "tag": "other way round", "chosen": judged["rejected"],
         "rejected": judged["chosen"]},
        pair("identical", chosen=said, rejected=said),
        pair("equal but for case", chosen=said + " Yes.", rejected=said.upper() + "  YES."),
        pair("jinja", prompt=f"{question(draw)} {{{{ question }}}}"),
        pair("format", chosen=f"{said} Answer {{question}} now."),
        pair("None", rejected="None"),
        pair("nan", prompt=f"{question(draw)}\nContext: nan"),
        pair("two users", prompt=chat(user, user), chosen=chat(assistant), rejected=other),
        pair("assistant first", prompt=chat(("assistant", said), user), chosen=chat(assistant),
             rejected=other),
        pair("no user", prompt=chat(("system", said)), chosen=chat(assistant), rejected=other),
        pair("goes on", chosen=f"{said}\n\nHuman: And then?"),
        pair("repeats", prompt=(repeated := question(draw)), chosen=f"{repeated} {said}"),
        pair("mark", prompt=f"{question(draw)}<|im_end|>"),
        pair("foreign mark", chosen=f"[INST] {said}"),
        pair("doubled", chosen=f"{said}<|endoftext|><|endoftext|>"),
        pair("empty answer", rejected="  "),
        pair("empty prompt", prompt="   "),
        pair("blank turn", prompt=chat(("user", " "), assistant, user), chosen=chat(assistant),
             rejected=other),
        pair("too long", prompt=sentences(draw, 30)),
        pair("longer than the context", prompt=sentences(draw, 15)),
        pair("German answer", chosen=GERMAN),
        {"tag": "half a row", "prompt": question(draw), "chosen": said},
    ]  # fmt: skip
    val += [
        pair("leak", prompt=asked["prompt"]),
        pair("near leak", prompt=reworded["prompt"].replace("number", "no.", 1)),
    ]
    return train, val, {
        "exact duplicates": {"duplicate"},
        "near-duplicates": {"near-duplicate"},
        "contradictory pairs": {"judged", "other way round"},
        "equal candidates": {"identical", "equal but for case"},
        "leaks between train and validation": {"leak"},
        "near leaks between train and validation": {"near leak"},
        "unfilled templates": {"jinja", "format"},
        "literal None or nan": {"None", "nan"},
        "roles missing or repeated": {"two users", "assistant first", "no user"},
        "answers that go on with the next turn": {"goes on"},
        "prompt inside of the answer": {"repeats"},
        "special tokens in texts": {"mark", "foreign mark", "doubled"},
        "doubled special tokens": {"doubled"},
        "empty texts": {"empty answer", "empty prompt", "blank turn"},
        "answers cut off at a limit": {row["tag"] for row in cut},
        "left out: too long": {"too long"},
        "longer than the model's context": {"longer than the context"},
        "answers in another language than the prompt": {"German answer"},
        "rows in a rare language": {"German answer"},
        "left out: missing column": {"half a row"},
    }  # fmt: skip


def test_nothing_is_found_in_clean_data() -> None:
    found = audited(clean_pairs(300), clean_pairs(60, seed=1))

    assert found.findings == []
    assert found.totals == found.usable == {"train": 300, "validation": 60}
    assert "Nothing was found." in as_text(found)


def test_every_planted_fault_is_found_in_its_rows() -> None:
    train, val, expected = planted()

    assert tags(audited(train, val), train, val) == expected


def test_the_order_of_the_rows_does_not_matter() -> None:
    train, val, _ = planted()
    before = tags(audited(train, val), train, val)
    random.Random(4).shuffle(train)
    random.Random(5).shuffle(val)

    after = tags(audited(train, val), train, val)

    # which of two equal rows is the copy is a matter of their order
    either = {"exact duplicates": {"original"}, "near-duplicates": {"resembled"}}
    assert before.keys() == after.keys()
    for name, rows in after.items():
        assert rows in (before[name], either.get(name))


@pytest.mark.parametrize(("longer", "severity"), [(170, "note"), (250, "warning")])
def test_a_bias_to_the_longer_answer_is_told_with_its_interval(longer: int, severity: str) -> None:
    rows = clean_pairs(300)
    for number, row in enumerate(rows):
        worse, better = sorted((row["chosen"], row["rejected"]), key=len)
        better += "!"  # where they are equally long
        row["chosen"], row["rejected"] = (better, worse) if number < longer else (worse, better)

    found = audited(rows)

    (bias,) = found.findings
    assert (bias.name, bias.severity) == ("length bias", severity)
    assert (bias.count, bias.of) == (longer, 300)
    measure = next(one for one in found.measures if "longer" in one.name)
    assert measure.low is not None
    assert measure.high is not None
    assert 0.5 < measure.low < longer / 300 < measure.high


def test_pairs_of_equal_length_are_said_not_to_count_and_figures_say_of_what_they_are() -> None:
    rows = clean_pairs(40)
    for number, row in enumerate(rows):
        # 30 pairs whose better answer is the longer one, and 10 of equal length
        row["chosen"] = row["rejected"][::-1] + ("!" if number < 30 else "")

    said = {" ".join(line.split()) for line in as_text(audited(rows)).splitlines()}

    (bias,) = [line for line in said if line.startswith("longer answer preferred (share) 1 ")]
    assert bias.endswith(" 30 pairs 10 with answers of equal")  # length
    (median,) = [line for line in said if line.startswith("tokens of a row, median ")]
    assert median.endswith(" 80 texts")  # two of each pair


def test_pairs_of_one_prompt_count_as_a_cluster() -> None:
    rows = clean_pairs(60)
    for number, row in enumerate(rows):
        worse, better = sorted((row["chosen"], row["rejected"]), key=len)
        better += "!"
        row["chosen"], row["rejected"] = (better, worse) if number < 37 else (worse, better)
    # answers that are other texts, and as long
    copies = [
        {**row, "chosen": row["chosen"].replace("e", vowel), "rejected": row["rejected"]}
        for row in rows
        for vowel in "aeiou"
    ]

    (alone,), (repeated,) = (
        [one for one in audited(some).measures if "longer" in one.name] for some in (rows, copies)
    )

    assert (alone.of, repeated.of) == (60, 300)
    # Wilson's interval of 60: with the normal quantile where outcomes are alone, and with that of
    # Student's t of 59 degrees of freedom where the clusters tell the deviation
    for measure, quantile in ((alone, 1.959963985), (repeated, 2.000995378)):
        share, weight = 37 / 60, quantile**2 / 60
        half = quantile * math.sqrt(share * (1 - share) / 60 + weight / 240)
        ends = ((share + weight / 2 + sign * half) / (1 + weight) for sign in (-1, 1))
        assert measure[1:4] == pytest.approx((share, *ends))
    # 37 of 60 may well be chance; 185 of 300 independent pairs would not
    assert "length bias" not in tags(audited(copies), copies)


def as_candidates(rows: Sequence[Row], first: int) -> list[Row]:
    """Write pairs in an order that says nothing, the first ``first`` of them better-first."""
    written = []
    for number, row in enumerate(rows):
        better_first = number < first
        names = ("candidate0", "candidate1") if better_first else ("candidate1", "candidate0")
        texts = dict(zip(names, (row["chosen"], row["rejected"]), strict=True))
        label = "A" if better_first else "B"
        written.append({"prompt": row["prompt"], "label": label, "tag": row["tag"], **texts})
    return written


def test_a_bias_to_the_first_answer_is_found_where_the_order_says_nothing() -> None:
    found = audited(as_candidates(clean_pairs(200), 130))

    (bias,) = found.findings
    assert (bias.name, bias.count, bias.of) == ("position bias", 130, 200)
    assert audited(as_candidates(clean_pairs(200), 104)).findings == []


def test_swapped_candidates_with_a_swapped_label_are_duplicates_and_contradict_nothing() -> None:
    rows = as_candidates(clean_pairs(60), 30)
    rows[5]["label"] = "C"  # a tie
    for number, label in ((3, "B"), (5, "C")):
        copy = {**rows[number], "tag": f"copy of {number}", "label": label}
        copy["candidate0"], copy["candidate1"] = copy["candidate1"], copy["candidate0"]
        rows.append(copy)

    assert tags(audited(rows), rows) == {"exact duplicates": {"copy of 3", "copy of 5"}}


def test_rows_held_out_by_the_data_module_are_its_validation_rows() -> None:
    rows = clean_pairs(80)
    rows[10]["prompt"] = rows[50]["prompt"]  # which stay in one split
    data = PreferenceDataModule(train=Rows(rows, "train.jsonl"), val_fraction=0.25)

    found = audit(data, BESIDE)

    assert found.totals == found.usable == {"train": 60, "validation": 20}
    assert found.findings == []


def test_files_of_the_same_name_keep_their_leaks_apart() -> None:
    draw = random.Random(6)
    train, val, more = clean_pairs(30), clean_pairs(20, seed=1), clean_pairs(20, seed=2)
    train += [{**row, "prompt": question(draw)} for row in clean_pairs(2, seed=3)]
    val[4]["prompt"] = train[30]["prompt"]
    more[4]["prompt"] = train[31]["prompt"].replace("number", "no.", 1)
    data = PreferenceDataModule(
        train=Rows(train, "train.jsonl"),
        val={"one": Rows(val, "val.jsonl"), "two": Rows(more, "val.jsonl")},
        max_tokens=MAX_TOKENS,
    )

    found = audit(data, BESIDE)

    leaks = {
        finding.name: [row[:2] for row in finding.rows]
        for finding in found.findings
        if "leaks" in finding.name
    }
    assert leaks == {
        "leaks between train and validation": [("one validation", "val.jsonl:5")],
        "near leaks between train and validation": [("two validation", "val.jsonl:5")],
    }


def test_an_instruction_around_different_questions_makes_no_near_duplicates() -> None:
    draw = random.Random(8)
    tasks = [(sentences(draw, 4), sentences(draw, 2)) for _ in range(2)]

    def row(number: int, asked: str, tag: str = "") -> Row:
        before, after = tasks[number % 2]
        verdict = {"chosen": "Yes", "rejected": "Not", "tag": tag or str(number)}
        return {"prompt": f"{before}\nQuestion: {asked}\n{after}", **verdict}

    def short(number: int) -> str:
        return f"is {draw.randrange(10**6)} more than {number}?"

    rows = [row(number, short(number)) for number in range(60)]
    long = [sentences(draw, 4) for _ in range(60)]
    rows += [row(60 + number, asked) for number, asked in enumerate(long)]
    held = [row(number, short(number)) for number in range(30)]

    assert audited(rows, held).findings == []

    rows.append(row(100, long[40].replace("number", "no.", 1), "like 100"))
    held.append(row(110, long[50].replace("number", "no.", 1), "like 110"))
    assert tags(audited(rows, held), rows, held) == {
        "near-duplicates": {"like 100"},
        "near leaks between train and validation": {"like 110"},
    }


def test_texts_to_be_learnt_are_audited_in_all_their_shapes() -> None:
    draw = random.Random(11)
    clean = [
        {"prompt": question(draw), "completion": sentences(draw, 2), "tag": f"clean {number}"}
        for number in range(40)
    ]
    said, asked = sentences(draw, 2), question(draw)
    user, assistant = ("user", question(draw)), ("assistant", sentences(draw, 2))
    train: list[Row] = [
        *clean,
        {"text": said, "tag": "text"},
        {"text": said, "tag": "the text again"},
        {"messages": chat(user, assistant), "tag": "chat"},
        {"messages": chat(user, assistant), "tag": "the chat again"},
        {"messages": chat(("user", asked), ("user", asked), assistant), "tag": "two users"},
        # a column that nobody reads
        {
            "messages": chat(("user", question(draw)), ("assistant", sentences(draw, 2))),
            "prompt": "",
        },
        {"text": sentences(draw, 2), "prompt": " "},
        {"prompt": " ", "completion": sentences(draw, 2), "tag": "blank prompt"},
        {"messages": chat(("user", question(draw)), ("assistant", " ")), "tag": "blank turn"},
        {"prompt": (repeated := question(draw)), "completion": f" {repeated} {said}", "tag": "r"},
        {"prompt": question(draw), "completion": "None", "tag": "None"},
        {"prompt": question(draw), "completion": sentences(draw, 40), "tag": "too long"},
    ]
    val = [{"prompt": clean[3]["prompt"], "completion": sentences(draw, 1), "tag": "leak"}]
    data = SupervisedDataModule(
        Rows(train, "train.jsonl"), val=Rows(val, "val.jsonl"), max_tokens=MAX_TOKENS
    )

    found = audit(data, BESIDE, context=CONTEXT)

    assert tags(found, train, val) == {
        "exact duplicates": {"the text again", "the chat again"},
        "roles missing or repeated": {"two users"},
        "empty texts": {"blank turn", "blank prompt"},
        "prompt inside of the answer": {"r"},
        "literal None or nan": {"None"},
        "left out: too long": {"too long"},
        "leaks between train and validation": {"leak"},
    }
    assert found.totals == {"train": len(train), "validation": 1}
    lengths = {measure.name: measure for measure in found.measures}
    assert lengths["tokens of an answer, most"].of == len(train)  # all but the one that is too long
    # a byte is a token, and the end of the sequence is one more
    completions = [len(row["completion"]) + 1 for row in clean]
    assert lengths["tokens of an answer, most"].value >= max(completions)


def test_prompts_are_audited_with_the_room_that_their_responses_need() -> None:
    draw = random.Random(2)
    rows: list[Row] = [{"prompt": question(draw), "tag": str(number)} for number in range(50)]
    longest = max(len(row["prompt"]) for row in rows)
    rows += [
        {"prompt": rows[4]["prompt"], "tag": "again"},
        {"prompt": f"{question(draw)} {'x' * longest}", "tag": "long"},
    ]
    data = PromptDataModule(train=Rows(rows, "train.jsonl"))

    found = audit(data, BESIDE, context=longest + 100, new_tokens=100)

    # a byte is a token
    assert tags(found, rows) == {
        "exact duplicates": {"again"},
        "longer than the model's context": {"long"},
    }
    assert audit(data, BESIDE, context=10_000, new_tokens=100).findings == found.findings[1:]


def test_rows_that_a_run_drops_as_duplicates_are_none() -> None:
    rows = [{"prompt": "What is it that you want?"}] * 3 + [{"prompt": "Nothing at all."}]
    data = PromptDataModule(train=Rows(rows, "train.jsonl"), deduplicate=True)

    found = audit(data, BESIDE)

    assert found.findings == []
    assert (found.totals, found.usable) == ({"train": 4}, {"train": 2})


def test_a_report_holds_what_was_found(tmp_path: Path) -> None:
    rows = clean_pairs(30)
    rows += [{**row, "tag": "copy"} for row in rows[:6]]
    rows[0]["chosen"] = rows[30]["chosen"] = "<script>alert(1)</script> {{ name }}"

    found = audited(rows)

    text = as_text(found)
    assert "warning exact duplicates 6 36 16.67%" in " ".join(text.split())
    assert "train.jsonl:31: same as train.jsonl:1" in text
    assert "and 3 more" in text
    report = json.loads(json.dumps(as_json(found)))
    (copies,) = [one for one in report["findings"] if one["name"] == "exact duplicates"]
    assert [row["place"] for row in copies["rows"]] == [f"train.jsonl:{n}" for n in range(31, 37)]
    assert copies["share"] == pytest.approx(1 / 6)
    page = as_page(found, tmp_path / "audit.html", "Audit of <data>").read_text()
    assert "unfilled templates" in page
    assert "train.jsonl:36" in page
    assert "Audit of &lt;data&gt;" in page
    assert f'data-value="{1 / 6}">16.67%<' in page
