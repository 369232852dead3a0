from pathlib import Path

from lightning.pytorch.loggers import CSVLogger

from lrlhf.callbacks.output_files import output_folder
from tests.callbacks.fakes import trainer


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
