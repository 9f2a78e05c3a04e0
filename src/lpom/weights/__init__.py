"""What moves weights: optimisers fed by convex problems, and the exact step of the paper."""
