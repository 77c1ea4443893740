"""Weights that rest in host memory, or in a file, and come to the device block by block."""

from deepspeed_ext.zero.streaming.streamed_model import Stream, stream

__all__ = ["Stream", "stream"]
