"""A file that an option names as data is no config: nothing in it is read while the config is."""

import builtins
import inspect
import json
import sys
from collections.abc import Iterator
from contextlib import suppress
from importlib import import_module
from pathlib import Path
from typing import Any

import lightning as L
import pytest

from lrlhf.cli import run
from lrlhf.datamodules import EvalLoader, TrainLoader
from lrlhf.options.errors import ValidationError
from lrlhf.options.parser import Parser
from tests.cli import toys  # noqa: F401  its classes are known by their short names
from tests.cli.conftest import CONFIG

# where the classes are that a config names
PLACES = (
    "callbacks", "datamodules", "loggers", "media", "models", "modules", "rewards", "rollout",
    "strategies",
)  # fmt: skip
NO_OPTIONS = (Exception, EvalLoader, TrainLoader)


@pytest.fixture
def rows(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """A data file; whoever reads its row as a config imports a module that leaves a file `ran`."""
    module = (
        "from pathlib import Path\n"
        "from tests.cli.toys import ToySource\n"
        "Path('ran').touch()\n"
        "class Spy(ToySource): ...\n"
    )
    (tmp_path / "lrlhf_spy.py").write_text(module)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delitem(sys.modules, "lrlhf_spy", raising=False)
    (tmp_path / "rows.jsonl").write_text(json.dumps({"class_path": "lrlhf_spy.Spy"}) + "\n")
    return "rows.jsonl"


def test_rows_that_name_a_class_run_nothing(config: Path, rows: str) -> None:
    assert run(["fit", "--config", config.name, "--data.train", rows]) == 0
    config.write_text(CONFIG.replace("prompts.jsonl", rows))
    assert run(["plan", "--config", config.name]) == 0
    assert not Path("ran").exists()


def classes() -> Iterator[type]:
    for place in PLACES:
        module = import_module(f"lrlhf.{place}")
        for name in module.__all__:
            found = getattr(module, name)
            if inspect.isclass(found) and not issubclass(found, NO_OPTIONS):
                yield found
    yield L.Trainer


def options(parser: Parser) -> Iterator[str]:
    """Every option that takes a value of its own, and is no group of options."""
    names = parser._dotted()
    yield from (name for name in names if not any(other.startswith(f"{name}.") for other in names))


def test_no_option_reads_the_file_that_is_called_like_its_value(
    rows: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    kept, opened, asked = builtins.open, [], []

    def watched(file: Any, *args: Any, **kwargs: Any) -> Any:
        if str(file).endswith(rows):
            opened.append(asked[-1])
        return kept(file, *args, **kwargs)

    monkeypatch.setattr(builtins, "open", watched)
    for owner in dict.fromkeys(classes()):
        parser = Parser()
        # as jsonargparse does for the class of `model`, and for all within
        parser.add_class_arguments(owner, owner.__name__, fail_untyped=False, sub_configs=True)
        for option in options(parser):
            asked.append(option)
            with suppress(ValidationError):  # another type, or other options are missing
                parser.parse_args([f"--{option}={rows}"])
    assert opened == []
    assert not Path("ran").exists()
    # the walk did find them
    assert {"PromptDataModule.train", "PPO.policy", "Critic.model", "LearnedReward.source"} <= {
        *asked
    }
