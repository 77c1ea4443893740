"""Named tensors in one file, scratch or durable.

- tensor_store: TensorStore. checks are those of a tensor that is read.
- ledger: which name has which part of the file, which requests (job) are under way.
- space: the file's bytes, taken and given back.
- durable: opens and commits a store that stays; folder has its locks, manifest its text.
"""
