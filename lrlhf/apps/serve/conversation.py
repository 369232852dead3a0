"""A conversation with a policy: its turns, and answers that are shown as they come."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor
from transformers import GenerationConfig, TextStreamer

from lrlhf.cli.trained_policy import TrainedPolicy, load_named
from lrlhf.datamodules.rows.bad_rows import BadRow
from lrlhf.datamodules.rows.chat import ChatFormat
from lrlhf.models import context_length, eos_token_ids, plain_model, ruled_out_ids
from lrlhf.modules.policy.generate import PromptReader
from lrlhf.options.errors import ConfigError, hint
from lrlhf.rollout import Sampling
from lrlhf.rollout.engines.transformers_engine import plain_generation_config
from lrlhf.secrets import safe

_SETTINGS: dict[str, Callable[[str], Any]] = {"temperature": float, "max_new_tokens": int}


class Conversation:
    """What was said, and what is said next.

    Args:
        trained: Answers.
        sampling: How.
        system: System prompt; None: there is none.
        plain: Go on with the text instead of rendering a chat.
    """

    def __init__(
        self, trained: TrainedPolicy, sampling: Sampling, *, system: str | None, plain: bool
    ) -> None:
        policy = trained.policy
        template = trained.prompts.get("chat_template")
        self._policy = policy
        self._sampling = sampling
        self._system = system
        self._is_chat = not plain and bool(template or policy.tokenizer.chat_template)
        options = trained.prompts.get("chat_template_kwargs") or {}
        self._reader = PromptReader(policy, ChatFormat(policy.tokenizer, template, options))
        self._turns: list[tuple[str, str | None]] = []
        """What the user said and what was answered."""
        self._limit = context_length(policy.model)
        how = "its chat template" if self._is_chat else "no chat template: it goes on with the text"
        self.opening = f"{trained.origin}: {how}, temperature {sampling.temperature:g}"

    def say(self, text: str) -> None:
        """Answer a turn of the user, on standard output."""
        self._turns.append((text, None))
        try:
            ids = self._prompt_ids()
        except (BadRow, ValueError) as problem:
            self._turns.pop()
            _remark(f"not said: {getattr(problem, 'detail', problem)}")
            return
        room = self._sampling.max_new_tokens
        if self._limit is not None:
            room = min(room, self._limit - ids.shape[1])
        if room < 1:
            self._turns.pop()
            _remark(f"not said: it has {ids.shape[1]} tokens, and the model reads {self._limit}")
            return
        answer, ending = self._generate(ids, room)
        self._turns[-1] = (text, answer)
        sys.stdout.write("\n")
        sys.stdout.flush()
        if ending:
            _remark(ending)

    def command(self, name: str, value: str) -> str:
        """Change a setting or forget the turns; returns a remark."""
        if name == "reset":
            self._turns.clear()
            return "the conversation is forgotten"
        if name == "system":
            if not self._is_chat:
                return "without a chat template there is no system prompt"
            self._system = value or None
            return "system prompt set" if value else "system prompt removed"
        if name not in _SETTINGS:
            return (
                f"no command /{name}{hint(name, ['reset', 'system', 'help', 'exit', *_SETTINGS])}"
            )
        try:
            self._sampling = replace(self._sampling, **{name: _SETTINGS[name](value)})
        except ValueError as error:
            return str(error).removeprefix("sampling.")
        return f"{name} is {value}"

    def _prompt_ids(self) -> Tensor:
        """Return the prompt, `[1, P]`; the oldest turns go where they leave no room."""
        while True:
            ids = self._reader.read({"prompt": self._prompt()}).input_ids
            limit = self._limit or len(ids) * 2 + 2 * self._sampling.max_new_tokens
            needed = len(ids) + min(self._sampling.max_new_tokens, limit // 2)
            if needed <= limit or len(self._turns) == 1:
                device = next(self._policy.model.parameters()).device
                return torch.from_numpy(ids).long()[None].to(device)
            del self._turns[0]
            _remark(f"the model reads {self._limit} tokens: the oldest turn is forgotten")

    def _prompt(self) -> Any:
        if not self._is_chat:
            return "".join(f"{user_text}{answered or ''}" for user_text, answered in self._turns)
        system = [] if self._system is None else [{"role": "system", "content": self._system}]
        turns = [
            {"role": role, "content": content}
            for user_text, answered in self._turns
            for role, content in (("user", user_text), ("assistant", answered))
            if content is not None
        ]
        return [*system, *turns]

    @torch.no_grad()
    def _generate(self, ids: Tensor, max_new_tokens: int) -> tuple[str, str]:
        """Show an answer as it comes; returns it, and a remark on how it ended."""
        model, tokenizer = plain_model(self._policy.model), self._policy.tokenizer
        eos = sorted(eos_token_ids(model, tokenizer))
        sampling = self._sampling
        drawn: dict[str, Any] = {"do_sample": False}
        if sampling.temperature > 0:
            drawn = {"do_sample": True, "temperature": sampling.temperature}
            drawn |= {"top_p": sampling.top_p, "top_k": 0}
        config = GenerationConfig(  # type: ignore[no-untyped-call]
            **drawn,
            max_new_tokens=max_new_tokens,
            eos_token_id=eos,
            pad_token_id=tokenizer.pad_token_id,
            suppress_tokens=list(ruled_out_ids(model.config)) or None,
            stop_strings=list(sampling.stop) or None,
        )
        printer = _Printer(tokenizer)
        ending = ""
        try:
            with plain_generation_config(model):
                model.generate(  # type: ignore[operator]
                    input_ids=ids,
                    attention_mask=torch.ones_like(ids),
                    generation_config=config,
                    streamer=printer,
                    tokenizer=tokenizer,
                )
        except KeyboardInterrupt:
            printer.end()  # type: ignore[no-untyped-call]
            ending = "stopped"
        response_ids = printer.ids
        if not ending and len(response_ids) >= max_new_tokens and response_ids[-1] not in eos:
            ending = f"cut off after {len(response_ids)} tokens"
        return str(tokenizer.decode(response_ids, skip_special_tokens=True)), ending


class _Printer(TextStreamer):
    """Shows tokens as they come, and keeps them."""

    def __init__(self, tokenizer: Any) -> None:
        super().__init__(tokenizer, skip_prompt=True, skip_special_tokens=True)
        self.ids: list[int] = []
        self._is_prompt = True

    def put(self, value: Tensor) -> None:
        if not self._is_prompt:
            self.ids += value.flatten().tolist()
        self._is_prompt = False
        super().put(value)  # type: ignore[no-untyped-call]

    def on_finalized_text(self, text: str, stream_end: bool = False) -> None:
        del stream_end
        sys.stdout.write(safe(text))
        sys.stdout.flush()


def open_conversation(options: argparse.Namespace) -> Conversation:
    """Load what the options name.

    Raises:
        ConfigError: Nothing that generates is there, or an option is out of its range.
    """
    try:
        sampling = Sampling(
            temperature=options.temperature,
            top_p=options.top_p,
            max_new_tokens=options.max_new_tokens,
        )
    except ValueError as error:
        raise ConfigError(str(error).removeprefix("sampling.")) from error
    trained = load_named(options)
    if trained.sampling is not None:
        sampling = replace(sampling, stop=trained.sampling.stop)
    if options.seed is not None:
        torch.manual_seed(options.seed)
    else:
        torch.seed()
    system = options.system or trained.prompts.get("system_prompt")
    return Conversation(trained, sampling, system=system, plain=options.plain)


def _remark(text: str) -> None:
    sys.stderr.write(f"[{safe(text)}]\n")
    sys.stderr.flush()
