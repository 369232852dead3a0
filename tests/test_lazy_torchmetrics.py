"""torchmetrics loaded piece by piece is torchmetrics, whatever is asked of it and in which order.

Each test starts programs, as a package is loaded once in a process, and is slow by that.
"""

import subprocess
import sys

import pytest

# what it is before anyone has a hand in it: the names of the real package, and their homes
DESCRIBE = """
import sys, torchmetrics
def home(value):
    return getattr(value, "__module__", None), getattr(value, "__qualname__", repr(value))
shown = {name: home(getattr(torchmetrics, name)) for name in dir(torchmetrics)
         if name not in ("__builtins__", "__spec__", "__loader__", "__warningregistry__")}
print(sorted(shown.items()))
"""


def lines_of(code: str) -> list[str]:
    """Run a program and return what it prints."""
    command = [sys.executable, "-W", "ignore", "-c", code]
    result = subprocess.run(command, capture_output=True, text=True, check=False)
    assert result.returncode == 0, result.stderr
    return result.stdout.splitlines()


@pytest.mark.exhaustive
def test_every_name_is_that_of_the_real_package() -> None:
    assert lines_of("import lrlhf\n" + DESCRIBE) == lines_of(DESCRIBE)


def test_a_run_loads_three_modules_of_it_whose_classes_stay_and_no_deepspeed() -> None:
    printed = lines_of(
        "import lrlhf.modules, lrlhf.strategies, pickle, sys, torchmetrics\n"
        "print({'torchmetrics.functional', 'torchmetrics.classification', 'torchmetrics.text',"
        " 'torchmetrics.image', 'deepspeed'} & {*sys.modules})\n"
        "from torchmetrics import MeanMetric, Metric\n"
        "early = MeanMetric(); early.update(3.0)\n"
        "print(type(torchmetrics).__name__, torchmetrics.Accuracy.__module__)\n"
        "late = pickle.loads(pickle.dumps(early))\n"
        "print(torchmetrics.MeanMetric is MeanMetric, isinstance(late, torchmetrics.Metric))\n"
        "print(float(late.compute()), issubclass(torchmetrics.Accuracy, Metric))\n"
        "print(type(torchmetrics).__name__, 'torchmetrics.classification' in sys.modules)\n"
    )
    assert printed == [
        "set()",
        "_PiecemealPackage torchmetrics.classification.accuracy",
        "True True",
        "3.0 True",
        "module True",
    ]


@pytest.mark.exhaustive
@pytest.mark.parametrize(
    ("code", "value", "expected"),
    [
        (
            "import lrlhf, torchmetrics.functional as f",
            "f.accuracy.__module__[:12]",
            "torchmetrics",
        ),
        ("import lrlhf; from torchmetrics.metric import Metric", "Metric.__name__", "Metric"),
        ("import lrlhf; from torchmetrics import *", "Accuracy.__name__", "Accuracy"),
        ("import lrlhf, torchmetrics as t", "'Accuracy' in dir(t)", "True"),
        ("import lrlhf, torchmetrics as t", "hasattr(t, 'no_such_name')", "False"),
        # one that is loaded already is left alone
        ("import torchmetrics as t, lrlhf", "type(t).__name__", "module"),
    ],
)
def test_any_kind_of_import_finds_what_it_asks_for(code: str, value: str, expected: str) -> None:
    assert lines_of(f"{code}\nprint({value})") == [expected]


def test_without_torchmetrics_nothing_takes_its_place() -> None:
    printed = lines_of(
        "import importlib.machinery as m, sys\n"
        "find = m.PathFinder.find_spec\n"
        "m.PathFinder.find_spec = classmethod(lambda cls, name, *rest: None if name == "
        "'torchmetrics' else find(name, *rest))\n"
        "import lrlhf\n"
        "print('torchmetrics' in sys.modules)\n"
    )
    assert printed == ["False"]
