"""A notebook as a page of the site."""

import json
import runpy
from pathlib import Path

HOOKS = runpy.run_path(str(Path(__file__).parents[2] / "tools" / "docs_hooks.py"))


def test_cells_and_what_came_out_are_shown() -> None:
    text = (
        "See [rewards](../docs/rewards.md#own), [the start](../README.md), [a site](https://a.b)."
    )
    cells = [
        {"cell_type": "markdown", "source": ["# Title\n", text]},
        {
            "cell_type": "code",
            "source": ["print(1)"],
            "outputs": [
                {"output_type": "stream", "text": ["1\n", "2\n"]},
                {"output_type": "display_data", "data": {"image/png": "aGk=\n", "text/plain": "F"}},
                {"output_type": "execute_result", "data": {"text/plain": ["3"]}},
            ],
        },
    ]
    page = HOOKS["notebook_page"](json.dumps({"cells": cells}))
    assert "# Title\nSee [rewards](../../rewards.md#own), the start, [a site](https://a.b)." in page
    assert "```python\nprint(1)\n```" in page
    assert "```text\n1\n2\n```" in page
    assert "](data:image/png;base64,aGk=)" in page
    assert page.index("aGk=") < page.index("```text\n3\n```")
