"""Mixture of experts: which tokens go to which experts, there and back."""
