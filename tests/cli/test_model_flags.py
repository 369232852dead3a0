"""Flags below a model that is given as text keep the text."""

from pathlib import Path

import pytest

from lrlhf.cli.config_files import read_config_files, with_sources

TEXT = "model: {class_path: RLOO, init_args: {policy: tiny}}\n"
GROUP = "model: {class_path: RLOO, init_args: {policy: {source: tiny}}}\n"


@pytest.mark.parametrize(
    ("files", "flags", "expected"),
    [
        ([TEXT], "--model.policy.lora.r 8", "--model.policy.source=tiny --model.policy.lora.r 8"),
        ([TEXT], "--model.policy.lora.r=8", "--model.policy.source=tiny --model.policy.lora.r=8"),
        (
            [TEXT],
            "--model.policy other --model.policy.dtype=bfloat16",
            "--model.policy.source=other --model.policy.dtype=bfloat16",
        ),
        # whichever comes first
        (
            [TEXT],
            "--model.policy.dtype=bfloat16 --model.policy=other --trainer.max_steps 1",
            "--model.policy.source=other --model.policy.dtype=bfloat16 --trainer.max_steps 1",
        ),
        ([GROUP, TEXT], "--model.policy.lora.r 8", None),
        ([GROUP], "--model.policy.lora.r 8", ""),
        ([TEXT, GROUP], "--model.policy.lora.r 8", ""),
        ([TEXT], "--model.policy.source=x --model.policy.lora.r 8", ""),
        ([TEXT], "--model.policy.class_path=CausalLM --model.policy.lora.r 8", ""),
        ([TEXT], "--model.policy other", ""),
        ([TEXT], "--model.policyx.lora.r 8", ""),
        ([], "--model.policy.lora.r 8", ""),
        ([TEXT], "--model.policy={source:x} --model.policy.lora.r 8", ""),
        (
            [TEXT],
            "--model.init_args.policy.lora.r 8",
            "--model.policy.source=tiny --model.policy.lora.r 8",
        ),
        ([], "--model RewardModel --model.model a --model.model.heads [x]",
         "--model RewardModel --model.model.source=a --model.model.heads [x]"),
    ],
)  # fmt: skip
def test_the_text_becomes_the_source(files: list[str], flags: str, expected: str | None) -> None:
    arguments = ["fit"]
    for number, text in enumerate(files):
        Path(f"{number}.yaml").write_text(text)
        arguments += ["--config", f"{number}.yaml"]
    if expected is None:
        expected = f"--model.policy.source=tiny {flags}"
    changed = with_sources([*arguments, *flags.split()], read_config_files(arguments))
    assert changed == [*arguments, *(expected or flags).split()]
