"""Tables as plain text."""

from __future__ import annotations

import io

from rich.console import Console
from rich.table import Table


def plain_text(table: Table) -> str:
    """Render a table without colours, each row on one line."""
    buffer = io.StringIO()
    # wider than any line: a table that wraps cannot be searched
    Console(file=buffer, width=4096, color_system=None, force_jupyter=False).print(table)
    return "\n".join(line.rstrip() for line in buffer.getvalue().splitlines() if line.strip())
