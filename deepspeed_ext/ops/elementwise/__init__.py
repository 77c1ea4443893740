"""Elementwise ops: activations and sums with biases."""
