"""What tests of faults are given, beside what all tests are."""

import logging
import warnings
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.faults.faulty_runs import Run


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory, model_folder: str) -> Run:
    """A run without a fault."""
    run = Run(tmp_path_factory.mktemp("undisturbed"), model_folder)
    logger = logging.getLogger("lrlhf")
    before = logger.handlers, logger.level
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        ended = run.fit()
    logger.handlers, logger.level = before
    assert ended.status == 0, ended.err
    return run


@pytest.fixture
def run(tmp_path: Path, model_folder: str) -> Run:
    """A run that is to be disturbed."""
    return Run(tmp_path, model_folder)


@pytest.fixture
def _own_log(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.delenv("LRLHF_DEBUG", raising=False)
    logger = logging.getLogger("lrlhf")
    before = logger.handlers, logger.level
    yield
    logger.handlers, logger.level = before
