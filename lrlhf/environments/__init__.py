"""Multi-turn tool use: environments that a policy talks to, and tools that it can call."""

from typing import TYPE_CHECKING

from lrlhf.lazy_exports import lazy_exports

if TYPE_CHECKING:
    from lrlhf.environments.session import TextEnvironment
    from lrlhf.environments.settings import Episodes
    from lrlhf.environments.tool_calls import (
        TOOL_CALL_FORMATS,
        MalformedCall,
        RegexCalls,
        ToolCall,
        ToolCallFormat,
        detect_format,
        tool_call_format,
    )
    from lrlhf.environments.tools import (
        NamedTool,
        Tool,
        ToolArgumentsError,
        result_text,
        tools_by_name,
        tools_of,
        tools_of_functions,
    )
else:
    __getattr__ = lazy_exports(__name__)

__all__ = [
    "TOOL_CALL_FORMATS",
    "Episodes",
    "MalformedCall",
    "NamedTool",
    "RegexCalls",
    "TextEnvironment",
    "Tool",
    "ToolArgumentsError",
    "ToolCall",
    "ToolCallFormat",
    "detect_format",
    "result_text",
    "tool_call_format",
    "tools_by_name",
    "tools_of",
    "tools_of_functions",
]
