"""What other libraries would say when lrlhf is imported."""

import logging
import subprocess
import sys

import pytest

_WARNS = "logging.getLogger('bitsandbytes.backends.cpu.ops').warning('no gemm_4bit_forward')"


@pytest.mark.parametrize(
    ("own", "shown"),
    [("", False), (".getLogger('bitsandbytes.backends.cpu.ops').setLevel(20)", True)],
)
def test_a_faster_kernel_that_is_not_installed_is_no_news_but_to_who_asked_for_it(
    own: str, shown: bool
) -> None:
    asked = f"; logging{own}" if own else ""
    code = f"import logging; logging.basicConfig(){asked}; import lrlhf; {_WARNS}"
    result = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True
    )
    assert ("gemm_4bit_forward" in result.stderr) == shown


def test_errors_of_it_come_through() -> None:
    assert logging.getLogger("bitsandbytes.backends.cpu.ops").isEnabledFor(logging.ERROR)
