import re
from pathlib import Path

import pytest

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
    # looks at the clock: step starts, generate starts, ends, update starts, ends, line: 5 s in all
    assert capsys.readouterr().out.splitlines() == [
        f"step {step}/2  score {step - 1}  loss 0.25  5.0 s/step (generate 1.0 update 1.0)"
        for step in (1, 2)
    ]


def test_an_evaluation_has_a_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run(tmp_path, PhaseProgress(), 2, val_check_interval=2, num_sanity_val_steps=-1)
    evaluations = re.findall(r"eval at step.*", capsys.readouterr().out)
    assert evaluations == ["eval at step 0  score 0", "eval at step 2  score 2"]


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
    assert "score=0, loss=0.25" in drawn
