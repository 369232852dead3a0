"""Evaluations of a policy: what several responses to a prompt say, and what must not matter."""

import itertools
import json
import math
from collections import Counter, defaultdict
from collections.abc import Hashable, Mapping, Sequence
from pathlib import Path
from typing import Any

import lightning as L
import pytest

from lrlhf.callbacks import EvalJSONL
from lrlhf.datamodules import PromptDataModule, ValidationSet
from lrlhf.modules import PPO, RLOO, Critic, Evaluation
from lrlhf.modules.hyperparameters import NOT_KEPT, as_hyperparameters
from lrlhf.rewards import ExactMatch, NumericAnswer, RewardFunction, Rewards
from lrlhf.rollout import Sampling, TransformersEngine
from lrlhf.statistics.intervals import Outcomes
from lrlhf.types import Rollout
from tests.modules.policy_runs import letters
from tests.rollout.scripted_engine import ScriptedEngine

Lines = list[dict[str, Any]]


class First:
    """Scores 1 if the response begins with a letter of the first half; reads that letter."""

    def __call__(self, completions: Sequence[str]) -> list[float]:
        return [float(text[:1].lower() < "n") for text in completions]

    def answer_of(self, text: str) -> str | None:
        return text[:1].lower() or None


def length(completion_ids: Sequence[Sequence[int]]) -> list[float]:
    return [len(ids) for ids in completion_ids]


def rows(path: Path, words: str) -> str:
    path.write_text("\n".join(json.dumps({"prompt": f"say {word}"}) for word in words))
    return str(path)


def validate(
    module: RLOO | PPO, data: L.LightningDataModule, folder: Path, **options: Any
) -> tuple[dict[str, float], Lines]:
    """Return the logged metrics, and the lines of the file."""
    log = EvalJSONL(folder)
    trainer = L.Trainer(
        accelerator="cpu",
        logger=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        enable_checkpointing=False,
        use_distributed_sampler=False,
        callbacks=[log],
        **{"devices": 1, **options},
    )
    (found, *_) = trainer.validate(module, datamodule=data, verbose=False)
    written = (folder / "eval_scores_0.jsonl").read_bytes().split(b"\n")
    lines = [json.loads(line) for line in written if line]
    return dict(found), lines


@pytest.fixture
def data(tmp_path: Path) -> PromptDataModule:
    train = rows(tmp_path / "train.jsonl", "xyz")
    return PromptDataModule(train, rows(tmp_path / "val.jsonl", "abcdefg"), batch_size=3)


def per_prompt(lines: Lines, value: str = "score") -> list[list[float]]:
    groups: defaultdict[str, list[float]] = defaultdict(list)
    for line in lines:
        groups[line["prompt"]].append(line[value])
    return list(groups.values())


def mean(values: Sequence[float]) -> float:
    return sum(values) / len(values)


def test_several_samples_are_measured_per_prompt(build, data, tmp_path: Path) -> None:
    module = build(
        rewards=Rewards([First()]),
        num_generations=3,
        evaluation=Evaluation(num_samples=4, metrics=[length]),
    )
    found, lines = validate(module, data, tmp_path / "out")
    assert len(lines) == 7 * 4
    assert [line["sample"] for line in lines] == [0, 1, 2, 3] * 7
    assert [line["row"] for line in lines] == [row for row in range(1, 8) for _ in range(4)]
    scores, lengths = per_prompt(lines), per_prompt(lines, "length")
    assert len({tuple(own) for own in scores}) > 1
    assert found["eval/score"] == pytest.approx(mean([mean(own) for own in scores]))
    assert found["eval/score"] == pytest.approx(found["eval/first"])
    assert found["eval/length"] == pytest.approx(mean([mean(own) for own in lengths]))
    assert found["eval/length"] == found["eval/response_length"]
    assert found["eval/score_low"] < found["eval/score"] < found["eval/score_high"]
    # by counting: of 4 draws 2 are all wrong in C(wrong, 2) of C(4, 2) ways
    wrong = [4 - sum(own) for own in scores]
    pass_at_2 = mean([1 - math.comb(int(number), 2) / 6 for number in wrong])
    assert found["eval/pass@2"] == pytest.approx(pass_at_2)
    assert found["eval/pass@1"] == pytest.approx(found["eval/score"])
    assert found["eval/pass@4"] == pytest.approx(mean([float(sum(own) > 0) for own in scores]))
    majority = []
    for number in range(7):
        own = lines[4 * number : 4 * number + 4]
        votes = Counter(line["answer"] for line in own if line["answer"] is not None)
        top = [answer for answer, count in votes.items() if count == max(votes.values())]
        majority.append(mean([float(answer < "n") for answer in top]) if votes else 0.0)
    assert found["eval/maj@4"] == pytest.approx(mean(majority))
    assert {line["correct"] for line in lines} == {True, False}
    by_name = {one.name: one for one in module.measurements}
    assert by_name["eval/maj@4"].number == 7
    assert by_name["eval/score"].low == pytest.approx(found["eval/score_low"])
    known = module.evaluator.metric_names([""])
    assert found.keys() == known


def test_batches_order_and_rounds_do_not_matter(build, tmp_path: Path) -> None:
    def run(name: str, *, words: str, size: int, at_once: int) -> tuple[dict[str, float], Lines]:
        folder = tmp_path / name
        folder.mkdir()
        module = build(
            rewards=Rewards([First()]),
            num_generations=at_once,
            evaluation=Evaluation(num_samples=4),
        )
        val = [{"prompt": f"say {word}"} for word in words]
        data = PromptDataModule(val, val, batch_size=size)
        found, lines = validate(module, data, folder)
        return found, sorted(lines, key=lambda line: (line["row"], line["sample"]))

    one, lines = run("one", words="abcdefg", size=7, at_once=4)
    for name, size, at_once in (("small", 2, 4), ("rounds", 7, 2), ("both", 3, 3)):
        other, same = run(name, words="abcdefg", size=size, at_once=at_once)
        assert other == one
        told = [[line[key] for key in ("completion", "score", "sample")] for line in same]
        assert told == [[line[key] for key in ("completion", "score", "sample")] for line in lines]
    fewer, _ = run("fewer", words="abc", size=2, at_once=2)
    assert fewer["eval/score"] == pytest.approx(mean([line["score"] for line in lines[:12]]))


@pytest.mark.slow
def test_two_ranks_measure_what_one_does(build, data, tmp_path: Path) -> None:
    def module() -> Any:
        return build(
            rewards=Rewards([First()]),
            num_generations=2,
            evaluation=Evaluation(num_samples=4, temperatures=(1.0, 0.0)),
        )

    alone, lines = validate(module(), data, tmp_path / "one")
    both, same = validate(module(), data, tmp_path / "two", devices=2, strategy="ddp_fork")
    assert both == alone
    untold = ("group",)
    for line in (*lines, *same):
        for key in untold:
            line.pop(key)
    assert same == lines


def test_each_temperature_is_measured_and_named(build, data, tmp_path: Path) -> None:
    module = build(
        rewards=Rewards([First()]),
        sampling=Sampling(max_new_tokens=3),
        evaluation=Evaluation(num_samples=3, temperatures=(0.0, 1.5), pass_at=(3,)),
    )
    found, lines = validate(module, data, tmp_path)
    assert ["answer" in line for line in lines] == [line["temperature"] > 0 for line in lines]
    greedy = [line for line in lines if line["temperature"] == 0]
    warm = [line for line in lines if line["temperature"] == 1.5]
    assert (len(greedy), len(warm)) == (7, 21)
    assert found["eval/t0/score"] == found["eval/score"]
    assert found["eval/score"] == pytest.approx(mean([one["score"] for one in greedy]))
    assert found["eval/t1.5/score"] == pytest.approx(mean([one["score"] for one in warm]))
    assert "eval/t1.5/pass@3" in found
    assert "eval/pass@3" not in found  # one response at temperature 0
    assert found.keys() == module.evaluator.metric_names([""])


def test_named_sets_have_metrics_of_their_own(build, tmp_path: Path) -> None:
    questions = [{"question": f"say {word}", "answer": word} for word in "mnop"]
    val = {
        "plain": rows(tmp_path / "plain.jsonl", "abc"),
        "asked": ValidationSet(questions, {"prompt_template": "Please {{ question }}"}),
    }
    data = PromptDataModule(rows(tmp_path / "t.jsonl", "xyz"), val, batch_size=2)
    module = build(rewards=Rewards([letters]))
    found, lines = validate(module, data, tmp_path / "out")
    assert [line["set"] for line in lines] == ["plain"] * 3 + ["asked"] * 4
    assert lines[3]["prompt"].startswith("Please say m")
    parts = {name: [one["score"] for one in lines if one["set"] == name] for name in val}
    for name, scores in parts.items():
        assert found[f"eval/{name}/score"] == pytest.approx(mean(scores))
    assert found["eval/score"] == pytest.approx(mean([*parts["plain"], *parts["asked"]]))
    assert {one.name: one.number for one in module.measurements}["eval/asked/score"] == 4


class Counting(TransformersEngine):
    """Remembers the largest number of responses in one call."""

    most = 0

    def generate(self, *args: Any, seeds: Sequence[int], **options: Any) -> Rollout:
        self.most = max(self.most, len(seeds))
        return super().generate(*args, seeds=seeds, **options)


def test_memory_does_not_grow_with_the_number_of_samples(build, data, tmp_path: Path) -> None:
    sizes, kept = [], []
    for number in (2, 16):
        engine = Counting()
        module = build(
            engine=engine, num_generations=2, evaluation=Evaluation(num_samples=number, pass_at=())
        )
        validate(module, data, tmp_path / str(number), limit_val_batches=1)
        sizes.append(engine.most)
        evaluator = module.evaluator
        evaluator.measure = lambda ranks: []  # leaves what was kept
        validate(module, data, tmp_path / str(number), limit_val_batches=1)
        kept.append([len(result.values) for result in evaluator._results])
    assert sizes == [6, 6]
    assert kept[0] == kept[1]


class Breaking(RLOO):
    """Stops in the second batch of its first validation."""

    stops = True

    def validation_step(  # type: ignore[override]
        self, batch: Any, batch_idx: int, dataloader_idx: int = 0
    ) -> Any:
        if self.stops and batch_idx == 1:
            raise RuntimeError("stopped")
        return super().validation_step(batch, batch_idx, dataloader_idx)


def test_what_was_broken_off_counts_no_more(build, data, tmp_path: Path) -> None:
    module = build(kind=Breaking)
    with pytest.raises(RuntimeError, match="stopped"):
        validate(module, data, tmp_path)
    module.stops = False
    found, lines = validate(module, data, tmp_path)
    assert len(lines) == 7
    assert found["eval/score"] == pytest.approx(mean([line["score"] for line in lines]))
    assert module.measurements[0].number == 7


def some(completions: Sequence[str]) -> list[float | None]:
    return [None if text[:1].lower() < "h" else 1.0 for text in completions]


def test_responses_that_nobody_can_judge_are_left_out(build, data, tmp_path: Path) -> None:
    module = build(
        rewards=Rewards([some], max_unscorable_fraction=1.0),
        evaluation=Evaluation(num_samples=4, metrics={"begin": First()}),
    )
    found, lines = validate(module, data, tmp_path)
    judged = [[one for one in own if one is not None] for own in per_prompt(lines)]
    assert any(len(own) < 4 for own in judged)
    assert found["eval/pass@1"] == pytest.approx(mean([1.0 for own in judged if own]))
    numbers = {one.name: one.number for one in module.measurements}
    assert numbers["eval/pass@4"] == sum(len(own) == 4 for own in judged)
    assert numbers["eval/begin"] == 7


def test_majority_votes_need_no_pass_at_k(build, data, tmp_path: Path) -> None:
    module = build(
        rewards=Rewards([First()]), evaluation=Evaluation(num_samples=3, pass_at=(), threshold=0.9)
    )
    found, _ = validate(module, data, tmp_path)
    assert 0 <= found["eval/maj@3"] <= 1
    assert not any("pass@" in name for name in found)


def test_verdicts_that_were_cut_off_have_no_vote(build, tmp_path: Path) -> None:
    (tmp_path / "val.jsonl").write_text(json.dumps({"prompt": "which?", "gold": "A"}))
    data = PromptDataModule(rows(tmp_path / "train.jsonl", "xyz"), str(tmp_path / "val.jsonl"))
    cut_off = "Verdict: B" + " " * 20
    said = itertools.cycle(["Verdict: A", cut_off, cut_off])
    module = build(
        engine=ScriptedEngine(lambda _: next(said)),
        rewards=Rewards(["verdict_correct"]),
        sampling=Sampling(max_new_tokens=12),
        evaluation=Evaluation(num_samples=3),
    )
    found, lines = validate(module, data, tmp_path / "out")
    assert [line["answer"] for line in lines] == ["A", None, None]
    assert found["eval/maj@3"] == 1.0


def test_ppo_evaluates_alike(build, data, tmp_path: Path) -> None:
    module = build(kind=PPO, critic=Critic(), evaluation=Evaluation(num_samples=2))
    found, _ = validate(module, data, tmp_path)
    assert {"eval/pass@1", "eval/pass@2", "eval/score_low"} <= found.keys()


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"num_samples": 0}, r"num_samples is 0"),
        ({"temperatures": (1.0, 1.0)}, r"temperatures is \[1.0, 1.0\]: give each once"),
        ({"temperatures": (-1.0,)}, r"temperatures is \[-1.0\]"),
        ({"num_samples": 4, "pass_at": (8,)}, r"pass_at is \[8\]; each must lie between 1 and"),
        ({"num_samples": 2, "temperatures": (0.0,)}, "temperature 0 are all the same"),
        ({"correct": "lettrs"}, r"evaluation\.correct 'lettrs'.*letters"),
        ({"metrics": [letters]}, "a function called 'letters'"),
    ],
)
def test_what_makes_no_sense_is_refused(build, options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        build(evaluation=Evaluation(**options))


class Longest(RewardFunction):
    """Prefers the longest of the responses that it sees, which have to be two or more."""

    compares_responses = True

    def __call__(self, completions: Sequence[str]) -> list[float]:
        assert len(completions) > 1
        return [float(len(one) == max(map(len, completions))) for one in completions]


@pytest.mark.parametrize("place", ["rewards", "metrics"])
@pytest.mark.parametrize(
    ("evaluation", "message"),
    [
        ({}, r"num_samples is 1, .*rounds of num_generations \(2\).*'longest' compares"),
        ({"num_samples": 5}, r"num_samples is 5, .*rounds of num_generations \(2\)"),
        ({"num_samples": 4, "temperatures": (0.0, 1.0)}, "one of the temperatures .* is 0"),
        ({"num_samples": 4}, ""),
        ({"num_samples": 4, "temperatures": (0.5, 1.0)}, ""),
    ],
)
def test_single_responses_are_not_compared(
    build, data, tmp_path: Path, place: str, evaluation: dict[str, Any], message: str
) -> None:
    def module() -> Any:
        options = {"rewards": Rewards([Longest()])} if place == "rewards" else {"reward": letters}
        metrics: Any = [Longest()] if place == "metrics" else []
        given = Evaluation(**evaluation, metrics=metrics)
        return build(num_generations=2, evaluation=given, **options)

    if not message:
        metrics, _ = validate(module(), data, tmp_path)
        assert 0 < metrics["eval/longest"] <= 1
        return
    with pytest.raises(ValueError, match=message):
        validate(module(), data, tmp_path)
    # before a training spends an iteration, and only where it validates
    own = {"default_root_dir": tmp_path, "accelerator": "cpu", "logger": False, "max_steps": 1}
    own |= {"enable_checkpointing": False, "num_sanity_val_steps": 0}
    own |= {"enable_progress_bar": False}
    with pytest.raises(ValueError, match=message):
        L.Trainer(**own).fit((refused := module()), datamodule=data)
    assert refused.global_step == 0
    L.Trainer(**own, limit_val_batches=0).fit(module(), datamodule=data)


def test_other_refusals_of_single_responses_beside_functions_that_compare(
    build, data, tmp_path: Path
) -> None:
    def compared(num_generations: int = 2, **options: Any) -> Any:
        evaluation = Evaluation(num_samples=4, metrics=[Longest()])
        return build(num_generations=num_generations, evaluation=evaluation, **options)

    with pytest.raises(ValueError, match=r"num_generations is 1, .*'longest' compares"):
        validate(compared(1, algorithm="reinforce"), data, tmp_path)
    trainer = L.Trainer(accelerator="cpu", logger=False, enable_checkpointing=False)
    with pytest.raises(ValueError, match=r"a prediction has one response.*: validate, or let"):
        trainer.predict(compared(), datamodule=data)
    # what is compared at training only: no prompt of the evaluation has that label
    recipe = {"open": {"longest": 1.0}, "closed": {"letters": 1.0}}
    rewards = Rewards([Longest(), letters], recipe=recipe, label_column="kind")
    module = build(num_generations=2, rewards=rewards)
    words = [{"prompt": f"say {word}", "kind": "closed"} for word in "abc"]
    metrics, _ = validate(module, PromptDataModule(words, words, batch_size=3), tmp_path)
    assert "eval/letters" in metrics


def test_answers_that_the_rewards_read() -> None:
    numbers = NumericAnswer()
    assert numbers.answer_of("5 and then 1,000.50") == numbers.answer_of("#### 1000.5 or so")
    assert numbers.answer_of("no number\nx + y") == numbers.answer_of("x+y")
    assert numbers.answer_of("") is None
    words = ExactMatch(extract="is (.*)")
    assert words.answer_of("it is  Red. ") == words.answer_of("it is red") == "red"
    assert words.answer_of("it may be red") is None


def test_a_checkpoint_remembers_what_is_measured() -> None:
    given = Evaluation(
        num_samples=3, temperatures=(0.5, 0.0), metrics=[NumericAnswer(which="boxed")]
    )
    stored = as_hyperparameters(RLOO, {"evaluation": given})
    assert NOT_KEPT not in stored
    options = stored["evaluation"]["init_args"]
    assert options["temperatures"] == [0.5, 0.0]
    assert options["metrics"][0]["init_args"] == {"which": "boxed"}


def test_loaders_have_no_names_of_the_data_before_them(build, tmp_path: Path) -> None:
    train = rows(tmp_path / "train.jsonl", "xyz")
    sets = {name: rows(tmp_path / f"{name}.jsonl", name) for name in ("ab", "cde")}
    data = PromptDataModule(train, sets, batch_size=2)
    log = EvalJSONL(tmp_path)
    trainer = L.Trainer(
        accelerator="cpu", devices=1, logger=False, enable_progress_bar=False, callbacks=[log],
        enable_model_summary=False, enable_checkpointing=False, max_steps=1, max_epochs=-1,
        use_distributed_sampler=False, num_sanity_val_steps=0, val_check_interval=1,
    )  # fmt: skip
    module = build()
    trainer.fit(module, datamodule=data)
    assert "eval/ab/score" in trainer.logged_metrics
    loaders = data.val_dataloader()
    assert isinstance(loaders, list)
    trainer.validate(module, dataloaders=[*loaders, loaders[0]], verbose=False)
    lines = [json.loads(line) for line in log.paths[-1].read_text().splitlines()]
    assert [line.get("dataloader") for line in lines] == [0, 0, 1, 1, 1, 2, 2]
    assert not any("set" in line for line in lines)
    assert {one.name for one in module.measurements} >= {"eval/score"}
    assert not any("ab/" in name for name in trainer.logged_metrics)
    trainer.validate(module, datamodule=data, verbose=False)
    assert "eval/ab/score" in trainer.logged_metrics


class Heavy(RewardFunction):
    """Cannot be loaded."""

    def prepare(self) -> None:
        raise RuntimeError("there is no such metric")

    def __call__(self, **_: Any) -> list[float]:
        raise AssertionError


def test_metrics_are_prepared_before_anything_is_generated(build, data, tmp_path: Path) -> None:
    engine = Counting()
    module = build(engine=engine, evaluation=Evaluation(metrics=[Heavy()]))
    with pytest.raises(RuntimeError, match="no such metric"):
        validate(module, data, tmp_path)
    assert engine.most == 0


class Counted:
    """Of all answers how many begin with a letter of the first half, and how many with any."""

    share_names = ("first_half", "letters", "cut", "unheard_of")

    def __call__(self, completions: Sequence[str]) -> list[float]:
        return [0.0] * len(completions)

    def observed(
        self, text: str, columns: Mapping[str, Any], *, truncated: bool, row: Hashable
    ) -> tuple[str, str, bool, Hashable]:
        return text[:1].lower(), columns["topic"], truncated, row

    def shares(self, observed: Sequence[tuple[str, str, bool, Hashable]]) -> dict[str, Outcomes]:
        said, topics, cut, rows = zip(*observed, strict=True)
        return {
            "cut": Outcomes(cut, rows),
            "first_half": Outcomes(["a" <= one < "n" for one in said], topics),
            "letters": Outcomes([one.isalpha() for one in said], topics),
        }


def test_a_function_may_sum_up_all_answers_of_an_evaluation(build, tmp_path: Path) -> None:
    lines = [{"prompt": f"say {word}", "topic": str(n // 2)} for n, word in enumerate("abcdef")]
    sets = {"one": ValidationSet(lines[:4]), "two": ValidationSet(lines[4:])}
    data = PromptDataModule(lines, sets, batch_size=2)
    module = build(
        rewards=Rewards([First()]),
        eval_sampling=Sampling(max_new_tokens=150),
        evaluation=Evaluation(metrics={"sums": Counted()}, num_samples=2),
    )
    for _ in range(2):  # of the first nothing is left
        found, records = validate(module, data, tmp_path / "out")
    said = [record["completion"][:1].lower() for record in records]
    for name, own in (("", said), ("one/", said[:8]), ("two/", said[8:])):
        right = sum("a" <= one < "n" for one in own)
        assert found[f"eval/{name}sums/first_half"] == pytest.approx(right / len(own))
        low, high = (found[f"eval/{name}sums/first_half_{end}"] for end in ("low", "high"))
        assert 0 <= low <= right / len(own) <= high <= 1
    logged = {name for name in found if "sums/" in name}
    assert len(logged) == 3 * 3 * 3
    assert logged < module_names(module)
    table = {one.name: one for one in module.measurements}
    assert table["eval/sums/letters"].number == 3  # topics
    assert table["eval/sums/cut"].number == 6  # rows, of two responses each
    cut = [record["finish_reason"] == "length" for record in records]
    assert 0 < sum(cut) < len(cut)
    assert found["eval/sums/cut"] == pytest.approx(sum(cut) / len(cut))


def module_names(module: RLOO) -> set[str]:
    return module.evaluator.metric_names(["one", "two"])
