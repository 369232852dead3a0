import re
from pathlib import Path
from typing import Any

import pytest
import torch

from lrlhf.callbacks import PhaseProgress
from lrlhf.callbacks.reports import progress as progress_module
from tests.callbacks.fakes import ToyPolicy, batches, trainer


class Clock:
    """Each look at it is one second later."""

    def __init__(self) -> None:
        self.now = 0.0

    def monotonic(self) -> float:
        self.now += 1.0
        return self.now


def run(tmp_path: Path, bar: PhaseProgress, steps: int, **options: object) -> None:
    validation = batches(1) if "val_check_interval" in options else None
    fit = trainer(tmp_path, bar, enable_progress_bar=True, **options)
    fit.fit(ToyPolicy(kl=[0.0625] * steps), batches(steps), validation)


def test_without_a_terminal_there_is_one_plain_line_per_step(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(progress_module, "time", Clock())
    run(tmp_path, PhaseProgress(), 2)
    first, *lines = capsys.readouterr().out.splitlines()
    assert first == "policy: Weight, 2 parameters, 1 of them trained"
    # looks at the clock: step starts, generate starts, ends, update starts, ends, line: 5 s in all
    assert lines == [
        "step 1/2  score 0  5.0 s/step (generate 1.0 update 1.0)  5 s left",
        "step 2/2  score 1  5.0 s/step (generate 1.0 update 1.0)",
    ]


class Every(ToyPolicy):
    """Logs every other step."""

    def training_step(self, batch: Any, batch_idx: int) -> None:
        super().training_step(batch, batch_idx)
        if batch_idx % 2 == 0:
            self.log("own/value", float(batch_idx))


@pytest.mark.parametrize("every", [1, 2, 5])
def test_a_plain_line_does_not_repeat_what_an_earlier_step_measured(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], every: int
) -> None:
    bar = PhaseProgress(metrics={"own/value": "value"})
    fit = trainer(tmp_path, bar, enable_progress_bar=True, log_every_n_steps=every)
    fit.fit(Every(), batches(5))
    values = re.findall(r"step \d/5 (?: value (\d) )?", capsys.readouterr().out)
    assert values == ["0", "", "2", "", "4"]


def test_an_evaluation_has_a_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run(tmp_path, PhaseProgress(), 2, val_check_interval=2, num_sanity_val_steps=-1)
    evaluations = re.findall(r"eval at step.*", capsys.readouterr().out)
    assert evaluations == [
        "eval at step 0 (before training)  score 0",
        "eval at step 2  score 2",
    ]


def test_on_a_terminal_an_evaluation_has_a_line_too_which_fits(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    options = {"val_check_interval": 2, "num_sanity_val_steps": -1}
    run(tmp_path / "wide", PhaseProgress(plain=False), 2, **options)
    evaluations = re.findall(r"eval at step[^\r\n]*\n", capsys.readouterr().out)
    assert evaluations == [
        "eval at step 0 (before training)  score 0\n",
        "eval at step 2  score 2\n",
    ]
    monkeypatch.setenv("COLUMNS", "41")
    run(tmp_path / "narrow", PhaseProgress(plain=False), 2, **options)
    # its 41 characters and the mark would be one too many
    evaluations = re.findall(r"eval at step[^\r\n]*\n", capsys.readouterr().out)
    assert evaluations == ["eval at step 0 (before training)  …\n", "eval at step 2  score 2\n"]


def test_an_evaluation_by_itself_has_no_line_beside_its_table(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    validate = trainer(tmp_path, PhaseProgress(plain=False), enable_progress_bar=True)
    validate.validate(ToyPolicy(), batches(1), verbose=False)
    assert "eval at step" not in capsys.readouterr().out


class Judge(ToyPolicy):
    """Measures much besides what matters most."""

    train_metric, eval_metric = "rollout/score", "eval/accuracy"

    def validation_step(self, *_: object) -> None:  # type: ignore[override]
        self.log_dict({f"eval/mean_of_something_{number}": 0.5 for number in range(9)})
        self.log_dict({"eval/accuracy_low": 0.25, "eval/accuracy": 0.5, "eval/accuracy_high": 0.75})
        self.log("eval/accuracy_of_two", 0.125)


def test_the_line_of_an_evaluation_begins_with_what_matters_and_is_short(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    fit = trainer(tmp_path, PhaseProgress(), enable_progress_bar=True)
    fit.fit(Judge(), batches(1), batches(1))
    (line,) = re.findall(r"eval at step.*", capsys.readouterr().out)
    start = (
        "eval at step 1  accuracy 0.5 (0.25 to 0.75)  accuracy_of_two 0.125  mean_of_something_0"
    )
    assert line.startswith(start)
    assert line.endswith(" 0.5  …")
    assert 90 < len(line) <= 120


def test_a_disabled_bar_is_silent(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run(tmp_path, PhaseProgress(refresh_rate=0), 2)
    bar = PhaseProgress()
    bar.disable()
    run(tmp_path / "b", bar, 2)
    assert capsys.readouterr().out == ""


def test_on_a_terminal_the_bar_names_the_phase_and_the_metrics(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run(tmp_path, PhaseProgress(plain=False), 1)
    drawn = capsys.readouterr().out
    assert "Epoch 0 [generate]" in drawn
    assert "Epoch 0 [update]" in drawn
    assert "score=0" in drawn
    assert "loss" not in drawn  # of a policy it measures nothing


def test_what_is_left_of_a_zero_is_a_zero() -> None:
    # -2⁻²⁴, as float32 leaves it
    assert [progress_module.short(value) for value in (-5.96e-8, 0.0, 0.00012346)] == [
        "0",
        "0",
        "0.000123",
    ]


def test_chosen_metrics_take_the_place_of_the_usual_ones(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run(tmp_path, PhaseProgress(metrics={"train/loss": "objective"}), 1)
    (line,) = re.findall(r"step 1/1.*", capsys.readouterr().out)
    assert line.startswith("step 1/1  objective 0.25  ")


@pytest.mark.parametrize(
    ("seconds", "said"),
    [
        (5.4, "5 s"),
        (89.0, "89 s"),
        (150.0, "2 min"),
        (3599.0, "1 h 00 min"),
        (7500.0, "2 h 05 min"),
    ],
)
def test_times_are_told_as_people_say_them(seconds: float, said: str) -> None:
    assert progress_module._duration(seconds) == said


def test_an_evaluation_counts_what_was_cut_off() -> None:
    logged = {"eval/score": torch.tensor(0.5), "eval/truncated_fraction": torch.tensor(0.625)}
    responses = {"eval/truncated_fraction": 8}
    assert progress_module._evaluated(logged, "eval/score", responses) == [
        "score 0.5",
        "5 of 8 cut off",
    ]


@pytest.mark.parametrize("prefix", ["reward_model", "rewards"])
def test_of_pairs_loss_accuracy_and_margin_are_shown(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], prefix: str
) -> None:
    class Pairs(ToyPolicy):
        def training_step(self, *arguments: Any) -> None:  # type: ignore[override]
            del arguments
            self.log_dict({"train/loss": 0.75, f"{prefix}/accuracy": 0.5, f"{prefix}/margin": 0.25})

    trainer(tmp_path, PhaseProgress(), enable_progress_bar=True, max_steps=-1, max_epochs=1).fit(
        Pairs(), batches(1)
    )
    assert re.search("loss 0.75  accuracy 0.5  margin 0.25", capsys.readouterr().out)


@pytest.mark.parametrize(
    ("number", "counted"), [(0, "0"), (999, "999"), (26_900, "26.9 K"), (134_515_008, "134.5 M")]
)
def test_sizes_are_counted_as_people_say_them(number: int, counted: str) -> None:
    assert progress_module._counted(number) == counted
