"""Numbers in texts: with separators of thousands, decimal commas, currency and per-cent signs."""

from __future__ import annotations

import math
import re
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import final

import numpy as np

from lpom.exceptions import DataError
from lpom.tables.values import Array

#: Texts that stand for nothing.
MISSING = frozenset(
    ("", "na", "n/a", "n.a.", "#n/a", "nan", "null", "none", "nil", "-", "--", "?", "missing", ".")
    + ("inf", "-inf", "infinity", "-infinity", "<na>", "nat")
)

_UNIT = r"(?:[$€£¥₹%]|\b(?:USD|EUR|GBP|CHF|JPY|INR)\b)"
_DRESSED = re.compile(rf"^([+-]?)\s*{_UNIT}?\s*([+-]?)(.*?)\s*{_UNIT}?$", re.I)
_SIGNS = str.maketrans("\u00a0\u2007\u2009\u202f−’", "    -'")
_BODY = re.compile(r"[+-]?(\d[\d.,' ]*|[.,]\d+)(e[+-]?\d+)?", re.I)
_SHARE = re.compile(r"%\W*$")
_SAMPLE = 1000  # values that are looked at before all others are
_CODE = re.compile(r"0\d+$")  # 007: a leading zero means that it is not counted with
_ROWS = 20  # from so many rows on, values that all differ tell something
_IDENTIFIER = re.compile(
    r"(^|[_\W])(?i:id|key|index|nr|no|uuid|guid)$|[a-z](Id|ID|Key|Nr|No|Index)$"
)
_NAMELESS = ("column 1", "Unnamed: 0", "rownames", "row.names")  # where row numbers are written


@final
@dataclass(frozen=True)
class NumberFormat:
    """What separates the whole from the fraction, and thousands from each other ("": nothing)."""

    decimal: str = "."
    thousands: str = ""

    def read(self, texts: Sequence[str]) -> Array:
        """Numbers, NaN where a text is none (and where it is infinite); 12 % is 0.12."""
        decimal, thousands = re.escape(self.decimal), re.escape(self.thousands)
        whole = rf"(?:\d{{1,3}}(?:{thousands}\d{{3}})+|\d+)" if self.thousands else r"\d+"
        shape = re.compile(
            rf"[+-]?(?:{whole}(?:{decimal}\d*)?|{decimal}\d+)(?:[eE][+-]?\d+)?", re.ASCII
        )
        plain = self == NumberFormat()

        def number(text: str) -> float:
            if plain and not math.isnan(value := plain_number(text)):
                return value
            bare = _bare(text)
            if not shape.fullmatch(bare):
                return math.nan
            bare = bare.replace(self.thousands, "") if self.thousands else bare
            value = float(bare.replace(self.decimal, "."))
            value = value / 100 if _SHARE.search(text) else value
            return value if math.isfinite(value) else math.nan

        return np.array([number(text) for text in texts], dtype=np.float64)

    def __str__(self) -> str:
        parts = [f"decimal {self.decimal!r}"] if self.decimal != "." else []
        parts += [f"thousands {self.thousands!r}"] if self.thousands else []
        return ", ".join(parts)


def number_format(
    texts: Sequence[str], decimal: str | None = None, thousands: str | None = None
) -> NumberFormat | None:
    """How most of these different texts are to be read as numbers; None if they are none.

    A comma or point before any other number of digits than three is a decimal sign; one that
    comes twice in a number, or before the decimal sign, separates thousands. A single comma
    before three digits, as in "29,477", may be either: unless another value of the column tells,
    ``decimal`` or ``thousands`` must. A point alone is a decimal sign.

    Raises
    ------
    DataError
        If it could be either, or if some values say the one and some the other.
    """
    some = [_bare(text) for text in texts[:_SAMPLE]]
    if sum(_BODY.fullmatch(text) is not None for text in some) < 0.5 * len(some) or not some:
        return None
    bare = list(map(_bare, texts))
    if any(map(_CODE.match, bare)):
        return None
    roles, open_question = _roles([match[1] for match in map(_BODY.fullmatch, bare) if match])
    asked = {decimal: "decimal", thousands: "thousands"}
    for sign, example in open_question.items():
        settled = any(other == sign for other, _ in roles)
        if not settled and sign in asked:
            roles[sign, asked[sign]] += 1
        elif not settled and sign == ",":
            raise DataError(
                f"holds {example!r}, which may be {example.replace(',', '')} or "
                f"{example.replace(',', '.')}: say --thousands ',' or --decimal ',' "
                "(in Python thousands=',' or decimal=',')"
            )
        elif not settled:
            comma_is_decimal = roles[",", "decimal"] or decimal == ","
            roles[sign, "thousands" if comma_is_decimal else "decimal"] += 1
    for sign in ",.":
        if roles[sign, "decimal"] and roles[sign, "thousands"]:
            raise DataError(
                f"uses {sign!r} both before decimals and between thousands; write all numbers in "
                "one way, or if these are none, versions say, give --as NAME=category (in Python "
                "kinds={NAME: 'category'})"
            )
    if roles[",", "decimal"] and roles[".", "decimal"]:
        raise DataError("holds decimal points and decimal commas; write all numbers in one way")
    comma = bool(roles[",", "decimal"]) or roles[".", "thousands"] > 0
    groups = [sign for sign in ",.' " if roles[sign, "thousands"]]
    return NumberFormat("," if comma else ".", groups[0] if groups else "")


def plain_number(text: str) -> float:
    """A number as a computer writes it, NaN for all other texts."""
    try:
        value = float(text)
    except ValueError:
        return math.nan
    return value if math.isfinite(value) and "_" not in text else math.nan


def like_thousands(texts: Sequence[str]) -> str | None:
    """An example if every point in the texts stands before three digits, as in "29.477"."""
    pointed = [bare for bare in map(_bare, texts) if "." in bare]
    if pointed and all(re.fullmatch(r"[+-]?[1-9]\d{0,2}\.\d{3}", bare) for bare in pointed):
        return pointed[0]
    return None


def of_rows(name: str, numbers: Array) -> str | None:
    """Why the numbers of a column only count or name its rows, if they do."""
    whole = bool((numbers % 1 == 0).all())
    if not (whole and len(numbers) >= _ROWS and len(np.unique(numbers)) == len(numbers)):
        return None
    first, last = float(numbers[0]), float(numbers[-1])
    dense = last - first < 2 * len(numbers) and first <= max(5, 0.05 * len(numbers))
    if dense and bool((np.diff(numbers) > 0).all()):
        return "counts the rows"
    named = _IDENTIFIER.search(name) or name in _NAMELESS
    return "an identifier: another number in every row" if named else None


def is_missing(text: str) -> bool:
    """Whether a text is only a word or sign for a missing value."""
    return text.strip().lower() in MISSING


def _bare(text: str) -> str:
    """Without spaces around, currency and per cent; (5) and a long minus as -5."""
    plain = text.translate(_SIGNS).strip()
    if plain.startswith("(") and plain.endswith(")"):
        plain = f"-{plain[1:-1]}"
    return _DRESSED.sub(r"\1\2\3", plain)


def _roles(bodies: list[str]) -> tuple[Counter[tuple[str, str]], dict[str, str]]:
    """How often each sign surely is what, and an example for each that leaves it open."""
    roles: Counter[tuple[str, str]] = Counter()
    open_question: dict[str, str] = {}
    for body in bodies:
        for sign in "' ":
            if sign in body:
                roles[sign, "thousands"] += 1
        signs = [sign for sign in body if sign in ".,"]
        if not signs:
            continue
        last = signs[-1]
        if len(set(signs)) == 2:
            roles[last, "decimal"] += 1
            roles[signs[0], "thousands"] += 1
        elif len(signs) > 1:
            roles[last, "thousands"] += 1
        else:
            before, after = body.split(last)
            grouped = len(after) == 3 and 0 < len(before) <= 3 and before[0] != "0"
            if grouped:
                open_question.setdefault(last, body)
            else:
                roles[last, "decimal"] += 1
    return roles, open_question
