"""Environments of verifiers, which hold the conversation themselves."""

from __future__ import annotations

import importlib
import os
import uuid
from collections.abc import Mapping
from typing import Any


class VerifiersAgent:
    """An environment of verifiers as an agent, a function for ``model.episodes.agent``.

    verifiers calls the policy through an OpenAI client, in a program of its own, its harness; so
    it is an agent with an endpoint of lrlhf, and no environment. The sum of its rewards is the
    reward of the episode. verifiers' default harness, ``bash``, runs what the policy writes on
    this machine; ``null`` runs the environment's tools alone. Harnesses need the program ``uv``.

    Args:
        config: Of the environment, as verifiers has it, such as ``{"taskset": {"id": "gsm8k"},
            "agent": {"harness": {"id": "null"}, "runtime": {"type": "subprocess"}}}``.

    Raises:
        ValueError: Its tasks have no end.
    """

    def __init__(self, config: Mapping[str, Any]) -> None:
        self._verifiers = importlib.import_module("verifiers.v1")
        self._config = self._verifiers.resolve_env_config(dict(config))
        taskset = self._verifiers.load_environment(self._config).taskset
        if not taskset.bounded:
            raise ValueError(f"the tasks of {self._config.env_id} have no end: bound the taskset")
        self._tasks = list(taskset)

    @property
    def rows(self) -> list[dict[str, Any]]:
        """A row for each task, to train on."""
        return [
            {"prompt": task.data.prompt_text or f"task {number}", "idx": number}
            for number, task in enumerate(self._tasks)
        ]

    async def __call__(self, base_url: str, api_key: str, model: str, idx: int) -> float:
        """Run the policy on a task.

        Args:
            base_url: Of the endpoint of the policy.
            api_key: Of this conversation.
            model: The policy's name there.
            idx: Column of the row: the number of the task.

        Raises:
            RuntimeError: The environment could not go on, or has several agents.
        """
        key = f"LRLHF_{uuid.uuid4().hex}"  # verifiers takes keys from the environment alone
        client = self._verifiers.EvalClientConfig(base_url=base_url, api_key_var=key)
        context = self._verifiers.ModelContext(model=model, client=client)
        environment = self._verifiers.load_environment(self._config)
        os.environ[key] = api_key
        try:
            async with environment.serving():
                episode = await environment.run_episode(self._tasks[idx], context)
        finally:
            del os.environ[key]
        errors = [*episode.errors, *(error for trace in episode.traces for error in trace.errors)]
        if errors or not episode.ok:
            raise RuntimeError(errors[0].message if errors else "the episode is not ok")
        if len(episode.traces) != 1:
            raise RuntimeError(
                f"{len(episode.traces)} agents act in {self._config.env_id}, and an episode has "
                "one reward: take an environment with one agent"
            )
        return float(episode.traces[0].reward)
