"""Tensors to files and back, while the caller does something else.

- async_io: AsyncIO. in_flight keeps its transfers until their outcome is known to somebody.
- future: Future, and Job, which is what one waits for. watcher calls callbacks, window bounds how
  much is under way.
- cuda, bounce, ring: CUDA tensors travel through pinned memory, in pieces.
- pinned: PinnedBuffer and PinnedPool.
- handle: aio_handle, the interface of older libraries.
"""
