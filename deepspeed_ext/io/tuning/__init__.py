"""Which arguments of AsyncIO suit a disk.

- tune: finds them; rates says which of several is the best, raw_device what the disk can do.
- settings: keeps them for each disk, for `io.tuned`.
"""
