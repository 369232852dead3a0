"""How adapters are found."""

import pytest

from lrlhf.environments import adapters
from tests.environments.adapters.sessions import session


def test_a_missing_package_is_named_with_its_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(adapters, "find_spec", lambda _: None)
    for name in adapters.__all__:
        with pytest.raises(ValueError, match=rf"{name} needs the package .*lrlhf\[\w+\]"):
            session(name)


def test_there_is_no_other_adapter() -> None:
    with pytest.raises(ValueError, match="no attribute 'AtariEnvironment'"):
        session("AtariEnvironment")
