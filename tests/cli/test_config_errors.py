"""Whatever is wrong with a config, one line says where and what, and the status is 2."""

from pathlib import Path

import pytest

from lrlhf.cli import run
from tests.cli import toys, twins  # noqa: F401  their classes are known by their short names
from tests.cli.conftest import CONFIG

# name, what to replace in CONFIG, by what, and the whole message with its line there
MISTAKES = r"""
misspelt option of the module | lr: 0.1 | lrr: 0.1 | toy.yaml:6: model.init_args.lrr: ToyModule has no option 'lrr'; did you mean 'lr'?
option that another one took over | lr: 0.1 | max_skipped_steps: 3 | toy.yaml:6: model.init_args.max_skipped_steps: ToyModule has no option 'max_skipped_steps'; did you mean 'guard.max_skipped', which took its place?
the same name in another class | train: prompts.jsonl | train: prompts.jsonl\n    names: 1 | toy.yaml:11: data.init_args.names: ToyData has no option 'names'; accepted: batch_size, train
misspelt option of an optional group | lr: 0.1 | reference:\n      source: tiny\n      dtpe: float32 | toy.yaml:8: model.init_args.reference.dtpe: ToyPolicy has no option 'dtpe'; did you mean 'dtype'?
an option like no other lists those there are | train: prompts.jsonl | train: prompts.jsonl\n    zzz: 1 | toy.yaml:11: data.init_args.zzz: ToyData has no option 'zzz'; accepted: batch_size, train
misspelt class | ToyModule | ToyModul | toy.yaml:2: model.class_path: no class 'ToyModul'; did you mean 'ToyModule'?
misspelt class with its path | ToyModule | tests.cli.toys.ToyModuel | toy.yaml:2: model.class_path: no class 'tests.cli.toys.ToyModuel' (module 'tests.cli.toys' has no attribute 'ToyModuel'); did you mean 'ToyModule'?
short name of two classes | ToyModule | ToyTwin | toy.yaml:2: model.class_path: several classes are named ToyTwin; give one in full: tests.cli.toys.ToyTwin, tests.cli.twins.ToyTwin
class of another kind | ToyModule | torch.nn.Linear | toy.yaml:1: model: Import path torch.nn.Linear does not correspond to a subclass of LightningModule
misspelt callback | ModelCheckpoint | ModelChekpoint | toy.yaml:15: trainer.callbacks[0].class_path: no class 'ModelChekpoint'; did you mean 'ModelCheckpoint'?
misspelt option of the trainer | max_steps | max_stepss | toy.yaml:12: trainer.max_stepss: no such option; did you mean 'max_steps'?
misspelt section | trainer: | trainr: | toy.yaml:12: trainr.max_steps: no such option; did you mean 'trainer'?
text for a number | lr: 0.1 | lr: fast | toy.yaml:6: model.init_args.lr: expected a number, got 'fast'
null for a number | lr: 0.1 | lr: null | toy.yaml:6: model.init_args.lr: null is not accepted here; leave the line out to get the default
text for an optional number | lr: 0.1 | clip: no limit | toy.yaml:6: model.init_args.clip: expected a number or null, got 'no limit'
wrong element of a list | lr: 0.1 | weights: [1.0, heavy] | toy.yaml:6: model.init_args.weights[1]: expected a number, got 'heavy'
number for a list | lr: 0.1 | weights: 0.5 | toy.yaml:6: model.init_args.weights: expected a list or null, got '0.5'
word out of a fixed choice | lr: 0.1 | estimator: k9 | toy.yaml:6: model.init_args.estimator: expected one of k1, k2, k3, got 'k9'
wrong type of a source in a list | train: prompts.jsonl | train:\n      - class_path: ToySource\n        init_args: {size: big} | toy.yaml:12: data.init_args.train[0].init_args.size: expected an integer, got 'big'
value that fits no alternative | train: prompts.jsonl | train: 5 | toy.yaml:10: data.init_args.train: expected text, a ToySource (class_path and init_args) or a list, got '5'
required option left out | source: tiny | dtype: float32 | toy.yaml:4: model.init_args.policy.source: required, but missing
impossible value that the message names with its group | source: tiny | source: nowhere | toy.yaml:5: model.init_args.policy.source: policy.source is 'nowhere'; give a folder
impossible value that the message names in its midst | lr: 0.1 | clip: -2.0 | toy.yaml:6: model.init_args.clip: ToyModule cannot run like this: clip is -2.0
misspelt class of a list of functions | lr: 0.1 | rewards: [{class_path: tests.cli.toys.ToyRewar}] | toy.yaml:6: model.init_args.rewards[0].class_path: no function or class 'tests.cli.toys.ToyRewar' (module 'tests.cli.toys' has no attribute 'ToyRewar'); did you mean 'ToyReward'?
impossible value two groups down | source: tiny | source: tiny\n      adapter: {rank: 0} | toy.yaml:6: model.init_args.policy.adapter.rank: rank must be at least 1, got 0
option beside class_path | class_path: ToyData | class_path: ToyData\n  batch_size: 3 | toy.yaml:9: data.batch_size: does not belong beside class_path; a class's options go under init_args
key given twice | lr: 0.1 | lr: 0.1\n    lr: 0.2 | toy.yaml:7: model.init_args.lr: given twice, first on line 6
tab as indentation |     lr: 0.1 | \tlr: 0.1 | toy.yaml:6: not valid YAML: found character '\t' that cannot start any token
"""  # noqa: E501


def _rows(table: str) -> list[list[str]]:
    return [[cell.strip(" ") for cell in line.split(" | ")] for line in table.strip().splitlines()]


@pytest.mark.parametrize(
    ("old", "new", "message"), [pytest.param(*row, id=name) for name, *row in _rows(MISTAKES)]
)
def test_a_mistake_in_the_file_is_named_with_its_line(
    config: Path, capsys: pytest.CaptureFixture[str], old: str, new: str, message: str
) -> None:
    assert old in CONFIG
    new = new.replace(r"\n", "\n").replace(r"\t", "\t")
    config.write_text(CONFIG.replace(old, new, 1))

    status = run(["fit", "--config", "toy.yaml"])

    assert capsys.readouterr().err == f"error: {message}\n"
    assert status == 2


FLAGS = """
--model.lrr=1 | command line: --model.lrr: ToyModule has no option 'lrr'; did you mean 'lr'?
--model.policy.sorce=x | command line: --model.policy.sorce: no such option; did you mean 'policy.source'?
--trainer.max_step=1 | command line: --trainer.max_step: no such option; did you mean 'trainer.max_steps'?
--model.lr=-1 | command line: --model.lr: lr must be positive, got -1.0
quickly | unexpected argument 'quickly'
--config toi.yaml | toi.yaml: no such file; did you mean 'toy.yaml'?
--config . | .: is a folder; --config wants a YAML file
--config overlay.yaml | overlay.yaml:2: trainer.max_steps: expected an integer, got 'soon'
--ckpt_path stp-20.ckpt | command line: --ckpt_path: no file stp-20.ckpt; did you mean 'step-20.ckpt'?
--trainer.strategy=fsdp_cpu_offload | command line: --trainer.strategy: fsdp_cpu_offload splits a module as one model with one optimizer; take fsdp2, which splits each trained model by itself (docs/distributed.md)
--trainer.strategy=deepspeed_stage_3_offload | command line: --trainer.strategy: deepspeed_stage_3_offload splits a module as one model with one optimizer; take deepspeed_zero3, which splits each trained model by itself (docs/distributed.md)
"""  # noqa: E501


@pytest.mark.parametrize(("flags", "message"), _rows(FLAGS))
def test_a_mistake_on_the_command_line_is_named_with_its_flag(
    config: Path, capsys: pytest.CaptureFixture[str], flags: str, message: str
) -> None:
    Path("step-20.ckpt").touch()
    Path("overlay.yaml").write_text("trainer:\n  max_steps: soon\n")

    status = run(["fit", "--config", config.name, *flags.split()])

    assert capsys.readouterr().err == f"error: {message}\n"
    assert status == 2


def test_a_class_that_a_flag_replaces_is_named_where_it_stands(
    config: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    config.write_text(
        CONFIG.replace("train: prompts.jsonl", "train:\n      class_path: no_such_module.Rows")
    )
    assert run(["fit", "--config", config.name, "--data.train", "pairs.jsonl"]) == 2
    assert capsys.readouterr().err.startswith(
        "error: toy.yaml:11: data.init_args.train.class_path: no class 'no_such_module.Rows' (No "
        "module named 'no_such_module')"
    )


def test_without_a_config_the_message_says_how_to_give_one(
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert run(["fit"]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert "required, but missing" in line
    assert line.endswith("(a YAML file is given with --config)")


def test_debug_shows_the_traceback_and_ends_with_the_same_line(
    config: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    config.write_text(CONFIG.replace("lr: 0.1", "lr: -1"))

    assert run(["fit", "--config", config.name], debug=True) == 2

    error = capsys.readouterr().err
    assert "Traceback (most recent call last)" in error
    assert error.endswith(
        "\nerror: toy.yaml:6: model.init_args.lr: lr must be positive, got -1.0\n"
    )


REWARDS = """
model:
  class_path: PPO
  init_args:
    rewards:
      class_path: Rewards
      init_args:
        functions:
          - class_path: lrlhf.rewards.RemoteReward
            init_args: {urls: "http://a"}
        # more
"""


@pytest.mark.parametrize(
    ("old", "new", "present"),
    [
        ("# more", "names: [a]", "functions"),
        ("# more", "max_failures_in_a_row: 3", "max_failures"),
        ('"http://a"', '"http://a", reference_column: b', "columns"),
    ],
)
def test_a_reward_that_has_another_option_by_now_names_it(
    config: Path, capsys: pytest.CaptureFixture[str], old: str, new: str, present: str
) -> None:
    config.write_text(REWARDS.replace(old, new))
    assert run(["fit", "--config", "toy.yaml"]) == 2
    assert f"did you mean '{present}', which took its place?" in capsys.readouterr().err


def test_a_file_larger_than_any_config_is_not_parsed(
    config: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    config.write_text(CONFIG + "# " + "x" * 2**20)
    assert run(["fit", "--config", "toy.yaml"]) == 2
    expected = "error: toy.yaml: has more than 1,048,576 bytes, which no config needs\n"
    assert capsys.readouterr().err == expected


def test_a_line_break_in_a_name_makes_no_line_of_its_own(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    folder = tmp_path / "run\nerror: all is well"
    folder.mkdir()
    assert run(["inspect", str(folder)]) == 2
    lines = capsys.readouterr().err.splitlines()
    assert lines[0].startswith("error: ")
    assert len(lines) > 1
    assert all(line.startswith("  ") for line in lines[1:])
