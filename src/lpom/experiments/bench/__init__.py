"""What things cost on this machine, beside what people would use instead: ``lpom bench``."""
