"""Sub-commands of the shell command ``lpom``, one module each."""
