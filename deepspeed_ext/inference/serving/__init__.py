"""Engines: who runs when, and what a caller holds."""
