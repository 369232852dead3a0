"""Exports that go to the hub, and what becomes of them where it does not take them."""

from pathlib import Path

import huggingface_hub
import pytest
import yaml

from lrlhf.arguments import given_arguments
from lrlhf.callbacks import HFExport
from lrlhf.callbacks.hub import HubRepo
from tests.callbacks.fakes import ToyPolicy, batches, trainer
from tests.hub_stand_in import TOKEN, Hub, hub

__all__ = ["hub"]

# of the hub's own client
pytestmark = pytest.mark.filterwarnings("ignore:Use 'content=:DeprecationWarning")


class WithWeights(ToyPolicy):
    def export_pretrained(self, folder: Path) -> None:
        super().export_pretrained(folder)
        (folder / "model.safetensors").write_bytes(b"\x00\x01" * 500)


def test_the_last_export_arrives_whole(tmp_path: Path, hub: Hub) -> None:
    export = HFExport(every_n_steps=2, push_to_hub="me/toy", private=True, license="mit")
    trainer(tmp_path, export).fit(WithWeights(), batches(3))
    assert [(one["name"], one["organization"], one["visibility"]) for one in hub.repos] == [
        ("toy", "me", "private")
    ]
    assert list(hub.commits) == ["me/toy@main"]
    (files,) = hub.commits["me/toy@main"]
    final = tmp_path / "export" / "final"
    assert files == {path.name: path.read_bytes() for path in final.iterdir()}
    assert files["model.safetensors"] == b"\x00\x01" * 500
    assert files["weight.txt"] == b"3"
    assert hub.messages == ["Step 3"]
    (card,) = set(hub.cards)
    assert yaml.safe_load(card.split("---")[1])["license"] == "mit"


def test_each_export_is_a_commit_on_the_branch_where_that_is_wanted(
    tmp_path: Path, hub: Hub
) -> None:
    export = HFExport(every_n_steps=2, push_to_hub="me/toy", push_steps=True, revision="seed1")
    trainer(tmp_path, export).fit(ToyPolicy(), batches(5))
    assert hub.branches == ["me/toy@seed1"]
    commits = hub.commits["me/toy@seed1"]
    assert [files["weight.txt"] for files in commits] == [b"2", b"4", b"5"]
    assert hub.messages == ["Step 2", "Step 4", "Step 5"]


@pytest.mark.parametrize("request_", ["/preupload/", "/lfs/objects", "/commit/"])
def test_a_push_that_fails_keeps_the_export_and_names_the_command(
    tmp_path: Path, hub: Hub, request_: str
) -> None:
    hub.refused = request_
    export = HFExport(push_to_hub="me/toy", private=True, revision="v1")
    with pytest.warns(UserWarning, match="was not pushed") as said:
        trainer(tmp_path, export).fit(WithWeights(), batches(2))
    final = tmp_path / "export" / "final"
    assert (final / "weight.txt").read_text() == "2"
    (message,) = [str(one.message) for one in said if "pushed" in str(one.message)]
    assert "no space left on the hub" in message
    assert message.endswith(f"hf upload me/toy {final} . --revision v1 --private")
    assert "\n" not in message
    assert TOKEN not in message


def test_what_the_hub_refuses_is_said_before_training(tmp_path: Path, hub: Hub) -> None:
    hub.refused = "/repos/create"
    module = ToyPolicy()
    with pytest.raises(ValueError, match=r"push_to_hub me/toy is refused: .*no space left"):
        trainer(tmp_path, HFExport(push_to_hub="me/toy")).fit(module, batches(2))
    assert module.weight == 0


@pytest.mark.usefixtures("hub")
def test_a_hub_that_is_not_there_is_said_before_training(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(huggingface_hub.constants, "ENDPOINT", "http://127.0.0.1:9")
    with pytest.raises(ValueError, match=r"push_to_hub me/toy is refused: .*refused"):
        trainer(tmp_path, HFExport(push_to_hub="me/toy")).fit(ToyPolicy(), batches(2))


def test_offline_is_said_before_training(tmp_path: Path) -> None:
    assert huggingface_hub.is_offline_mode()  # as all tests are
    module = ToyPolicy()
    with pytest.raises(ValueError, match="HF_HUB_OFFLINE is set"):
        trainer(tmp_path, HFExport(push_to_hub="me/toy")).fit(module, batches(2))
    assert module.weight == 0


def test_a_missing_token_is_said_before_training(
    hub: Hub, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.delenv("HF_TOKEN")
    monkeypatch.setattr(huggingface_hub.constants, "HF_TOKEN_PATH", str(tmp_path / "none"))
    with pytest.raises(ValueError, match="set HF_TOKEN, or run `hf auth login`"):
        HubRepo(repo_id="me/toy").create()
    assert hub.repos == []


def test_a_trial_pushes_nothing(tmp_path: Path, hub: Hub) -> None:
    trainer(tmp_path, HFExport(push_to_hub="me/toy"), fast_dev_run=True).fit(
        ToyPolicy(), batches(1)
    )
    assert hub.repos == []
    assert hub.commits == {}


@pytest.mark.parametrize("name", ["toy", "me/toy/more", "me/to y", "", "me/--toy"])
def test_a_name_that_no_model_can_have_is_refused(name: str) -> None:
    with pytest.raises(ValueError, match="push_to_hub is"):
        HFExport(push_to_hub=name)


@pytest.mark.parametrize("option", [{"private": True}, {"revision": "v1"}, {"push_steps": True}])
def test_options_of_a_push_to_nowhere_are_refused(option: dict[str, object]) -> None:
    with pytest.raises(ValueError, match="say where to with push_to_hub"):
        HFExport(**option)  # type: ignore[arg-type]


def test_a_push_of_steps_that_are_never_exported_is_refused() -> None:
    with pytest.raises(ValueError, match="set every_n_steps"):
        HFExport(push_to_hub="a/b", push_steps=True)


def test_no_option_takes_a_token() -> None:
    assert not any("token" in name for name in given_arguments(HFExport(push_to_hub="a/b")) or {})
    with pytest.raises(TypeError, match="token"):
        HFExport(push_to_hub="a/b", token=TOKEN)  # type: ignore[call-arg]
