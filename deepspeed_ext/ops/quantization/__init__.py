"""Quantization: floats to codes and back, and matrix multiplications that read codes."""
