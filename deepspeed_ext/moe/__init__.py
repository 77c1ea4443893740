"""Mixture of experts: layers, experts, and their way over processes."""
