import sys
from pathlib import Path
from typing import Any

import pytest
from lightning.pytorch.loggers import CSVLogger

from lrlhf.callbacks import EvalJSONL, HFExport, PhaseProgress, RLCheckpoint, RolloutLog, RunReport
from lrlhf.callbacks.reports import curves
from lrlhf.callbacks.reports.curves import Curve, draw_panels
from tests.callbacks.fakes import ToyPolicy, batches, trainer


def test_the_report_compares_start_and_end_and_says_where_things_are(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    callbacks = [
        RunReport(),
        EvalJSONL(),
        RolloutLog(print_every=None),
        HFExport(),
        RLCheckpoint(tmp_path / "ck"),
    ]
    fit = trainer(
        tmp_path,
        *callbacks,
        logger=CSVLogger(tmp_path, name="logs", version=0),
        enable_checkpointing=True,
        num_sanity_val_steps=-1,
        val_check_interval=2,
        log_every_n_steps=1,
    )
    fit.fit(ToyPolicy(), batches(4), batches(1))
    logs = tmp_path / "logs" / "version_0"
    places = {
        "metrics (CSV)": logs / "metrics.csv",
        "evaluations": logs / "eval_scores_4.jsonl",
        "rollouts": logs / "rollouts.jsonl",
        "trained model": logs / "export" / "final",
        "last checkpoint": tmp_path / "ck" / "last.ckpt",
        "reward curve": logs / "reward_curve.png",
    }
    blank, *printed = capsys.readouterr().out.splitlines()
    assert blank == ""
    assert printed[:2] == [
        "rollout/score: 0 at step 1 → 3 at step 4 (+3)",
        "eval/score: 0 at step 0 → 4 at step 4 (+4)",
    ]
    assert [line.strip().split("  ")[0] for line in printed[2:]] == list(places)
    assert [line.split("  ")[-1].strip() for line in printed[2:]] == list(map(str, places.values()))
    for path in ("metrics.csv", "eval_scores_4.jsonl", "rollouts.jsonl", "export/final"):
        assert (logs / path).exists()


def test_the_report_comes_after_a_progress_bar_has_ended(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    bar = PhaseProgress(plain=False)
    trainer(tmp_path, bar, RunReport(), enable_progress_bar=True).fit(ToyPolicy(), batches(2))
    last = capsys.readouterr().out.rpartition("\r")[2].splitlines()
    assert "rollout/score: 0 at step 1 → 1 at step 2 (+1)" in last


def test_without_matplotlib_a_run_says_once_that_pictures_are_left_out(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    recwarn: pytest.WarningsRecorder,
) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)  # makes `import` fail
    trainer(tmp_path, RunReport(panels=["train/loss"])).fit(ToyPolicy(), batches(2))
    assert len([one for one in recwarn if "lrlhf[plots]" in str(one.message)]) == 1
    assert not list(tmp_path.glob("*.png"))
    assert "rollout/score: 0 at step 1" in capsys.readouterr().out
    with pytest.raises(ImportError, match="drawing curves needs the package matplotlib"):
        draw_panels(tmp_path / "a.png", {"run": [Curve("a", [1], [1.0])]})


def test_a_resumed_run_reports_the_whole(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    options = {"val_check_interval": 1}
    first = trainer(tmp_path, RunReport(), num_sanity_val_steps=-1, **options)
    first.fit(ToyPolicy(), batches(2), batches(1))
    first.save_checkpoint(tmp_path / "two.ckpt")
    capsys.readouterr()
    report = RunReport()
    again = trainer(tmp_path, report, max_epochs=2, **options)
    again.fit(
        ToyPolicy(), batches(2), batches(1), ckpt_path=tmp_path / "two.ckpt", weights_only=True
    )
    assert report.curves == {
        "rollout/score": Curve("rollout/score", [1, 2, 3, 4], [0.0, 1.0, 2.0, 3.0]),
        "eval/score": Curve("eval/score", [0, 1, 2, 3, 4], [0.0, 1.0, 2.0, 3.0, 4.0]),
    }
    assert "eval/score: 0 at step 0 → 4 at step 4" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("options", "every"),
    [
        ({"val_check_interval": 40, "check_val_every_n_epoch": None}, "40 batches"),
        ({"val_check_interval": 4}, "4 batches"),
        ({}, "epoch"),
        # the sanity check of one batch is none
        ({"check_val_every_n_epoch": 2, "num_sanity_val_steps": 1}, "2 epochs"),
    ],
)
def test_a_run_without_an_evaluation_says_so(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], options: dict[str, Any], every: str
) -> None:
    fit = trainer(tmp_path, RunReport(), max_steps=2, **options)
    fit.fit(ToyPolicy(), batches(5), batches(2))
    line = capsys.readouterr().out.splitlines()[2]
    assert line == f"eval/score: no evaluation in these steps (one each {every})"


def test_a_metric_that_an_evaluation_does_not_log_is_told_with_those_it_does(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    fit = trainer(tmp_path, RunReport(eval_metric="eval/acuracy"))
    fit.fit(ToyPolicy(), batches(2), batches(1))
    line = capsys.readouterr().out.splitlines()[2]
    assert line == ("eval/acuracy: never logged (logged: eval/score, rollout/score, train/loss)")


def test_a_resumed_run_with_no_step_left_says_only_that(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    first = trainer(tmp_path)  # whose checkpoint knows no curves
    first.fit(ToyPolicy(), batches(2))
    first.save_checkpoint(tmp_path / "two.ckpt")
    again, checkpoint = trainer(tmp_path, RunReport(), max_steps=2), tmp_path / "two.ckpt"
    again.fit(ToyPolicy(), batches(2), batches(1), ckpt_path=checkpoint, weights_only=True)
    assert capsys.readouterr().out.splitlines() == ["", "no step was left: the run is at step 2"]


@pytest.fixture
def drawn(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """The figures that would have been saved."""
    figures: list[Any] = []
    monkeypatch.setattr(curves, "_save", lambda _, figure: figures.append(figure))
    return figures


def test_a_single_step_has_whole_steps_and_plain_values_on_its_axes(
    tmp_path: Path, drawn: list[Any]
) -> None:
    # the same value, but for the rounding of float32
    curves = {"a": [Curve("eval", [1], [0.5])], "b": [Curve("eval", [1], [0.50000003])]}
    for runs in (curves, {"run": [Curve("train/loss", [1], [0.5])]}):
        draw_panels(tmp_path, runs)
    for figure in drawn:
        figure.draw_without_rendering()
        (axes,) = figure.axes
        low, high = axes.get_xlim()
        assert [text.get_text() for text in axes.get_xticklabels() if
                low <= text.get_position()[0] <= high] == ["1"]  # fmt: skip
        assert axes.yaxis.get_offset_text().get_text() == ""
        assert all(len(text.get_text()) <= 5 for text in axes.get_yticklabels())


def test_many_values_are_drawn_behind_their_mean(tmp_path: Path, drawn: list[Any]) -> None:
    values = [float(step % 4) for step in range(80)]
    values[3] = float("nan")
    draw_panels(tmp_path, {"run": [Curve("train/loss", list(range(80)), values)]})
    (axes,) = drawn[0].axes
    faint, mean = axes.lines
    assert len(faint.get_xdata()) == 79
    # of three values, as 79 // 20 is 3: (0, 1, 2), (1, 2, 0), (2, 0, 1), (0, 1, 2), (1, 2, 3)
    assert list(mean.get_xdata()[:5]) == [2, 4, 5, 6, 7]
    assert list(mean.get_ydata()[:5]) == pytest.approx([1.0, 1.0, 1.0, 1.0, 2.0])


def test_the_label_of_a_target_stands_on_white_above_the_curves(
    tmp_path: Path, drawn: list[Any]
) -> None:
    panels = {"run": [Curve("kl/sequence", [1, 2], [1.0, 2.0])]}
    draw_panels(tmp_path, panels, targets={"kl/sequence": 1.5})
    (axes,) = drawn[0].axes
    (label,) = axes.texts
    assert label.get_text() == "target 1.5"
    assert label.get_bbox_patch().get_facecolor()[:3] == (1.0, 1.0, 1.0)
    assert label.get_zorder() > max(line.get_zorder() for line in axes.lines)
