"""`lrlhf inspect` of a run that was really trained, with an image in a prompt."""

import base64
import io
import json
import re
import zlib
from pathlib import Path
from typing import Any

import pytest
import yaml
from PIL import Image

from lrlhf.cli import run
from tests.cli.experiment import experiment


def data_of(page: str) -> dict[str, Any]:
    found = re.search(r'id="data">(.*?)</script>', page, re.DOTALL)
    assert found is not None
    loaded: dict[str, Any] = json.loads(zlib.decompress(base64.b64decode(found[1])))
    return loaded


@pytest.mark.parametrize("kl_coef", [0.0, 0.05])
def test_a_trained_run_is_inspected_with_its_image_and_its_token_values(
    kl_coef: float, model_folder: str
) -> None:
    Path("train.jsonl").write_text(
        "".join(f"{json.dumps({'prompt': f'{n} + 1 = '})}\n" for n in range(4))
    )
    config = experiment(
        "RLOO",
        {"policy": model_folder, "reference": {"kl_coef": kl_coef}},
        {"train": "train.jsonl", "batch_size": 2},
        reward="tests.modules.policy_runs.letters",
        default_root_dir="here",
        logger={"class_path": "ResumingCSVLogger", "init_args": {"save_dir": "here"}},
        callbacks=[{"class_path": "RolloutLog", "init_args": {"token_values": 3}}],
        max_steps=2,
        log_every_n_steps=1,
    )
    Path("run.yaml").write_text(yaml.safe_dump(config))
    assert run(["fit", "--config", "run.yaml"]) == 0
    lines = [json.loads(line) for line in Path("here/rollouts.jsonl").read_text().splitlines()]
    assert len(lines) == 2 * 2 * 2  # steps, prompts, responses
    # a policy of text shows none: as one that sees would have written it
    Image.new("RGB", (800, 400), (255, 0, 0)).save("here/red.png")
    lines[0]["media"] = [str(Path("here/red.png").resolve())]
    Path("here/rollouts.jsonl").write_text("".join(f"{json.dumps(line)}\n" for line in lines))

    assert run(["inspect", "here"]) == 0

    data = data_of(Path("here/inspect.html").read_text())
    assert data["responses"]["size"] == len(lines)
    assert "perf/memory_gib" in json.dumps(data)
    (uri,) = data["images"].values()
    with Image.open(io.BytesIO(base64.b64decode(uri.partition(",")[2]))) as shown:
        assert shown.size == (384, 192)
        assert shown.getpixel((5, 5))[0] > 250
    tokens = data["responses"]["tokens"]
    assert len(tokens) == 3 * 2
    always = {"texts", "advantage", "engine_logprob"}
    penalized = {"logprob", "ref_logprob"} if kl_coef else set()
    assert {name for own in tokens.values() for name in own} == always | penalized
