"""Rotary embedding, the paged cache of keys and values, attention to it."""
