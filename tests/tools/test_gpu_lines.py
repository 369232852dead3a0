"""Every line for GPUs has a test that runs it, and the page of them is up to date."""

import runpy
from pathlib import Path

ROOT = Path(__file__).parents[2]
SOURCE = '''
import torch

LIMIT = torch.cuda.device_count()

def plain(x):
    return x

class Memory:
    def free(self):
        return torch.cuda.mem_get_info()

def choose(device):
    """Not for cuda."""
    if device.type == "cpu":
        return "gloo"
    return "nccl"
'''
TESTS = """
import pytest

@pytest.mark.gpu_lines("package.part.Memory", "package.part.gone")
def test_memory():
    pass
"""


def tool() -> dict:
    return runpy.run_path(str(ROOT / "tools" / "gpu_lines.py"))


def test_every_line_for_gpus_has_a_test() -> None:
    assert tool()["problems"]() == []


def test_the_page_is_up_to_date() -> None:
    found = tool()
    assert found["PAGE"].read_text() == found["page"](), "run python tools/gpu_lines.py"


def test_places_are_functions_that_ask_for_a_device(tmp_path: Path) -> None:
    (tmp_path / "package").mkdir()
    (tmp_path / "package" / "part.py").write_text(SOURCE)
    found = dict(tool()["places"](tmp_path / "package"))
    assert found == {
        "package.part": (4,),
        "package.part.Memory.free": (11,),
        "package.part.choose": (15, 17),
    }


def test_a_class_that_is_named_stands_for_its_methods(tmp_path: Path) -> None:
    (tmp_path / "test_part.py").write_text(TESTS)
    found = tool()
    known = found["marked_tests"](tmp_path)
    assert known == {
        "package.part.Memory": ["test_part.py::test_memory"],
        "package.part.gone": ["test_part.py::test_memory"],
    }
    assert found["cover"]("package.part.Memory.free", known) == ["test_part.py::test_memory"]
    assert found["cover"]("package.part.choose", known) == []
    assert found["cover"]("package.part.MemoryPool", known) == []
