"""What a column of a table is, told from its values, and how it is read and encoded."""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, ClassVar, final

import numpy as np

from lpom.exceptions import DataError
from lpom.tables.dates import DateFormat, cycles_of, cyclic, date_format
from lpom.tables.encodings import Pieces, Scaling, share_words
from lpom.tables.numbers import NumberFormat, is_missing, number_format, of_rows
from lpom.tables.values import Array, Texts, Values, listed, rows

if TYPE_CHECKING:
    from lpom.tables.encoder import TableEncoder as Options

FEW = 20  # as many categories or classes are always fine; more must be few beside the rows
ENOUGH = 3  # rows of a category among many, for an input of its own
OTHER = "(other)"  # all categories without an input of their own
MISSING = "(missing)"

_NUMBERS = 0.9  # share of texts that must be numbers for a column of numbers
_ALL_RARE = 10  # rows whose category is rare in all of them
_OTHERS = 0.05  # of the rows: so many rare categories are looked into
_FAR = 10.0  # times the spread of training
YES_NO = {"true": 1.0, "false": 0.0, "yes": 1.0, "no": 0.0, "t": 1.0, "f": 0.0, "y": 1.0, "n": 0.0}
_AS_FLAG = YES_NO | {"1": 1.0, "0": 0.0, "1.0": 1.0, "0.0": 0.0}


@dataclass(frozen=True)
class Column(ABC):
    """One column: how it is read, which inputs it makes, and what is to be said about it.

    Attributes
    ----------
    why : why it was dropped, or what else a reader of the plan should know
    missing : rows without a value among those it was decided from
    """

    kind: ClassVar[str]

    name: str
    why: str = ""
    missing: int = 0

    @abstractmethod
    def names(self) -> list[str]:
        """A name for each input."""

    @abstractmethod
    def inputs(self, values: Values) -> Array:
        """A column for each input."""

    def strange(self, values: Values) -> list[str]:
        """What these values have that those of training had not."""
        return []

    def remark(self) -> str:
        """For the printed plan."""
        parts = [self.why, self.detail(), self.missing and f"missing in {rows(self.missing)}"]
        return "; ".join(str(part) for part in parts if part)

    def detail(self) -> str:
        return ""


@final
@dataclass(frozen=True)
class Dropped(Column):
    kind = "dropped"

    def names(self) -> list[str]:
        return []

    def inputs(self, values: Values) -> Array:
        return np.empty((len(values), 0))

    def remark(self) -> str:
        return self.why


@dataclass(frozen=True)
class Numeric(Column):
    """Numbers, flags and dates: read as numbers, NaN where there is none."""

    curved: ClassVar[bool] = True

    number: NumberFormat = field(default_factory=NumberFormat)
    scaling: Scaling = Scaling(-np.inf, np.inf, 0.0)  # until it is fitted

    @abstractmethod
    def of_texts(self, texts: list[str]) -> Array: ...

    def of_numbers(self, numbers: Array) -> Array:
        return numbers

    def read(self, values: Values) -> Array:
        if values.numbers is not None:
            return self.of_numbers(values.numbers)
        return values.texts.spread(self.of_texts(values.texts.distinct))

    def fitted(self, values: Values, options: Options) -> Numeric:
        """With its scaling and what is missing."""
        read = self.read(values)
        with np.errstate(over="ignore", invalid="ignore"):
            spread = float(np.std(read[~np.isnan(read)])) if len(read) else 0.0
        if not np.isfinite(spread):
            raise DataError(
                f"holds values up to {np.nanmax(np.abs(read)):g}, whose squares are not finite; "
                "change its unit"
            )
        scaling = Scaling.fit(read, curved=self.curved and options.scale)
        if not options.scale:
            scaling = Scaling(-np.inf, np.inf, scaling.median, indicated=scaling.indicated)
        missing = int(np.isnan(read).sum())
        return replace(self._with_cycles(read), scaling=scaling, missing=missing)

    def _with_cycles(self, read: Array) -> Numeric:
        return self

    def names(self) -> list[str]:
        return self.scaling.names(self.name)

    def inputs(self, values: Values) -> Array:
        return self.scaling.inputs(self.read(values))

    def strange(self, values: Values) -> list[str]:
        read, notes = self.read(values), []
        nothing = values.missing if values.numbers is not None else known_texts(values).codes < 0
        unread = np.flatnonzero(np.isnan(read) & ~nothing)
        if len(unread):
            example = values.texts.distinct[values.texts.codes[unread[0]]]
            notes.append(
                f"column {self.name!r} holds {example!r} in row {unread[0] + 1}, which is no "
                f"{self.kind} ({len(unread)} such)"
            )
        if nothing.any() and not self.missing:
            notes.append(f"column {self.name!r} has no value in {rows(int(nothing.sum()))}")
        reach = max(self.scaling.high - self.scaling.low, self.scaling.scale)
        far = np.flatnonzero(np.abs(read - self.scaling.mean) > _FAR * reach)
        if len(far):
            notes.append(
                f"column {self.name!r} holds {read[far[0]]:g} in row {far[0] + 1}, far from all "
                "of training; is the unit the same?"
            )
        return notes


@final
@dataclass(frozen=True)
class Number(Numeric):
    kind = "number"

    def of_texts(self, texts: list[str]) -> Array:
        return self.number.read(texts)

    def detail(self) -> str:
        return str(self.number)


@final
@dataclass(frozen=True)
class YesNo(Numeric):
    kind = "yes/no"
    curved = False

    def of_texts(self, texts: list[str]) -> Array:
        return np.array([_AS_FLAG.get(text.lower(), np.nan) for text in texts])

    def of_numbers(self, numbers: Array) -> Array:
        return np.where(np.isin(numbers, (0, 1)), numbers, np.nan)


@final
@dataclass(frozen=True)
class Date(Numeric):
    """Days since 1970, and the cycles that they tell of."""

    kind = "date"
    date: DateFormat = field(default_factory=DateFormat)
    cycles: tuple[str, ...] = ()

    def of_texts(self, texts: list[str]) -> Array:
        return self.date.read(texts)

    def _with_cycles(self, read: Array) -> Numeric:
        return replace(self, cycles=cycles_of(read))

    def names(self) -> list[str]:
        waves = [f"{self.name}, {cycle} {f}" for cycle in self.cycles for f in ("sin", "cos")]
        return [*super().names(), *waves]

    def inputs(self, values: Values) -> Array:
        days = self.read(values)
        return np.hstack([super().inputs(values), cyclic(days, self.cycles)])

    def detail(self) -> str:
        return f"time, and place in the {', '.join(self.cycles)}" if self.cycles else ""


@dataclass(frozen=True)
class Worded(Column):
    """Texts: those of ``values`` have an input each, all may be taken by their pieces."""

    values: tuple[str, ...] = ()
    pieces: Pieces | None = None
    counts: dict[str, float] | None = None  # rows of each text in training, as log(1 + n)

    def names(self) -> list[str]:
        names = [f"{self.name} = {value}" for value in self.values]
        names += [f"{self.name}, how frequent"] if self.counts is not None else []
        n = 0 if self.pieces is None else len(self.pieces.directions)
        return names + [f"{self.name}, part {k + 1}" for k in range(n)]

    def inputs(self, values: Values) -> Array:
        texts = known_texts(values)
        places = {value: k for k, value in enumerate(self.values)}
        other, none = places.get(OTHER, -1), places.get(MISSING, -1)
        one_hot = np.eye(len(self.values) + 1, len(self.values), dtype=np.float32)
        codes = np.array([places.get(text, other) for text in texts.distinct], dtype=np.int64)
        parts = [one_hot[texts.spread(codes, none).astype(np.int64)]]
        if self.counts is not None:
            often = np.array([self.counts.get(text, 0.0) for text in texts.distinct])
            parts.append(texts.spread(often, 0.0)[:, None])
        if self.pieces is not None:
            made = self.pieces.inputs(texts.distinct)
            parts.append(np.vstack([made, np.zeros((1, made.shape[1]))])[texts.codes])
        return np.hstack(parts)

    def strange(self, values: Values) -> list[str]:
        texts = known_texts(values)
        empty = int((texts.codes < 0).sum())
        if empty and MISSING not in self.values:
            return [f"column {self.name!r} has no value in {rows(empty)}"]
        return []


@final
@dataclass(frozen=True)
class Category(Worded):
    kind = "category"

    def strange(self, values: Values) -> list[str]:
        texts, notes = known_texts(values), super().strange(values)
        new = [text for text in texts.distinct if text not in set(self.values)]
        padded = [value for value in self.values if value.isdigit() and value[0] == "0" != value]
        if padded and values.numbers is not None:
            return [
                f"column {self.name!r} held texts such as {padded[0]!r} and holds numbers here, "
                "without the zeros in front: read it as text (dtype=str)",
                *notes,
            ]
        if OTHER not in self.values:
            return [*([f"column {self.name!r} holds {listed(new, 3)}"] if new else []), *notes]
        if len(new) == len(texts.distinct) and (texts.codes >= 0).sum() >= _ALL_RARE:
            notes.append(
                f"every row of column {self.name!r} holds a value that was rare or absent, e.g. "
                f"{new[0]!r}"
            )
        return notes

    def detail(self) -> str:
        shown = [value for value in self.values if value not in (MISSING, OTHER)]
        return "" if self.why else f"{len(shown)}: {listed(shown, 4)}"


@final
@dataclass(frozen=True)
class Text(Worded):
    kind = "text"

    def detail(self) -> str:
        n = 0 if self.pieces is None else len(self.pieces.directions)
        return f"by its {'words' if self.pieces and self.pieces.words else 'letters'}, {n} inputs"


KINDS: dict[str, type[Column]] = {
    kind.kind: kind for kind in (Number, YesNo, Category, Text, Date, Dropped)
}


def decide(values: Values, options: Options, kind: str | None = None) -> Column:
    """What a column is, from its values; ``kind`` if the user said it.

    Raises
    ------
    DataError
        If it can't be told, or can't be what it is said to be; without the name of the column.
    """
    column = _asked(values, options, kind) if kind else _told(values, options)
    if not isinstance(column, Numeric):
        return column
    read = column.read(values)
    if kind and np.isnan(read).all():
        texts = known_texts(values).distinct
        example = repr(texts[0]) if texts else "it is empty"
        raise DataError(f"should be a {kind}, as asked for, but no value of it is, e.g. {example}")
    if not kind and (reason := _teaches_nothing(column, read, values)):
        return Dropped(column.name, reason)
    return column.fitted(values, options)


def known_texts(values: Values) -> Texts:
    """The texts that stand for something."""
    return values.texts.where(not is_missing(text) for text in values.texts.distinct)


def _told(values: Values, options: Options) -> Column:
    name = values.name
    if values.form in _OF_FORM:
        empty = bool(values.missing.all())
        return Dropped(name, "empty") if empty else _OF_FORM[values.form](name)
    texts = known_texts(values)
    if not texts.distinct:
        return Dropped(name, "empty")
    if values.form == "category":  # of numbers too: somebody said so
        return _worded(values, texts, options)
    if all(text.lower() in YES_NO for text in texts.distinct):
        return YesNo(name)
    number = number_format(texts.distinct, options.decimal, options.thousands)
    if number is not None:
        unread = np.isnan(number.read(texts.distinct))
        if texts.counts[unread].sum() <= (1 - _NUMBERS) * texts.counts.sum():
            return Number(name, _taken_as_missing(values.texts, number), number=number)
    date = date_format(texts.distinct, options.date_order)
    return _worded(values, texts, options) if date is None else Date(name, date=date)


_OF_FORM: dict[str, type[Numeric]] = {
    "yes/no": YesNo, "integer": Number, "number": Number, "date": Date,
}  # fmt: skip


def _asked(values: Values, options: Options, kind: str) -> Column:
    texts, why = known_texts(values), "as asked for"
    if kind == "dropped":
        return Dropped(values.name, why)
    if kind in ("category", "text"):
        make = _categorical if kind == "category" else _text
        return replace(make(texts, values.name, options), why=why)
    if kind == "date":
        written = [] if values.numbers is not None else texts.distinct
        date = date_format(written, options.date_order) if written else None
        return Date(values.name, why, date=date or DateFormat())
    if kind == "yes/no":
        return YesNo(values.name, why)
    number = number_format(texts.distinct, options.decimal, options.thousands)
    return Number(values.name, why, number=number or NumberFormat())


def _worded(values: Values, texts: Texts, options: Options) -> Column:
    """Texts that are nothing else: categories, names of rows, or sentences."""
    name, n_values, n = values.name, len(texts.distinct), int(texts.counts.sum())
    if n_values == 1 and n == len(texts.codes):
        return Dropped(name, _constant(values))
    if n_values <= max(FEW, n / 2):
        return _categorical(texts, name, options)
    if share_words(texts.distinct):
        text = _text(texts, name, options)
        if text.pieces is not None:
            return text
    spaces = np.mean([text.count(" ") for text in texts.distinct])
    what = "free text" if spaces > 3 else "an identifier"
    return Dropped(name, f"{what}: {n_values:,} different values in {n:,} rows")


def _text(texts: Texts, name: str, options: Options) -> Text:
    missing = int((texts.codes < 0).sum())
    values = (MISSING,) if missing else ()
    pieces = Pieces.fit(texts.distinct, texts.counts, options.n_components)
    return Text(name, missing=missing, values=values, pieces=pieces)


def _categorical(texts: Texts, name: str, options: Options) -> Category:
    """An input for each category that is frequent enough; none of several as frequent is cut."""
    counts, most = texts.counts, options.max_categories
    least = ENOUGH if len(counts) > FEW else 0
    if len(counts) > most:
        least = max(least, int(np.sort(counts)[-most - 1]) + 1)
    kept = [text for text, n in zip(texts.distinct, counts, strict=True) if n >= least]
    missing = int((texts.codes < 0).sum())
    values = (*sorted(kept), *([MISSING] if missing else []))
    if len(kept) == len(counts):
        return Category(name, missing=missing, values=values)
    why = f"the {len(kept)} most frequent of {len(counts):,}, the others as one"
    made = Category(name, why, missing, (*values, OTHER))
    if counts[counts < least].sum() < _OTHERS * counts.sum():
        return made
    often = dict(zip(texts.distinct, np.log1p(counts).tolist(), strict=True))
    pieces = None
    if share_words(texts.distinct):
        pieces = Pieces.fit(texts.distinct, counts, options.n_components)
    return replace(made, pieces=pieces, counts=often)


def _teaches_nothing(column: Column, read: Array, values: Values) -> str | None:
    """Why a column of numbers is dropped: one value, or only names or counts of the rows."""
    known = read[~np.isnan(read)]
    if len(known) == len(read) and (known == known[0]).all():
        return _constant(values)
    return of_rows(column.name, known) if column.kind == "number" else None


def _taken_as_missing(texts: Texts, number: NumberFormat) -> str:
    unread = np.isnan(number.read(texts.distinct))
    order = np.argsort(-texts.counts, kind="stable")
    words = [texts.distinct[k] for k in order if unread[k]]
    return f"{listed(words, 3)} taken as missing" if words else ""


def _constant(values: Values) -> str:
    text = values.texts.distinct[0]
    shown = repr(text) if values.numbers is None else text
    return f"{shown if len(shown) < 30 else f'{shown[:27]}...'} in every row"
