"""State that rests on disk: where it lies, the ring by which it comes and goes, what steps it.

- disk_state: the flat buffers of a bucket, cut into pieces that are records of a store.
- ring: host memory for some pieces, which are read ahead and written behind.
- nvme: a bucket of the optimizer whose state is stepped piece by piece.
- room: which parameters' state rests there, and how large the ring is.
"""
