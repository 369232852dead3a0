"""Options of other trainers are answered with ours, and ours exist."""

import inspect
import re
from pathlib import Path
from typing import Any

import lightning as L
import pytest

import lrlhf.callbacks
from lrlhf.cli import run
from lrlhf.datamodules import PreferenceDataModule, PromptDataModule
from lrlhf.environments import Episodes
from lrlhf.familiar_names import FAMILIAR_NAMES
from lrlhf.models import CausalLM, ScoreModel
from lrlhf.modules import PPO, RewardModel
from lrlhf.modules.settings import Advantage, Critic, Evaluation, Reference, Update
from lrlhf.rewards import Rewards
from lrlhf.rollout import Sampling, VLLMEngine
from tests.cli import toys  # noqa: F401  its classes are known by their short names
from tests.cli.conftest import CONFIG

CLASSES = {"policy": CausalLM, "model": ScoreModel, "rewards": Rewards, "engine": VLLMEngine}
GROUPS = {
    "sampling": Sampling,
    "reference": Reference,
    "advantage": Advantage,
    "update": Update,
    "critic": Critic,
    "episodes": Episodes,
    "evaluation": Evaluation,
}


def _options(cls: type) -> set[str]:
    """Names that a constructor takes, those of its ancestors where it passes them on."""
    names: set[str] = set()
    for one in cls.__mro__:
        parameters = inspect.signature(one.__init__).parameters.values()
        names |= {parameter.name for parameter in parameters}
        if not any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters):
            break
    return names


def _exists(path: str) -> bool:
    section, *rest = path.split(".")
    if section in {"ckpt_path", "seed_everything", "clip_high"}:
        return not rest
    owners = {"model": (PPO, RewardModel), "trainer": (L.Trainer,)}
    owners["data"] = (PromptDataModule, PreferenceDataModule)
    if not rest or not any(rest[0] in _options(owner) for owner in owners[section]):
        return False
    inner: Any = CLASSES if rest[1:2] == ["init_args"] else GROUPS
    below = rest[2:] if rest[1:2] == ["init_args"] else rest[1:]
    if not below or section == "trainer":
        return True
    if rest[0] == "optimizer":
        return below[0] in {"lr", "schedule", "warmup_steps", "weight_decay", "betas", "eps"} | {
            "optimizer_class"
        }
    if below[0] == "optimizer" and rest[0] == "critic":
        return below[1:] == ["lr"]
    return below[0] in _options(inner[rest[0]])


@pytest.mark.parametrize("answer", sorted(set(FAMILIAR_NAMES.values())))
def test_the_option_of_an_answer_exists(answer: str) -> None:
    named = re.findall(r"(?:model|data|trainer)(?:\.[a-z_]+)+|^[a-z_]+$", answer)
    assert named or "hf upload" in answer
    for path in named:
        assert _exists(path), path
    for callback in re.findall(r"lrlhf\.callbacks\.(\w+)", answer):
        assert callback in lrlhf.callbacks.__all__


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        (
            "    lr: 0.1",
            "    beta: 0.1",
            "toy.yaml:6: model.init_args.beta: ToyModule has no option 'beta'; did you mean "
            "model.reference.kl_coef?",
        ),
        (
            "  max_steps: 1",
            "  num_train_epochs: 1",
            "toy.yaml:12: trainer.num_train_epochs: no such option; did you mean "
            "trainer.max_epochs?",
        ),
    ],
)
def test_a_name_of_another_trainer_is_answered_with_ours(
    config: Path, capsys: pytest.CaptureFixture[str], old: str, new: str, message: str
) -> None:
    config.write_text(CONFIG.replace(old, new, 1))
    assert run(["fit", "--config", config.name]) == 2
    assert capsys.readouterr().err == f"error: {message}\n"
