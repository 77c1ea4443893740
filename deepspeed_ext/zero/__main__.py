"""The command line: python -m deepspeed_ext.zero consolidate DIR OUT."""

import argparse
import sys

import torch
from tqdm import tqdm  # type: ignore[import-untyped]

from deepspeed_ext.op_builder import BuildError, program
from deepspeed_ext.zero.checkpoint.consolidate import consolidate

_DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
_UNITS = {"K": 1 << 10, "M": 1 << 20, "G": 1 << 30}


def _bytes(text: str) -> int:
    """Read a size such as 512M."""
    unit = _UNITS.get(text[-1:].upper(), 1)
    try:
        count = int(text[:-1] if unit > 1 else text) * unit
    except ValueError:
        count = 0
    if count < 1:
        raise argparse.ArgumentTypeError(f"is {text}, expected a size such as 5G")
    return count


@program
def main(arguments: list[str] | None = None) -> int:
    """Do what the command line asks for and return the exit status."""
    parser = argparse.ArgumentParser(
        prog="python -m deepspeed_ext.zero", description="Work with checkpoints of zero.save."
    )
    commands = parser.add_subparsers(dest="command", required=True, metavar="consolidate")
    text = "write the weights as safetensors files with Hugging Face's index"
    one = commands.add_parser("consolidate", help=text, description=text)
    one.add_argument("folder", metavar="DIR", help="the folder that zero.save was given")
    one.add_argument("out", metavar="OUT", help="folder for the files")
    one.add_argument("--tag", help="of the checkpoint; default: the latest")
    one.add_argument("--dtype", choices=tuple(_DTYPES), help="default: that of the master weights")
    one.add_argument(
        "--max-shard", type=_bytes, default=5 << 30, metavar="SIZE", help="of a file; default: 5G"
    )
    options = parser.parse_args(arguments)
    try:
        with tqdm(unit="B", unit_scale=True, disable=None) as bar:
            written = consolidate(
                options.folder,
                options.out,
                tag=options.tag,
                dtype=_DTYPES.get(options.dtype),
                max_shard_bytes=options.max_shard,
                progress=bar.update,
            )
    except BrokenPipeError:
        raise
    except (ValueError, OSError, BuildError) as error:
        print(f"consolidate: {error}", file=sys.stderr)
        return 1
    for path in written:
        print(f"wrote {path}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
