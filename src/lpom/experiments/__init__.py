"""What ``lpom bench``, ``lpom compare`` and ``lpom reproduce`` run."""
