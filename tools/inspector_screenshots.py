"""Takes the screenshots of docs/inspector.md, with `python -m tools.inspector_screenshots`."""

from __future__ import annotations

import tempfile
from pathlib import Path

from PIL import Image

from lrlhf.apps.lab.inspector import write_inspector
from tests.apps.lab.browser import NARROW, WIDE, opening, wait_until_drawn
from tests.apps.lab.inspector.runs import policy_run, reward_run

_IMAGES = Path(__file__).parents[1] / "docs" / "images"


def main() -> None:
    """Write the pictures."""
    with tempfile.TemporaryDirectory() as folder, opening() as opened:
        runs = [policy_run(Path(folder) / f"seed_{seed}", seed=seed) for seed in (1, 2)]
        write_inspector(runs, curves := Path(folder) / "curves.html")
        write_inspector([runs[0]], response := Path(folder) / "response.html")
        write_inspector(
            [reward_run(Path(folder) / "reward_text")], pairs := Path(folder) / "pairs.html"
        )
        shots = [
            ("curves", curves, "curves", WIDE, "light"),
            ("response", response, "response/88", WIDE, "dark"),
            ("pairs", pairs, "pairs", WIDE, "light"),
            ("phone", response, "response/88", NARROW, "light"),
        ]
        for name, path, part, size, scheme in shots:
            page = opened(path, part, size, scheme)
            wait_until_drawn(page)
            if part.startswith("response"):
                page.get_by_label("Colour by").select_option(label="KL to the reference")
            page.locator("#runs").evaluate(
                "runs => runs.querySelectorAll('.run').forEach((run) => {"
                " run.lastChild.textContent = 'runs/' + run.innerText.split('/').pop(); })"
            )
            path = _IMAGES / f"inspector_{name}.png"
            page.screenshot(path=path)
            # a palette takes a third of the bytes
            Image.open(path).convert("RGB").quantize(128).save(path, optimize=True)
            page.context.close()


if __name__ == "__main__":
    main()
