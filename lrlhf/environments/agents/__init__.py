"""Agents: programs that ask the policy through an OpenAI-compatible endpoint of the run."""

from typing import TYPE_CHECKING

from lrlhf.lazy_exports import lazy_exports

if TYPE_CHECKING:
    from lrlhf.environments.agents.agent_session import AgentSession
    from lrlhf.environments.agents.chat_protocol import ChatAnswer
    from lrlhf.environments.agents.endpoint import ChatEndpoint, Question
    from lrlhf.environments.turn_message import call_ids, turn_message
else:
    __getattr__ = lazy_exports(__name__)

try:
    import pydantic  # noqa: F401  looked for here, so that one message names the extra
    import starlette  # noqa: F401
    import uvicorn  # noqa: F401
except ImportError as error:
    raise ImportError(
        f"agents need Starlette, uvicorn and pydantic ({error}): pip install 'lrlhf[serve]'"
    ) from error


__all__ = ["AgentSession", "ChatAnswer", "ChatEndpoint", "Question", "call_ids", "turn_message"]
