"""Pairs of every kind become questions to a judge, with the right verdict."""

import json
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from convert_media_pairs import main
from PIL import Image

from lrlhf.datamodules import BadRow, PromptDataModule, SupervisedDataModule, VerdictTasks
from lrlhf.datamodules.rows.bad_rows import BadDataError
from lrlhf.rewards import JudgeReward, Rewards
from lrlhf.rewards.judge.verdicts import SYSTEM
from tests.datamodules.conftest import TOKENIZER
from tests.rewards.reward_server import serving

PAIRS = [{"prompt": f"why {n}?", "chosen": f"good {n}", "rejected": f"bad {n}"} for n in range(40)]
TIE = {"prompt": "which?", "candidate0": "this", "candidate1": "that", "preference": "C"}
SHORT = "{{ responses[0] }}|{{ responses[1] }}"


def tasks(pairs: Any, **options: Any) -> list[Mapping[str, Any]]:
    rows = list(VerdictTasks(pairs, **options).rows())
    assert not [row for row in rows if isinstance(row, BadRow)]
    return [row for row in rows if not isinstance(row, BadRow)]


def question(task: Mapping[str, Any]) -> Any:
    return task["prompt"][-1]["content"]


def shown(task: Mapping[str, Any], kind: str = "image") -> list[Any]:
    return [part[kind] for part in question(task) if part["type"] == kind]


def write(path: Path, rows: Sequence[Mapping[str, Any]]) -> str:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(rows))
    return str(path)


# ---------------------------------------------------------------------- positions


def test_both_orders_show_the_candidates_exchanged_and_flip_the_verdict() -> None:
    given, other = tasks(PAIRS[:1], positions="both", form="direct", template=SHORT, system="")
    assert given["prompt"] == [{"role": "user", "content": "good 0|bad 0"}]
    assert other["prompt"] == [{"role": "user", "content": "bad 0|good 0"}]
    assert (given["gold"], other["gold"]) == ("A", "B")
    assert (given["completion"], other["completion"]) == ("Verdict: A", "Verdict: B")
    assert (given["exchanged"], other["exchanged"]) == (False, True)
    assert given["pair"] == other["pair"]


def test_at_random_the_better_one_is_first_in_exactly_half_of_the_pairs() -> None:
    seeds = [[task["gold"] for task in tasks(PAIRS, seed=seed)] for seed in (0, 0, 1)]
    assert seeds[0] == seeds[1] != seeds[2]
    for gold in seeds:
        assert Counter(gold) == {"A": 20, "B": 20}
        # also of any beginning of the data, to one
        assert all(abs(gold[:n].count("A") * 2 - n) <= 1 for n in range(40))
    assert {task["gold"] for task in tasks(PAIRS, positions="given")} == {"A"}


def test_what_is_first_does_not_tell_which_is_better_where_labels_come_in_blocks() -> None:
    rows = [{**TIE, "preference": label} for label in "AAAAAAAABBBBBBBB"]
    golds = [task["gold"] for task in tasks(rows)]
    assert golds[:8].count("A") == golds[8:].count("A") == 4


def test_ties_have_a_verdict_of_their_own_or_are_left_out() -> None:
    both = tasks([TIE], positions="both")
    assert [task["gold"] for task in both] == ["tie", "tie"]
    assert both[0]["completion"] == "Verdict: tie"
    assert question(both[0]) != question(both[1])
    (answer,) = tasks([TIE], form="answer")
    assert answer["completion"] == "<answer>Both are equally good</answer>"
    assert tasks([TIE], ties=False) == []


def test_rows_with_reasoning_stay_as_they_are_because_it_names_positions() -> None:
    said = {"reasoning": "Response 1 is kinder.", "id": 7}
    rows = [{**TIE, **said, "preference": label} for label in "AABB"]
    reasoned = tasks(rows, form="answer", positions="both")
    assert [task["completion"] for task in reasoned] == [
        f"<think>\nResponse 1 is kinder.\n</think>\n<answer>Response {better} is better</answer>"
        for better in (1, 1, 2, 2)
    ]
    assert reasoned[0]["id"] == 7  # further columns stay
    (line, *_) = tasks(rows, form="line")
    assert line["completion"] == "Response 1 is kinder.\n\nVerdict: A"
    assert len(tasks(rows, reasoning_column=None, positions="both")) == 8


def test_reasoning_that_no_reply_has_leaves_the_positions_free() -> None:
    rows = [{**row, "reasoning": "Response 1 is kinder."} for row in PAIRS[:8]]
    both = tasks(rows, form="direct", positions="both")
    assert [task["completion"] for task in both] == ["Verdict: A", "Verdict: B"] * 8
    golds = Counter(task["gold"] for task in tasks(rows, form="direct"))
    assert golds == {"A": 4, "B": 4}


@pytest.mark.parametrize("positions", ["random", "both"])
def test_reasoning_about_pairs_that_tell_no_positions_is_refused(positions: Any) -> None:
    rows = [{**row, "reasoning": "It is kinder." if n else ""} for n, row in enumerate(PAIRS[:2])]
    *unreasoned, problem = VerdictTasks(rows, positions=positions).rows()
    assert not any(isinstance(row, BadRow) for row in unreasoned)
    assert isinstance(problem, BadRow)
    assert problem.reason == "reasoning without positions"
    assert "candidate0 and candidate1" in problem.remedy
    # who says that they stand as they are has said where
    given = tasks(rows, positions="given")
    assert given[1]["completion"] == "It is kinder.\n\nVerdict: A"


# ---------------------------------------------------------------------- the judge's own question


@pytest.mark.parametrize("form", ["line", "direct", "answer"])
@pytest.mark.parametrize("system", [SYSTEM, ""])
def test_a_judge_is_asked_what_it_was_trained_on(form: Any, system: str) -> None:
    asked: list[Any] = []

    def act(handler: Any) -> None:
        asked.append(handler.body["messages"])
        text = "Verdict: tie"
        choice = {"message": {"content": text}, "finish_reason": "stop"}
        handler.reply({"choices": [choice]})

    with serving() as server:
        server.models = ["wise"]
        server.always = act
        reward = JudgeReward(
            f"{server.url}/v1", mode="pairwise", form=form, rubric="Be kind.", system=system
        )
        Rewards([reward], max_unscorable_fraction=1.0).score(
            ["why 0?"] * 2, ["good 0", "bad 0"], [[0]] * 2, [{}] * 2
        )
    trained = tasks(PAIRS[:1], positions="both", form=form, rubric="Be kind.", system=system)
    assert len(asked) == 2
    assert all(task["prompt"] in asked for task in trained)
    assert "Be kind." in question(trained[0])


# ---------------------------------------------------------------------- images and videos

REPLY = "<think>\nImage 1 (9/10), Image 2 (6/10)\n</think>\n<answer>Image 1 is better</answer>"
COT = {
    "conversations": [
        {
            "from": "human",
            "value": "<image>\n<image>\nGiven a caption and two images …\n"
            "Your task is provided as follows:\nText Caption: **a red hat**",
        },
        {"from": "gpt", "value": REPLY},
    ],
    "images": ["images/a.png", "images/b.png"],
}
HPD = {"prompt": "a cat", "path1": "good.jpg", "path2": "bad.jpg", "model1": "x", "model2": "y"}
OMNI = {
    "id": "1", "prompt": "a cow", "criteria": "the colours", "criteria_preference": "response2",
    "model1": "x", "model2": "y", "response1_path": "t/0.mp4", "response2_path": "t/1.mp4",
    "response1": "t/0.mp4", "response2": "t/1.mp4",
}  # fmt: skip


def converted(name: str, path: str) -> str:
    """The file of pairs that the script makes of a published set."""
    output = Path(path).with_suffix(".pairs.jsonl")
    main([name, path, str(output)])
    return str(output)


def test_reasoning_about_images_is_trained_on_as_it_was_given(tmp_path: Path) -> None:
    path = write(tmp_path / "train.json", [COT])
    (task,) = tasks(converted("imagegen_cot_reward", path), form="answer", positions="both")
    assert task["completion"] == REPLY
    assert task["gold"] == "A"
    assert shown(task) == [str(tmp_path / name) for name in COT["images"]]
    first, *_, last = question(task)
    assert "<request>\na red hat\n</request>" in first["text"]
    assert "one of\n\n<answer>Image 1 is better</answer>" in last["text"]


def test_human_preferences_of_images_are_verdicts(tmp_path: Path) -> None:
    path = write(tmp_path / "train.json", [HPD] * 8)
    rows = tasks(converted("hpdv3", path), form="answer")
    for task in rows:
        better = str(tmp_path / "good.jpg")
        assert shown(task)[task["gold"] == "B"] == better
        place = 1 + (task["gold"] == "B")
        assert task["completion"] == f"<answer>Image {place} is better</answer>"
    assert Counter(task["gold"] for task in rows) == {"A": 4, "B": 4}


@pytest.mark.parametrize(
    ("format", "kind"), [("omnireward_t2v", "video"), ("omnireward_t2i", "image")]
)
def test_each_row_may_say_what_counts(tmp_path: Path, format: str, kind: str) -> None:
    path = write(tmp_path / "a.json", [OMNI, {**OMNI, "criteria_preference": "other"}])
    given, other, tie, _ = tasks(
        converted(format, path), form="answer", rubric="Look.", rubric_column="criteria",
        positions="both",
    )  # fmt: skip
    assert [part["type"] for part in question(given)] == ["text", kind, "text", kind, "text"]
    assert "What counts:\nLook.\nthe colours\n" in question(given)[0]["text"]
    assert shown(given, kind) == shown(other, kind)[::-1]
    assert given["completion"] == f"<answer>{kind.title()} 2 is better</answer>"
    assert other["completion"] == f"<answer>{kind.title()} 1 is better</answer>"
    assert tie["gold"] == "tie"


def test_what_the_prompt_shows_stands_before_the_question() -> None:
    turn = {"role": "user", "content": [{"type": "image"}, {"type": "text", "text": "Which bird?"}]}
    rows = [
        {"prompt": [turn], "image": "bird.png", "chosen": "a jay", "rejected": "a tit"},
        {"prompt": "Which bird?", "images": ["bird.png"], "chosen": "a jay", "rejected": "a tit"},
    ]
    first, second = tasks(rows, positions="given")
    assert first["prompt"] == second["prompt"]
    picture, text = question(first)
    assert picture == {"type": "image", "image": "bird.png"}
    assert "<request>\nWhich bird?\n</request>" in text["text"]
    assert "image" not in first  # or it would be shown twice
    assert "images" not in second


def test_transcripts_and_conversations_are_told_turn_by_turn() -> None:
    said = "\n\nHuman: hi\n\nAssistant: yes?\n\nHuman: why?\n\nAssistant:"
    (task,) = tasks([{"chosen": f"{said} so", "rejected": f"{said} no"}], positions="given")
    assert "<request>\nuser: hi\n\nassistant: yes?\n\nuser: why?\n</request>" in question(task)
    assert "<response A>\nso\n</response A>" in question(task)
    user = {"role": "user", "content": "why?"}
    turns = [[user, {"role": "assistant", "content": text}] for text in ("so", "no")]
    (other,) = tasks([{"chosen": turns[0], "rejected": turns[1]}], positions="given")
    assert "<request>\nwhy?\n</request>" in question(other)


# ---------------------------------------------------------------------- parts, bad rows


def test_parts_share_no_prompt_and_keep_both_orders_together() -> None:
    rows = [{**row, "prompt": f"why {n // 2}?"} for n, row in enumerate(PAIRS)]
    options: dict[str, Any] = {"positions": "both", "template": "{{ prompt }}", "system": ""}
    train, validation = (
        tasks(rows, part=part, validation_fraction=0.2, **options)
        for part in ("train", "validation")
    )
    assert (len(train), len(validation)) == (64, 16)
    assert not {question(task) for task in train} & {question(task) for task in validation}
    assert set(Counter(task["pair"] for task in validation).values()) == {2}


@pytest.mark.parametrize(
    ("row", "options", "reason", "detail"),
    [
        ({**TIE, "preference": "D"}, {}, "unknown label", "'D'"),
        ({"prompt": "a", "chosen": "b"}, {}, "missing column", "'rejected'"),
        ({"prompt": "a", "chosen": "b", "rejected": " "}, {}, "empty text", "'rejected'"),
        ({**TIE, "image_0": "a.png"}, {}, "missing media", "_1"),
        (TIE, {"rubric_column": "criteria"}, "missing column", "'criteria'"),
        (TIE, {"template": "{{ topic }}"}, "missing column", "'topic'"),
        (TIE, {"template": "{{ prompt.x.y }}"}, "template failed", "UndefinedError"),
    ],
)
def test_rows_that_cannot_be_used_say_why(
    row: Mapping[str, Any], options: dict[str, Any], reason: str, detail: str
) -> None:
    (found,) = VerdictTasks([row], **options).rows()
    assert isinstance(found, BadRow)
    assert found.reason == reason
    assert detail in found.detail


def test_options_that_cannot_be_used_are_refused_at_once(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="form is 'words'; choose one of line, direct, answer"):
        VerdictTasks(PAIRS, form="words")  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="positions is 'any'"):
        VerdictTasks(PAIRS, positions="any")  # type: ignore[arg-type]
    path = write(tmp_path / "a.json", [{**TIE, "image_0": "a.png", "image_1": "b.png"}])
    with pytest.raises(ValueError, match="does not show both responses"):
        list(VerdictTasks(path, template="{{ responses[0] }}").rows())
    for folder in ("one", "two"):
        write(tmp_path / folder / "a.json", [TIE])
    with pytest.raises(BadDataError, match="several folders"):
        _ = VerdictTasks(f"{tmp_path}/*/a.json").folder


def test_parts_share_no_picture_however_it_is_held() -> None:
    pixels = np.random.default_rng(0).integers(0, 256, (10, 40, 40, 3), dtype=np.uint8)
    for array in pixels:  # numpy writes the same of all
        array[:10] = array[-10:] = array[:, :10] = array[:, -10:] = 0

    def pictures_of(held: int, part: Any) -> list[bytes]:
        """Each picture is in four rows, as objects of their own."""
        rows = []
        for number in range(40):
            image = Image.fromarray(pixels[number % 10])
            row = {"chosen": f"good {number}", "rejected": f"bad {number}"}
            turn = {"role": "user", "content": [{"type": "image", "image": image}]}
            asked: dict[str, Any] = (
                {"prompt": [turn]},
                {"prompt": "Which?", "image": image},
                {"prompt": "Which?", "image": pixels[number % 10].copy()},
            )[held]
            rows.append({**row, **asked})
        found = tasks(rows, part=part, validation_fraction=0.3)
        return [np.asarray(shown(task)[0]).tobytes() for task in found]

    for held in range(3):
        train, validation = (pictures_of(held, part) for part in ("train", "validation"))
        assert len(train) + len(validation) == 40
        assert len({*validation}) == 3
        assert not {*train} & {*validation}


# ---------------------------------------------------------------------- in data modules


def test_only_the_reply_is_learnt_and_prompts_know_their_verdict() -> None:
    source = VerdictTasks(PAIRS[:4], form="direct", template=SHORT, system="", positions="both")
    texts = SupervisedDataModule(source, tokenizer=TOKENIZER, batch_size=8)
    texts.setup("fit")
    batch = next(iter(texts.train_dataloader()))
    learnt = {
        TOKENIZER.decode(batch.input_ids[row, batch.response_mask[row]])
        for row in range(len(batch))
    }
    assert learnt == {f"Verdict: {letter}<|im_end|>\n" for letter in "AB"}
    prompts = PromptDataModule(source, tokenizer=TOKENIZER, batch_size=8)
    prompts.setup("fit")
    asked = next(iter(prompts.train_dataloader()))
    for prompt, columns in zip(asked.prompts, asked.columns, strict=True):
        good_first = prompt[0]["content"].startswith("good")
        assert columns["gold"] == ("A" if good_first else "B")


def test_a_vision_language_judge_is_shown_both_candidates(tmp_path: Path, vlm_folder: str) -> None:
    for name in ("good.jpg", "bad.jpg"):
        Image.new("RGB", (56, 56)).save(tmp_path / name)
    row = {"prompt": "a cat", "image_0": "good.jpg", "image_1": "bad.jpg", "preference": "A"}
    path = write(tmp_path / "rows.json", [row] * 4)  # relative to the file
    source = VerdictTasks(path, form="answer", system="", positions="both")
    texts = SupervisedDataModule(source, tokenizer=vlm_folder, batch_size=8)
    prompts = PromptDataModule(source, tokenizer=vlm_folder, batch_size=8)
    for module in (texts, prompts):
        module.setup("fit")
        batch = next(iter(module.train_dataloader()))
        assert batch.media is not None
        names = [media.names for media in batch.media if media is not None]
        ends = {tuple(Path(name).name for name in own) for own in names}
        assert ends == {("good.jpg", "bad.jpg"), ("bad.jpg", "good.jpg")}


# ---------------------------------------------------------------------- what a question shows


def test_a_question_shows_the_system_turn_of_the_pair() -> None:
    chat = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "why 0?"}]
    as_column, as_turn = (
        tasks([{**PAIRS[0], **row}])[0]["prompt"]
        for row in ({"system": "Be brief."}, {"prompt": chat})
    )
    assert as_column == as_turn
    assert "system: Be brief." in as_turn[-1]["content"]


def test_what_no_question_shows_is_refused_or_named(caplog: pytest.LogCaptureFixture) -> None:
    call = {"type": "function", "function": {"name": "f", "arguments": {"x": "y"}}}
    answer = {"role": "assistant", "content": "good"}
    ask = {"role": "user", "content": "why?", "name": "me"}
    (bad,) = VerdictTasks(
        [{"prompt": [ask], "chosen": [{**answer, "tool_calls": [call]}], "rejected": "bad"}]
    ).rows()
    assert isinstance(bad, BadRow)
    assert "`tool_calls` of turns of the assistant" in bad.detail
    assert len(tasks([{"prompt": [ask], "chosen": [answer], "rejected": "bad"}])) == 1
    assert "`name` of turns of the user" in caplog.text
