"""``lrlhf audit``: what is wrong with the data of a config."""

from __future__ import annotations

import sys
from collections.abc import Callable
from types import SimpleNamespace

import lightning as L
from jsonargparse import ArgumentParser, Namespace

from lrlhf.apps.lab.audit import as_json, as_page, as_text, audit
from lrlhf.apps.lab.report_files import check_output, write_json
from lrlhf.datamodules import RowDataModule
from lrlhf.planning.checks.data_rows import taken_from
from lrlhf.planning.checks.mistake import MistakeError
from lrlhf.planning.checks.models import check_models
from lrlhf.planning.config_entries import options_of
from lrlhf.secrets import safe


def add_audit_options(parser: ArgumentParser) -> None:
    """Add what ``audit`` takes beside the options of ``fit``."""
    parser.add_argument("--json", type=str | None, help="file for all findings with all their rows")
    parser.add_argument("--html", type=str | None, help="file for a page of the findings")
    parser.add_argument(
        "--label-noise", action="store_true", help="fit small reward models to doubt labels"
    )


def audit_data(config: Namespace, build: Callable[[], L.LightningDataModule]) -> None:
    """Look at all rows of the data of a config, and print and write what was found.

    Args:
        config: Parsed.
        build: Makes the data module.

    Raises:
        ConfigError: An output cannot be written.
        MistakeError: The data cannot be looked at.
    """
    sections = config.as_dict()
    for name in ("json", "html"):
        check_output(name, sections[name])
    model = sections["model"]
    trained = check_models(model)
    beside = SimpleNamespace() if trained is None else taken_from(model, trained)
    if sections.get("data") is None:
        raise MistakeError(("data",), "audit needs a config with data")
    data = build()
    if not isinstance(data, RowDataModule):
        raise MistakeError(
            ("data",),
            f"{type(data).__name__} is no data module whose rows can be looked at one by one; use "
            "PromptDataModule, PreferenceDataModule or SupervisedDataModule",
        )
    room = options_of(options_of(model).get("sampling")).get("max_new_tokens")
    try:
        found = audit(
            data,
            beside,
            context=None if trained is None else trained.context,
            new_tokens=room or 0,
            with_label_noise=sections["label_noise"],
        )
    except (ValueError, ImportError) as error:
        raise MistakeError(("data",), str(error)) from error
    sys.stdout.write(safe(f"{as_text(found)}\n"))
    if sections["html"] is not None:
        as_page(found, sections["html"], "Audit of the data")
    if sections["json"] is not None:
        write_json(sections["json"], as_json(found))
