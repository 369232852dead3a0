"""How a type of row is read, checked and put into batches."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any, Generic, TypeVar

from transformers import PreTrainedTokenizerBase

from lrlhf.datamodules.loading.loader import Companion
from lrlhf.datamodules.loading.sources import Component, Entries, Row, components_of
from lrlhf.datamodules.loading.splits import Located, Split
from lrlhf.datamodules.rows.bad_rows import BadDataError, BadRow, BadRows, lost_notes
from lrlhf.datamodules.rows.conservation import Conservation, Reached
from lrlhf.models import is_split
from lrlhf.models.chat_templates import TemplateConstants

DraftT = TypeVar("DraftT")
RowT = TypeVar("RowT")
BatchT = TypeVar("BatchT")


@dataclass(frozen=True, kw_only=True)
class RowKind(Generic[DraftT, RowT, BatchT]):
    """How a `RowDataModule` parses, checks and collates one type of row.

    Args:
        parse: Reads one row, given the folder that its relative paths start from, or raises
            `BadRow`.
        collate: Makes a batch of rows; must be picklable to reach worker processes.
        finish: Makes rows of what was parsed, many at a time, such as by tokenising; a `BadRow`
            stands for one that cannot be used. None: what was parsed are the rows.
        reached: Says what has become of a row that was parsed, so that values which reach nothing
            are named; None: this is not looked at.
        constants: What the chat template knows by name.
        keys: What a row must not share with a row of the other split, such as its prompt.
        check: Refuses rows that are good one by one and make no sense together, or leaves some
            out; gets the split and what messages call it.
        texts: What of a parsed row is tokenised; counted are those in which special tokens are
            split.
        notes: What is to be said of the usable rows, a line each.
        placed: Tells a row where it stands in the data, such as ``train.jsonl:17``.
        read: Reads what a row only names, such as images, when it comes into a batch, or raises
            `BadRow`.
        cost: Tokens of a row, by which each train batch is shared out to the ranks; None for a
            row: not known, the order alone decides.
        companion: Makes what adds something to each train batch, see `Companion`.
        tokenizer: That rows are tokenised with.
        made_with: The rows are loaded again in a `setup` where these differ.
        dated: Today's date is in the tokens, so that they may differ from the checkpoint's.
    """

    parse: Callable[[Row, Path | None], DraftT]
    collate: Callable[[Sequence[RowT]], BatchT]
    finish: Callable[[Sequence[DraftT]], Sequence[RowT | BadRow]] | None = None
    reached: Callable[[DraftT], Reached] | None = None
    constants: TemplateConstants = TemplateConstants()  # noqa: RUF009  a tuple
    keys: Callable[[RowT], Iterable[str]] = lambda _: ()
    check: Callable[[Split[RowT], str], Split[RowT]] = lambda split, _: split
    texts: Callable[[DraftT], Iterable[str]] = lambda _: ()
    notes: Callable[[Sequence[RowT]], Iterable[str]] = lambda _: ()
    placed: Callable[[RowT, str], RowT] = lambda row, _: row
    read: Callable[[RowT], RowT] | None = None
    cost: Callable[[RowT], int | None] | None = None
    companion: Callable[[], Companion[BatchT]] | None = None
    tokenizer: PreTrainedTokenizerBase | None = None
    made_with: tuple[object, ...] = ()
    dated: bool = False

    def load(self, entries: Entries, what: str, max_bad_fraction: float) -> Split[RowT]:
        """Load every row of every source; bad rows are counted and logged.

        Args:
            entries: What the user gave.
            what: What messages call it, such as ``train``.
            max_bad_fraction: Largest share of bad rows to go on with.

        Raises:
            BadDataError: Too many rows are bad.
        """
        components = components_of(entries)
        bad_rows = BadRows(what)
        split = self.read_rows(components, bad_rows)
        bad_rows.check(max_bad_fraction)
        return self.check(split, what)

    def read_rows(
        self, components: Sequence[Component], bad_rows: BadRows, *, limit: int | None = None
    ) -> Split[RowT]:
        """Read the usable rows of every source, and count all of them.

        Args:
            components: The entries of the mixture.
            bad_rows: Counts the rows, and those that cannot be used.
            limit: Rows of each source to stop after; None: all.

        Raises:
            BadDataError: There are no rows.
        """
        drafts: list[Located[DraftT]] = []
        columns: dict[str, None] = {}
        split = 0
        parse = self._parser(bad_rows, ours={"source"} if len(components) > 1 else ())
        for index, component in enumerate(components):
            # where there are several sources, the column keeps results apart
            added = {"source": component.name} if len(components) > 1 else {}
            for source in component.sources:
                for number, row in enumerate(islice(source, limit), start=1):
                    place = f"{source.name}:{number}"
                    bad_rows.total += 1
                    try:
                        if isinstance(row, BadRow):
                            raise row
                        columns.update(dict.fromkeys(row))
                        draft = parse({**added, **row, **component.columns}, source.folder)
                    except BadRow as problem:
                        bad_rows.add(place, problem)
                    else:
                        drafts.append(Located(index, place, draft))
                        split += any(map(is_split, self.texts(draft)))
        values: Sequence[Any] = [draft.value for draft in drafts]
        rows: list[Located[RowT]] = []
        finished = values if self.finish is None else self.finish(values)
        for parsed, value in zip(drafts, finished, strict=True):
            if isinstance(value, BadRow):
                bad_rows.add(parsed.place, value)
            else:
                rows.append(
                    Located(parsed.component, parsed.place, self.placed(value, parsed.place))
                )
        if bad_rows.total == 0:
            names = ", ".join(component.name for component in components)
            raise BadDataError(f"the {bad_rows.what} data is empty: no rows in {names}")
        bad_rows.notes = [
            *_split_note(split),
            *self.notes([row.value for row in rows]),
            *lost_notes(bad_rows.lost),
        ]
        return Split(components, rows, tuple(columns))

    def _parser(
        self, bad_rows: BadRows, ours: Collection[str]
    ) -> Callable[[Row, Path | None], DraftT]:
        """Return what parses rows, and counts what is lost of them."""
        if self.reached is None:
            return self.parse
        conservation = Conservation(self.parse, self.reached, self.constants, ours)

        def parse(row: Row, folder: Path | None) -> DraftT:
            draft = self.parse(row, folder)
            bad_rows.lost.update(conservation.lost(row, folder, draft))
            return draft

        return parse


def _split_note(count: int) -> Iterator[str]:
    """Say in how many rows special tokens are split, and what to do where they are meant."""
    if count:
        yield (
            f"{'1 row has' if count == 1 else f'{count} rows have'} special tokens in what turns "
            "say, which are read as text; where the data means the tokens, set "
            "split_special_tokens: false"
        )
