"""Whatever is wrong with rows, YAML, models or rewards: one message names it, nothing is lost."""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import yaml

from lrlhf.cli import run
from tests.cli.experiment import experiment

pytestmark = pytest.mark.usefixtures("_own_log")

PROMPTS = [{"prompt": f"say {n}", "answer": str(n)} for n in range(12)]


def raising(completions: Sequence[str]) -> list[float]:  # noqa: ARG001  the keyword is the point
    raise RuntimeError("the reward is broken")


def too_few(completions: Sequence[str]) -> list[float]:  # noqa: ARG001  the keyword is the point
    return [1.0]


def reward(name: str) -> str:
    return f'--model.rewards.functions=["{__name__}.{name}"]'


# what the message must contain, by the rows that are wrong; of pairs where they have an answer
ROWS: dict[str, tuple[str | list[Any], str]] = {
    "a line that is no JSON": ('{"prompt": "a"}\n{"prompt": \n', "data.jsonl 2"),
    "no prompt column": ([{"promt": "a"}] * 4, "data.jsonl prompt promt"),
    "pairs without a rejected answer": (
        [{"prompt": "a", "chosen": "b"}] * 4,
        "data.jsonl rejected",
    ),
}
# the same by options
OPTIONS = {
    "--data.max_prompt_tokens=2": "data.jsonl long",
    "--data.train=dat.jsonl": "dat.jsonl data.jsonl",
    "--model.sampling.max_nw_tokens=3": "max_nw_tokens",
    "--model.num_generations=1": "num_generations 2",
    "--model.update.loss=sequence_clp": "sequence_clp sequence_clip",
    "--model.sampling.temperature=0": "sampling.temperature",
    "--model.update.minibatch_size=3": "minibatch_size 2 4",
    "--trainer.precision=bf16-true": "bf16-true bf16-mixed",
    "--model.advantage.estimator=reinforce --model.update.loss=sequence_clip": "update.loss "
    "reinforce",
    "--model.policy=./no_such_model": "no_such_model",
    '--model.rewards.functions=["exact_mtch"]': "exact_mtch exact_match",
    reward("raising"): "raising the reward is broken",
    reward("too_few"): "too_few 2",
}
CASES = [
    *(pytest.param(rows, "", culprits, id=name) for name, (rows, culprits) in ROWS.items()),
    *(pytest.param(PROMPTS, flags, culprits, id=flags) for flags, culprits in OPTIONS.items()),
]


def config(kind: str, model_folder: str) -> dict[str, Any]:
    data, place = {"train": "data.jsonl", "batch_size": 4}, {"default_root_dir": "run"}
    if kind == "pairs":
        return experiment("RewardModel", {"model": {"source": model_folder}}, data, **place)
    log = {"class_path": "RolloutLog", "init_args": {"dirpath": "run"}}
    options = {"policy": model_folder}
    return experiment("RLOO", options, data, reward="exact_match", callbacks=[log], **place)


@pytest.mark.parametrize(("rows", "flags", "culprits"), CASES)
def test_a_mistake_is_named_and_nothing_is_lost(
    rows: str | list[Any],
    flags: str,
    culprits: str,
    model_folder: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(tmp_path)
    content = rows if isinstance(rows, str) else "".join(json.dumps(row) + "\n" for row in rows)
    (tmp_path / "data.jsonl").write_text(content)
    kind = "pairs" if "chosen" in content else "prompts"
    (tmp_path / "config.yaml").write_text(yaml.safe_dump(config(kind, model_folder)))
    written = tmp_path / "run" / "notes.txt"
    written.parent.mkdir()
    written.write_text("of an earlier run")

    status = run(["fit", "--config=config.yaml", *flags.split()])

    said = capsys.readouterr().err
    assert status in (1, 2)
    # only the user's own reward is shown with the line where it failed
    assert ("Traceback" in said) == ("the reward is broken" in said)
    message = said[said.index("error:") :]
    for culprit in culprits.split():
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
