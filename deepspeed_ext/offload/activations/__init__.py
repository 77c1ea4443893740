"""Tensors that autograd saves, kept in host memory or on disk until backward wants them.

- host, disk: the places where their bytes rest, and how they get there and back.
- forms: what a tensor looks like in its storage. kept: what has left, and what is back for a while.
- ahead: what comes back before it is wanted.
- packing: the two hooks of autograd. saved_tensors, checkpointing: what users call.
"""
