"""A vLLM server beside the trainer, and what becomes of a run when it dies."""

import os
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import lightning as L
import pytest
import torch
from torch import Tensor
from transformers import PreTrainedTokenizerBase

from lrlhf.callbacks import VLLMWeightSync
from lrlhf.modules import RLOO
from lrlhf.modules.optimizers import OptimizerConfig
from lrlhf.rewards import Rewards
from lrlhf.rollout import EngineFailure, Sampling, VLLMServerEngine
from lrlhf.rollout.engines.synced_engine import without_recovery
from lrlhf.rollout.vllm.process import ServerProcess
from tests.modules.policy_runs import fit, letters, weights
from tests.vllm.models import build_policy, disturb, largest_gap, new_server, prompts_of

LONG = "a prompt that fills more than one block of the prefix cache"
STEPS = 5


def test_pushes_through_the_socket_agree_with_the_policy_each_time(
    server: VLLMServerEngine, tokenizer: PreTrainedTokenizerBase
) -> None:
    policy = server._policy
    assert policy is not None
    prompts = prompts_of(LONG, "short", tokenizer=tokenizer)
    for version in range(1, 4):
        disturb(policy, seed=version)
        server.push(version)
        rollout = server.generate(
            prompts,
            Sampling(max_new_tokens=12, temperature=0.8),
            num_generations=2,
            seeds=range(4),
        )
        assert largest_gap(policy, rollout, 0.8) < 1e-4
        assert rollout.weight_version is not None
        assert rollout.weight_version.tolist() == [version] * 4
    assert server.probe().mean < 1e-4


def test_every_route_that_changes_anything_asks_for_the_token(server: VLLMServerEngine) -> None:
    assert server._client is not None
    url = server._client.url
    assert httpx.get(f"{url}/health").status_code == 200
    for path in ("/collective_rpc", "/reset_prefix_cache", "/v1/completions", "/pause"):
        assert httpx.post(f"{url}{path}", json={}).status_code == 401
        wrong = {"Authorization": "Bearer " + "0" * 64}
        assert httpx.post(f"{url}{path}", json={}, headers=wrong).status_code == 401
    assert httpx.get(f"{url}/v1/models").status_code == 401


def test_a_server_that_someone_started_takes_weights_too(
    server: VLLMServerEngine,
    tokenizer: PreTrainedTokenizerBase,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    assert server._client is not None
    token = server._client._http.headers["Authorization"].removeprefix("Bearer ")
    monkeypatch.setenv("VLLM_API_KEY", token)
    policy = build_policy(tokenizer, seed=7)
    guest = VLLMServerEngine(url=server._client.url, start_timeout=10)
    guest.attach(policy, tokenizer)
    guest.push(3)
    assert guest.probe().mean < 1e-4
    # the one that was there first notices that its weights are gone
    with (
        pytest.raises(EngineFailure, match="other weights than it was given here"),
        without_recovery(),
    ):
        server.generate(
            prompts_of(LONG, tokenizer=tokenizer),
            Sampling(max_new_tokens=4),
            num_generations=1,
            seeds=[0],
        )
    guest.close()
    assert server._client.is_healthy()
    monkeypatch.setenv("VLLM_API_KEY", "wrong")
    stranger = VLLMServerEngine(url=server._client.url, start_timeout=10)
    stranger.attach(policy, tokenizer)
    with pytest.raises(PermissionError, match="wants another token"):
        stranger.push(0)


class Faults(L.Callback):
    """Kills a part of the server at three moments of a run."""

    def __init__(self) -> None:
        self.done: list[str] = []

    def on_train_batch_start(
        self, trainer: L.Trainer, module: Any, batch: Any, batch_idx: int
    ) -> None:
        engine = module.engine
        if trainer.global_step == 1:
            self._kill_on(engine, "_respond", "in the middle of generation")
        elif trainer.global_step == 2:
            kill_server(engine._process)
            self.done.append("between iterations")
        elif trainer.global_step == 3:
            self._kill_on(engine, "_send", "during a push")

    def _kill_on(self, engine: VLLMServerEngine, name: str, when: str) -> None:
        original = getattr(engine, name)

        def once(first: Any, *rest: Any) -> Any:
            setattr(engine, name, original)
            self.done.append(when)
            if name == "_send":
                return original(killing(first, engine._process))
            client = engine._client
            assert client is not None
            checked, answers = client._checked, []

            def check_and_kill(answer: httpx.Response) -> Any:
                answers.append(answer)
                if len(answers) == 3:
                    kill_server(engine._process)
                return checked(answer)

            client._checked = check_and_kill  # type: ignore[method-assign]
            return original(first, *rest)

        setattr(engine, name, once)


def killing(
    tensors: Iterator[tuple[str, Tensor]], process: ServerProcess | None
) -> Iterator[tuple[str, Tensor]]:
    for index, pair in enumerate(tensors):
        if index == 2:
            kill_server(process)
        yield pair


def kill_server(process: ServerProcess | None) -> None:
    """Kill the engine's processes but not its guard, as a crash would."""
    assert process is not None
    assert process._guard is not None
    for pid in process.pids():
        if pid != process._guard.pid:
            os.kill(pid, signal.SIGKILL)


def run(
    tokenizer: PreTrainedTokenizerBase, folder: Path, callbacks: list[L.Callback], **options: Any
) -> tuple[RLOO, L.Trainer]:
    folder.mkdir()
    prompts = folder / "prompts.jsonl"
    prompts.write_text("\n".join(f'{{"prompt": "say {word}"}}' for word in "abcdefghijklmnop"))
    module = RLOO(
        build_policy(tokenizer),
        Rewards([letters]),
        tokenizer=tokenizer,
        engine=new_server(folder),
        num_generations=4,
        sampling=Sampling(max_new_tokens=8),
        optimizer=OptimizerConfig(lr=1e-2),
        seed=1,
        **options,
    )
    trainer = fit(
        module, prompts, folder, steps=STEPS, callbacks=[*callbacks, VLLMWeightSync(probe_every=1)]
    )
    return module, trainer


@pytest.mark.exhaustive
def test_a_run_whose_server_is_killed_three_times_ends_with_the_same_weights(
    tokenizer: PreTrainedTokenizerBase, tmp_path: Path
) -> None:
    undisturbed, trainer = run(tokenizer, tmp_path / "undisturbed", [])
    assert trainer.callback_metrics["mismatch/max"] < 1e-4
    # the next responses are generated while the present ones train
    _, ahead = run(tokenizer, tmp_path / "ahead", [], rollout_ahead=1)
    assert int(ahead.callback_metrics["sync/age"]) == 1
    faults = Faults()
    disturbed, _ = run(tokenizer, tmp_path / "disturbed", [faults])
    assert faults.done == ["in the middle of generation", "between iterations", "during a push"]
    assert disturbed.engine.restarts == 3
    expected = weights(undisturbed.policy)
    for name, weight in weights(disturbed.policy).items():
        torch.testing.assert_close(weight, expected[name], atol=1e-5, rtol=1e-4)
