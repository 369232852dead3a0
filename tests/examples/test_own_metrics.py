"""Metrics of one's own: the program of ``docs/callbacks.md`` logs what its responses say."""

import csv
import json
import re
from pathlib import Path

import pytest

from lrlhf.functional import Algorithm, PolicyLoss
from lrlhf.functional.algorithms import ALGORITHMS
from lrlhf.modules import RLOO
from lrlhf.types import Experience

PAGE = (Path(__file__).parents[2] / "docs" / "callbacks.md").read_text(encoding="utf-8")


def test_each_part_logs_what_the_responses_say(
    model_folder: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (program,) = re.findall(r"```python\n(import lightning.*?trainer\.fit.*?)```", PAGE, re.DOTALL)
    program = program[program.rindex("import lightning") :]
    program = program.replace(
        "num_generations=2", "num_generations=2, update={'micro_batch_tokens': 40}"
    )

    exec(compile(program, "callbacks.md", "exec"), {"model": model_folder})

    with Path("runs/metrics/metrics.csv").open() as handle:
        steps = [*csv.DictReader(handle)]
    lines = [
        json.loads(line) for line in Path("runs/metrics/rollouts.jsonl").read_text().splitlines()
    ]
    assert len(steps) == 2
    assert len({line["score"] for line in lines}) > 1
    for number, step in enumerate(steps, start=1):
        own = [line for line in lines if line["step"] == number]
        scores = [line["score"] for line in own]
        # four groups of two responses, in several micro-batches
        best = [max(pair) for pair in zip(scores[::2], scores[1::2], strict=True)]
        assert float(step["algorithm/best"]) == sum(best) / 4
        assert float(step["rewards/without"]) == scores.count(0.0) / 8
        assert float(step["my/shortest"]) == min(line["length"] for line in own)
        # the update is on-policy, and 0 outside of the mask would lower the mean
        assert float(step["algorithm/ratio"]) == pytest.approx(1.0, abs=1e-5)


def test_the_page_names_fields_of_an_experience() -> None:
    (named,) = re.findall(r"`Experience` has, for(.*?)`records` has", PAGE, re.DOTALL)
    fields = {*re.findall(r"`(\w+)`", named)} - {"B", "T"}
    assert {"scores", "advantages", "columns"} < fields
    assert fields <= Experience.__dataclass_fields__.keys()


def test_log_metric_is_no_option_of_a_config(model_folder: str) -> None:
    def logs(*_: object, log_metric: object) -> None: ...

    algorithm = Algorithm(
        name="mine", estimator=ALGORITHMS["rloo"].estimator, loss=PolicyLoss("logs", logs)
    )
    with pytest.raises(ValueError, match="log_metric"):
        RLOO(
            model_folder,
            {"functions": ["repetition_penalty"]},
            algorithm=algorithm,
            update={"options": {"log_metric": None}},
        )
