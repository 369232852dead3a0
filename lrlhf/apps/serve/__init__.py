"""Trained reward models as a service: reward functions behind HTTP, with batches and limits."""

try:
    import prometheus_client  # noqa: F401  looked for here, so that one message names the extra
    import pydantic_core  # noqa: F401
    import starlette  # noqa: F401
    import uvicorn  # noqa: F401
except ImportError as error:
    raise ImportError(
        f"serving rewards needs Starlette, uvicorn, pydantic and prometheus_client ({error}): "
        "pip install 'lrlhf[serve]'"
    ) from error

from lrlhf.apps.serve.app import RewardService, check_exposure, create_app, serve
from lrlhf.apps.serve.batcher import Scorer
from lrlhf.apps.serve.score_request import QueueOptions, RequestLimits
from lrlhf.rewards.remote.service_client import read_token

__all__ = [
    "QueueOptions",
    "RequestLimits",
    "RewardService",
    "Scorer",
    "check_exposure",
    "create_app",
    "read_token",
    "serve",
]
