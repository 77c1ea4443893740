"""State that rests on disk: where it lies, the ring by which it comes and goes, what steps it.

- records: what the store has, and who holds it.
- disk_state: the flat buffers of a bucket, cut into pieces that are records of a store.
- ring: host memory for some pieces, which are read ahead and written behind.
- nvme: a bucket of the optimizer whose state is stepped piece by piece.
- commits: what a durable store keeps of a step; contents says what that is, stream writes it.
- room: which parameters' state rests there, and how large the ring is.
"""
