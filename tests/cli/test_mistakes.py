"""Typical mistakes end with status 2 and a message that says what to do, before weights load."""

import re
import runpy
import shutil
from pathlib import Path
from typing import Any

import pytest
from lightning.fabric.utilities.exceptions import MisconfigurationException

from lrlhf.__main__ import main
from lrlhf.models import CausalLM, ScoreModel

TABLE = runpy.run_path(str(Path(__file__).parents[2] / "tools/mistakes.py"))
MISTAKES = TABLE["MISTAKES"]


@pytest.fixture
def folder(tmp_path: Path, model_folder: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder with all that the configs name, and nobody who is logged in anywhere."""
    TABLE["prepare"](tmp_path)
    TABLE["write_checkpoint"](tmp_path)
    without = shutil.ignore_patterns("chat_template*")
    shutil.copytree(model_folder, tmp_path / "model", ignore=without)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setenv("HOME", str(tmp_path))
    for name in ("WANDB_MODE", "WANDB_API_KEY", "NETRC"):
        monkeypatch.delenv(name, raising=False)
    return tmp_path


@pytest.mark.parametrize(
    "mistake", [pytest.param(one, id=one.name) for one in MISTAKES if one.early]
)
def test_a_mistake_is_answered_before_weights_are_loaded(
    folder: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, mistake: Any
) -> None:
    def load(*_: object, **__: object) -> None:
        raise AssertionError("weights were loaded")

    for spec in (CausalLM, ScoreModel):
        monkeypatch.setattr(spec, "load", load)

    status = main(TABLE["arguments_of"](mistake, folder))

    error = capsys.readouterr().err
    assert "Traceback" not in error
    assert status == 2
    assert re.match(r"(\d\d:\d\d:\d\d row 1 .*\n)?error: ", error)
    for part in mistake.says:
        assert part in error


@pytest.mark.parametrize(
    "mistake", [pytest.param(one, id=one.name) for one in MISTAKES if TABLE["program_of"](one)]
)
def test_python_gets_the_sentence_of_the_command_line(folder: Path, mistake: Any) -> None:
    TABLE["arguments_of"](mistake, folder)  # some mistakes are about this file
    program = TABLE["program_of"](mistake)
    with pytest.raises(Exception) as raised:  # noqa: PT011  its kind is looked at below
        exec(program, {})
    kinds = (ValueError, TypeError, OSError, ImportError, MisconfigurationException)
    assert isinstance(raised.value, kinds)
    message = "; ".join([str(raised.value), *getattr(raised.value, "__notes__", ())])
    for part in mistake.says_in_python:
        assert part in message
