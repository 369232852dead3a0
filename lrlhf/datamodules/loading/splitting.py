"""Parting rows into train and validation data without telling one what the other holds."""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Sequence

import numpy as np

from lrlhf.datamodules.rows.bad_rows import BadDataError


def connected_groups(keys: Sequence[Iterable[Hashable]]) -> list[list[int]]:
    """Group rows that share a key, directly or through other rows.

    Args:
        keys: The keys of each row; a row without keys is a group of its own.

    Returns:
        Row indices by group, groups in the order of their first row.
    """
    leader = list(range(len(keys)))

    def find(row: int) -> int:
        while leader[row] != row:
            leader[row] = leader[leader[row]]
            row = leader[row]
        return row

    first_with: dict[Hashable, int] = {}
    for row, own in enumerate(keys):
        for key in own:
            low, high = sorted((find(row), find(first_with.setdefault(key, row))))
            leader[high] = low
    groups: dict[int, list[int]] = {}
    for row in range(len(keys)):
        groups.setdefault(find(row), []).append(row)
    return list(groups.values())


def hold_out(
    keys: Sequence[Iterable[Hashable]], *, size: int = 0, fraction: float = 0.0, seed: int
) -> tuple[list[int], list[int]]:
    """Part rows so that no key stands on both sides.

    Args:
        keys: What each row must not share with the other side, such as its prompt.
        size: Number of rows to hold out, or
        fraction: share of the rows. Groups of rows that belong together stay together, so that
            the side can come out somewhat smaller.
        seed: Which groups are drawn.

    Returns:
        Indices of the train and of the held-out rows, each in the order of the data.

    Raises:
        BadDataError: One of the sides would be empty.
    """
    wanted = size or round(fraction * len(keys))
    held: list[int] = []
    groups = connected_groups(keys)
    for index in np.random.default_rng([seed, len(keys)]).permutation(len(groups)).tolist():
        if len(held) + len(groups[index]) <= wanted:
            held += groups[index]
    if not held or len(held) == len(keys):
        largest = max(map(len, groups), default=0)
        raise BadDataError(
            f"cannot hold out {wanted} of {len(keys)} rows for validation: they form {len(groups)} "
            f"groups that share a prompt or a text, the largest of {largest} rows, and one side "
            "would be empty. Give `val` data of its own, or another val_size or val_fraction"
        )
    kept = set(held)
    return [row for row in range(len(keys)) if row not in kept], sorted(held)
