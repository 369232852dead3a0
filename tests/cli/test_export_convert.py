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
from huggingface_hub import ModelCard
from safetensors.torch import load_file
from torch import Tensor
from transformers import AutoModelForCausalLM, AutoTokenizer

from lrlhf.cli import run
from lrlhf.models import RewardNetwork, ValueModel
from lrlhf.run.checkpoints.checkpoint_reader import is_folder_checkpoint, read_checkpoint
from tests.cli.experiment import experiment
from tests.hub_stand_in import Hub, hub

__all__ = ["hub"]

pytestmark = [
    pytest.mark.filterwarnings("ignore:Use 'content=:DeprecationWarning"),  # of the hub's client
    pytest.mark.filterwarnings("ignore:.*does not have many workers"),
    pytest.mark.filterwarnings("ignore:Checkpoint directory .* exists and is not empty"),
]


def letter_count(completions: list[str]) -> list[float]:
    return [float(len(completion)) for completion in completions]


def config_of(kind: str, model_folder: str) -> dict[str, Any]:
    rows = [{"prompt": f"say {word}", "chosen": word * 2, "rejected": word} for word in "abcdefgh"]
    Path("rows.jsonl").write_text("\n".join(map(json.dumps, rows)))
    optimizer = {"optimizer": {"lr": 0.01}}
    source = {"source": model_folder}
    critic = {"critic": {"model": source, **optimizer}}
    module, options = {
        "reward": ("RewardModel", {"model": source}),
        "rloo": ("RLOO", {"policy": model_folder}),
        "ppo": ("PPO", {"policy": {**source, "lora": {"r": 2}}, **critic}),
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
    torch.testing.assert_close(one, other, rtol=0, atol=0)


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
    # what a killed export has left goes with the next, and a name does nothing to the terminal
    left = Path(".0123abcd.of another name.export")
    left.mkdir()
    assert export("--ckpt_path", str(file), "--output", "\x1b[31mred") == 0
    assert capsys.readouterr().out.endswith("wrote \\x1b[31mred\n")
    assert not left.exists()

    if kind == "reward":
        assert RewardNetwork.from_pretrained("of split.ckpt").head_names == ("reward",)
    else:
        assert AutoModelForCausalLM.from_pretrained("of split.ckpt") is not None
        assert AutoTokenizer.from_pretrained("of split.ckpt").eos_token == "<|endoftext|>"
        critic = ValueModel(source="of split.ckpt/critic").load()
        stored = read_checkpoint(file)["state_dict"]
        for name, value in critic.state_dict().items():
            assert torch.equal(stored[f"critic.{name}"], value), name


def test_averaged_weights_are_exported_on_demand(run_of: tuple[str, Path]) -> None:
    _, file = run_of
    flags = ["--output", "averaged", "--use_ema", "true"]
    assert export("--ckpt_path", str(file), *flags) == 0
    averaged = weights("averaged")
    last = weights("by the run/final")
    assert any(not torch.equal(value, last[name]) for name, value in averaged.items())
    callbacks = torch.load(file, weights_only=True)["callbacks"]
    (state,) = (value for key, value in callbacks.items() if key.startswith("EMA"))
    for key, value in averaged.items():
        assert torch.equal(state["shadows"][f"policy.{key.removeprefix('./')}"], value), key


def test_what_export_lacks_is_said_in_one_line(
    run_of: tuple[str, Path], capsys: pytest.CaptureFixture[str]
) -> None:
    stored = torch.load(run_of[1], weights_only=True)
    torch.save({**stored, "callbacks": {}}, "no average.ckpt")
    del stored["callbacks"]
    torch.save(stored, "weights.ckpt")
    del stored["state_dict"]["policy.model.norm.weight"]
    torch.save(stored, "other.ckpt")
    Path("o2").mkdir()
    for checkpoint, output, flags, what in (
        ("", "o", "", "ckpt_path: lrlhf export needs --ckpt_path"),
        ("other.ckpt", "", "", "output: lrlhf export needs --output"),
        ("othr.ckpt", "o", "", "no file othr.ckpt; did you mean 'other.ckpt'?"),
        ("weights.ckpt", "o2", "", "o2 exists; choose another name"),
        ("o2", "o", "", "o2 is no checkpoint"),
        ("last", "o", "", "ckpt_path: last is a word of fit"),  # for a run that goes on
        ("no average.ckpt", "o", "--use_ema=true", "has no averaged weights"),
        ("weights.ckpt", "o", "--use_ema=true", "holds weights only"),
        ("other.ckpt", "o", "", "only the model has 'policy.model.norm.weight'"),
    ):
        given = [f"--ckpt_path={checkpoint}"] if checkpoint else []
        given += [f"--output={output}"] if output else []
        assert export(*given, *flags.split()) in (1, 2)
        shown = capsys.readouterr().err
        assert what in shown.splitlines()[-1]
        assert "Traceback" not in shown
    assert not Path("o").exists()


def test_weights_alone_export_with_no_processes_and_no_strategy(run_of: tuple[str, Path]) -> None:
    stored = torch.load(run_of[1], weights_only=True)
    torch.save({"state_dict": stored["state_dict"]}, "weights.ckpt")
    flags = ["--trainer.devices=4", "--trainer.strategy=fsdp2"]
    assert export("--ckpt_path", "weights.ckpt", "--output", "o", *flags) == 0
    assert_same(weights("o"), weights("by the run/final"))


def test_a_checkpoint_of_weights_alone_exports_what_the_run_exported(model_folder: str) -> None:
    config = config_of("rloo", model_folder)
    (saver,) = (
        one for one in config["trainer"]["callbacks"] if one["class_path"] == "RLCheckpoint"
    )
    saver["init_args"]["save_weights_only"] = True
    Path("run.yaml").write_text(yaml.safe_dump(config))
    assert run(["fit", "--config", "run.yaml"]) == 0
    stored = torch.load("checkpoints/last.ckpt", weights_only=True)
    assert "optimizer_states" not in stored
    assert export("--ckpt_path", "checkpoints/last.ckpt", "--output", "o") == 0
    assert_same(weights("o"), weights("by the run/final"))
    assert AutoModelForCausalLM.from_pretrained("o") is not None


def test_an_export_goes_to_the_hub_with_what_its_run_has_measured(
    run_of: tuple[str, Path], hub: Hub, capsys: pytest.CaptureFixture[str]
) -> None:
    Path("metrics.csv").write_text("step,rollout/score\n1,0.5\n2,0.75\n")
    Path("eval_scores_2.jsonl").write_text('{"row": 1, "score": 0.5}\n{"row": 2, "score": 1.0}\n')
    flags = ["--push_to_hub", "me/mine", "--private", "true", "--license", "mit"]
    assert export("--ckpt_path", str(run_of[1]), "--output", "o", *flags) == 0
    (files,) = hub.commits["me/mine@main"]
    assert files == {path.name: path.read_bytes() for path in Path("o").iterdir()}
    card = ModelCard(files["README.md"].decode())
    assert card.data.license == "mit"
    assert card.data.eval_results[0].metric_value == 0.75
    assert "by RLOO for 2 steps" in card.text
    assert "Trained on rows.jsonl." in card.text
    assert "max_new_tokens: 3" in card.text
    assert "training_curves.png" in files
    assert "pushed it to http" in capsys.readouterr().out
    # what the snippet in the card says works
    AutoModelForCausalLM.from_pretrained("o")

    hub.refused = "/commit/"
    assert export("--ckpt_path", str(run_of[1]), "--output", "again", *flags[:2]) == 2
    (line,) = capsys.readouterr().err.splitlines()[-1:]
    assert line.endswith("push it with: hf upload me/mine again .")
    assert Path("again/README.md").exists()


@pytest.mark.parametrize(
    ("flags", "what"),
    [
        (["--push_to_hub", "mine"], "give owner/name"),
        (["--push_to_hub", "me/mine"], "HF_HUB_OFFLINE is set"),
        (["--private", "true"], "give push_to_hub too"),
    ],
)
def test_a_push_that_cannot_be_is_refused_before_anything_is_loaded(
    run_of: tuple[str, Path], flags: list[str], what: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert export("--ckpt_path", str(run_of[1]), "--output", "o", *flags) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert what in line
    assert not Path("o").exists()


def test_convert_says_in_one_line_what_is_wrong(capsys: pytest.CaptureFixture[str]) -> None:
    Path("text.ckpt").write_text("words")
    torch.save({"state_dict": {}}, "good.ckpt")
    for source, target, complaint in (
        ("lost.ckpt", "new.ckpt", "lost.ckpt is no checkpoint: it is not there"),
        ("text.ckpt", "new.ckpt", "text.ckpt is damaged: it is a file of another kind"),
        ("good.ckpt", "text.ckpt", "text.ckpt exists; choose another name"),
    ):
        assert run(["convert", source, target]) == 2
        (line,) = capsys.readouterr().err.splitlines()
        assert line.startswith(f"error: {complaint}")
    assert not Path("new.ckpt").exists()
    assert Path("text.ckpt").read_text() == "words"
    for arguments in (["a.ckpt"], ["a", "b", "--to", "pieces"]):
        assert run(["convert", *arguments]) == 2
        assert "usage: lrlhf convert" in capsys.readouterr().err


def test_convert_rewrites_in_the_form_that_is_asked_for() -> None:
    torch.save({"state_dict": {"w": torch.ones(2)}}, "a.ckpt")
    for source, target, form in (
        ("a.ckpt", "b.ckpt", "full"),
        ("a.ckpt", "new/c.ckpt", "sharded"),
        ("new/c.ckpt", "d.ckpt", "sharded"),
    ):
        assert run(["convert", source, target, "--to", form]) == 0
        assert Path(target).is_file() == (form == "full")
        assert read_checkpoint(Path(target))["state_dict"]["w"].tolist() == [1.0, 1.0]
