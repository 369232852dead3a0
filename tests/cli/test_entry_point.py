"""The part of the command line that must answer at once."""

import subprocess
import sys
import time
from importlib.metadata import version

import pytest

from lrlhf.__main__ import main


@pytest.mark.parametrize("argument", ["--help", "fti"])
def test_what_needs_no_torch_imports_little_and_is_fast(argument: str) -> None:
    started = time.perf_counter()
    command = [sys.executable, "-X", "importtime", "-m", "lrlhf", argument]
    result = subprocess.run(command, capture_output=True, text=True, check=False)
    # 0.1 s on an idle machine; the bound leaves room for a busy one, and torch would break it
    assert time.perf_counter() - started < 1.5

    imported = {line.rpartition("|")[2].strip() for line in result.stderr.splitlines()}
    assert "lrlhf" in imported
    assert not imported & {"torch", "lightning", "transformers", "jsonargparse", "numpy", "yaml"}


def test_help_names_every_command_and_there_is_a_version(
    capsys: pytest.CaptureFixture[str],
) -> None:
    from lrlhf.cli.application import Application  # noqa: PLC0415  seconds, for this test only

    assert main(["--help"]) == 0
    shown = capsys.readouterr().out
    for command in Application.subcommands():
        assert f"\n  {command} " in shown
    assert main([]) == 0
    assert capsys.readouterr().out.startswith("usage: lrlhf COMMAND")
    assert main(["--version"]) == 0
    assert capsys.readouterr().out == f"lrlhf {version('lrlhf')}\n"


@pytest.mark.parametrize(
    ("word", "message"),
    [
        ("fti", "error: no command 'fti'; did you mean 'fit'?\n"),
        (
            "--config",
            "error: no command '--config'; the command comes first: "
            "lrlhf {fit,check,plan,validate,test,predict,export,replay,"
            "convert,serve-reward} --config ...\n",
        ),
    ],
)
def test_a_misspelt_command_is_answered(
    capsys: pytest.CaptureFixture[str], word: str, message: str
) -> None:
    assert main([word]) == 2
    assert capsys.readouterr().err == message


@pytest.mark.parametrize(
    ("variable", "flags", "shown"), [("1", [], True), ("0", ["--debug"], True), ("0", [], False)]
)
def test_debug_comes_from_the_flag_or_the_environment(
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    variable: str,
    flags: list[str],
    shown: bool,
) -> None:
    monkeypatch.setenv("LRLHF_DEBUG", variable)

    assert main(["fit", "--config", "nowhere.yaml", *flags]) == 2
    error = capsys.readouterr().err
    assert ("Traceback" in error) == shown
    assert error.endswith("error: nowhere.yaml: no such file\n")
