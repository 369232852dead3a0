"""Which lines are shown: shares by hand, and what a choice must keep."""

import json
from pathlib import Path
from typing import Any

import pytest

from lrlhf.apps.lab.inspector import write_inspector
from lrlhf.apps.lab.inspector.inspector import (
    Source,
    chosen_lines,
    counted,
    even_shares,
    read_chosen,
)
from tests.apps.lab.inspector.runs import write_lines


@pytest.mark.parametrize(
    ("sizes", "total", "expected"),
    [
        ([5, 5, 5], 20, [5, 5, 5]),
        ([5, 5, 5], 6, [2, 2, 2]),
        ([1, 10, 10], 9, [1, 4, 4]),  # what the first does not have goes to the others
        ([4, 4, 4, 4], 2, [0, 1, 0, 1]),  # fewer than there are steps: at even distances
        ([3, 3], 5, [2, 3]),
        ([], 5, []),
    ],
)
def test_every_step_has_the_same_share(sizes: list[int], total: int, expected: list[int]) -> None:
    assert even_shares(sizes, total) == expected


def test_shares_always_add_up_and_never_exceed_what_there_is() -> None:
    sizes = [(7 * at) % 23 for at in range(200)]
    for total in range(0, sum(sizes) + 1, 37):
        shares = even_shares(sizes, total)
        assert sum(shares) == total
        assert all(0 <= share <= size for share, size in zip(shares, sizes, strict=True))


def lines(steps: int, each: int, **more: Any) -> list[dict[str, Any]]:
    return [{"step": s, "row": row, **more} for s in range(steps) for row in range(each)]


def test_the_same_rows_of_every_evaluation_are_chosen(tmp_path: Path) -> None:
    for step in (0, 10):
        write_lines(tmp_path / f"{step}.jsonl", [{"step": step, "row": row} for row in range(50)])
    files = [counted(Source(0, tmp_path / f"{step}.jsonl", evaluation=True)) for step in (0, 10)]
    first, second = chosen_lines(files, 20)
    assert first == second
    assert len(first) == 10
    fewer, _ = chosen_lines(files, 10)
    assert fewer < first  # nested: a row that is there stays there


def test_a_response_with_token_values_is_in_every_choice(tmp_path: Path) -> None:
    records = lines(3, 9)
    for at in (7, 12, 26):
        records[at]["tokens"] = {"texts": []}
    records[3]["completion"] = '"tokens": {'  # in a text it says nothing
    write_lines(tmp_path / "r.jsonl", records)
    file = counted(Source(0, tmp_path / "r.jsonl", evaluation=False))
    (chosen,) = chosen_lines([file], 3)
    assert sorted(chosen) == [8, 13, 27]
    assert [record["row"] for record in read_chosen(file, chosen)] == [7, 3, 8]


def test_lines_are_counted_whatever_comes_first_in_them(tmp_path: Path) -> None:
    path = tmp_path / "r.jsonl"
    path.write_text('{"step": 3, "a": 1}\n{"a": 1, "step": 4}\n{"a": 1}\n{"step": 5')
    assert counted(Source(0, path, evaluation=False)).lines == {3: [1], 4: [2], 0: [3]}
    path.write_text('{"step": "x"}\n')
    with pytest.raises(ValueError, match=r'r\.jsonl, line 1: step is "x", no whole number'):
        counted(Source(0, path, evaluation=False))


def test_a_line_that_is_no_json_is_named(tmp_path: Path) -> None:
    (tmp_path / "rollouts.jsonl").write_text('{"step": 1, "score": 1}\n{"step": 1, "score": }\n')
    with pytest.raises(ValueError, match=r"rollouts\.jsonl, line 2 is no JSON"):
        write_inspector([tmp_path], tmp_path / "page.html")
    assert not (tmp_path / "page.html").exists()


def test_a_run_that_is_named_twice_is_refused(tmp_path: Path) -> None:
    write_lines(tmp_path / "a" / "rollouts.jsonl", [{"step": 1}])
    with pytest.raises(ValueError, match="a run is named twice"):
        write_inspector([tmp_path / "a", tmp_path / "b" / ".." / "a"], tmp_path / "page.html")


def test_more_than_a_page_holds_is_left_out_and_said(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("lrlhf.apps.lab.inspector.inspector._DATA_BYTES", 6_000)
    noise = [
        json.dumps({"step": at, "completion": f"{hash((at, 1))} {at**9}"}) for at in range(400)
    ]
    (tmp_path / "rollouts.jsonl").write_text("".join(f"{line}\n" for line in noise))
    told = write_inspector([tmp_path], tmp_path / "page.html")
    assert "of 400 responses are in this page, evenly many of each step." in told
    shown = int(told.splitlines()[1].split()[0])
    assert 20 < shown < 400
    # who asks for a number gets it
    told = write_inspector([tmp_path], tmp_path / "page.html", max_responses=400)
    assert "responses are in" not in told


def test_few_responses_do_not_limit_how_many_pairs_a_page_holds(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("lrlhf.apps.lab.inspector.inspector._DATA_BYTES", 12_000)
    write_lines(tmp_path / "rollouts.jsonl", [{"step": at, "completion": "a"} for at in range(3)])
    pairs = [
        {"margins": {"h": at / 7}, "labels": {"h": 1}, "candidate0": str(at**9), "candidate1": "b"}
        for at in range(600)
    ]
    write_lines(tmp_path / "eval_scores_1.jsonl", pairs)

    told = write_inspector([tmp_path], tmp_path / "page.html")

    (note,) = told.splitlines()[1:]
    assert note.endswith("the charts count all.")
    assert 100 < int(note.split()[0]) < 600
