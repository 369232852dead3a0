"""Tokens and passwords are in no file that a run writes, and in no line that it prints."""

import logging
from pathlib import Path
from typing import Any, ClassVar

import lightning as L
import pytest
import torch
import yaml
from jsonargparse import Namespace

from lrlhf.cli import run
from lrlhf.run.log_rows import without_secrets
from lrlhf.secrets import HIDDEN, hide, is_secret_name, safe
from tests.cli.conftest import CONFIG
from tests.cli.toys import ToyModule, ToyPolicy

TOKEN = "hf_9jWq3LrTzAbCdEfG"
PASSWORD = "correct-horse-battery"


class Sending(L.Callback):
    """Has options of the kinds that hold secrets, and some that hold none."""

    received: ClassVar[list["Sending"]] = []

    def __init__(
        self, api_key: str = "", url: str = "", note: str = "", token_env: str = "ENV",
        eos_token: str = "</s>",
    ) -> None:  # fmt: skip
        self.api_key, self.url, self.note = api_key, url, note
        self.token_env, self.eos_token = token_env, eos_token
        self.received.append(self)

    def on_train_start(self, *_: Any) -> None:
        logging.getLogger("lrlhf.test").warning("sending to %s with %s", self.url, self.api_key)


class Keeping(ToyModule):
    """Keeps a secret among its hyperparameters, and may quote it."""

    def __init__(self, policy: ToyPolicy, *, password: str, lr: float = 0.1) -> None:
        super().__init__(policy, lr=lr)
        self.save_hyperparameters()
        self.password = password

    def training_step(self, batch: torch.Tensor) -> torch.Tensor:
        if self.password.endswith("!"):
            raise RuntimeError(f"the service does not know {self.password}")
        return super().training_step(batch)


def write(path: Path, *, password: str, **options: str) -> None:
    config = yaml.safe_load(CONFIG)
    config["model"]["class_path"] = f"{__name__}.Keeping"
    config["model"]["init_args"]["password"] = password
    callback = {"class_path": f"{__name__}.Sending", "init_args": options}
    config["trainer"]["callbacks"].append(callback)
    path.write_text(yaml.safe_dump(config))


def test_no_file_and_no_line_of_a_run_has_a_secret(
    config: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("LRLHF_REWARD_TOKEN", TOKEN)
    key = "sk-0123456789abcdef"
    url = f"https://me:{PASSWORD}@rewards.example:8000/v1"
    write(config, password="tr0ub4dor&3", api_key=key, url=url, note=f"as {TOKEN}")
    Sending.received.clear()
    assert run(["fit", "--config", config.name]) == 0

    # the run itself has them
    (sending,) = Sending.received
    assert (sending.api_key, sending.url) == (key, url)
    files = [path for path in Path().rglob("*") if path.is_file() and path.name != config.name]
    assert len(files) >= 2
    written = b"".join(path.read_bytes() for path in files)
    saved = yaml.safe_load(Path("runs/toy/config.yaml").read_text())
    assert saved["trainer"]["callbacks"][1]["init_args"] == {
        "api_key": HIDDEN,
        "url": f"https://{HIDDEN}@rewards.example:8000/v1",
        "note": f"as {HIDDEN}",
        "token_env": "ENV",
        "eos_token": "</s>",
    }
    assert saved["model"]["init_args"]["password"] == HIDDEN
    kept = torch.load("checkpoints/last.ckpt", weights_only=True)["hyper_parameters"]
    assert kept["password"] == HIDDEN
    said = "".join(capsys.readouterr())
    assert f"sending to https://{HIDDEN}@rewards.example:8000/v1 with {HIDDEN}" in said
    assert "trainer.callbacks[1].init_args.api_key" in said
    assert "model.init_args.password" in said
    for secret in (TOKEN, PASSWORD, key, "tr0ub4dor&3"):
        assert secret.encode() not in written
        assert secret not in said


def test_errors_do_not_quote_secrets(config: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write(config, password="open sesame now!")
    assert run(["fit", "--config", config.name], debug=True) == 1
    said = "".join(capsys.readouterr())
    assert f"the service does not know {HIDDEN}" in said
    assert "sesame" not in said


def test_a_refused_option_is_not_quoted(config: Path, capsys: pytest.CaptureFixture[str]) -> None:
    config.write_text(CONFIG.replace("max_steps: 1", "api_key: shibboleth-7"))
    assert run(["fit", "--config", config.name, "--model.lr=x", "--a.token=hunter2hunter2"]) == 2
    said = "".join(capsys.readouterr())
    assert "shibboleth" not in said
    assert "hunter2" not in said


SECRET = (
    "api_key apikey token auth_token hf_token secret client_secret password aws_secret_access_key "
    "PASSWD wandb_api_key private_key credentials"
)
OTHER = (
    "eos_token pad_token max_tokens token_env token_file tokenizer key token_clip per_token "
    "api_key_env stop_token_ids image_token keys"
)


def test_names_of_secrets_and_of_other_things() -> None:
    assert [name for name in SECRET.split() if not is_secret_name(name)] == []
    assert [name for name in OTHER.split() if is_secret_name(name)] == []


def test_a_config_is_copied_and_not_changed() -> None:
    # a password may be digits; a short number under such a name is an id
    kept = {"c": None, "token": 42, "api_key": True}
    a, b = [{"token": "abc", "ids": [1, 2]}], Namespace(secret=["x", "y"])
    shown = without_secrets(Namespace(a=a, b=b, password=12345678, **kept))
    b = Namespace(secret=[HIDDEN, HIDDEN])
    assert shown == Namespace(a=[{"token": HIDDEN, "ids": [1, 2]}], b=b, password=HIDDEN, **kept)
    assert a[0]["token"] == "abc"


def test_addresses_without_a_password_stay_as_they_are() -> None:
    text = "see https://example.org/a@b?c=d@e and mail me@example.org, s3://bucket/x"
    assert hide(text) == text


def test_what_a_terminal_would_act_on_is_escaped() -> None:
    hostile = "row 3: '\x1b]0;owned\x07\x1b[2J\u202egnp.exe\r\udcff'\nnext\tline é 文"
    shown = safe(hostile)
    assert shown == ("row 3: '\\x1b]0;owned\\x07\\x1b[2J\\u202egnp.exe\\r\\udcff'\nnext\tline é 文")


@pytest.mark.parametrize(
    "text",
    [
        "\N{WOMAN}\N{ZERO WIDTH JOINER}\N{PERSONAL COMPUTER}",
        "\u0645\u06cc\N{ZERO WIDTH NON-JOINER}\u062e\u0648\u0627\u0647\u0645",  # Persian
        "10\N{NO-BREAK SPACE}000\N{THIN SPACE}\N{EURO SIGN}",
        "\u6f22\N{IDEOGRAPHIC SPACE}\u5b57",
        "a\N{LEFT-TO-RIGHT MARK}b\N{SOFT HYPHEN}c",
    ],
)
def test_ordinary_text_is_shown_as_it_is(text: str) -> None:
    assert safe(text) == text


def test_variables_that_hold_no_secret_change_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in {
        "PAD_TOKEN": "<|endoftext|>",
        "SORT_KEY": "difficulty",
        "DATA_KEY": "/data/of/a/run",
        "HF_TOKEN": "two words of it",
        "SOME_TOKEN": "false",
    }.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setenv("GITHUB_TOKEN", "runs4242")
    text = "false <|endoftext|> by difficulty in /data/of/a/run, two words of it, runs42429"
    assert hide(text) == text
    assert hide("as runs4242: no") == f"as {HIDDEN}: no"
