"""``lrlhf diagnose``: why does a policy not learn, and what to change first."""

from __future__ import annotations

import argparse
import math
import sys
import textwrap
from collections.abc import Sequence
from pathlib import Path

from lrlhf.cli.command_parser import command_parser
from lrlhf.options.errors import ConfigError
from lrlhf.secrets import safe

_EPILOG = """\
It reads metrics.csv, rollouts.jsonl and the evaluations, while the run goes on too. The first cause
is the one to mend: those behind it are often its consequences. With --gradients it loads the newest
checkpoint and says how many prompts an iteration needs until its gradient is as much signal as
noise, for each reward.

examples:
  lrlhf diagnose runs/quickstart
  lrlhf diagnose runs/quickstart --gradients 32 --json diagnosis.json
"""


def parser() -> argparse.ArgumentParser:
    """Return what reads the options."""
    parser = command_parser(
        "diagnose", "Say why a policy does not learn, and what to change first.", _EPILOG
    )
    parser.add_argument("run", metavar="RUN", type=Path, help="folder of a run (default_root_dir)")
    parser.add_argument(
        "--gradients",
        metavar="PROMPTS",
        type=_count,
        help="also compute the gradients of the run's last prompts, at least 2",
    )
    parser.add_argument("--json", metavar="FILE", help="write everything as JSON")
    return parser


def diagnose(arguments: Sequence[str]) -> None:
    """Run the command.

    Raises:
        ConfigError: A folder or file cannot be used.
    """
    options = parser().parse_args(arguments)
    # not at the top: help needs none of it
    from lrlhf.apps.lab.diagnosis import diagnose as diagnosed  # noqa: PLC0415
    from lrlhf.apps.lab.run_files import RunFiles, check_output, plain_json, write_json  # noqa: PLC0415

    check_output("json", options.json)
    try:
        run = RunFiles(options.run)
        result = diagnosed(run)
        if options.gradients:
            from lrlhf.apps.lab.gradient_signal import gradient_signal  # noqa: PLC0415

            signals = gradient_signal(run, prompts=options.gradients)
            result = result._replace(
                facts=result.facts
                | {
                    f"prompts until the gradient of {name} is half signal": own.noise_scale
                    for name, own in signals.items()
                }
            )
    except (ValueError, OSError, ImportError) as error:
        raise ConfigError(str(error)) from error
    lines = [result.verdict, ""]
    for number, cause in enumerate(result.causes, start=1):
        text = f"{number}. {cause.name}: {cause.evidence}. Change: {cause.change}."
        lines += [*textwrap.wrap(text, 100, subsequent_indent="   "), ""]
    width = max(map(len, result.facts))
    known = {name: value for name, value in result.facts.items() if not math.isnan(value)}
    lines += [f"{name:{width}}  {value:.3g}" for name, value in known.items()]
    sys.stdout.write(safe("\n".join(lines)) + "\n")
    if options.json:
        write_json(options.json, plain_json(result))


def _count(text: str) -> int:
    if (count := int(text)) < 2:
        raise argparse.ArgumentTypeError(f"{text} is less than 2")
    return count
