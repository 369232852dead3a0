"""Agents: programs that ask the policy through an OpenAI-compatible endpoint of the run."""

try:
    import pydantic  # noqa: F401  looked for here, so that one message names the extra
    import starlette  # noqa: F401
    import uvicorn  # noqa: F401
except ImportError as error:
    raise ImportError(
        f"agents need Starlette, uvicorn and pydantic ({error}): pip install 'lrlhf[serve]'"
    ) from error

from lrlhf.environments.agents.agent_session import AgentSession
from lrlhf.environments.agents.chat_answer import ChatAnswer
from lrlhf.environments.agents.endpoint import ChatEndpoint, Question
from lrlhf.environments.turn_message import call_ids, turn_message

__all__ = ["AgentSession", "ChatAnswer", "ChatEndpoint", "Question", "call_ids", "turn_message"]
