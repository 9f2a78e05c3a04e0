"""``python -m lpom`` is the command ``lpom``."""

from lpom.cli import main

if __name__ == "__main__":
    main()
