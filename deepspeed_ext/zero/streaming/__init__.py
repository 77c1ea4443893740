"""Weights that rest in host memory, or in a file, and come to the device block by block."""

from deepspeed_ext.zero.streaming.streamed_model import Stream, is_streamed, stream

__all__ = ["Stream", "is_streamed", "stream"]
