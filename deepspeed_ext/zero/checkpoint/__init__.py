"""Checkpoints that any number of processes can load, whole or absent, and in which nothing runs.

- storage: Writer and Reader, of torch's distributed checkpoint (DCP).
- manifest: what a checkpoint holds; data_file: the bytes of a process; reading: parts of them;
  plain_values: all the rest.
- training_state: model, optimizer and others as one flat state dict; folder: tags and `latest`;
  streaming: one of tensors that come one by one.
- saving: save and load. consolidate: one model for everybody else; weight_files: its files.
"""
