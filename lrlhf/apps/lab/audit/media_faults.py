"""Images that are so small or so large that something is wrong with them."""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

from lrlhf.apps.lab.audit.findings import FaultKind, Finding, RowToLookAt
from lrlhf.apps.lab.audit.rows import AuditedData, AuditedRow
from lrlhf.media import MediaError, media_name
from lrlhf.media.decode import check_image

UNREADABLE = FaultKind(
    "bad media",
    "error",
    "An image, video or sound is missing, damaged, or does not fit the text; a run leaves the row "
    "out.",
    "Repair or download the files, or leave these rows out.",
)
TINY = FaultKind(
    "tiny images",
    "warning",
    "A side of the image has fewer pixels than a patch of most vision encoders: an icon, or an "
    "address that returned a blank.",
    "Download these images again, or leave the rows out.",
)
HUGE = FaultKind(
    "huge images",
    "note",
    "The image has more than 25 million pixels: reading it takes long, and models scale it down.",
    "Scale such images down beforehand, or set media.max_pixels.",
)
_FEWEST, _MOST = 16, 25_000_000
_THREADS = 8


def media_faults(data: AuditedData) -> list[Finding]:
    """Look at what rows show: at the heads of images, not at their pixels.

    What a run finds unusable as it reads rows (with ``media.check: all`` every pixel) is counted as
    bad media too.
    """
    showing = [row for row in data.rows if any(row.refs)]
    unreadable = [
        RowToLookAt(split, place, problem.detail)
        for split, place, problem in data.bad
        if isinstance(problem, MediaError)
    ]
    with ThreadPoolExecutor(_THREADS) as pool:
        found = [each for faults in pool.map(_look_at, showing) for each in faults]
    found += [(UNREADABLE, row) for row in unreadable]
    of = len(showing) + len(unreadable)
    return [
        finding
        for kind in (UNREADABLE, TINY, HUGE)
        for finding in kind.found((row for own, row in found if own is kind), of)
    ]


def _look_at(row: AuditedRow) -> list[tuple[FaultKind, RowToLookAt]]:
    return list(_faults(row))


def _faults(row: AuditedRow) -> Iterator[tuple[FaultKind, RowToLookAt]]:
    for refs in row.refs:
        for image in refs.images:
            try:
                width, height = check_image(image)
            except MediaError as problem:
                yield UNREADABLE, RowToLookAt(row.split, row.place, problem.detail)
                continue
            said = RowToLookAt(row.split, row.place, f"{media_name(image)}: {width} x {height}")
            if min(width, height) < _FEWEST:
                yield TINY, said
            if width * height > _MOST:
                yield HUGE, said
