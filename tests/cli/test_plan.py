"""`lrlhf plan` says what `fit` would do, and does nothing."""

import functools
import shutil
from pathlib import Path

import lightning as L
import pytest
from lightning.pytorch.accelerators import CUDAAccelerator, MPSAccelerator

from lrlhf.cli import run
from lrlhf.cli.config_entries import processes, training_steps
from lrlhf.models import CausalLM, ScoreModel
from tests.cli import toys  # noqa: F401  its classes are known by their short names

CONFIGS = Path(__file__).parents[2] / "configs"


@pytest.fixture(autouse=True)
def _only_a_cpu_and_nothing_built(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(self: object, *_: object, **__: object) -> None:
        raise AssertionError(f"plan built a {type(self).__name__}")

    for cls in (L.LightningModule, L.LightningDataModule, L.Trainer):
        monkeypatch.setattr(cls, "__init__", functools.wraps(cls.__init__)(refuse))
    for spec in (CausalLM, ScoreModel):
        monkeypatch.setattr(spec, "load", refuse)
    # memory has tests of its own, with models that take less time than those of the configs
    monkeypatch.setattr(
        "lrlhf.apps.plan.plan_command.memory_report", lambda *_: "no memory table: a test"
    )
    monkeypatch.setattr(CUDAAccelerator, "is_available", staticmethod(lambda: False))
    monkeypatch.setattr(MPSAccelerator, "is_available", staticmethod(lambda: False))


def _copy(name: str) -> str:
    shutil.copy(CONFIGS / name, name)
    return name


def _planned(capsys: pytest.CaptureFixture[str], *arguments: str) -> dict[str, list[str]]:
    """Plan without leaving anything behind; cells by table and line: `one iteration/prompts`."""
    before = sorted(Path().rglob("*"))
    status = run(["plan", *arguments])
    shown = capsys.readouterr()
    assert (status, shown.err) == (0, "")
    assert sorted(Path().rglob("*")) == before
    cells: dict[str, list[str]] = {}
    for block in shown.out.split("\n\n"):
        lines = [line.strip("| ").split("|") for line in block.splitlines() if "|" in line]
        for what, *rest in lines:
            cells[f"{lines[0][0].strip()}/{what.strip()}"] = [cell.strip() for cell in rest]
    return cells


def test_flags_and_overlays_change_the_plan_as_they_change_fit(
    capsys: pytest.CaptureFixture[str],
) -> None:
    Path("overlay.yaml").write_text("model: {init_args: {update: {minibatch_size: 16}}}\n")
    flags = ["--trainer.devices=2", "--trainer.num_nodes=2", "--model.update.num_iterations=3"]

    plan = _planned(capsys, "-c", _copy("rloo_text.yaml"), "--config=overlay.yaml", *flags)

    # 2 x 2 processes of 4 prompts with 4 responses: 64, in 4 steps, 3 times, in 100 iterations
    assert plan["the run/processes"] == ["4", "trainer.devices 2 × trainer.num_nodes (2)"]
    assert plan["one iteration/responses sampled, at most"][0] == "64"
    assert plan["one iteration/responses per optimizer step"][0] == "16"
    assert plan["one iteration/optimizer steps"][0] == "12"
    assert plan["one iteration/off-policy optimizer steps"][0] == "11"
    assert plan["the run/optimizer steps"][0] == "1200"


def test_a_reward_model_counts_pairs(capsys: pytest.CaptureFixture[str]) -> None:
    flags = ["--trainer.accumulate_grad_batches=4", "--trainer.devices=3"]

    plan = _planned(capsys, "--config", _copy("reward_text.yaml"), *flags)

    assert plan["the run/optimizer steps"] == ["80", "trainer.max_steps"]
    assert plan["one optimizer step/pairs per batch and process"] == ["16", "data.batch_size"]
    assert plan["one optimizer step/batches per process"][0] == "4"
    assert plan["one optimizer step/pairs"][0] == "192"  # 16 x 4 x 3


def test_sft_counts_rows_and_dpo_pairs(capsys: pytest.CaptureFixture[str]) -> None:
    shared = ["--trainer.devices=3", "--trainer.max_steps=7"]

    plan = _planned(capsys, "--config", _copy("sft.yaml"), *shared)

    assert plan["one optimizer step/rows per process"] == ["16", "data.batch_size"]
    assert plan["one optimizer step/rows"] == ["48", "data.batch_size × processes"]
    assert plan["the run/optimizer steps"][0] == "7"

    plan = _planned(capsys, "--config", _copy("dpo.yaml"), *shared)

    assert plan["one optimizer step/pairs"][0] == "48"  # 4 x 4 x 3
    assert plan["one optimizer step/batches per process"][0] == "4"


def test_a_module_is_planned_whatever_its_class_if_it_draws_groups(
    config: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(["plan", "--config", config.name]) == 0
    unknown = "no batch plan: it is unknown how tests.cli.toys.ToyModule uses a batch\n"
    assert capsys.readouterr().out.endswith(unknown)
    config.write_text(config.read_text().replace("ToyModule", "ToyGroupPolicy"))

    flags = ["--model.dynamic_sampling.prompts=3", "--data.batch_size=5"]
    plan = _planned(capsys, "--config", config.name, *flags)

    assert plan["one iteration/responses sampled, at most"][0] == "10"  # 5 prompts x 2
    assert plan["one iteration/responses trained on"][0] == "6"  # 3 prompts x 2


def test_a_size_that_does_not_fit_is_named_with_its_line_and_the_nearest_ones(
    capsys: pytest.CaptureFixture[str],
) -> None:
    Path("overlay.yaml").write_text("model:\n  init_args:\n    update: {minibatch_size: 24}\n")

    status = run(["plan", "--config", _copy("quickstart.yaml"), "--config", "overlay.yaml"])

    assert capsys.readouterr().err == (
        "error: overlay.yaml:3: model.init_args.update.minibatch_size: update.minibatch_size is "
        "24, but an iteration has 64 responses, 64 on each of 1 process(es); the nearest sizes "
        "that fit are 16 and 32\n"
    )
    assert status == 2


def test_devices_are_counted_as_lightning_counts_them(monkeypatch: pytest.MonkeyPatch) -> None:
    options = {"accelerator": "auto", "num_nodes": 2}
    for devices, number in ((2, 2), ("4", 4), ([0, 3], 2), ("0,3", 2), ("3,", 1), ("auto", 1)):
        assert processes({**options, "devices": devices}).number == 2 * number
    gpus = {"accelerator": "gpu", "devices": "auto", "num_nodes": 1}
    assert "assumed" in processes(gpus).origin
    # auto means the GPUs of this machine where there are some
    monkeypatch.setattr(CUDAAccelerator, "is_available", staticmethod(lambda: True))
    monkeypatch.setattr(CUDAAccelerator, "auto_device_count", staticmethod(lambda: 8))
    assert processes({**options, "devices": -1}).number == 16
    assert processes({**options, "devices": "auto", "accelerator": "cpu"}).number == 2


@pytest.mark.parametrize(
    ("config_name", "flag", "message"),
    [
        ("toy.yaml", "--trainer.max_stepss=1", "no such option; did you mean 'trainer.max_steps'?"),
        ("toy.yaml", "--ckpt_path=gone.ckpt", "ckpt_path: no file gone.ckpt"),
        ("toy.yaml", "--trainer.devices=two", "'two'; give a number above 0, a list of device"),
        ("toy.yaml", "--trainer.devices=0", "'0'; give a number above 0, a list of device"),
        ("reward_text.yaml", "--data.batch_size=0", "data.batch_size is 0; it must be 1 or more"),
        ("reward_text.yaml", "--gpus=0", "--gpus is 0; it must be above 0"),
        ("reward_text.yaml", "--gpu-memory=0", "--gpu-memory is 0.0; it must be above 0"),
    ],
)
@pytest.mark.usefixtures("config")
def test_other_mistakes_read_as_they_do_for_fit(
    capsys: pytest.CaptureFixture[str], config_name: str, flag: str, message: str
) -> None:
    name = config_name if Path(config_name).exists() else _copy(config_name)

    assert run(["plan", "--config", name, flag]) == 2
    assert message in capsys.readouterr().err


@pytest.mark.parametrize(
    ("changes", "number", "origin"),
    [
        ({"max_steps": 7}, 7, "trainer.max_steps"),
        # 10 batches are 4 windows of 3, the last one short
        ({"max_epochs": 2, "limit_train_batches": 10}, 8, "trainer.limit_train_batches over 2 "),
        ({"max_epochs": 2, "overfit_batches": 3}, 2, "trainer.overfit_batches over 2 "),
        ({"max_steps": 5, "max_epochs": 2, "limit_train_batches": 10}, 5, "trainer.max_steps, "),
        ({"limit_train_batches": 3}, 1000, "trainer.limit_train_batches over 1000 "),
        ({"max_epochs": 2, "limit_train_batches": 0.5}, None, "2 epoch(s) over the data"),
        ({"max_epochs": -1}, None, "no limit"),
        ({"fast_dev_run": 4, "max_steps": 100}, 2, "trainer.fast_dev_run"),
    ],
)
def test_steps_are_known_as_far_as_the_options_tell(
    changes: dict[str, int], number: int | None, origin: str
) -> None:
    trainer = {"fast_dev_run": False, "max_steps": -1, "max_epochs": None}
    trainer |= {"overfit_batches": 0.0, "limit_train_batches": None}
    steps = training_steps(trainer | changes, "steps", batches_per_step=3)

    assert steps.number == number
    assert steps.origin.startswith(origin)
