"""What is refused before anything is imported is what the classes themselves would refuse."""

import inspect
from importlib import import_module
from pathlib import Path

import pytest

from lrlhf.cli.config_files import read_config_files
from lrlhf.cli.early_checks import check_names, options_of
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
        assert options == set(inspect.signature(cls).parameters), name
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
        check_names(read_config_files(["--config", str(file)]), command)
