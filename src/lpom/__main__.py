"""``python -m lpom`` is the command ``lpom``."""

from lpom.cli import main

main()
