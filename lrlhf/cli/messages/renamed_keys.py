"""Options that have another name now, or were taken over by another one."""

from __future__ import annotations

RENAMED_KEYS = {
    "max_skipped_steps": "guard.max_skipped",
    "update.max_skipped_steps": "guard.max_skipped",
}
"""The present name by the old one, both below ``model.init_args`` (or whichever class has them)."""


def new_name(key: str) -> str | None:
    """Return what an option is called now.

    Args:
        key: As it was given, with as many of the keys around it as are known.
    """
    parts = key.split(".")
    endings = (".".join(parts[start:]) for start in range(len(parts)))
    return next((RENAMED_KEYS[one] for one in endings if one in RENAMED_KEYS), None)
