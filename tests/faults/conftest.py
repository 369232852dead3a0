"""What tests of faults are given, beside what all tests are."""

import warnings
from pathlib import Path

import pytest

from tests.faults.faulty_runs import Run


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory, model_folder: str) -> Run:
    """A run without a fault."""
    run = Run(tmp_path_factory.mktemp("undisturbed"), model_folder)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        ended = run.fit()
    assert ended.status == 0, ended.err
    return run


@pytest.fixture
def run(tmp_path: Path, model_folder: str, monkeypatch: pytest.MonkeyPatch) -> Run:
    """A run that is to be disturbed."""
    monkeypatch.delenv("LRLHF_DEBUG", raising=False)
    return Run(tmp_path, model_folder)
