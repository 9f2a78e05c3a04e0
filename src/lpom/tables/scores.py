from lpom.tables.old.scores import *  # noqa: F403
