"""The forms in which people give prompts to `generate` and `score`: text, chats, rows, images."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from lrlhf.datamodules.loading.plain_rows import plain
from lrlhf.datamodules.loading.python_rows import Rows, check_rows, is_table, read_rows
from lrlhf.media import BadRow


def rows_of(prompts: Any, images: Any) -> tuple[list[Mapping[str, Any]], bool]:
    """Write prompts as rows of a data set, with columns ``prompt`` and ``images``.

    Args:
        prompts: Text, a chat (a list of messages), a row; or several of these in a list; or a
            table or a dict of columns.
        images: An image or a list of them, for several prompts a list with an entry for each;
            None: there are none.

    Returns:
        The rows, and whether it was a single prompt.

    Raises:
        BadDataError: The columns of a dict do not fit together.
        TypeError: A prompt is of another form.
        ValueError: There are not as many images as prompts.
    """
    if is_table(prompts) or _is_columns(prompts):
        check_rows(prompts, "prompts")
        prompts = list(read_rows(prompts))
    alone = isinstance(prompts, str | Mapping) or _is_chat(prompts)
    listed = [prompts] if alone else list(prompts)
    shown: list[Any] = [None] * len(listed)
    if images is not None:
        shown = [images] if alone else list(images)
    if len(shown) != len(listed):
        raise ValueError(
            f"there are images for {len(shown)} prompts, and {len(listed)} prompts; give an image, "
            "a list of images or None for each"
        )
    rows = [_row(prompt, own) for prompt, own in zip(listed, shown, strict=True)]
    return [{name: plain(value) for name, value in row.items()} for row in rows], alone


def refusal(number: int, problem: BadRow) -> ValueError:
    """Say which prompt cannot be read, and why."""
    return ValueError(f"prompt {number} (from 0): {problem.detail}")


def _is_chat(prompts: Any) -> bool:
    if isinstance(prompts, str) or not isinstance(prompts, Sequence) or not prompts:
        return False
    first = prompts[0]
    return isinstance(first, Mapping) and bool({"role", "from"} & first.keys())


def _is_columns(prompts: Any) -> bool:
    if not isinstance(prompts, Mapping):
        return False
    column = prompts.get("prompt", prompts.get("messages"))
    is_column = isinstance(column, Rows) and not isinstance(column, str | Mapping)
    return is_column and len(column) > 0 and not _is_chat(column)


def _row(prompt: Any, images: Any) -> Mapping[str, Any]:
    shown = {}
    if images is not None:
        shown = {"images": list(images) if isinstance(images, list | tuple) else [images]}
    if isinstance(prompt, str):
        return {"prompt": [{"role": "user", "content": prompt}] if shown else prompt, **shown}
    if _is_chat(prompt):
        return {"prompt": list(prompt), **shown}
    if isinstance(prompt, Mapping):
        return {**prompt, **shown}
    raise TypeError(
        f"a prompt is a {type(prompt).__name__}; give text, a list of messages "
        "({'role': …, 'content': …}), or a row of a data set with a column 'prompt'"
    )
