import json
from pathlib import Path

import numpy as np
import pytest
import torch

from lrlhf.callbacks.output_files import json_line


def test_a_line_holds_every_plain_type() -> None:
    line = json_line(
        {
            "tensor": torch.tensor([1, 2]),
            "array": np.array([0.5]),
            "number": np.float32(0.25),
            "nested": {"a": (True, None)},
            "path": Path("x/y"),
            "text": "ü\n",
        }
    )
    assert "\n" not in line
    assert "ü" in line
    assert json.loads(line) == {
        "tensor": [1, 2],
        "array": [0.5],
        "number": 0.25,
        "nested": {"a": [True, None]},
        "path": "x/y",
        "text": "ü\n",
    }


def test_what_is_not_finite_becomes_null() -> None:
    line = json_line({"a": float("nan"), "b": [float("-inf")], "c": torch.tensor(float("inf"))})
    assert line == '{"a": null, "b": [null], "c": null}'


def test_half_a_surrogate_pair_survives_a_round_trip() -> None:
    text = "x\ud83d"
    assert json.loads(json_line({"a": text}).encode()) == {"a": text}


def test_a_value_without_a_json_form_is_named() -> None:
    with pytest.raises(ValueError, match=r"'columns\.images\[1\]' holds a object"):
        json_line({"columns": {"images": ["x", object()]}})
