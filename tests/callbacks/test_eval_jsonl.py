import json
from pathlib import Path
from typing import Any

import lightning as L
import pytest
import torch
from torch import Tensor

from lrlhf.callbacks import EvalJSONL, PredictionJSONL
from tests.callbacks.fakes import ToyPolicy, batches, trainer


def lines(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def test_each_evaluation_becomes_one_file_in_data_set_order(tmp_path: Path) -> None:
    log = EvalJSONL(tmp_path / "eval")
    fit = trainer(tmp_path, log, val_check_interval=2, num_sanity_val_steps=-1)
    fit.fit(ToyPolicy(), batches(4), batches(3, order=[2, 0, 1]))
    names = [f"eval_scores_{step}.jsonl" for step in (0, 2, 4)]
    assert [path.name for path in log.paths] == names
    assert sorted(path.name for path in (tmp_path / "eval").iterdir()) == names
    # NaN is no JSON
    assert lines(log.paths[1]) == [
        {"step": 2, "index": index, "score": None} for index in (0, 1, 2)
    ]


def test_a_training_does_not_mix_its_evaluations_with_those_of_an_earlier_one(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    def fit(steps: int, **options: Any) -> L.Trainer:
        made = trainer(tmp_path, EvalJSONL(), val_check_interval=2, max_steps=steps, **options)
        made.fit(ToyPolicy(), batches(8), batches(2))
        return made

    def files() -> list[str]:
        return sorted(path.name for path in tmp_path.glob("eval_scores_*"))

    first = fit(6)
    assert files() == [f"eval_scores_{step}.jsonl" for step in (2, 4, 6)]
    first.save_checkpoint(tmp_path / "six.ckpt")
    # from the beginning, and shorter: what the longer run said of step 6 is none of its own
    with caplog.at_level("INFO"):
        fit(2, num_sanity_val_steps=-1)
    aside = [f"eval_scores_{step}.1.jsonl" for step in (2, 4, 6)]
    assert files() == sorted([*aside, "eval_scores_0.jsonl", "eval_scores_2.jsonl"])
    (said,) = [one for one in caplog.messages if "EvalJSONL" in one]
    assert "earlier run has written eval_scores_2.jsonl and 2 more; they are now" in said
    # on from a checkpoint: what came after it is none of this training's
    (tmp_path / "eval_scores_8.jsonl").write_text("")
    went_on = trainer(tmp_path, EvalJSONL(), max_epochs=2, max_steps=9, limit_val_batches=0)
    went_on.fit(ToyPolicy(), batches(8), ckpt_path=str(tmp_path / "six.ckpt"))
    aside.append("eval_scores_8.2.jsonl")  # of the second run to be put aside
    assert files() == sorted([*aside, "eval_scores_0.jsonl", "eval_scores_2.jsonl"])
    # an evaluation by itself leaves all of them where they are
    trainer(tmp_path, EvalJSONL()).validate(ToyPolicy(), batches(2), verbose=False)
    assert {*files()} >= {*aside, "eval_scores_2.jsonl"}


def test_records_of_several_validation_sets_are_told_apart(tmp_path: Path) -> None:
    log = EvalJSONL()
    trainer(tmp_path, log).fit(
        ToyPolicy(), batches(1), [batches(1, order=[5]), batches(1, order=[3])]
    )
    assert lines(log.paths[0]) == [
        {"step": 1, "dataloader": 0, "index": 5, "score": None},
        {"step": 1, "dataloader": 1, "index": 3, "score": None},
    ]


def test_an_evaluation_of_a_checkpoint_is_named_after_its_step(tmp_path: Path) -> None:
    fit = trainer(tmp_path, EvalJSONL())
    fit.fit(ToyPolicy(), batches(3))
    fit.save_checkpoint(tmp_path / "three.ckpt")
    fresh = EvalJSONL(tmp_path / "later")
    again = trainer(tmp_path, fresh)
    again.validate(ToyPolicy(), batches(1), ckpt_path=tmp_path / "three.ckpt", verbose=False)
    again.test(ToyPolicy(), batches(1), ckpt_path=tmp_path / "three.ckpt", verbose=False)
    assert [path.name for path in fresh.paths] == ["eval_scores_3.jsonl", "test_scores_3.jsonl"]
    assert lines(fresh.paths[1]) == [{"step": 3, "index": 0, "weight": 3.0}]


class Named(ToyPolicy):
    """Whose records have columns of the user's by the names of positions."""

    def predict_step(self, batch: Tensor, batch_idx: int) -> list[dict[str, Any]]:
        return [{"row": f"q{int(number)}", "index": [1, 2]} for number in batch]

    def test_step(self, batch: Tensor, batch_idx: int) -> dict[str, Any]:
        return {"records": [{"index": f"q{int(number)}"} for number in batch]}


def test_a_column_that_is_no_position_leaves_the_order_of_arrival(tmp_path: Path) -> None:
    predictions, evaluations = PredictionJSONL(), EvalJSONL()
    run = trainer(tmp_path, predictions, evaluations)
    run.predict(Named(), batches(3, order=[2, 0, 1]))
    run.test(Named(), batches(3, order=[2, 0, 1]), verbose=False)
    assert [line["row"] for line in lines(predictions.path)] == ["q2", "q0", "q1"]
    assert [line["index"] for line in lines(evaluations.paths[0])] == ["q2", "q0", "q1"]


class Halves(L.LightningModule):
    """Each rank answers every second row."""

    def validation_step(self, batch: Tensor, batch_idx: int) -> dict[str, Any]:
        mine = batch[self.global_rank :: 2]
        return {"records": [{"index": int(row), "rank": self.global_rank} for row in mine]}


@pytest.mark.slow
def test_records_of_all_ranks_are_interleaved_into_one_file(tmp_path: Path) -> None:
    # 5 rows: rank 0 has 3 of them and rank 1 has 2
    loader = torch.utils.data.DataLoader(torch.arange(5), batch_size=5)
    settings = {"devices": 2, "strategy": "ddp_fork", "use_distributed_sampler": False}
    trainer(tmp_path, EvalJSONL(), **settings).validate(Halves(), loader, verbose=False)
    assert lines(tmp_path / "eval_scores_0.jsonl") == [
        {"step": 0, "index": index, "rank": index % 2} for index in range(5)
    ]
