"""`lrlhf export` and `lrlhf convert` on checkpoints of runs that `lrlhf fit` made."""

from __future__ import annotations

import contextlib
import functools
import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from safetensors.torch import load_file
from torch import Tensor
from transformers import AutoModelForCausalLM, AutoTokenizer

from lrlhf.cli import run
from lrlhf.models import RewardNetwork, ValueModel
from lrlhf.run.checkpoints.checkpoint_reader import is_folder_checkpoint, read_checkpoint
from tests.cli.experiment import experiment
from tests.conftest import build_language_model, build_tokenizer

pytestmark = [
    pytest.mark.filterwarnings("ignore:.*does not have many workers"),
    pytest.mark.filterwarnings("ignore:Checkpoint directory .* exists and is not empty"),
]


def letter_count(completions: list[str]) -> list[float]:
    return [float(len(completion)) for completion in completions]


def config_of(kind: str, model_folder: str) -> dict[str, Any]:
    rows = [{"prompt": f"say {word}", "chosen": word * 2, "rejected": word} for word in "abcdefgh"]
    Path("rows.jsonl").write_text("\n".join(map(json.dumps, rows)))
    optimizer = {"optimizer": {"lr": 0.01}}
    module, options = {
        "reward": ("RewardModel", {"model": {"source": model_folder}}),
        "rloo": ("RLOO", {"policy": model_folder}),
        "ppo": (
            "PPO",
            {
                "policy": {"source": model_folder, "lora": {"r": 2}},
                "critic": {"model": {"source": model_folder}, **optimizer},
            },
        ),
    }[kind]
    saved = {"dirpath": "checkpoints", "every_n_train_steps": 1}
    return experiment(
        module,
        {**options, **optimizer},
        {"train": "rows.jsonl", "batch_size": 2},
        reward=f"{__name__}.letter_count",
        max_steps=2,
        enable_checkpointing=True,
        callbacks=[
            {"class_path": "EMA", "init_args": {"decay": 0.5}},
            {"class_path": "RLCheckpoint", "init_args": saved},
            {"class_path": "HFExport", "init_args": {"dirpath": "by the run"}},
        ],
    )


@pytest.fixture(scope="module")
def folder_of(model_folder: str, tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """Folder of a run of two steps, made once for each kind."""

    @functools.cache
    def make(kind: str) -> Path:
        folder = tmp_path_factory.mktemp(kind)
        with contextlib.chdir(folder):
            Path("run.yaml").write_text(yaml.safe_dump(config_of(kind, model_folder)))
            assert run(["fit", "--config", "run.yaml"]) == 0
        return folder

    return make


@pytest.fixture
def run_of(folder_of: Callable[[str], Path], request: pytest.FixtureRequest) -> tuple[str, Path]:
    """Kind and checkpoint of a run, whose files are in the folder of the test."""
    kind = getattr(request, "param", "rloo")
    shutil.copytree(folder_of(kind), Path(), dirs_exist_ok=True)
    return kind, Path("checkpoints/last.ckpt")


def weights(folder: Path | str) -> dict[str, Tensor]:
    return {
        f"{file.relative_to(folder).parent}/{name}": value
        for file in sorted(Path(folder).rglob("*.safetensors"))
        for name, value in load_file(file).items()
    }


def assert_same(one: dict[str, Tensor], other: dict[str, Tensor]) -> None:
    assert one
    assert one.keys() == other.keys()
    for name, value in one.items():
        assert torch.equal(value, other[name]), name


def differ(one: dict[str, Tensor], other: dict[str, Tensor]) -> bool:
    return any(not torch.equal(value, other[name]) for name, value in one.items())


def export(*flags: str) -> int:
    return run(["export", "--config", "run.yaml", *flags])


@pytest.mark.parametrize("run_of", ["reward", "ppo"], indirect=True)
def test_a_file_and_its_folder_export_what_the_run_exported(
    run_of: tuple[str, Path], capsys: pytest.CaptureFixture[str]
) -> None:
    kind, file = run_of
    assert file.is_file()
    assert run(["convert", str(file), "split.ckpt"]) == 0
    assert is_folder_checkpoint("split.ckpt")
    assert run(["convert", "split.ckpt", "again.ckpt"]) == 0
    assert capsys.readouterr().out.endswith("wrote split.ckpt\nwrote again.ckpt\n")
    before = sorted(Path().rglob("*"))

    for name in (str(file), "split.ckpt", "again.ckpt"):
        assert export("--ckpt_path", name, "--output", f"of {Path(name).name}") == 0
        assert capsys.readouterr().out.endswith(f"wrote of {Path(name).name}\n")
    expected = weights("by the run/final")
    for folder in ("of last.ckpt", "of split.ckpt", "of again.ckpt"):
        assert_same(weights(folder), expected)
    # it writes the export, and nothing else
    new = {path.parts[0] for path in set(Path().rglob("*")) - set(before)}
    assert new == {"of last.ckpt", "of split.ckpt", "of again.ckpt"}

    if kind == "reward":
        found: Any = RewardNetwork.from_pretrained("of split.ckpt")
        assert found.head_names == ("reward",)
    else:
        found = AutoModelForCausalLM.from_pretrained("of split.ckpt")
        assert AutoTokenizer.from_pretrained("of split.ckpt").eos_token == "<|endoftext|>"
        assert differ(
            dict(found.state_dict()), dict(build_language_model(build_tokenizer()).state_dict())
        )
    if kind == "ppo":
        critic = ValueModel(source="of split.ckpt/critic").load()
        stored = read_checkpoint(file)["state_dict"]
        for name, value in critic.state_dict().items():
            assert torch.equal(stored[f"critic.{name}"], value), name


def test_averaged_weights_are_exported_on_demand(run_of: tuple[str, Path]) -> None:
    _, file = run_of
    assert run(["convert", str(file), "split.ckpt"]) == 0
    for name in (str(file), "split.ckpt"):
        out = f"averaged {Path(name).name}"
        assert export("--ckpt_path", name, "--output", out, "--use_ema", "true") == 0
        averaged = weights(out)
        assert differ(averaged, weights("by the run/final"))
        (state,) = (
            value
            for key, value in torch.load(file, weights_only=True)["callbacks"].items()
            if key.startswith("EMA")
        )
        for key, value in averaged.items():
            assert torch.equal(state["shadows"][f"policy.{key.removeprefix('./')}"], value), key


def test_what_export_lacks_is_said_in_one_line(
    run_of: tuple[str, Path], capsys: pytest.CaptureFixture[str]
) -> None:
    _, file = run_of

    def complaint(*flags: str) -> str:
        capsys.readouterr()
        assert export(*flags) in (1, 2)
        shown = capsys.readouterr().err
        assert "Traceback" not in shown
        return shown.splitlines()[-1]

    assert complaint("--output", "o") == "error: ckpt_path: lrlhf export needs --ckpt_path"
    assert complaint("--ckpt_path", str(file)) == "error: output: lrlhf export needs --output"
    missing = complaint("--ckpt_path", "checkpoints/lost.ckpt", "--output", "o")
    assert "no file checkpoints/lost.ckpt; did you mean 'last.ckpt'?" in missing
    Path("o2").mkdir()
    assert "o2 exists; choose another name" in complaint("--ckpt_path", str(file), "--output", "o2")
    Path("empty").mkdir()
    assert "empty is no checkpoint" in complaint("--ckpt_path", "empty", "--output", "o")
    named = complaint("--ckpt_path", "last", "--output", "o")  # for a run that goes on
    assert named.startswith("error: ckpt_path: last is a word of fit")

    # a checkpoint without averages
    stored = torch.load(file, weights_only=True)
    torch.save({**stored, "callbacks": {}}, "no average.ckpt")
    del stored["callbacks"]
    torch.save(stored, "weights.ckpt")
    for name, what in (
        ("no average.ckpt", "has no averaged weights"),
        ("weights.ckpt", "holds weights only"),
    ):
        flags = ["--ckpt_path", name, "--output", "o", "--use_ema", "true"]
        assert what in complaint(*flags)
    # a checkpoint of another model
    del stored["state_dict"]["policy.model.norm.weight"]
    torch.save(stored, "other.ckpt")
    other = complaint("--ckpt_path", "other.ckpt", "--output", "o")
    assert "only the model has 'policy.model.norm.weight'" in other
    assert not Path("o").exists()


def test_weights_alone_export_with_no_processes_and_no_strategy(run_of: tuple[str, Path]) -> None:
    stored = torch.load(run_of[1], weights_only=True)
    torch.save({"state_dict": stored["state_dict"]}, "weights.ckpt")
    flags = ["--trainer.devices=4", "--trainer.strategy=fsdp2"]
    assert export("--ckpt_path", "weights.ckpt", "--output", "o", *flags) == 0
    assert_same(weights("o"), weights("by the run/final"))


def test_convert_says_in_one_line_what_is_wrong(capsys: pytest.CaptureFixture[str]) -> None:
    Path("folder").mkdir()
    Path("text.ckpt").write_text("words")
    torch.save({"state_dict": {}}, "good.ckpt")
    for source, target, complaint in (
        ("lost.ckpt", "new.ckpt", "lost.ckpt is no checkpoint: it is not there"),
        ("folder", "new.ckpt", "folder is no checkpoint"),
        ("text.ckpt", "new.ckpt", "text.ckpt is damaged: it is a file of another kind"),
        ("good.ckpt", "text.ckpt", "text.ckpt exists; choose another name"),
        ("good.ckpt", "folder", "folder exists; choose another name"),
    ):
        assert run(["convert", source, target]) == 1
        shown = capsys.readouterr().err
        assert shown.startswith(f"error: {complaint}")
        assert shown.count("\n") == 1
    assert not Path("new.ckpt").exists()
    assert Path("text.ckpt").read_text() == "words"
    for arguments in ([], ["a.ckpt"], ["a", "b", "--to", "pieces"], ["a", "b", "c"]):
        assert run(["convert", *arguments]) == 2
        assert "usage: lrlhf convert" in capsys.readouterr().err


def test_convert_rewrites_in_the_form_that_is_asked_for() -> None:
    torch.save({"state_dict": {"w": torch.ones(2)}}, "a.ckpt")
    assert run(["convert", "a.ckpt", "b.ckpt", "--to", "full"]) == 0
    assert Path("b.ckpt").is_file()
    assert run(["convert", "a.ckpt", "new/c.ckpt", "--to=sharded"]) == 0
    assert run(["convert", "new/c.ckpt", "d.ckpt", "--to", "sharded"]) == 0
    for name in ("b.ckpt", "new/c.ckpt", "d.ckpt"):
        assert read_checkpoint(Path(name))["state_dict"]["w"].tolist() == [1.0, 1.0]
