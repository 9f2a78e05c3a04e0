"""``python -m lpom`` is the command ``lpom``."""

from lpom.shell import main

main()
