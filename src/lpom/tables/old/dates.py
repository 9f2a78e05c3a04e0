"""Dates and times in texts, and the numbers that a network can use of them."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import final

import numpy as np
import pandas as pd

from lpom.exceptions import DataError

_ISO = "ISO8601"
_ISO_SHAPE = re.compile(r"\d{4}[-/]\d{1,2}([-/]\d{1,2}([T ]\d{1,2}:\d{2}.*)?)?")
_CLOCKS = ("", " %H:%M", " %H:%M:%S", " %I:%M %p")
_NAMED = ("%d %b %Y", "%d %B %Y", "%d-%b-%Y", "%d-%b-%y", "%b %d, %Y", "%B %d, %Y", "%b %d %Y")
_SHARE = 0.95  # of the values that must be dates
_SAMPLE = 50  # values that a format is tried on first

#: Parts of a date that come round again, and how many days a round takes.
CYCLES = {"year": 365.2425, "week": 7.0, "day": 1.0}


@final
@dataclass(frozen=True)
class DateFormat:
    """How a date is written (``strptime``), and which of its cycles are inputs."""

    form: str = _ISO
    cycles: tuple[str, ...] = ()

    def read(self, column: pd.Series) -> pd.Series:
        """Days since 1970 as numbers, NaN where there is no date."""
        if not pd.api.types.is_datetime64_any_dtype(column.dtype):
            texts = column.astype("string").str.strip()
            form = _ISO if self.form == _ISO else self.form
            column = pd.to_datetime(texts, format=form, errors="coerce", utc=True)
        return _days(column)

    def inputs(self, name: str, days: pd.Series) -> dict[str, pd.Series]:
        """Columns of numbers: the days, then sine and cosine of each cycle (0 where unknown)."""
        made = {name: days}
        for cycle in self.cycles:
            angle = 2 * np.pi * days / CYCLES[cycle]
            made[f"{name}, {cycle} sin"] = pd.Series(np.sin(angle)).fillna(0.0)
            made[f"{name}, {cycle} cos"] = pd.Series(np.cos(angle)).fillna(0.0)
        return made

    def with_cycles(self, days: pd.Series) -> DateFormat:
        """With those cycles that these days tell anything about."""
        known = days.dropna()
        span = float(known.max() - known.min()) if len(known) else 0.0
        found = []
        if span > 180:
            found.append("year")
        if span > 14 and len(np.unique(np.floor(known) % 7)) > 2:
            found.append("week")
        if len(np.unique(known % 1)) > 2:
            found.append("day")
        return DateFormat(self.form, tuple(found))


def date_format(texts: pd.Series, order: str | None = None) -> DateFormat | None:
    """How most of the texts are to be read as dates; None if they are none.

    Raises
    ------
    DataError
        If days and months could change places in every one, unless ``order`` ("dmy" or "mdy")
        says which is first.
    """
    distinct = texts.drop_duplicates().str.strip()
    some = distinct.iloc[:_SAMPLE]
    if not some.str.contains(r"\d").all() or not some.str.contains(r"[-/. ,]").any():
        return None
    if _share(distinct.str.fullmatch(_ISO_SHAPE)) and _fits(distinct, _ISO):
        return DateFormat(_ISO)
    for sign in "./-":
        first = [f"%d{sign}%m{sign}%{year}{clock}" for year in "Yy" for clock in _CLOCKS]
        for form in first:
            swapped = form.replace("%d", "%#").replace("%m", "%d").replace("%#", "%m")
            day_first, month_first = _fits(distinct, form), _fits(distinct, swapped)
            if day_first and month_first and sign != "." and order is None:
                raise DataError(
                    f"holds dates like {distinct.iloc[0]!r}, of which day and month could change "
                    "places: say --date-order dmy or mdy (in Python date_order='dmy' or 'mdy')"
                )
            if day_first and (not month_first or sign == "." or order == "dmy"):
                return DateFormat(form)
            if month_first:
                return DateFormat(swapped)
    for form in (f"{day}{clock}" for day in _NAMED for clock in _CLOCKS):
        if _fits(distinct, form):
            return DateFormat(form)
    return None


def _fits(texts: pd.Series, form: str) -> bool:
    for part in (texts.iloc[:_SAMPLE], texts):
        if not _share(pd.to_datetime(part, format=form, errors="coerce", utc=True).notna()):
            return False
    return True


def _share(yes: pd.Series) -> bool:
    return bool(yes.mean() >= _SHARE)


def _days(moments: pd.Series) -> pd.Series:
    """Days since 1970; the year 9999, by which tables say that there is no end, is none."""
    if moments.dt.tz is not None:
        moments = moments.dt.tz_convert("UTC").dt.tz_localize(None)
    # nanoseconds do not go as far as that
    days = moments.to_numpy("datetime64[us]").astype(np.int64) / 86_400e6
    return pd.Series(days, index=moments.index).mask(moments.isna() | (moments.dt.year >= 9999))
