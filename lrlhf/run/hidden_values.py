"""Configs and hyperparameters without the secrets in them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from jsonargparse import Namespace

from lrlhf.secrets import HIDDEN, hide, is_secret_name


def without_secrets(value: Any, *, secret: bool = False) -> Any:
    """Copy a config, with ``***`` for the secrets in it.

    Args:
        value: Mappings, namespaces and lists are gone through; other objects stay what they are.
        secret: Whether the whole value stands under the name of a secret.
    """
    if isinstance(value, Namespace):
        items = without_secrets(vars(value), secret=secret)
        return Namespace(**items)  # type: ignore[no-untyped-call]
    if isinstance(value, Mapping):
        items = {
            key: without_secrets(
                part, secret=(secret or is_secret_name(str(key))) and key != "class_path"
            )
            for key, part in value.items()
        }
        return items if type(value) is dict else type(value)(items)  # type: ignore[call-arg]
    if type(value) in (list, tuple):
        return type(value)(without_secrets(item, secret=secret) for item in value)
    # digits alone are a number in YAML; a short one is no password
    long_number = isinstance(value, int) and value > 99_999
    if secret and value and (isinstance(value, str) or long_number):
        return HIDDEN
    return hide(value) if isinstance(value, str) else value
