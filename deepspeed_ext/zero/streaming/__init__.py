"""Weights that rest in host memory, or in a file, and come to the device block by block."""

from deepspeed_ext.zero.streaming.streamed_model import Stream, computes_on, is_streamed, stream

__all__ = ["Stream", "computes_on", "is_streamed", "stream"]
