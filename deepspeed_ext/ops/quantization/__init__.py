"""Ops on few bits: floats to codes and back, and matrix multiplications that read codes."""
