"""Former name of `lpom.objective`."""

from lpom.objective import *  # noqa: F403
