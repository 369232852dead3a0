"""The part of the command line that must answer at once."""

import subprocess
import sys
import time
from importlib.metadata import version

import pytest

from lrlhf.__main__ import main


def _lrlhf(*arguments: str) -> "subprocess.CompletedProcess[str]":
    command = [sys.executable, "-X", "importtime", "-m", "lrlhf", *arguments]
    return subprocess.run(command, capture_output=True, text=True, check=False)


@pytest.mark.parametrize("arguments", [(), ("--help",), ("-h",), ("--version",), ("fti",)])
def test_help_and_version_import_neither_torch_nor_lightning(arguments: tuple[str, ...]) -> None:
    imported = {line.rpartition("|")[2].strip() for line in _lrlhf(*arguments).stderr.splitlines()}

    assert "lrlhf" in imported
    assert not imported & {"torch", "lightning", "transformers", "jsonargparse", "numpy", "yaml"}


def test_help_takes_little_time() -> None:
    started = time.perf_counter()
    result = _lrlhf("--help")

    assert result.returncode == 0
    # 0.1 s on an idle machine; the bound leaves room for a busy one, and torch would break it
    assert time.perf_counter() - started < 1.5


def test_help_names_every_command_of_the_application(capsys: pytest.CaptureFixture[str]) -> None:
    from lrlhf.cli.application import Application  # noqa: PLC0415  seconds, for this test only

    assert main(["--help"]) == 0

    shown = capsys.readouterr().out
    for command in Application.subcommands():
        assert f"\n  {command} " in shown


def test_no_arguments_show_the_help(capsys: pytest.CaptureFixture[str]) -> None:
    assert main([]) == 0
    assert capsys.readouterr().out.startswith("usage: lrlhf COMMAND")


def test_version_is_that_of_the_package(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--version"]) == 0
    assert capsys.readouterr().out == f"lrlhf {version('lrlhf')}\n"


@pytest.mark.parametrize(
    ("word", "message"),
    [
        ("fti", "error: no command 'fti'; did you mean 'fit'?\n"),
        (
            "xyz",
            "error: no command 'xyz'; there are fit, plan, validate, test, predict, "
            "export, replay, convert, serve-reward\n",
        ),
        (
            "--config",
            "error: no command '--config'; the command comes first: "
            "lrlhf {fit,plan,validate,test,predict,export,replay,"
            "convert,serve-reward} --config ...\n",
        ),
    ],
)
def test_a_misspelt_command_is_answered(
    capsys: pytest.CaptureFixture[str], word: str, message: str
) -> None:
    assert main([word]) == 2
    assert capsys.readouterr().err == message


@pytest.mark.parametrize(("variable", "flags"), [("1", []), ("0", ["--debug"]), ("", ["--debug"])])
def test_debug_comes_from_the_flag_or_the_environment(
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    variable: str,
    flags: list[str],
) -> None:
    monkeypatch.setenv("LRLHF_DEBUG", variable)

    assert main(["fit", "--config", "nowhere.yaml", *flags]) == 2
    assert "Traceback" in capsys.readouterr().err


def test_without_debug_there_is_no_traceback(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("LRLHF_DEBUG", "0")

    assert main(["fit", "--config", "nowhere.yaml"]) == 2
    assert capsys.readouterr().err == "error: nowhere.yaml: no such file\n"
