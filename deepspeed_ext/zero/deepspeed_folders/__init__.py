"""Folders of DeepSpeed's save_checkpoint, read without DeepSpeed; nothing in them is run.

- pickles: a file, and its fields, checked. shard_files: which files there are.
- model_file, optimizer_files: what they say. placing: where a parameter lies in flat tensors.
- flat_groups: parameters and state put together; universal, whole_state: those of universal folders
  and of stage 0. source: all that a folder holds, read when asked.
- contents: the same under the names of zero.save; reader: for zero.load; importing: as a checkpoint
  of zero.save, or as plain weights. exporting: the way back.
"""
