"""Tables as text."""

import pytest
from rich.table import Table

from lrlhf.planning.plain_table import plain_text


def test_a_table_is_text_in_a_notebook_too(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("rich.console._is_jupyter", lambda: True)
    table = Table("name", box=None)
    table.add_row("value")
    assert [line.strip() for line in plain_text(table).splitlines()] == ["name", "value"]
