import io
import json
from pathlib import Path
from typing import Any

import pytest
from lightning.pytorch.loggers import TensorBoardLogger, WandbLogger
from PIL import Image
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from lrlhf.callbacks import RolloutLog
from lrlhf.rollout import load_rollout
from lrlhf.types import Media
from tests.callbacks.fakes import ToyPolicy, batches, experience, record, resume, trainer


def steps(path: Path) -> list[int]:
    return [json.loads(line)["step"] for line in path.read_text().splitlines()]


def test_every_response_of_training_is_on_file(tmp_path: Path) -> None:
    log = RolloutLog(print_every=None)
    trainer(tmp_path, log).fit(ToyPolicy(records_per_step=2), batches(2))
    assert log.path == tmp_path / "rollouts.jsonl"
    expected = [record(step, row, columns={"answer": "plain"}) for step in (1, 2) for row in (0, 1)]
    written = [json.loads(line) for line in log.path.read_text().splitlines()]
    assert written == [{**line, "rank": 0} for line in expected]


def test_a_resumed_run_repeats_no_step(tmp_path: Path) -> None:
    log = RolloutLog(print_every=None)
    again = resume(tmp_path, log, log)
    path = tmp_path / "rollouts.jsonl"
    # what the run went on to write before it was killed: two steps and half a line
    with path.open("a") as handle:
        handle.writelines(json.dumps(record(step, 0)) + "\n" for step in (3, 4))
        handle.write('{"step": 5, "comp')
    again()
    assert steps(path) == [1, 1, 2, 2, 3, 3, 4, 4]


def test_a_line_that_is_no_record_is_named_and_nothing_is_lost(tmp_path: Path) -> None:
    log = RolloutLog(print_every=None)
    again = resume(tmp_path, log, log, steps=1)
    path = tmp_path / "rollouts.jsonl"
    content = path.read_text() + "[1]\n"
    path.write_text(content)
    with pytest.raises(ValueError, match=r"rollouts\.jsonl, line 3 is no rollout record"):
        again()
    assert path.read_text() == content


def tensors(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.glob("rollouts*/*"))


def stored(*steps: int) -> list[str]:
    return [f"step_00000{step}.rank_0.safetensors" for step in steps]


def saving(**options: Any) -> RolloutLog:
    return RolloutLog(print_every=None, save_tensors=True, **options)


def test_the_newest_tensors_are_kept_on_demand_beside_the_records(tmp_path: Path) -> None:
    trainer(tmp_path, saving(keep_tensors=1)).fit(ToyPolicy(records_per_step=1), batches(2))
    assert tensors(tmp_path) == stored(2)
    kept = load_rollout(tmp_path / "rollouts" / "step_000002.rank_0.safetensors")
    expected = experience()
    assert kept.rollout.input_ids.tolist() == expected.input_ids.tolist()
    assert kept.rollout.response_mask.tolist() == [[False, True]]
    assert kept.scores.tolist() == [0.0]
    lines = (tmp_path / "rollouts.jsonl").read_text().splitlines()
    assert list(kept.records) == [json.loads(lines[1])]


def test_a_resumed_run_removes_the_tensors_of_the_steps_it_repeats(tmp_path: Path) -> None:
    again = resume(tmp_path, saving(), saving(), records_per_step=1)
    folder = tmp_path / "rollouts"
    # what the run went on to write before it was killed, also of a rank that is no more
    for name in ("step_000003.rank_0", "step_000003.rank_1", "step_000009.rank_0"):
        (folder / f"{name}.safetensors").write_bytes(b"old")
    (folder / "notes.txt").write_text("mine")
    again()
    assert tensors(tmp_path) == ["notes.txt", *stored(1, 2, 3, 4)]
    assert load_rollout(folder / stored(3)[0]).records[0]["step"] == 3


def test_a_new_run_sets_the_tensors_of_an_earlier_one_aside(tmp_path: Path) -> None:
    logs = [saving(), RolloutLog(print_every=None), saving()]
    for count, log in enumerate(logs, start=1):
        trainer(tmp_path, log).fit(ToyPolicy(records_per_step=1), batches(count))
    written = [str(path.relative_to(tmp_path)) for path in sorted(tmp_path.glob("rollouts*/*"))]
    earlier, newest = stored(1), stored(1, 2, 3)
    assert written == [*(f"rollouts/{name}" for name in newest), f"rollouts.1/{earlier[0]}"]
    # file and folder of one run have one number
    assert steps(tmp_path / "rollouts.1.jsonl") == [1]
    assert steps(tmp_path / "rollouts.2.jsonl") == [1, 2]


def test_tensorboard_gets_a_table_without_markup(tmp_path: Path) -> None:
    logger = TensorBoardLogger(tmp_path, name="tb", version=0)
    module = ToyPolicy(records_per_step=1)
    log = RolloutLog(tmp_path, print_every=None, table_every=2)
    trainer(tmp_path, log, logger=logger).fit(module, batches(5))
    events = EventAccumulator(logger.log_dir)
    events.Reload()
    tables = events.Tensors("rollout/samples/text_summary")
    assert [event.step for event in tables] == [1, 2, 4]
    text = tables[0].tensor_proto.string_val[0].decode()
    assert text.splitlines()[0] == (
        "| prompt | answer | completion | score | rewards | advantage | length | finish |"
    )
    assert "2 &#43; 2 =" in text  # a plus sign could open a list


def red() -> Media:
    images = (Image.new("RGB", (8, 4), "red"), Image.new("RGB", (4, 8), "blue"))
    return Media(tensors={}, tokens={}, images=images)


def test_tensorboard_gets_the_images_of_each_row_side_by_side(tmp_path: Path) -> None:
    logger = TensorBoardLogger(tmp_path, name="tb", version=0)
    log = RolloutLog(tmp_path, print_every=None, table_every=1)
    module = ToyPolicy()
    module.media = (red(),)  # of the first response; the second shows nothing
    trainer(tmp_path, log, logger=logger).fit(module, batches(2))
    events = EventAccumulator(logger.log_dir)
    events.Reload()
    pictures = events.Images("rollout/samples/images")
    assert [event.step for event in pictures] == [1, 2]
    with Image.open(io.BytesIO(pictures[0].encoded_image_string)) as shown:
        assert shown.size == (256 + 4 + 256, 256)
        assert shown.getpixel((128, 128)) == (255, 0, 0)
        assert shown.getpixel((260 + 128, 128)) == (0, 0, 255)


@pytest.mark.slow
def test_wandb_gets_a_table_offline(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WANDB_MODE", "offline")
    monkeypatch.setenv("WANDB_SILENT", "true")
    logger = WandbLogger(save_dir=tmp_path, project="toy", offline=True)
    log = RolloutLog(tmp_path, print_every=None, table_every=1, table_rows=1)
    module = ToyPolicy()
    module.media = (red(),)
    trainer(tmp_path, log, logger=logger).fit(module, batches(2))
    logger.experiment.finish()
    tables: list[dict[str, Any]] = [
        json.loads(path.read_text())
        for path in tmp_path.glob("wandb/offline-run-*/files/media/table/**/*.json")
    ]
    columns = [
        "step",
        "prompt",
        "answer",
        "completion",
        "score",
        "rewards",
        "advantage",
        "length",
        "finish",
        "images",
    ]
    assert [table["columns"] for table in tables] == [columns, columns]
    rewards = '{"exact": 0.0, "format": null}'
    images = [table["data"][0].pop() for table in tables]
    assert images == ["Image", "Image"]  # the pictures themselves go where W&B keeps artifacts
    assert sorted(table["data"][0] for table in tables) == [
        [step, "2 + 2 =", "plain", "answer 0", 0, rewards, -0.5, 2, "stop"] for step in (1, 2)
    ]


@pytest.mark.slow
def test_responses_of_all_ranks_are_in_one_file_and_their_tensors_in_their_own(
    tmp_path: Path,
) -> None:
    settings = {"devices": 2, "strategy": "ddp_fork", "use_distributed_sampler": False}
    log = saving(keep_tensors=1)
    trainer(tmp_path, log, **settings).fit(ToyPolicy(records_per_step=1), batches(3))
    lines = [json.loads(line) for line in (tmp_path / "rollouts.jsonl").read_text().splitlines()]
    expected = [(step, rank) for step in (1, 2, 3) for rank in (0, 1)]
    assert [(line["step"], line["rank"]) for line in lines] == expected
    # and only the newest are kept
    assert tensors(tmp_path) == [f"step_000003.rank_{rank}.safetensors" for rank in (0, 1)]
    for rank in (0, 1):
        path = tmp_path / "rollouts" / f"step_000003.rank_{rank}.safetensors"
        assert [line["rank"] for line in load_rollout(path).records] == [rank]
