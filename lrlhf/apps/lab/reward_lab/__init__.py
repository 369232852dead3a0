"""What the rewards of a config, or of a run, say: an audit of their values."""

from lrlhf.apps.lab.reward_lab.lab import (
    Lab,
    Response,
    as_json,
    as_page,
    as_text,
    look_at,
    responses_of_run,
)

__all__ = [
    "Lab",
    "Response",
    "as_json",
    "as_page",
    "as_text",
    "look_at",
    "responses_of_run",
]
