"""Whatever is wrong with rows, YAML, models or rewards: one message names it, nothing is lost."""

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import yaml

from lrlhf.cli import run
from tests.cli.experiment import experiment

pytestmark = pytest.mark.usefixtures("_own_log")

PROMPTS = [{"prompt": f"say {n}", "answer": str(n)} for n in range(12)]
PAIRS = [{"prompt": "hi ", "chosen": f"good {n}", "rejected": f"bad {n}"} for n in range(12)]


def raising(completions: Sequence[str]) -> list[float]:  # noqa: ARG001  the keyword is the point
    raise RuntimeError("the reward is broken")


def too_few(completions: Sequence[str]) -> list[float]:  # noqa: ARG001  the keyword is the point
    return [1.0]


def words(completions: Sequence[str]) -> list[Any]:
    return ["good" for _ in completions]


def undecided(completions: Sequence[str]) -> list[None]:
    return [None for _ in completions]


def needs_a_column(completions: Sequence[str], anwser: Sequence[str]) -> list[float]:
    return [0.0 for _ in zip(completions, anwser, strict=True)]


@dataclass
class Case:
    """A mistake, and what the message must contain."""

    culprits: tuple[str, ...]
    options: tuple[str, ...] = ()
    rows: Sequence[Any] | str | None = None
    kind: str = "prompts"


def rlhf(*options: str, says: Sequence[str]) -> Case:
    return Case(culprits=tuple(says), options=options)


def rows(values: Sequence[Any] | str, *says: str, kind: str = "prompts") -> Case:
    return Case(culprits=says, rows=values, kind=kind)


def reward(name: str) -> str:
    return f'--model.rewards.functions=["{__name__}.{name}"]'


CASES = {
    # rows
    "a line that is no JSON": rows('{"prompt": "a"}\n{"prompt": \n', "data.jsonl", "2"),
    "a row that is a list": rows([["a"], *PROMPTS], "data.jsonl"),
    "a file without rows": rows("", "data.jsonl"),
    "no prompt column": rows([{"promt": "a"}] * 4, "data.jsonl", "prompt", "promt"),
    "a prompt that is a number": rows([{"prompt": 3}] * 4, "data.jsonl", "prompt"),
    "an empty prompt": rows([{"prompt": ""}] * 4, "data.jsonl", "empty"),
    "a chat turn without a role": rows([{"prompt": [{"content": "a"}]}] * 4, "data.jsonl", "role"),
    "prompts that are all too long": Case(
        culprits=("data.jsonl", "long"), options=("--data.max_prompt_tokens=2",)
    ),
    "fewer rows than a batch": Case(
        culprits=("batch_size", "12"), options=("--data.batch_size=64",)
    ),
    "pairs without a rejected answer": rows(
        [{"prompt": "a", "chosen": "b"}] * 4, "data.jsonl", "rejected", kind="pairs"
    ),
    "a pair of equal answers": rows(
        [{"prompt": "a ", "chosen": "b", "rejected": "b"}] * 4, "data.jsonl", kind="pairs"
    ),
    "a margin that is no number": rows(
        [{**row, "margin": "much"} for row in PAIRS], "data.jsonl", "margin", kind="pairs"
    ),
    "an empty answer": rows(
        [{"prompt": "a", "chosen": "", "rejected": "b"}] * 4, "data.jsonl", "empty", kind="pairs"
    ),
    # YAML and options
    "a file that is not there": rlhf("--data.train=dat.jsonl", says=["dat.jsonl", "data.jsonl"]),
    "a misspelt option": rlhf("--model.num_generation=2", says=["num_generation"]),
    "a misspelt nested option": rlhf("--model.sampling.max_nw_tokens=3", says=["max_nw_tokens"]),
    "a word where a number belongs": rlhf(
        "--model.num_generations=many", says=["num_generations", "many"]
    ),
    "one generation for a group": rlhf("--model.num_generations=1", says=["num_generations", "2"]),
    "a misspelt estimator": rlhf("--model.advantage.estimator=rlo", says=["rlo", "rloo"]),
    "a misspelt loss": rlhf(
        "--model.update.loss=sequence_clp", says=["sequence_clp", "sequence_clip"]
    ),
    "a temperature of zero": rlhf("--model.sampling.temperature=0", says=["sampling.temperature"]),
    "truncated sampling": rlhf("--model.sampling.top_p=0.9", says=["allow_truncated_sampling"]),
    "a minibatch that does not divide": rlhf(
        "--model.update.minibatch_size=3", says=["minibatch_size", "2", "4"]
    ),
    "weights in pure bfloat16": rlhf(
        "--trainer.precision=bf16-true", says=["bf16-true", "bf16-mixed"]
    ),
    "a loss that does not fit the estimator": rlhf(
        "--model.advantage.estimator=reinforce",
        "--model.update.loss=sequence_clip",
        says=["update.loss", "reinforce"],
    ),
    "a checkpoint that is not there": rlhf("--ckpt_path=no.ckpt", says=["no.ckpt"]),
    "a negative KL coefficient": rlhf("--model.reference.kl_coef=-1", says=["reference.kl_coef"]),
    "a range the wrong way round": rlhf(
        "--model.advantage.reward_clip_range=[1, -1]", says=["reward_clip_range"]
    ),
    # models
    "a model folder that is not there": rlhf(
        "--model.policy=./no_such_model", says=["no_such_model"]
    ),
    "a package that is not installed": rlhf(
        "--model.policy=package:no_such_package", says=["no_such_package"]
    ),
    "a folder without a config": rlhf("--model.policy=empty_folder", says=["empty_folder"]),
    "an unknown dtype": rlhf(
        "--model.policy.source=empty_folder", "--model.policy.dtype=float33", says=["float33"]
    ),
    # rewards
    "an unknown reward": rlhf(
        '--model.rewards.functions=["exact_mtch"]', says=["exact_mtch", "exact_match"]
    ),
    "a reward that raises": rlhf(reward("raising"), says=["raising", "the reward is broken"]),
    "a reward with too few values": rlhf(reward("too_few"), says=["too_few", "8"]),
    "a reward that returns words": rlhf(reward("words"), says=["words", "good"]),
    "a reward that never knows": rlhf(reward("undecided"), says=["undecided"]),
    "a reward without its column": rlhf(
        reward("needs_a_column"), says=["needs_a_column", "anwser", "answer"]
    ),
    "more weights than rewards": rlhf("--model.rewards.weights=[1, 2]", says=["weights", "2"]),
}


def config(kind: str, model_folder: str) -> dict[str, Any]:
    data, place = {"train": "data.jsonl", "batch_size": 4}, {"default_root_dir": "run"}
    if kind == "pairs":
        return experiment("RewardModel", {"model": {"source": model_folder}}, data, **place)
    log = {"class_path": "RolloutLog", "init_args": {"dirpath": "run"}}
    options = {"policy": model_folder}
    return experiment("RLOO", options, data, reward="exact_match", callbacks=[log], **place)


def test_there_are_enough_cases() -> None:
    assert len(CASES) >= 30


@pytest.mark.parametrize("case", CASES.values(), ids=CASES.keys())
def test_a_mistake_is_named_and_nothing_is_lost(
    case: Case,
    model_folder: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "empty_folder").mkdir()
    content = case.rows if case.rows is not None else PAIRS if case.kind == "pairs" else PROMPTS
    if not isinstance(content, str):
        content = "".join(json.dumps(row) + "\n" for row in content)
    (tmp_path / "data.jsonl").write_text(content)
    (tmp_path / "config.yaml").write_text(yaml.safe_dump(config(case.kind, model_folder)))
    written = tmp_path / "run" / "notes.txt"
    written.parent.mkdir()
    written.write_text("of an earlier run")

    status = run(["fit", "--config=config.yaml", *case.options])

    said = capsys.readouterr().err
    assert status in (1, 2)
    # only the user's own reward is shown with the line where it failed
    assert ("Traceback" in said) == ("the reward is broken" in said)
    message = said[said.index("error:") :]
    for culprit in case.culprits:
        assert culprit in message, message
    assert written.read_text() == "of an earlier run"


def test_the_same_configuration_without_a_mistake_runs(
    model_folder: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "data.jsonl").write_text("".join(json.dumps(row) + "\n" for row in PROMPTS))
    (tmp_path / "config.yaml").write_text(yaml.safe_dump(config("prompts", model_folder)))
    assert run(["fit", "--config=config.yaml"]) == 0
    lines = (tmp_path / "run" / "rollouts.jsonl").read_text().splitlines()
    assert len(lines) == 8
