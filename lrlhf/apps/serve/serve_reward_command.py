"""``lrlhf serve-reward``: a trained reward model, or any reward function, behind HTTP."""

from __future__ import annotations

import importlib
import re
import signal
from collections.abc import Sequence
from typing import Any

from jsonargparse import Namespace

from lrlhf.cli.config_files import read_config_files
from lrlhf.cli.messages.exit_status import located
from lrlhf.cli.messages.locations import locate_refusal
from lrlhf.options.errors import ConfigError, ValidationError
from lrlhf.options.parser import Parser, check_values, options_without_null
from lrlhf.rewards import LearnedReward, RewardFunction

_TERMINATED = 128 + signal.SIGTERM
_REWARD: Any = RewardFunction | str | None


def serve_reward(arguments: Sequence[str]) -> None:
    """Run the command until it is asked to end.

    Args:
        arguments: Its options.

    Raises:
        ConfigError: The options do not fit.
        SystemExit: With 143, after SIGTERM and the end of the requests that were being answered.
        KeyboardInterrupt: The same after SIGINT.
    """
    serving = importlib.import_module("lrlhf.apps.serve")
    config = _parsed(_parser(serving), arguments)
    own: dict[str, Any] = dict.fromkeys(("host", "port", "token_env"), str)
    for options in (serving.RequestLimits, serving.QueueOptions):
        own |= options_without_null(options)
    check_values(config, strict=own)
    check_values(config.model, ("model",), strict=options_without_null(LearnedReward))
    try:
        service = _service(serving, config)
    except ValueError as error:
        sentence, files = " ".join(str(error).split()), read_config_files(arguments)
        location = locate_refusal(sentence, ["LearnedReward"], files, arguments)
        raise ConfigError(located(sentence, *location)) from error
    ended_by = serving.serve(
        service,
        host=config.host,
        port=config.port,
        max_queue=config.max_queue,
        grace_seconds=config.timeout_s,
    )
    if ended_by == signal.SIGTERM:
        raise SystemExit(_TERMINATED)
    if ended_by == signal.SIGINT:
        raise KeyboardInterrupt


def _parser(serving: Any) -> Parser:
    parser = Parser(
        prog="lrlhf serve-reward",
        description="Serve a reward model that RewardModel trained, or any reward function.",
        allow_abbrev=False,
    )
    parser.add_argument("-c", "--config", action="config", help="YAML file with these options")
    parser.add_argument(
        "--model.source", type=str | None, help="folder of a trained reward model, or as in fit"
    )
    parser.add_class_arguments(LearnedReward, "model", skip={"source"}, instantiate=False)
    parser.add_argument(
        "--reward",
        type=_REWARD,
        help="a reward function instead of model: an import path, or class_path and init_args",
    )
    parser.add_argument("--host", type=str, default="127.0.0.1", help="address to listen at")
    parser.add_argument("--port", type=int, default=8100, help="0: any free one, which is logged")
    parser.add_argument("--name", type=str | None, help="what clients are told as the model")
    parser.add_argument(
        "--token_env",
        type=str,
        default="LRLHF_REWARD_TOKEN",
        help="environment variable that holds the token of clients",
    )
    parser.add_argument("--token_file", type=str | None, help="file that holds it, instead")
    parser.add_class_arguments(serving.RequestLimits, instantiate=False)
    parser.add_class_arguments(serving.QueueOptions, instantiate=False)
    return parser


def _parsed(parser: Parser, arguments: Sequence[str]) -> Namespace:
    try:
        return parser.parse_args(list(arguments))
    except ValidationError as error:
        # what is said of an option of a class, and these are the command's own
        unknown = re.sub(
            r"\AOption ('[^']+') is not accepted",
            r"Subcommand 'serve-reward' does not accept option \1",
            str(error),
        )
        raise ValidationError(unknown) from error


def _service(serving: Any, config: Namespace) -> Any:
    """Build what is served; the model is loaded later, when the server listens.

    Raises:
        ValueError: The options do not fit together.
    """
    if not 0 <= config.port < 2**16:
        raise ValueError(f"port is {config.port}; it must be below 65536")
    token = serving.read_token(config.token_env, config.token_file)
    serving.check_exposure(config.host, token)
    return serving.RewardService(
        serving.Scorer(_function(config), name=config.name),
        token=token,
        limits=_built(serving.RequestLimits, config),
        queue=_built(serving.QueueOptions, config),
    )


def _function(config: Namespace) -> RewardFunction | str:
    if (config.model.source is None) == (config.reward is None):
        problem = "neither was given" if config.reward is None else "both were given"
        raise ValueError(f"give model.source or reward, one of the two; {problem}")
    if config.model.source is not None:
        return LearnedReward(**vars(config.model))
    parser = Parser()
    parser.add_argument("--reward", type=_REWARD)
    entry = Namespace(reward=config.reward)  # type: ignore[no-untyped-call]
    built: RewardFunction | str = parser.instantiate(entry).reward
    return built


def _built(options: Any, config: Namespace) -> Any:
    return options(**{name: config[name] for name in options.__dataclass_fields__})
