"""Optimizer steps, the norms that they need, and the forms in which they store state."""
