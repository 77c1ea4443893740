"""State dicts as safetensors files.

- state_dict: save, load, inspect, file_bytes.
- format: the header of a file, read with every claim checked, and made.
- saved_tensors: what can be saved, and where in the file it lies; saved_ties: tensors of two names.
- new_file: a file that stands under its name when it is whole; packed_writer fills it.
- grouped_reader: reads, into memory of fresh_pages.
"""
