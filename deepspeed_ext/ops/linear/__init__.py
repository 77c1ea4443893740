"""Linear layers as skinny GEMMs, of floats and of codes."""
