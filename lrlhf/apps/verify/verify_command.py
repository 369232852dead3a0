"""``lrlhf verify``: which weights sampled these rollouts, and is what was made of them right?"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

from lrlhf.apps.lab.run_files import check_output, write_json
from lrlhf.cli.command_parser import command_parser
from lrlhf.foreign_files import TRUST_FLAG
from lrlhf.options.errors import ConfigError
from lrlhf.secrets import safe

_EPILOG = """\
ROLLOUTS is a run of lrlhf, a dump, or the file or folder that another trainer wrote (TRL, verl,
OpenRLHF, prime-rl, or rows of JSON with token ids). PATH is a run, a checkpoint, a folder,
package:<module> or a hub id. The first --weights should have sampled the rollouts.

exit status: 0 no fault was found, 3 there is one, 2 a file or an option cannot be used

examples:
  lrlhf verify runs/a --weights new=runs/a/export/final --weights base=my-org/base --algorithm rloo
  lrlhf verify token_exports/step_12 --weights k=weights/step_11 --weights k-1=weights/step_10
  lrlhf verify dump.jsonl --weights policy=out/checkpoint-10 --algorithm grpo --json verify.json
"""


def parser() -> argparse.ArgumentParser:
    """Return what reads the options."""
    parser = command_parser("verify", "Check rollouts of any trainer against weights.", _EPILOG)
    add = parser.add_argument
    add("rollouts", metavar="ROLLOUTS", type=Path, help="what to check")
    add(
        *("--weights", "-w"),
        metavar="NAME=PATH",
        action="append",
        required=True,
        help="weights that may have sampled the rollouts; may be given again",
    )
    add("--algorithm", help="whose advantages they are, such as rloo or grpo; default: any")
    add("--kl", choices=("k1", "k2", "k3"), help="form of the recorded KL; default: any")
    add("--kl_in", choices=("reward", "loss"), help="where the KL penalty is")
    add("--kl_coef", type=float, default=0.0, help="its strength, where it is in the reward")
    add("--reference", metavar="NAME", help="the weights that the KL is to, where not recorded")
    add("--truncated", choices=("train", "mask"), help="what becomes of truncated responses")
    add("--max_new_tokens", type=int, help="tokens that a response may have")
    add(
        "--loss_average",
        choices=("token_mean", "sequence_mean"),
        help="how recorded losses are averaged; default: either",
    )
    add("--temperature", type=float, default=1.0, help="of rows that do not record theirs")
    add("--top_p", type=float, default=1.0, help="likewise")
    add("--top_k", type=int, default=0, help="likewise; 0: all tokens")
    add("--min_p", type=float, default=0.0, help="likewise")
    add(
        "--engine_dtype",
        choices=("float32", "bfloat16", "float16"),
        help="type that the engine computed in, whose rounding is allowed for; default: that of "
        "the weights",
    )
    add("--rows", type=int, default=256, help="rows that the models compute; default: 256")
    add("--device", default="auto", help="auto (default): a GPU where there is one")
    add(TRUST_FLAG, action="store_true", help="run code that comes with a model")
    add("--json", metavar="FILE", help="write all conclusions with all their rows")
    return parser


def run_verify(arguments: Sequence[str]) -> None:
    """Run the command.

    Raises:
        ConfigError: The rollouts, a model or an option cannot be used.
        SystemExit: With 3 if there is a fault.
    """
    options = parser().parse_args(arguments)
    named = {name: path for name, _, path in (text.partition("=") for text in options.weights)}
    if len(named) < len(options.weights) or not all(name and path for name, path in named.items()):
        raise ConfigError("--weights takes a name of its own and a path, such as base=my-org/base")
    if options.rows < 1 or not options.temperature > 0:
        raise ConfigError("--rows must be 1 or more, and --temperature above 0")
    check_output("json", options.json)
    # not at the top: help needs none of it
    import torch  # noqa: PLC0415

    from lrlhf.apps.verify.candidate_weights import Candidate  # noqa: PLC0415
    from lrlhf.apps.verify.formula_checks import FORMULAS  # noqa: PLC0415
    from lrlhf.apps.verify.rollout_rows import Padding, read_rollouts  # noqa: PLC0415
    from lrlhf.apps.verify.verification import Settings, verify  # noqa: PLC0415
    from lrlhf.cli.trained_policy import load_trained  # noqa: PLC0415
    from lrlhf.rollout import Sampling  # noqa: PLC0415

    if options.algorithm is not None and options.algorithm not in FORMULAS:
        raise ConfigError(f"--algorithm is {options.algorithm}; known are {', '.join(FORMULAS)}")
    candidates = []
    for name, path in named.items():
        try:
            policy = load_trained(
                path, device=options.device, trust_remote_code=options.trust_remote_code
            ).policy
        except ConfigError as error:
            raise ConfigError(f"--weights {name}: {error}") from error
        stored = next(policy.model.parameters()).dtype
        # weights in float32 are those of engines that compute in bfloat16, too
        dtype = None if stored == torch.float32 else stored
        if options.engine_dtype is not None:
            dtype = getattr(torch, options.engine_dtype)
        candidates.append(Candidate(name, policy.model.float(), policy.tokenizer, dtype))
    pad = candidates[0].tokenizer.pad_token_id
    given = {
        name: value for name, value in vars(options).items() if name in Settings.__annotations__
    }
    try:
        sampling = Sampling(
            **{name: getattr(options, name) for name in ("temperature", "top_p", "top_k", "min_p")}
        )
        rows = read_rollouts(options.rollouts, Padding(pad, candidates[0].end_ids))
        settings = Settings(**given, sampling=sampling, most_rows=options.rows)
        result = verify(rows, candidates, settings)
    except (ValueError, OSError) as error:
        raise ConfigError(str(error)) from error
    sys.stdout.write(safe(f"{result.as_text()}\n"))
    if options.json is not None:
        write_json(options.json, result.as_json())
    if result.faults:
        raise SystemExit(3)
