"""Numbers in texts: with separators of thousands, decimal commas, currency and per-cent signs."""

from __future__ import annotations

import re
from collections import Counter
from dataclasses import dataclass
from typing import final

import numpy as np
import pandas as pd

from lpom.exceptions import DataError

#: Texts that stand for nothing, in a column of numbers or dates.
MISSING = frozenset(
    ("", "na", "n/a", "n.a.", "#n/a", "nan", "null", "none", "nil", "-", "--", "?", "missing", ".")
    + ("inf", "-inf", "infinity", "-infinity")
)

_UNIT = r"(?:[$€£¥₹%]|\b(?:USD|EUR|GBP|CHF|JPY|INR)\b)"
_DRESSED = re.compile(rf"^([+-]?)\s*{_UNIT}?\s*([+-]?)(.*?)\s*{_UNIT}?$", re.I)
_SIGNS = str.maketrans("\u00a0\u2007\u2009\u202f−’", "    -'")
_BODY = re.compile(r"[+-]?(\d[\d.,' ]*|[.,]\d+)(e[+-]?\d+)?", re.I)
_SAMPLE = 1000  # values that are looked at before all others are
_CODE = re.compile(r"0\d+$")  # 007: a leading zero means that it is not counted with


@final
@dataclass(frozen=True)
class NumberFormat:
    """What separates the whole from the fraction, and thousands from each other ("": nothing)."""

    decimal: str = "."
    thousands: str = ""

    def read(self, texts: pd.Series) -> pd.Series:
        """Numbers, NaN where a text is none (and where it is infinite); 12 % is 0.12."""
        values = np.full(len(texts), np.nan)
        if self == NumberFormat():  # most are plain, which is faster to see than to read
            values = plain_numbers(texts)
        rest = np.isnan(values)
        if rest.any():
            distinct = texts[rest].drop_duplicates()
            read = self._read(_bare(distinct))
            shares = distinct.str.contains(r"%\W*$", regex=True).to_numpy(dtype=bool)
            numbers = pd.Series(np.where(shares, read / 100, read), index=pd.Index(distinct))
            values[rest] = texts[rest].map(numbers).to_numpy(np.float64)
        return pd.Series(values, index=texts.index)

    def _read(self, bare: pd.Series) -> np.ndarray:
        decimal, thousands = re.escape(self.decimal), re.escape(self.thousands)
        if self.thousands:
            whole = rf"(?:\d{{1,3}}(?:{thousands}\d{{3}})+|\d+)"
        else:
            whole = r"\d+"
        shape = rf"[+-]?(?:{whole}(?:{decimal}\d*)?|{decimal}\d+)(?:[eE][+-]?\d+)?"
        fits = bare.str.fullmatch(shape).to_numpy(dtype=bool)
        plain = bare.str.replace(self.thousands, "", regex=False) if self.thousands else bare
        plain = plain.str.replace(self.decimal, ".", regex=False)
        numbers = pd.to_numeric(plain.where(fits), errors="coerce").to_numpy(np.float64)
        return np.where(np.isfinite(numbers), numbers, np.nan)

    def __str__(self) -> str:
        if (self.decimal, self.thousands) == (".", ""):
            return ""
        parts = [f"decimal {self.decimal!r}"] if self.decimal != "." else []
        parts += [f"thousands {self.thousands!r}"] if self.thousands else []
        return ", ".join(parts)


def number_format(
    texts: pd.Series, decimal: str | None = None, thousands: str | None = None
) -> NumberFormat | None:
    """How most of the texts are to be read as numbers; None if they are none.

    A comma or point before any other number of digits than three is a decimal sign; one that
    comes twice in a number, or before the decimal sign, separates thousands. A single comma
    before three digits, as in "29,477", may be either: unless another value of the column tells,
    ``decimal`` or ``thousands`` must. A point alone is a decimal sign.

    Raises
    ------
    DataError
        If it could be either, or if some values say the one and some the other.
    """
    told = decimal == "," or thousands == "."
    if not told and not np.isnan(plain_numbers(texts)).any() and not texts.str.match(_CODE).any():
        return NumberFormat()
    distinct = texts.drop_duplicates()
    if _bare(distinct.iloc[:_SAMPLE]).str.fullmatch(_BODY).mean() < 0.5:
        return None
    bare = _bare(distinct)
    if bare.str.match(_CODE).any():
        return None
    bodies = [match[1] for match in map(_BODY.fullmatch, bare) if match]
    roles, open_question = _roles(bodies)
    given = {decimal: "decimal", thousands: "thousands"}
    for sign, example in open_question.items():
        known = {role for (other, role) in roles if other == sign}
        if not known and sign in given:
            roles[sign, given[sign]] += 1
        elif not known and sign == ",":
            raise DataError(
                f"holds {example!r}, which may be {example.replace(',', '')} or "
                f"{example.replace(',', '.')}: say --thousands ',' or --decimal ',' "
                "(in Python thousands=',' or decimal=',')"
            )
        elif not known:
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
    comma = bool(roles[",", "decimal"]) or (roles[".", "thousands"] > 0)
    groups = [sign for sign in ",.' " if roles[sign, "thousands"]]
    return NumberFormat("," if comma else ".", groups[0] if groups else "")


def plain_numbers(texts: pd.Series) -> np.ndarray:
    """Texts as a computer writes numbers, NaN for all others."""
    values = pd.to_numeric(texts, errors="coerce").to_numpy(np.float64, na_value=np.nan)
    return np.where(np.isfinite(values), values, np.nan)


def like_thousands(texts: pd.Series) -> str | None:
    """An example if every point in the texts stands before three digits, as in "29.477"."""
    bare = _bare(texts.drop_duplicates())
    pointed = bare[bare.str.contains(".", regex=False)]
    if len(pointed) and pointed.str.fullmatch(r"[+-]?[1-9]\d{0,2}\.\d{3}").all():
        return str(pointed.iloc[0])
    return None


def is_missing(texts: pd.Series) -> pd.Series:
    """Where a text is only a word or sign for a missing value."""
    return texts.str.strip().str.lower().isin(MISSING)


def _bare(texts: pd.Series) -> pd.Series:
    """Without spaces around, currency and per cent; (5) and a long minus as -5."""
    plain = texts.str.translate(_SIGNS).str.strip()
    plain = plain.str.replace(r"^\((.*)\)$", r"-\1", regex=True)
    return plain.str.replace(_DRESSED, r"\1\2\3", regex=True)


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
