"""Linear layers on few rows, of floats and of codes."""
