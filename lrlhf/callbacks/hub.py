"""Exports that are pushed to the Hugging Face hub."""

from __future__ import annotations

import shlex
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from huggingface_hub import HfApi, get_token, is_offline_mode
from huggingface_hub.errors import HTTPError  # type: ignore[attr-defined]  # its HTTP client's
from huggingface_hub.utils import validate_repo_id  # type: ignore[attr-defined]  # is in __all__

from lrlhf.options.conversion import settings
from lrlhf.secrets import hide

_FAILURES = (HTTPError, OSError, RuntimeError, ValueError)
"""What the hub's client raises: for large files ``RuntimeError``, for metadata ``ValueError``."""


class HubError(ValueError):
    """The hub cannot be reached, or refuses; the message says why in one line."""


@settings
@dataclass(frozen=True, kw_only=True)
class HubRepo:
    """A model on the hub.

    Whose token it is pushed with, the environment says (``HF_TOKEN``, or ``hf auth login``).

    Args:
        repo_id: ``owner/name``.
        private: Of a model that does not exist yet; None: as the owner's settings say.
        revision: Branch, made where it does not exist; None: ``main``.

    Raises:
        ValueError: No model can have this name.
    """

    repo_id: str
    private: bool | None = None
    revision: str | None = None

    def __post_init__(self) -> None:
        try:
            validate_repo_id(self.repo_id)
        except ValueError as error:
            raise ValueError(f"push_to_hub is {self.repo_id!r}: {_line(error)}") from error
        if "/" not in self.repo_id:
            raise ValueError(f"push_to_hub is {self.repo_id!r}; give owner/name")

    def check(self) -> None:
        """Refuse what is known to fail without asking the hub.

        Raises:
            HubError: The hub is not to be reached from here, or nobody is logged in.
        """
        if is_offline_mode():
            raise HubError(
                f"push_to_hub is {self.repo_id}, but HF_HUB_OFFLINE is set: unset it, or leave "
                "push_to_hub out and push the export later with `hf upload`"
            )
        if get_token() is None:
            raise HubError(
                f"push_to_hub is {self.repo_id}, but nobody is logged in at the hub on this "
                "machine: set HF_TOKEN, or run `hf auth login`"
            )

    def create(self) -> None:
        """Make sure that the model exists, and the branch.

        Raises:
            HubError: It does not, and cannot be made.
        """
        self.check()
        try:
            HfApi().create_repo(self.repo_id, private=self.private, exist_ok=True)
            if self.revision is not None:
                HfApi().create_branch(self.repo_id, branch=self.revision, exist_ok=True)
        except _FAILURES as error:
            raise HubError(f"push_to_hub {self.repo_id} is refused: {_line(error)}") from error

    def push(self, folder: Path, *, step: int | None) -> str:
        """Upload a folder as one commit; returns its address.

        Raises:
            HubError: It is not there; the message has the command that tries again.
        """
        try:
            commit = HfApi().upload_folder(
                repo_id=self.repo_id,
                folder_path=folder,
                revision=self.revision,
                commit_message="Export" if step is None else f"Step {step}",
            )
        except _FAILURES as error:
            raise HubError(
                f"{folder} was not pushed to {self.repo_id}: {_line(error)}. The export is "
                f"complete; push it with: {self.command(folder)}"
            ) from error
        return str(commit.commit_url)

    def command(self, folder: Path) -> str:
        """Return the shell command that uploads a folder."""
        options: list[Any] = ["hf", "upload", self.repo_id, folder, "."]
        options += [] if self.revision is None else ["--revision", self.revision]
        options += ["--private"] if self.private else []
        return shlex.join(map(str, options))


def _line(error: BaseException) -> str:
    errors = [error, *([error.__cause__] if isinstance(error, RuntimeError) else [])]
    texts = (
        " ".join(str(each).split()).rstrip(".") or type(each).__name__ for each in errors if each
    )
    return hide(": ".join(texts))
