"""The ops that transformers are made of."""
