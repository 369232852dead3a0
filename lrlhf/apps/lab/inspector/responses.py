"""Responses as columns."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from lrlhf.apps.lab.inspector.sampling import Source
from lrlhf.apps.lab.inspector.texts import NOTHING, Texts, plain, short_number

_NUMBERS = ("step", "score", "advantage", "length", "group", "rank", "row")
_TEXTS = ("prompt", "completion", "finish_reason", "source")
_LEFT_OUT = {"token_ids", "given_tokens", "tokens", "rewards", "media", *_NUMBERS, *_TEXTS}
"""What has a place of its own, and ids, which say nothing to people."""


class Responses:
    """Gathers responses in columns of the same length.

    Args:
        texts: Takes the texts.
    """

    def __init__(self, texts: Texts) -> None:
        self._texts = texts
        self.size = 0
        self._columns: dict[str, list[Any]] = {
            name: [] for name in ("run", "evaluation", "media", *_NUMBERS, *_TEXTS)
        }
        self._rewards: dict[str, list[Any]] = {}
        self._more: dict[str, list[int]] = {}
        self._tokens: dict[int, dict[str, list[Any]]] = {}

    def add(self, source: Source, record: Mapping[str, Any]) -> None:
        """Add a line of ``rollouts.jsonl`` or of an evaluation."""
        columns, texts = self._columns, self._texts
        columns["run"].append(source.run)
        columns["evaluation"].append(int(source.evaluation))
        columns["media"].append(texts.json_number(record.get("media")))
        for name in _NUMBERS:
            columns[name].append(short_number(record.get(name)))
        for name in _TEXTS:
            columns[name].append(texts.number(record.get(name)))
        rewards = record.get("rewards")
        parts = rewards.items() if isinstance(rewards, Mapping) else ()
        self._fill(self._rewards, ((name, short_number(value)) for name, value in parts), None)
        more = ((key, value) for key, value in record.items() if key not in _LEFT_OUT)
        numbers = ((key, texts.json_number(value)) for key, value in more)
        self._fill(self._more, numbers, NOTHING)
        if _are_tokens(tokens := record.get("tokens")):
            self._tokens[self.size] = plain(tokens)
        self.size += 1

    def _fill(
        self, columns: dict[str, list[Any]], cells: Iterable[tuple[str, Any]], missing: Any
    ) -> None:
        """Add a row of columns of which any may be missing, and of which there may be new ones."""
        for name, cell in cells:
            columns.setdefault(name, [missing] * self.size).append(cell)
        for column in columns.values():
            column.extend([missing] * (self.size + 1 - len(column)))

    def page_data(self) -> dict[str, Any]:
        """Return what the page reads."""
        return {
            "size": self.size,
            "columns": self._columns,
            "rewards": self._rewards,
            "more": self._more,
            "tokens": self._tokens,
        }


def _are_tokens(tokens: Any) -> bool:
    """Tell whether these are lists with an entry per token, as `RolloutLog` writes them."""
    if not isinstance(tokens, Mapping) or not isinstance(tokens.get("texts"), list):
        return False
    return all(
        isinstance(column, list) and len(column) == len(tokens["texts"])
        for column in tokens.values()
    )
