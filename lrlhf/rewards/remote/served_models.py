"""Which models an endpoint of OpenAI's kind serves."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from lrlhf.rewards.function import RewardError
from lrlhf.rewards.remote.remote_http import ServiceError, one_line

_SHOWN = 200


def read_models(reply: Mapping[str, Any]) -> dict[str, Mapping[str, Any]]:
    """Return what an endpoint tells of its models, by their names.

    Raises:
        ServiceError: It is no list of models.
    """
    try:
        return {str(entry["id"]): {**entry} for entry in reply["data"]}
    except (LookupError, TypeError) as error:
        raise ServiceError("the reply is no list of models") from error


def served_model(url: str, models: Mapping[str, Any], wanted: str | None) -> str:
    """Return the name of the model to ask.

    Args:
        url: Of the endpoint, for the error.
        models: Those that it serves.
        wanted: What the user set; None: the only one.

    Raises:
        RewardError: It is not served, or there are several to choose from.
    """
    name = wanted or (next(iter(models)) if len(models) == 1 else None)
    if name is None or name not in models:
        listed = one_line(", ".join(models), _SHOWN)
        raise RewardError(f"{url} serves {listed or 'no model'}; set model to one")
    return name
