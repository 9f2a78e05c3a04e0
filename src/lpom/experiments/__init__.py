"""What ``lpom compare`` and ``lpom tune`` run."""
