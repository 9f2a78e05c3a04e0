"""Dates and times in texts, and the numbers that a network can use of them."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from typing import final

import numpy as np

from lpom.exceptions import DataError
from lpom.tables.values import Array

ISO = "ISO8601"
_ISO = re.compile(
    r"(\d{4})([-/])(\d{1,2})(?:\2(\d{1,2})(?:[T ](\d{1,2}):(\d{2})(?::(\d{2})(?:[.,](\d+))?)?"
    r"\s*(?:(Z|UTC)|([+-])(\d{2}):?(\d{2})?)?)?)?",
    re.ASCII,
)
_CLOCKS = ("", " %H:%M", " %H:%M:%S", " %I:%M %p")
_NAMED = ("%d %b %Y", "%d %B %Y", "%d-%b-%Y", "%d-%b-%y", "%b %d, %Y", "%B %d, %Y", "%b %d %Y")
_SHARE = 0.95  # of the values that must be dates
_SAMPLE = 50  # values that a format is tried on first
_START = datetime(1970, 1, 1)
_END = datetime(9999, 1, 1)  # by which tables say that there is no end

#: Parts of a date that come round again, and how many days a round takes.
CYCLES = {"year": 365.2425, "week": 7.0, "day": 1.0}


@final
@dataclass(frozen=True)
class DateFormat:
    """How a date is written: as ``strptime`` has it, or ISO 8601."""

    form: str = ISO

    def read(self, texts: Sequence[str]) -> Array:
        """Days since 1970, NaN where there is no date."""
        return np.array([self._days(text) for text in texts], dtype=np.float64)

    def _days(self, text: str) -> float:
        try:
            moment = _from_iso(text) if self.form == ISO else datetime.strptime(text, self.form)
        except (ValueError, OverflowError):
            return np.nan
        if moment.tzinfo is not None:
            moment = moment.astimezone(UTC).replace(tzinfo=None)
        return (moment - _START) / timedelta(days=1) if moment < _END else np.nan


def date_format(texts: Sequence[str], order: str | None = None) -> DateFormat | None:
    """How most of these different texts are to be read as dates; None if they are none.

    Raises
    ------
    DataError
        If days and months could change places in every one, unless ``order`` ("dmy" or "mdy")
        says which is first.
    """
    some = texts[:_SAMPLE]
    digits = all(re.search(r"\d", text) for text in some)
    if not digits or not any(re.search(r"[-/. ,]", text) for text in some):
        return None
    if _fits(texts, ISO):
        return DateFormat(ISO)
    for sign in "./-":
        for form in [f"%d{sign}%m{sign}%{year}{clock}" for year in "Yy" for clock in _CLOCKS]:
            swapped = form.replace("%d", "%#").replace("%m", "%d").replace("%#", "%m")
            day_first, month_first = _fits(texts, form), _fits(texts, swapped)
            if day_first and month_first and sign != "." and order is None:
                raise DataError(
                    f"holds dates like {texts[0]!r}, of which day and month could change "
                    "places: say --date-order dmy or mdy (in Python date_order='dmy' or 'mdy')"
                )
            if day_first and (not month_first or sign == "." or order == "dmy"):
                return DateFormat(form)
            if month_first:
                return DateFormat(swapped)
    for form in (f"{day}{clock}" for day in _NAMED for clock in _CLOCKS):
        if _fits(texts, form):
            return DateFormat(form)
    return None


def cycles_of(days: Array) -> tuple[str, ...]:
    """Those cycles that these days tell anything about."""
    known = days[~np.isnan(days)]
    span = float(known.max() - known.min()) if len(known) else 0.0
    found = ["year"] if span > 180 else []
    found += ["week"] if span > 14 and len(np.unique(np.floor(known) % 7)) > 2 else []
    found += ["day"] if len(np.unique(known % 1)) > 2 else []
    return tuple(found)


def cyclic(days: Array, cycles: Sequence[str]) -> Array:
    """Sine and cosine of each cycle, a column each; 0 where a date is missing."""
    angles = [2 * np.pi * days / CYCLES[cycle] for cycle in cycles]
    waves = [wave(angle) for angle in angles for wave in (np.sin, np.cos)]
    return np.nan_to_num(np.stack(waves, axis=1)) if waves else np.empty((len(days), 0))


def _from_iso(text: str) -> datetime:
    match = _ISO.fullmatch(text)
    if match is None:
        raise ValueError(text)
    year, _, month, day, hour, minute, second, fraction, utc, sign, *offset = match.groups()
    moment = datetime(
        int(year), int(month), int(day or 1), int(hour or 0), int(minute or 0), int(second or 0),
        int(f"{fraction or 0:0<6}"[:6]),
    )  # fmt: skip
    if sign is None:
        return moment
    away = timedelta(hours=int(offset[0]), minutes=int(offset[1] or 0))
    return moment - away if sign == "+" else moment + away


def _fits(texts: Sequence[str], form: str) -> bool:
    """Whether most are such dates; the year 9999 counts as one."""
    read = DateFormat(form).read
    for part in (texts[:_SAMPLE], texts):
        ends = np.array(["9999" in text for text in part])
        if (~np.isnan(read(part)) | ends).mean() < _SHARE:
            return False
    return True
