"""Options that cannot work, and where callbacks write."""

from pathlib import Path
from typing import Any

import pytest
from lightning.pytorch.loggers import CSVLogger

from lrlhf.callbacks import EMA, HFExport, KLControl, RolloutLog, VLLMWeightSync
from lrlhf.callbacks.output_files import output_folder
from tests.callbacks.fakes import trainer


@pytest.mark.parametrize(
    ("callback", "option", "values"),
    [
        (KLControl, "mode", ["adaptiv"]),
        (KLControl, "init_coef", [-1.0, 0.0]),
        (KLControl, "target", [0]),
        (KLControl, "horizon", [0]),
        (EMA, "decay", [1.0, -0.1]),
        (EMA, "every_n_steps", [0]),
        (HFExport, "every_n_steps", [0]),
        (HFExport, "keep", [0]),
        (RolloutLog, "print_every", [0]),
        (RolloutLog, "keep_tensors", [0]),
        (VLLMWeightSync, "every_n_steps", [0]),
        (VLLMWeightSync, "probe_every", [-1]),
        (VLLMWeightSync, "tolerance", [0.0]),
    ],
)
def test_options_that_cannot_work_are_refused(callback: Any, option: str, values: Any) -> None:
    for value in values:
        with pytest.raises(ValueError, match=option):
            callback(**{option: value})


def test_the_output_folder_is_the_argument_then_the_loggers_then_the_root(tmp_path: Path) -> None:
    logger = CSVLogger(tmp_path / "logs", name="run", version=3)
    logged = trainer(tmp_path, logger=logger)
    assert output_folder(logged, "given") == Path("given")
    assert output_folder(logged, None) == tmp_path / "logs" / "run" / "version_3"
    assert output_folder(trainer(tmp_path), None) == tmp_path


def test_a_trial_run_writes_to_a_folder_of_its_own(tmp_path: Path) -> None:
    trial = trainer(tmp_path, fast_dev_run=True)
    assert output_folder(trial, None) == tmp_path / "fast_dev_run"
    assert output_folder(trial, "given") == Path("given/fast_dev_run")
