"""Every YAML under configs/ parses as it is, and trains one step with a tiny model."""

import json
import runpy
from pathlib import Path
from typing import Any

import pytest
import yaml

from lrlhf.cli import run

pytestmark = pytest.mark.usefixtures("_own_log")

ROOT = Path(__file__).parents[2]
# of other commands; tests/apps/serve and tests/apps/cluster read them
SERVICE = ROOT / "configs" / "serve_reward.yaml"
CLUSTERS = ROOT / "configs" / "cluster"
ALL = sorted(
    path
    for path in (ROOT / "configs").rglob("*.yaml")
    if path != SERVICE and path.parent != CLUSTERS
)
# tests/vllm runs those that start vLLM
CONFIGS = [
    path
    for path in ALL
    if "vllm" not in path.name and "_vl" not in path.name and "_audio" not in path.name
]
# tests/distributed runs those of several processes
STRATEGIES = [path for path in ALL if path.parent.name == "strategy"]
# each with an overlay of the same name in configs/cpu
VISION = [path for path in ALL if path.name.endswith("_vl.yaml") and path.parent.name == "configs"]
AUDIO = ROOT / "configs" / "reward_audio.yaml"
MEDIA = [*VISION, AUDIO]
BASE = ROOT / "configs" / "quickstart.yaml"
# asks more than a model of 256 tokens can read; tests/examples plays its agent
AGENT = ROOT / "configs" / "openai_agent.yaml"
# an overlay for policies on text
SUMS, TEXT = ROOT / "configs" / "cpu" / "sums.yaml", ROOT / "configs" / "rloo_text.yaml"

# how to shrink each module and its data; another module says here how it is made small
TINY = {
    "RLOO": ["--model.policy={model}"],
    "RewardModel": ["--model.model.source={model}"],
    "SFT": ["--model.policy.source={model}", "--data.max_tokens=128"],
    "ProcessRewardModel": ["--model.model.source={model}", "--data.max_tokens=128"],
    "DPO": ["--model.policy.source={model}", "--data.max_tokens=128"],
    "KTO": ["--model.policy.source={model}", "--data.max_tokens=128"],
    "PPO": [
        "--model.policy={model}",
        "--model.rewards.functions.preference.source={reward}",
        "--model.update.minibatch_size=8",
        "--model.sampling.max_new_tokens=48",  # with the prompt, what the reward model can read
        "--data.batch_size=8",
        "--data.val_size=8",
    ],
}
SIZES = ["--data.train.init_args.size=40", "--data.val.init_args.size=8"]
TINY_VISION = {
    "RLOO": ["--model.policy.source={model}", *SIZES],
    "RewardModel": [
        "--model.model.source={model}",
        "--data.train.init_args.pairs=40",
        "--data.val.init_args.pairs=8",
        "--data.num_workers=0",
    ],
    "PPO": ["--model.policy.source={model}", "--model.critic.model={model}", *SIZES],
}
TRIAL = [
    "--trainer.fast_dev_run=true",
    "--trainer.accelerator=cpu",
    "--trainer.devices=1",
    "--trainer.precision=32-true",
]


def _name(path: Path) -> str:
    return str(path.relative_to(ROOT / "configs"))


def _class(config: dict[str, Any], section: str) -> str:
    return str(config[section]["class_path"]).rpartition(".")[2]


def _with_base(path: Path) -> list[str]:
    """The flags that load a config; an overlay, which has no data, comes on top of quickstart."""
    alone = "data" in yaml.safe_load(path.read_text())
    base = TEXT if path == SUMS else BASE
    files = [path] if alone and path != SUMS else [base, path]
    return [f"--config={file}" for file in files]


@pytest.fixture(autouse=True)
def _own_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


def _small_data(config: dict[str, Any], folder: Path) -> list[str]:
    """Flags that replace data which would have to be downloaded or made at length."""
    options = config["data"]["init_args"]
    if not isinstance(options["train"], str) and "ReasoningGym" in str(options["train"]):
        return ["--data.train.size=40", "--data.val_size=4", "--data.val_batch_size=4"]
    if "calculator.Questions" in str(options["train"]):
        # all that a model of 256 tokens has room for
        short = ["--model.sampling.max_new_tokens=40", "--data.val_batch_size=4"]
        return ["--data.train.init_args.size=40", "--data.val_size=4", *short]
    rows = [
        {
            "question": f"What is {n} + 1?", "answer": f"#### {n + 1}", "prompt": f"{n} + 1 =",
            "chosen": f"{n + 1}", "rejected": "?", "completion": f"{n + 1}", "label": n % 3 > 0,
            "completions": ["Add.", f"{n + 1 + n % 2}"], "labels": [True, n % 2 == 0],
        }
        for n in range(40)
    ]  # fmt: skip
    file = folder / "rows.jsonl"
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    if "VerdictTasks" in str(options["train"]):
        # what a model of 256 tokens has room for
        judged = {"pairs": str(file), "template": "{{ responses[0] }}|{{ responses[1] }}"}
        small = {"system": "", "validation_fraction": 0.2}
        return [
            *(
                f"--data.{part}.init_args.{name}={value}"
                for part in ("train", "val")
                for name, value in (judged | small).items()
            ),
            *(
                ["--model.sampling.max_new_tokens=48", "--data.max_prompt_tokens=128"]
                if _class(config, "model") == "RLOO"
                else []
            ),
        ]
    if _class(config, "data") == "PreferenceDataModule":
        return [f"--data.{part}={file}" for part in ("train", "val") if part in options]
    if _class(config, "data") in (
        "SupervisedDataModule",
        "StepwiseDataModule",
        "UnpairedPreferenceDataModule",
    ):
        return [f"--data.train={file}"]
    held_out = [] if "val_size" in options else ["--data.val_fraction=0.2"]
    short = ["--data.max_prompt_tokens=128", "--model.sampling.max_new_tokens=48"]
    return [f"--data.train={file}", *held_out, *short]


def _with_overlay(path: Path) -> list[str]:
    return [f"--config={path}", f"--config={path.parent / 'cpu' / path.name}"]


@pytest.fixture(scope="module")
def tiny_vlm(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """What the headers tell to build first, the supervised start in small."""
    folder = tmp_path_factory.mktemp("vlm")
    script = runpy.run_path(str(ROOT / "examples" / "tiny_vlm.py"))
    script["build"](folder)
    script["begin"](folder, steps=2)
    return folder


@pytest.fixture(scope="module")
def tiny_audio(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The same for sounds."""
    folder = tmp_path_factory.mktemp("audio")
    runpy.run_path(str(ROOT / "examples" / "tones.py"))["build"](folder)
    return folder


def test_there_are_configs() -> None:
    assert BASE in CONFIGS
    assert [path.name for path in VISION] == ["ppo_vl.yaml", "reward_vl.yaml", "rloo_vl.yaml"]
    overlays = {path.name for path in ALL if path.parent.name == "cpu"}
    assert overlays == {path.name for path in MEDIA} | {SUMS.name}
    assert not any("RESULT:" in path.read_text() for path in ALL)
    # each says at its top what it is for
    assert all(path.read_text().startswith("# ") for path in ALL)


@pytest.mark.parametrize(
    "files",
    [
        *(pytest.param(_with_base(path), id=_name(path)) for path in (*CONFIGS, *MEDIA)),
        *(pytest.param(_with_overlay(path), id=f"{_name(path)} and cpu") for path in MEDIA),
    ],
)
def test_a_config_parses_as_it_is(files: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    status = run(["fit", *files, "--print_config"])

    shown = capsys.readouterr()
    assert shown.err == ""
    assert status == 0
    # what is printed is a whole config of its own
    assert {"model", "data", "trainer"} <= yaml.safe_load(shown.out).keys()


@pytest.mark.parametrize(
    "path",
    [*(path for path in CONFIGS if path not in (*STRATEGIES, AGENT)), *MEDIA],
    ids=_name,
)
def test_a_config_trains_a_step(
    path: Path,
    request: pytest.FixtureRequest,
    model_folder: str,
    reward_folder: str,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    caplog: pytest.LogCaptureFixture,
) -> None:
    config = yaml.safe_load(path.read_text())
    if "data" not in config:
        config = yaml.safe_load(BASE.read_text())
    if path == SUMS:
        whole = yaml.safe_load(TEXT.read_text())
        config = whole | {"data": {**config["data"], "class_path": "PromptDataModule"}}
    if path in MEDIA:
        tiny = TINY_VISION[_class(config, "model")]
        folder = "tiny_audio" if path == AUDIO else "tiny_vlm"
        folders = {"model": request.getfixturevalue(folder)}
        files, data = _with_overlay(path), []
    else:
        tiny = TINY[_class(config, "model")]
        folders = {"model": model_folder, "reward": reward_folder}
        files, data = _with_base(path), _small_data(config, tmp_path)
        if config["model"]["init_args"].get("critic", {}).get("model"):
            data.append(f"--model.critic.model={reward_folder}")
        if "teacher" in config["model"]["init_args"]:
            data.append(f"--model.teacher.model={model_folder}")

    status = run(["fit", *files, *(flag.format(**folders) for flag in tiny), *data, *TRIAL])

    assert "error:" not in capsys.readouterr().err
    assert "`max_steps=1` reached" in caplog.text
    assert status == 0
