"""The folder of a logger that cuts its files back when a run is resumed."""

from __future__ import annotations

from pathlib import Path


class LocalFolder:
    """Where the files of a logger are: the folder that it was given, else the run folder."""

    _folder: Path
    _in_run_folder: bool

    def choose_folder(self, save_dir: Path | str | None) -> None:
        """Take a folder, or the working folder until a trainer says which the run folder is.

        Raises:
            ValueError: It has a protocol, and what is there could not be cut back.
        """
        self._in_run_folder = save_dir is None
        self._folder = self._local("." if save_dir is None else save_dir)

    def use_run_folder(self, folder: Path | str) -> None:
        """Write there, unless a folder was given."""
        if self._in_run_folder:
            self._folder = self._local(folder)

    @property
    def save_dir(self) -> str:
        return str(self._folder)

    def _local(self, folder: Path | str) -> Path:
        if "://" in str(folder):
            raise ValueError(
                f"{type(self).__name__} save_dir is {folder}: it needs a folder of this machine, "
                "whose files it can cut back when a run is resumed"
            )
        return Path(folder)
