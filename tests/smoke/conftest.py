"""The log as it was, after a command has sent it to the terminal."""

import logging
from collections.abc import Iterator

import pytest


@pytest.fixture
def _own_log() -> Iterator[None]:
    logger = logging.getLogger("lrlhf")
    before = logger.handlers, logger.level
    yield
    logger.handlers, logger.level = before
