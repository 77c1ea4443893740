"""Programs that use the package as a user would; each runs with `python -m`, from a clone."""
