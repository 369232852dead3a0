"""What a policy plays with: environments, tools, and the limits of an episode."""

from lrlhf.environments.settings import Episodes
from lrlhf.environments.text_environment import TextEnvironment

__all__ = ["Episodes", "TextEnvironment"]
