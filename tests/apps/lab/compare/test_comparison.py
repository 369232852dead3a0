"""What is compared with what, and what does not matter."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import pytest

from lrlhf.apps.lab.compare import RunComparison, compare_runs
from lrlhf.apps.lab.compare.sentences import answer
from lrlhf.statistics import holm
from tests.apps.lab.compare.runs import pair, response, scored, write_run

A = [0.0, 1.0, 0.0, 1.0, 0.0, 1.0, 0.0, 0.0]
B = [1.0, 1.0, 1.0, 1.0, 0.0, 0.0, 1.0, 1.0]


def compared(a: list[Any], b: list[Any], **options: Any) -> RunComparison:
    """One run each, in folders of their own."""
    sides = {"a": [write_run("a", a)], "b": [write_run("b", b)]}
    return compare_runs(sides, **options).comparisons[0]


@pytest.fixture(autouse=True)
def _own_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


def test_the_difference_is_that_of_the_means_of_the_same_prompts() -> None:
    found = compared(scored(A), scored(B))
    assert found.main.metric == "score"
    assert found.main.means == pytest.approx((3 / 8, 6 / 8))
    assert found.main.difference.value == pytest.approx(3 / 8)
    # 4 wins, 1 loss
    assert (found.main.wins.wins, found.main.wins.losses) == (4 / 8, 1 / 8)
    assert (found.main.prompts, found.main.differing, found.main.binary) == (8, 5, True)
    # Exact is the score itself; lengths are equal on both sides
    assert [row.metric for row in found.others] == ["length", "truncated"]
    assert all(row.difference.value == 0 for row in found.others)


def test_neither_the_order_of_lines_nor_their_repetition_matters() -> None:
    plain = compared(scored(A), scored(B))
    mixed = scored(B) * 3
    random.Random(0).shuffle(mixed)
    again = compared(scored(A)[::-1], mixed)
    assert again.main == plain.main
    assert again.others == plain.others


def test_samples_of_a_prompt_are_no_prompts() -> None:
    many = [response(row, float(sample < row)) for row in (1, 2, 3) for sample in range(4)]
    found = compared(many, scored([1.0, 1.0, 1.0]))
    assert found.main.prompts == 3
    assert found.main.means[0] == pytest.approx((1 / 4 + 2 / 4 + 3 / 4) / 3)
    assert found.matched.samples == (4, 1)


def test_several_temperatures_are_metrics_of_their_own() -> None:
    hot = [response(row, 0.0, temperature=0.7) for row in range(1, 9)]
    cold = [{**one, "temperature": 0.0} for one in scored(A)]
    found = compared(cold + hot, cold + hot)
    assert found.main.means[0] == pytest.approx(3 / 8)
    assert {row.metric: row.means[0] for row in found.others}["t0.7/score"] == 0


def test_prompts_that_only_one_run_has_are_counted_and_left_out() -> None:
    found = compared(scored(A), scored(B)[:6])
    assert found.main.prompts == 6
    assert found.matched.unmatched == {"a": 2, "b": 0}


def test_prompts_without_a_score_are_counted_and_left_out() -> None:
    found = compared(scored([None, *A[1:]]), scored([*B[:7], None]))
    assert (found.main.prompts, found.main.left_out) == (6, 2)
    assert found.main.difference.value == pytest.approx((4 - 3) / 6)


def test_without_rows_prompts_are_matched_by_their_text() -> None:
    placeless = [{k: v for k, v in one.items() if k != "row"} for one in scored(B)]
    found = compared(scored(A), placeless[::-1])
    assert found.matched.by == "text"
    assert found.main.difference.value == pytest.approx(3 / 8)


def test_equal_rows_with_other_prompts_are_no_match() -> None:
    other = scored(B, lambda row: {"prompt": f"another question {row}"})
    with pytest.raises(ValueError, match=r"on 8 of them another prompt \(first val.jsonl 1\)"):
        compared(scored(A), other)
    assert compared(scored(A), other, how="row").main.prompts == 8
    # the same prompts in another order of the file
    moved = scored(B[::-1], lambda row: {"prompt": f"question {9 - row}"})
    found = compared(scored(A), moved)
    assert (found.matched.by, found.main.difference.value) == ("text", pytest.approx(3 / 8))


def test_evaluation_sets_are_kept_apart_and_shown() -> None:
    first = [{**one, "set": "sums"} for one in scored(A)]
    second = [{**one, "set": "letters"} for one in scored(B)]
    found = compared(first + second, second + first)
    assert found.main.prompts == 16
    assert {row.subset: row.prompts for row in found.subsets} == {"set=sums": 8, "set=letters": 8}


def test_subsets_are_made_of_columns() -> None:
    found = compared(scored(A), scored(B), by=["level"])
    by_name = {row.subset: row for row in found.subsets}
    # odd rows: 0 0 0 0 against 1 1 0 1; even: 1 1 1 0 against 1 1 0 1
    assert by_name["level=easy"].difference.value == pytest.approx(3 / 4)
    assert by_name["level=hard"].difference.value == pytest.approx(0)
    family = [*found.others, *found.subsets]
    corrected = [row.adjusted_p for row in family]
    assert corrected == holm([row.difference.p_value for row in family])
    assert found.main.adjusted_p == found.main.difference.p_value
    with pytest.raises(ValueError, match="no column 'levle' in the evaluations; there are level"):
        compared(scored(A), scored(B), by=["levle"])


def test_many_numbers_make_quarters_and_many_texts_none() -> None:
    def size(row: int) -> dict[str, Any]:
        return {"columns": {"meta": {"size": row, "name": f"n{row}"}}}

    lines = scored([0.0] * 40, size)
    found = compared(lines, lines, by=["meta.size"])
    assert sum(row.prompts for row in found.subsets) == 40
    assert [row.prompts for row in found.subsets] == [10, 10, 10, 10]
    with pytest.raises(ValueError, match=r"'meta\.name' has 40 different values"):
        compared(lines, lines, by=["meta.name"])


def test_of_reward_models_accuracy_and_margin() -> None:
    # of A: right, wrong, half right; labelled equal and not labelled count nowhere
    a = [pair(1, 1.0, 2.0), pair(2, -1.0, 1.0), pair(3, 1.0, 0.0), pair(4, 0.0, 5.0)]
    b = [pair(1, 1.0, 1.0), pair(2, -1.0, -3.0), pair(3, 1.0, 1.0), pair(4, 0.0, 0.0)]
    found = compared([*a, pair(5, None, 1.0)], [*b, pair(5, None, 1.0)])
    assert (found.main.metric, found.main.prompts, found.main.left_out) == ("accuracy", 3, 2)
    assert found.main.means == pytest.approx((0.5, 1.0))
    (margin,) = found.others
    assert margin.means == pytest.approx(((2 - 1 + 0) / 3, (1 + 3 + 1) / 3))


def test_pairs_of_one_prompt_are_one_observation_of_the_interval() -> None:
    gaps = [(1.0, 1.0), (1.0, -1.0), (-1.0, 1.0), (1.0, 1.0), (-1.0, 1.0), (-1.0, 1.0)]

    def lines(side: int, times: int) -> list[dict[str, Any]]:
        return [
            {**pair(times * prompt + again, 1.0, gap[side]), "prompt_id": prompt}
            for prompt, gap in enumerate(gaps)
            for again in range(times)
        ]

    once, often = (compared(lines(0, times), lines(1, times)).main for times in (1, 5))
    # each prompt's pairs say the same: 30 pairs, and six prompts that say how far they vary
    assert once.means == often.means == pytest.approx((3 / 6, 5 / 6))
    for name in ("value", "low", "high", "p_value"):
        wanted = getattr(once.difference, name)
        assert getattr(often.difference, name) == pytest.approx(wanted, abs=1e-9), name
    # of prompts of one pair and of five, each pair counts as much as any other
    mixed = [lines(side, 5)[:5] + lines(side, 5)[5::5] for side in (0, 1)]
    assert compared(*mixed).main.means == pytest.approx(((5 + 2) / 10, (5 + 4) / 10))


def test_of_given_texts_the_log_probability_of_a_token() -> None:
    def told(logprobs: list[float], completions: str = "abcdefgh") -> list[dict[str, Any]]:
        tokens = [2, 4, 1, 2, 4, 8, 2, 0]
        return [
            {
                "source": "val.jsonl",
                "row": row,
                "prompt": "say",
                "completion": text,
                "tokens": count,
                "logprob": logprob,
            }
            for row, (text, count, logprob) in enumerate(
                zip(completions, tokens, logprobs, strict=True), start=1
            )
        ]

    before, after = [-8.0] * 7 + [0.0], [-4.0] * 7 + [0.0]
    found = compared(told(before), told(after))
    assert found.main.metric == "mean_logprob"
    # -8 and -4 over 2, 4, 1, 2, 4, 8 and 2 tokens; the last text has none that is learnt
    shares = 1 / 2 + 1 / 4 + 1 + 1 / 2 + 1 / 4 + 1 / 8 + 1 / 2
    assert found.main.means == pytest.approx((-8 * shares / 7, -4 * shares / 7))
    assert (found.main.prompts, found.main.left_out) == (7, 1)
    assert "B is better than A" in answer(found)
    assert "on these 7 texts" in answer(found)
    # texts without a prompt in common are told apart by what is learnt
    with pytest.raises(ValueError, match="another prompt"):
        compared(told(before), told(after, "ijklmnop"))


def test_several_heads_have_metrics_of_their_own() -> None:
    line = pair(1, 1.0, 2.0) | {"labels": {"x": 1, "y": -1}, "margins": {"x": 2.0, "y": 1.0}}
    found = compared([line], [line])
    means = {row.metric: row.means[0] for row in (found.main, *found.others)}
    assert means["accuracy"] == 0.5
    assert (means["accuracy/x"], means["accuracy/y"]) == (1, 0)
    assert (means["margin/x"], means["margin/y"]) == (2, -1)


def test_steps_are_the_last_the_best_or_a_number() -> None:
    for step, scores in ((0, A), (5, B), (10, A)):
        write_run("run", scored(scores), step=step)
    write_run("other", scored(A), step=5)
    for step, expected in (("last", 10), ("best", 5), ("5", 5)):
        found = compare_runs({"r": [Path("run")], "o": [Path("other")]}, step=step)
        assert found.comparisons[0].a.evaluations[0].step == expected
    with pytest.raises(KeyError, match="run has no evaluation of step 7; there are 0, 5, 10"):
        compare_runs({"r": [Path("run")], "o": [Path("other")]}, step="7")


def test_several_seeds_are_rows_and_several_sides_are_corrected() -> None:
    seeds = {
        name: [write_run(f"{name}{seed}", scored(scores)) for seed in range(count)]
        for name, scores, count in (("a", A, 2), ("b", B, 3), ("c", A[::-1], 1))
    }
    report = compare_runs(seeds)
    first, second = report.comparisons
    assert (first.seeds, second.seeds) == ((2, 3), (2, 1))
    raw = [one.main.difference.p_value for one in report.comparisons]
    assert [one.main.adjusted_p for one in report.comparisons] == holm(raw)
    enough = compare_runs(seeds, differences=[0.9]).comparisons
    needs = [one.power.needs[0].seeds for one in enough if one.power is not None]
    assert needs == [2, None]  # what one seed of a side would do again is not known


def test_evaluations_of_process_reward_models_are_told_to_be_compared_by_their_metrics() -> None:
    steps = [{"text": "1 + 1 = 2", "label": 1.0, "probability": 0.9}]
    for name in ("a", "b"):
        write_run(name, [{"prompt": "what?", "steps": steps, "row": 0, "source": "x"}])
    with pytest.raises(ValueError, match="of a process reward model, whose steps are not compared"):
        compare_runs({"a": ["a"], "b": ["b"]})


def test_what_is_no_evaluation_is_refused() -> None:
    with pytest.raises(ValueError, match="line 1 has neither a score nor labels"):
        compared([{"text": "?"}], scored(B))
    with pytest.raises(ValueError, match="is empty"):
        compared([], scored(B))
    other = [response(row, 1.0, source="test.jsonl") for row in range(3)]
    with pytest.raises(ValueError, match="no prompt in common"):
        compared(scored(A), other)
    with pytest.raises(ValueError, match="no metric 'scroe' that both sides have; there are score"):
        compared(scored(A), scored(B), metric="scroe")
    with pytest.raises(ValueError, match="no metric 'score'"):
        compared(scored([None, None]), scored(B), metric="score")


@pytest.mark.parametrize(
    ("a", "b"), [([0.0] * 20, [1.0] * 20), ([0.0, 1.0, 0.0, 0.0], [1.0, 1.0, 0.0, 1.0])]
)
def test_equal_differences_or_too_few_tell_nothing_of_power(a: list[float], b: list[float]) -> None:
    assert compared(scored(a), scored(b)).power is None


def test_few_prompts_plan_for_six_at_least() -> None:
    found = compared(scored(A), scored(B), differences=[1000.0])
    assert found.power is not None
    assert found.power.needs[0].prompts == 6


def sampled(row: int, rights: str, said: str = "", **changed: Any) -> list[dict[str, Any]]:
    """A line for each sample of a prompt: + right, - wrong, ? not judged; one letter answered."""
    judged = {"+": True, "-": False, "?": None}
    texts = said or " " * len(rights)
    return [
        response(row, 0.5, sample=index, correct=judged[sign], **changed)
        | ({"answer": None if text == "_" else text} if said else {})
        for index, (sign, text) in enumerate(zip(rights, texts, strict=True))
    ]


def rows_of(found: RunComparison) -> dict[str, Any]:
    return {row.metric: row for row in (found.main, *found.others)}


def test_pass_at_k_and_the_majority_are_compared_prompt_by_prompt() -> None:
    a = [*sampled(1, "+---", "xyyz"), *sampled(2, "++--", "xxyz"), *sampled(3, "----", "xxyz")]
    b = [*sampled(1, "++--", "xxyy"), *sampled(2, "+---", "xyyz"), *sampled(3, "---+", "yy_z")]
    found = rows_of(compared(a, b[::-1], metric="pass@2"))
    assert [name for name in found if "@" in name] == ["pass@2", "pass@1", "pass@4", "maj@4"]
    # c right ones of 4: 1 - C(4 - c, 2) / 6 is 1/2, 5/6, 0 and 5/6, 1/2, 1/2
    assert found["pass@2"].means == pytest.approx((4 / 9, 11 / 18))
    assert found["pass@2"].difference.value == pytest.approx(1 / 6)
    assert found["pass@1"].means == pytest.approx((3 / 12, 4 / 12))
    assert found["pass@4"].means == pytest.approx((2 / 3, 1))
    # y and x win with A; with B x or y (one of them drawn: 1/2), y, y
    assert found["maj@4"].means == pytest.approx((1 / 3, 1 / 6))
    assert {found[name].prompts for name in found} == {3}
    assert all(found[name].binary for name in found if "@" in name)
    # one that is not usual is there if it is asked for
    # 1 - C(4 - c, 3) / 4: 3/4, 1, 0
    assert rows_of(compared(a, b, metric="pass@3"))["pass@3"].means[0] == pytest.approx(7 / 12)
    with pytest.raises(ValueError, match=r"no metric 'pass@5' that both sides have; .*pass@4"):
        compared(a, b, metric="pass@5")


def test_only_what_both_sides_have_sampled_often_enough_is_compared() -> None:
    four = [*sampled(1, "+-+-", "xxyy"), *sampled(2, "?-++", "xyzz")]
    two = [*sampled(1, "+-", "xx"), *sampled(2, "++", "xx")]
    found = rows_of(compared(four, two))
    assert [name for name in found if "@" in name] == ["pass@1", "pass@2"]
    # of the second prompt two of three are right: 1 - C(1, 2) / C(3, 2)
    assert found["pass@2"].means == pytest.approx(((5 / 6 + 1) / 2, 1))
    # without what they say there is no majority
    silent = [*sampled(1, "+-+-"), *sampled(2, "?-++")]
    assert "maj@4" not in rows_of(compared(silent, silent))
    # and four that could be judged are needed of each prompt
    assert rows_of(compared(silent, silent))["pass@4"].left_out == 1
    once = rows_of(compared([*sampled(1, "+")], [*sampled(1, "-")]))
    assert [name for name in once if "@" in name] == ["pass@1"]


def test_temperatures_are_no_samples() -> None:
    cold = scored([1.0, 0.0], lambda _: {"temperature": 0.0, "completion": "cold"})
    hot = [
        line
        for row, rights in ((1, "+-"), (2, "--"))
        for line in sampled(row, rights, temperature=0.7, completion="hot")
    ]
    found = compared(cold + hot, cold + hot)
    assert compared(cold, cold).matched.samples == (1, 1)
    assert compared(cold + hot[::2], cold + hot[::2]).matched.samples == (1, 1)
    assert found.matched.samples == (2, 2)
    assert rows_of(found)["t0.7/pass@2"].means == pytest.approx((1 / 2, 1 / 2))
    assert "pass@2" not in rows_of(found)


def test_equal_temperatures_are_compared_whichever_comes_first() -> None:
    cold = scored(A, lambda _: {"temperature": 0.0, "completion": "cold"})
    hot = scored(B, lambda _: {"temperature": 1.0, "completion": "hot"})
    found = compared(cold + hot, hot + cold)
    assert found.main.means == pytest.approx((3 / 8, 3 / 8))
    assert rows_of(found)["t1/score"].means == pytest.approx((6 / 8, 6 / 8))
    assert found.matched.prompts[0].answers == ("cold", "cold")
    told = r"b/eval_scores_1.jsonl has responses at temperature 1 and none at 0, at which the first"
    with pytest.raises(ValueError, match=told):
        compared(cold, hot)
    # a file that does not say is taken as it is
    assert compared(cold, scored(B)).main.means == pytest.approx((3 / 8, 6 / 8))


def test_the_best_step_may_be_that_of_the_highest_pass_at_k() -> None:
    write_run("run", [*sampled(1, "+++-"), *sampled(2, "----")], step=1)
    write_run("run", [*sampled(1, "+---"), *sampled(2, "+---")], step=2)
    write_run("other", [*sampled(1, "+---"), *sampled(2, "+---")])
    for metric, expected in (("pass@4", 2), ("pass@1", 1)):
        sides = {"r": [Path("run")], "o": [Path("other")]}
        found = compare_runs(sides, step="best", metric=metric).comparisons[0]
        assert found.a.evaluations[0].step == expected
