"""Options of other trainers are answered with ours, and ours exist."""

import re
from pathlib import Path

import pytest

import lrlhf.callbacks
from lrlhf.cli import run
from lrlhf.familiar_names import FAMILIAR_NAMES
from tests.cli import toys  # noqa: F401  its classes are known by their short names
from tests.cli.conftest import CONFIG
from tests.docs.names import is_path


@pytest.mark.parametrize("answer", sorted(set(FAMILIAR_NAMES.values())))
def test_the_option_of_an_answer_exists(answer: str) -> None:
    named = re.findall(r"(?:model|data|trainer)(?:\.[a-z_]+)+|^[a-z_]+$", answer)
    assert named or "hf upload" in answer
    for path in named:
        assert path in {"ckpt_path", "seed_everything"} or is_path(path), path
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
