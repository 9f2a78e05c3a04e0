"""Steps on several ranks: to be made of pieces of the lifted model."""

from __future__ import annotations

from typing import Any, final

from lpom.parallel.team import Team


@final
class Pipeline(Team):
    """The steps of one rank."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        raise NotImplementedError("parallel= is being rebuilt on the lifted model.")
