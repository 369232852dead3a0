"""``lrlhf reward``: what rewards say of responses. Reading a run's needs no torch."""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from lrlhf.apps.lab.reward_lab import Lab, as_json, as_page, as_text, look_at, responses_of_run
from lrlhf.apps.lab.run_files import check_output, write_json
from lrlhf.cli.command_parser import command_parser
from lrlhf.options.errors import ConfigError
from lrlhf.secrets import safe

if TYPE_CHECKING:
    from jsonargparse import ArgumentParser, Namespace

    from lrlhf.rewards import Rewards

_TITLE = "Rewards of {}"


def report_run(arguments: Sequence[str]) -> None:
    """Tell what the rewards said in a run.

    Raises:
        ConfigError: The folder or an option cannot be used.
    """
    parser = command_parser("reward", "Tell what the rewards said in a run.", "")
    parser.add_argument("run", metavar="RUN", type=Path)
    parser.add_argument("--json")
    parser.add_argument("--html")
    options = parser.parse_args(arguments)
    for name in ("json", "html"):
        check_output(name, vars(options)[name])
    if options.run.is_file():
        raise ConfigError(
            f"{options.run} is a file; its rewards are in a config: lrlhf reward --config FILE "
            f"{options.run}, or give the folder of a run"
        )
    try:
        lab = look_at(responses_of_run(options.run))
    except (ValueError, OSError) as error:
        raise ConfigError(str(error)) from error
    _report(lab, str(options.run), options.json, options.html)


def add_reward_options(parser: ArgumentParser) -> None:
    """Add what ``reward`` takes beside the options of ``fit``."""
    # as an argument of the parser, which alone knows which words are values of options
    parser.add_argument("responses", type=str, help="file of responses, or the folder of a run")
    parser.add_argument("--json", type=str | None, help="file for all figures")
    parser.add_argument("--html", type=str | None, help="file for a page with charts")
    parser.add_argument(
        "--prompts_per_call", type=int, default=1, help="responses of so many prompts in one call"
    )


def run_rewards(config: Namespace, build: Callable[[], Rewards]) -> None:
    """Run the rewards of a config over a file of responses, and tell what they say.

    Args:
        config: Parsed.
        build: Makes the rewards.

    Raises:
        ConfigError: The file or an option cannot be used.
        MistakeError: The rewards cannot be used on these responses.
    """
    # not at the top: they bring torch
    from lrlhf.apps.lab.reward_lab.response_inputs import read_response_inputs  # noqa: PLC0415
    from lrlhf.apps.lab.reward_lab.scoring import reads_media, score_responses, with_times  # noqa: PLC0415
    from lrlhf.cli.checks.models import check_models  # noqa: PLC0415
    from lrlhf.cli.config_entries import is_lrlhf, options_of  # noqa: PLC0415
    from lrlhf.datamodules.rows.media_rows import MediaReader  # noqa: PLC0415
    from lrlhf.media import MediaOptions  # noqa: PLC0415
    from lrlhf.options.errors import MistakeError  # noqa: PLC0415

    path = Path(config.responses)
    path = path / "rollouts.jsonl" if path.is_dir() else path
    if not path.is_file():
        raise ConfigError(f"there is no file {path}; give one with prompts and completions")
    for name in ("json", "html"):
        check_output(name, config[name])
    if config.prompts_per_call < 1:
        raise ConfigError(f"--prompts_per_call is {config.prompts_per_call}; give 1 or more")
    sections = config.as_dict()
    rewards, trained = build(), check_models(sections["model"])
    tokenizer, processor = (
        (None, None) if trained is None else (trained.tokenizer(), trained.processor())
    )
    data = sections.get("data")
    options = options_of(data).get("media") if is_lrlhf(data) else None
    media = MediaReader(processor, MediaOptions(**(options or {})))
    try:
        responses = read_response_inputs(path, media, reads_media=reads_media(rewards))
    except (ValueError, OSError) as error:
        raise ConfigError(str(error)) from error
    steps = sections["trainer"]["max_steps"]
    try:
        scored = score_responses(
            responses,
            rewards,
            tokenizer,
            config.prompts_per_call,
            max_steps=steps if steps and steps > 0 else None,
            media=media,
        )
    except (ValueError, ImportError, OSError) as error:
        raise MistakeError(("model", "rewards"), str(error)) from error
    lab = with_times(look_at(scored.responses, scored.unit), scored)
    _report(lab, str(path), config.json, config.html)


def _report(lab: Lab, of: str, json: str | None, html: str | None) -> None:
    sys.stdout.write(safe(f"{as_text(lab)}\n"))
    if json is not None:
        write_json(json, as_json(lab))
    if html is not None:
        try:
            as_page(lab, html, _TITLE.format(of))
        except ImportError as error:
            raise ConfigError(str(error)) from error
