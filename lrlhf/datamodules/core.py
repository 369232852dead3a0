"""The core of every data module: from sources to batches, the same ones after a resume."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import islice
from pathlib import Path
from types import MappingProxyType
from typing import Any, Generic, Protocol, TypeVar, cast, runtime_checkable

import lightning as L
import torch
from lightning.pytorch.callbacks import BatchSizeFinder
from transformers import PreTrainedTokenizerBase

from lrlhf.arguments import ShowsOptions
from lrlhf.datamodules.loading.loader import (
    CHANGES,
    BalancedOrder,
    Companion,
    CyclicOrder,
    EvalLoader,
    Order,
    TrainLoader,
    data_ranks,
)
from lrlhf.datamodules.loading.sources import (
    Component,
    Data,
    Entries,
    Fetching,
    Row,
    Source,
    Weighted,
    components_of,
    entries_of,
)
from lrlhf.datamodules.loading.splits import (
    FirstRows,
    Located,
    Split,
    Splits,
    described,
    refuse_other_rows,
)
from lrlhf.datamodules.loading.validation import (
    NamedSet,
    Validation,
    ValidationData,
    check_options,
    named_sets,
)
from lrlhf.datamodules.rows.bad_rows import BadDataError, BadRow, BadRows, unused_notes
from lrlhf.datamodules.rows.conservation import Conservation, Reached
from lrlhf.models import is_split
from lrlhf.models.chat_templates import TemplateConstants
from lrlhf.run.lightning_internals import data_in_use, has_callback

DraftT = TypeVar("DraftT")
RowT = TypeVar("RowT")
BatchT = TypeVar("BatchT")


@dataclass(frozen=True, kw_only=True)
class RowKind(Generic[DraftT, RowT, BatchT]):
    """How a `RowDataModule` parses, checks and collates one type of row.

    Args:
        parse: Reads one row, given the folder that its relative paths start from, or raises
            `BadRow`.
        expand: Returns the rows that one of the data stands for, or raises `BadRow`; these are what
            is counted.
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
        loader: Makes the loader of the train rows.
        tokenizer: That rows are tokenised with.
        made_with: The rows are loaded again in a `setup` where these differ.
        dated: Today's date is in the tokens, so that they may differ from the checkpoint's.
    """

    parse: Callable[[Row, Path | None], DraftT]
    expand: Callable[[Row], Sequence[Row]] = lambda row: (row,)
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
    loader: Callable[..., TrainLoader[RowT, BatchT]] = TrainLoader
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
                expanded = self._expanded(source, added, component.columns, columns)
                for location, row in islice(expanded, limit):
                    bad_rows.total += 1
                    try:
                        if isinstance(row, BadRow):
                            raise row
                        draft = parse(row, source.folder)
                    except BadRow as problem:
                        bad_rows.add(location, problem)
                    else:
                        drafts.append(Located(index, location, draft))
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
            *unused_notes(bad_rows.unused),
        ]
        return Split(components, rows, tuple(columns))

    def _expanded(
        self, source: Source, before: Row, after: Row, columns: dict[str, None]
    ) -> Iterator[tuple[str, Row | BadRow]]:
        """Yield the rows that those of a source stand for, and note what columns these have."""
        for number, row in enumerate(source, start=1):
            own: Sequence[Row | BadRow] = (row,)
            if not isinstance(row, BadRow):
                columns.update(dict.fromkeys(row))
                try:
                    own = self.expand({**before, **row, **after})
                except BadRow as problem:
                    own = (problem,)
            yield from ((f"{source.name}:{number}", each) for each in own)

    def _parser(
        self, bad_rows: BadRows, ours: Collection[str]
    ) -> Callable[[Row, Path | None], DraftT]:
        """Return what parses rows, and counts what is lost of them."""
        if self.reached is None:
            return self.parse
        conservation = Conservation(self.parse, self.reached, self.constants, ours)

        def parse(row: Row, folder: Path | None) -> DraftT:
            draft = self.parse(row, folder)
            bad_rows.unused.update(conservation.unused(row, folder, draft))
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


class RowDataModule(ShowsOptions, L.LightningDataModule, Generic[RowT, BatchT]):
    """Loads rows of one kind: splits, shuffling, shares of the ranks, resuming, bad rows.

    `PromptDataModule`, `PreferenceDataModule` and `ReplayDataModule` are this with their kinds of
    rows, and so is yours for another kind.

    Args:
        kind: Called in every `setup` with the trainer (None outside of one): how rows are read.
            For a `ValidationSet` with options it is called with these too.
        train: One source, a list of them, or rows (see `MemorySource`); `Weighted` entries give
            each a share of an epoch.
        val: Validation data of its own, every row of which is kept: as ``train``, or several sets
            by their names, each of which has metrics of its own.
        row_options: Options of ``kind`` that a `ValidationSet` may change.
        batch_size: Rows per train batch and rank.
        val_batch_size: Rows per validation batch and rank; None: as ``batch_size``.
        val_fraction: Share of the rows to hold out for validation when ``val`` is not given. Rows
            with equal prompts (or, without a prompt, equal texts) never stand in both splits.
        val_size: Number of rows to hold out instead.
        max_bad_fraction: Stop when a larger share of the rows cannot be used.
        shuffle: Shuffle the train rows in every epoch; else they keep the order of the data.
        seed: Of the order and of the held-out rows.
        num_workers: Processes that read images and videos and collate; text rows are tokenised
            once, so 0 is fast for them.
        pin_memory: None: where there is a GPU.
        accept_changed_data: Resume although the train data (or the tokenizer) is not what it was
            when the checkpoint was written; else that stops the run.
    """

    def __init__(  # noqa: PLR0913 - the constructor is the schema of the config
        self,
        kind: Callable[..., RowKind[Any, RowT, BatchT]],
        train: Data,
        val: Validation | None = None,
        *,
        row_options: Mapping[str, object] = MappingProxyType({}),
        batch_size: int = 8,
        val_batch_size: int | None = None,
        val_fraction: float = 0.0,
        val_size: int = 0,
        max_bad_fraction: float = 0.01,
        shuffle: bool = True,
        seed: int = 0,
        num_workers: int = 0,
        pin_memory: bool | None = None,
        accept_changed_data: bool = False,
    ) -> None:
        super().__init__()
        for name, value, least in (
            ("batch_size", batch_size, 1),
            ("val_batch_size", val_batch_size, 1),
            ("num_workers", num_workers, 0),
            ("seed", seed, 0),
        ):
            if value is not None and value < least:
                raise ValueError(f"{name}={value}: give {least} or more")
        self._make_kind = kind
        self._train: list[Weighted] = entries_of(train, "train")
        self._besides: Entries | None = None  # further sources to prepare
        sets = named_sets(val)
        check_options(sets, row_options, type(self).__name__)
        self._validation: ValidationData[RowT] = ValidationData(sets, val_size, val_fraction, seed)
        self._batch_size = batch_size
        self._val_batch_size = val_batch_size
        self._max_bad_fraction = max_bad_fraction
        self._shuffle = shuffle
        self._seed = seed
        self._num_workers = num_workers
        self._pin_memory = pin_memory
        self._accept_changed = accept_changed_data
        if not self.val_names:
            self._hide_validation()
        self._stage = ""
        self._searched = False  # whether Lightning looks for a batch size
        self._kind: RowKind[Any, RowT, BatchT] | None = None
        self._splits: Splits[RowT] | None = None
        self._fetching: Fetching[RowT, BatchT] | None = None
        self._companion: Companion[BatchT] | None = None
        self._loader: TrainLoader[RowT, BatchT] | None = None

    @property
    def batch_size(self) -> int:
        """Rows per train batch and rank; what is set acts from the next loader on.

        Raises:
            ValueError: It is set below 1, or in a run, whose loader is built already.
        """
        return self._batch_size

    @batch_size.setter
    def batch_size(self, size: int) -> None:
        if not isinstance(size, int) or size < 1:
            raise ValueError(f"batch_size={size}: give a whole number, 1 or more")
        if self.trainer is not None and self.trainer.training and not self._searched:
            raise ValueError(
                "a run keeps its batch_size: set it before fit, or between two of them"
            )
        self._batch_size, self._loader = size, None

    @property
    def train_components(self) -> list[Component]:
        """Where the train rows come from."""
        return components_of(self._train)

    def first_rows(self, module: object, number: int) -> list[FirstRows[RowT]]:
        """Read the first rows as a run would, and the others only where none of these can be used.

        Args:
            module: Has what the data takes from the module that it is used with, such as a
                ``tokenizer``.
            number: Rows of each source.

        Returns:
            Of the train data, and of validation data of its own.

        Raises:
            BadDataError: None of all rows can be used, or too many cannot.
        """
        trainer = cast("L.Trainer", _SingleProcessTrainer(module))
        splits: list[FirstRows[RowT]] = []
        for each in (NamedSet("", self._train, {}), *self._validation.sets):
            what = each.what if splits else "train"
            kind, entries = self._make_kind(trainer, **each.options), each.entries
            bad_rows, components = BadRows(what), components_of(entries)
            rows = kind.read_rows(components, bad_rows, limit=number).rows
            complete = bad_rows.total < number  # a source alone could have had more
            if not (rows or complete):
                bad_rows, complete = BadRows(what), True
                rows = kind.read_rows(components, bad_rows).rows
            if complete:
                bad_rows.refuse(self._max_bad_fraction)
            refuse_unreadable(trainer, rows, kind.tokenizer, training=not splits)
            values = [row.value for row in rows]
            splits.append(
                FirstRows(what, values, bad_rows.total, complete=complete, notes=bad_rows.notes)
            )
        return splits

    def read_all(
        self,
        module: object,
        change: Callable[[RowKind[Any, RowT, BatchT]], RowKind[Any, Any, Any]],
        count: Callable[[str], BadRows],
    ) -> Splits[Any]:
        """Read all rows into splits as a run would, however many cannot be used.

        Args:
            module: As of `first_rows`.
            change: Returns how to read rows, given how a run reads them.
            count: Makes what counts the bad rows of the data of such a name.
        """
        trainer = cast("L.Trainer", _SingleProcessTrainer(module))

        def read(one: NamedSet, what: str) -> Split[Any]:
            kind = change(self._make_kind(trainer, **one.options))
            split = kind.read_rows(components_of(one.entries), count(what))
            return kind.check(split, what) if split.rows else split

        train = read(NamedSet("", self._train, {}), "train")
        if not train.rows:
            return train, {}
        keys = change(self._make_kind(trainer)).keys
        return self._validation.load(train, lambda each: read(each, each.what), keys)

    def prepare_data(self) -> None:
        own = (named_set.entries for named_set in self._validation.sets)
        for entries in (self._train, *own, self._besides or ()):
            for component in components_of(entries) if entries else ():
                for source in component.sources:
                    source.prepare()

    def setup(self, stage: str) -> None:
        kind = self._make_kind(self.trainer)
        if self._splits is None or self._kind is None or kind.made_with != self._kind.made_with:
            train = kind.load(self._train, "train", self._max_bad_fraction)
            self._splits = self._validation.load(train, partial(self._load_set, kind), kind.keys)
            refuse_other_rows(self.trainer, self._splits, dated=kind.dated)
        train, held_out = self._splits
        if stage == "fit":
            refuse_unreadable(self.trainer, train.rows, kind.tokenizer, training=True)
        for split in held_out.values():
            refuse_unreadable(self.trainer, split.rows, kind.tokenizer, training=False)
        pin = torch.cuda.is_available() if self._pin_memory is None else self._pin_memory
        self._fetching = Fetching(kind.collate, self._num_workers, pin, kind.read)
        self._kind, self._stage, self._loader = kind, stage, None
        self._searched = has_callback(self.trainer, BatchSizeFinder)
        if not self.val_names:
            self._hide_validation()
            if self._searched:  # the search asks for a loader even where nothing is defined
                del self.val_dataloader
        self._companion = kind.companion() if kind.companion and stage == "fit" else None

    def _hide_validation(self) -> None:
        # to Lightning a hook that is not overridden means that there is nothing to validate on,
        # while it warns of an empty loader
        for hook in ("val_dataloader", "test_dataloader", "predict_dataloader"):
            setattr(self, hook, getattr(super(), hook))

    def _load_set(self, kind: RowKind[Any, RowT, BatchT], one: NamedSet) -> Split[RowT]:
        own = self._make_kind(self.trainer, **one.options) if one.options else kind
        return own.load(one.entries, one.what, self._max_bad_fraction)

    @property
    def val_names(self) -> tuple[str, ...]:
        """Names of the validation sets, in the order of their loaders; empty for one without."""
        return self._validation.names

    @property
    def tokenizer(self) -> PreTrainedTokenizerBase:
        """The tokenizer that made the ids; known after `setup`."""
        if self._kind is None or self._kind.tokenizer is None:
            raise RuntimeError("call setup() first: the tokenizer is not known before")
        return self._kind.tokenizer

    def train_dataloader(self) -> TrainLoader[RowT, BatchT] | EvalLoader[RowT, BatchT]:
        """Return the shuffled loader, always the same one, so that its position is kept.

        Under ``overfit_batches`` it is a loader of the same few batches in every pass.
        """
        kind, (train, _), fetching = self._ready
        trainer, ranks = self.trainer, data_ranks(self.trainer)
        if trainer is not None and trainer.overfit_batches:  # type: ignore[attr-defined]
            return EvalLoader(
                train.values,
                self._batch_size,
                fetching=fetching,
                ranks=ranks,
                companion=self._companion,
            )
        if self._loader is None:
            tolerated = ("tokens", "beside") if kind.dated else ()
            self._loader = kind.loader(
                train.values,
                self._order(kind, train, ranks.world),
                self._batch_size,
                fetching=fetching,
                ranks=ranks,
                pass_limit=trainer.limit_train_batches if trainer is not None else 1.0,
                companion=self._companion,
                accept_changed=tuple(CHANGES) if self._accept_changed else tolerated,
            )
        return self._loader

    def val_dataloader(self) -> EvalLoader[RowT, BatchT] | list[EvalLoader[RowT, BatchT]]:
        """Return a loader of every row of the validation set; of named sets a list of loaders."""
        _, (_, held_out), fetching = self._ready
        loaders = [
            EvalLoader(
                split.values,
                self._val_batch_size or self._batch_size,
                fetching=replace(fetching, drop=True),
                ranks=data_ranks(self.trainer),
            )
            for split in held_out.values()
        ]
        return loaders[0] if self.val_names == ("",) else loaders

    def every_row(self) -> Iterator[BatchT]:
        """Go through all train and validation rows once, in order, this rank's share of them.

        The position in the train data stays where it is. All ranks get equally many batches.
        """
        _, (train, held_out), fetching = self._ready
        fetching, ranks = replace(fetching, drop=True), data_ranks(self.trainer)
        for split in (train, *held_out.values()):
            yield from EvalLoader(split.values, self._batch_size, fetching=fetching, ranks=ranks)

    def test_dataloader(self) -> EvalLoader[RowT, BatchT] | list[EvalLoader[RowT, BatchT]]:
        return self.val_dataloader()

    def predict_dataloader(self) -> EvalLoader[RowT, BatchT] | list[EvalLoader[RowT, BatchT]]:
        return self.val_dataloader()

    def state_dict(self) -> dict[str, Any]:
        """Return the position in the train data; empty before it is known.

        Lightning also saves the loader's own state, but forgets to restore it when something asks
        for ``trainer.estimated_stepping_batches`` before.
        """
        return dict(self._loader.state_dict()) if self._loader is not None else {}

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Go on in the train data where ``state_dict`` was taken."""
        if self._splits is None or self._stage != "fit":
            return
        loader = self.train_dataloader()
        if state_dict and isinstance(loader, TrainLoader):
            loader.load_state_dict(state_dict)

    def __repr__(self) -> str:
        train, held_out = self._splits or (None, {})
        lines = [
            f"{type(self).__name__}(batch_size={self._batch_size})",
            f"train: {described(self._train, train)}",
            *self._validation.described(held_out, described),
        ]
        return "\n  ".join(lines)

    def __str__(self) -> str:
        return repr(self)  # Lightning's asks for every loader

    @property
    def _ready(
        self,
    ) -> tuple[RowKind[Any, RowT, BatchT], Splits[RowT], Fetching[RowT, BatchT]]:
        if self._kind is None or self._splits is None or self._fetching is None:
            raise RuntimeError("call setup() before asking for a loader")
        return self._kind, self._splits, self._fetching

    def _order(self, kind: RowKind[Any, RowT, BatchT], train: Split[RowT], world: int) -> Order:
        rows = len(train.rows)
        if not self._shuffle:
            return CyclicOrder(rows, rows - rows % (self._batch_size * world), self._seed)
        order = train.order(self._seed)
        if kind.cost is None or world == 1:
            return order
        costs = [cost for cost in map(kind.cost, train.values) if cost is not None]
        if len(costs) < rows:
            return order
        return BalancedOrder(order, costs, self._batch_size, world)


class _TokensLike(Protocol):
    @property
    def input_ids(self) -> Sequence[int]: ...


@runtime_checkable
class HasTexts(Protocol):
    """A row of texts whose tokens are known."""

    @property
    def texts(self) -> Iterable[_TokensLike]:
        """The texts."""


def refuse_unreadable(
    trainer: L.Trainer | None,
    rows: Sequence[Located[Any]],
    tokenizer: PreTrainedTokenizerBase | None,
    *,
    training: bool,
    answered: bool = True,
) -> None:
    """Refuse rows that a model of the trainer's module cannot read, if it tells what it can.

    Args:
        trainer: Of the run; None: outside of one.
        rows: Perhaps with texts.
        tokenizer: That made their ids.
        training: They are trained on, rather than evaluated.
        answered: A policy responds to them.

    Raises:
        ValueError: There is such a row.
    """
    limits_of = getattr(trainer and trainer.lightning_module, "text_limits", None)
    if limits_of is None or not rows or not isinstance(rows[0].value, HasTexts):
        return
    for limits in limits_of(training=training):
        texts = ((row.place, text.input_ids) for row in rows for text in row.value.texts)
        (limits if answered else replace(limits, response=0)).refuse_texts(texts, tokenizer)


class _SingleProcessTrainer:
    """Stands in for a trainer of one process, of which data modules ask for the module alone."""

    distributed_sampler_kwargs = None

    def __init__(self, module: object) -> None:
        self.lightning_module = module


def set_names(trainer: L.Trainer) -> tuple[str, ...]:
    """Return the name of each validation loader; empty: it has none.

    Data modules of this library name their sets where ``val`` is a mapping.
    """
    data = data_in_use(trainer)
    if isinstance(data, RowDataModule):
        return data.val_names
    of_stages = (
        *(trainer.num_val_batches, trainer.num_sanity_val_batches),
        *(trainer.num_test_batches, trainer.num_predict_batches),
    )
    return ("",) * max(1, *map(len, of_stages))


def set_column(trainer: L.Trainer, index: int, loaders: int) -> dict[str, Any]:
    """Return the column that tells the rows of several sets apart in files; of a single one: none.

    Args:
        trainer: Evaluates or predicts.
        index: Of the loader that a row comes from.
        loaders: How many there are.
    """
    if name := set_names(trainer)[index]:
        return {"set": name}
    return {"dataloader": index} if loaders > 1 else {}
