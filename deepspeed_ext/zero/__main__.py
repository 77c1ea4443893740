"""The command line: python -m deepspeed_ext.zero consolidate|import|export DIR OUT."""

import argparse
import sys
from collections.abc import Iterable
from pathlib import Path

import torch
from tqdm import tqdm  # type: ignore[import-untyped]

from deepspeed_ext.op_builder import BuildError, program
from deepspeed_ext.zero.checkpoint.consolidate import consolidate
from deepspeed_ext.zero.checkpoint.weight_files import Progress
from deepspeed_ext.zero.deepspeed_folders.exporting import export_deepspeed
from deepspeed_ext.zero.deepspeed_folders.importing import (
    import_deepspeed,
    import_deepspeed_weights,
)

_DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
_TAG = "of the checkpoint; default: the latest"
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


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m deepspeed_ext.zero",
        description="Work with checkpoints of zero.save, and of DeepSpeed.",
    )
    commands = parser.add_subparsers(
        dest="command", required=True, metavar="consolidate|import|export"
    )
    text = "write the weights as safetensors files with Hugging Face's index"
    one = commands.add_parser("consolidate", help=text, description=text)
    one.add_argument("folder", metavar="DIR", help="the folder that zero.save was given")
    one.add_argument("out", metavar="OUT", help="folder for the files")
    _add_options(one)
    text = (
        "write a checkpoint of DeepSpeed (stages 0 to 3) as one that zero.load goes"
        " on from, on any number of processes"
    )
    one = commands.add_parser("import", help=text, description=text + ". Nothing in it is run.")
    one.add_argument(
        "folder", metavar="DIR", help="the folder that save_checkpoint was given, or one of a tag"
    )
    one.add_argument("out", metavar="OUT", help="folder for the checkpoint, outside of DIR")
    text = "write plain weights, as consolidate and zero_to_fp32 do"
    one.add_argument("--weights", action="store_true", help=text)
    _add_options(one)
    text = "write a checkpoint of zero.save as one that DeepSpeed loads with load_universal"
    one = commands.add_parser("export", help=text, description=text + ".")
    one.add_argument("folder", metavar="DIR", help="the folder that zero.save was given")
    one.add_argument("out", metavar="OUT", help="folder for the checkpoint")
    one.add_argument("--format", choices=("universal",), default="universal")
    one.add_argument("--tag", help=_TAG)
    return parser


def _add_options(one: argparse.ArgumentParser) -> None:
    """Add what two commands take; import takes the last two for weights only."""
    one.add_argument("--tag", help=_TAG)
    one.add_argument(
        "--dtype", choices=tuple(_DTYPES), help="of weights; default: that of the master weights"
    )
    one.add_argument(
        "--max-shard",
        type=_bytes,
        default=5 << 30,
        metavar="SIZE",
        help="of a file of weights; default: 5G",
    )


def _written(options: argparse.Namespace, progress: Progress) -> Iterable[Path]:
    """Do what the command line asks for and return what was written."""
    if options.command == "export":
        return [export_deepspeed(options.folder, options.out, tag=options.tag, progress=progress)]
    if options.command == "import" and not options.weights:
        if options.dtype is not None:
            raise ValueError(f"import: --dtype is {options.dtype}, expected --weights with it")
        return [import_deepspeed(options.folder, options.out, tag=options.tag, progress=progress)]
    write = consolidate if options.command == "consolidate" else import_deepspeed_weights
    return write(
        options.folder,
        options.out,
        tag=options.tag,
        dtype=_DTYPES.get(options.dtype),
        max_shard_bytes=options.max_shard,
        progress=progress,
    )


@program
def main(arguments: list[str] | None = None) -> int:
    """Do what the command line asks for and return the exit status."""
    options = _parser().parse_args(arguments)
    try:
        with tqdm(unit="B", unit_scale=True, disable=None) as bar:
            written = _written(options, bar.update)
    except BrokenPipeError:
        raise
    except (ValueError, TypeError, OSError, BuildError) as error:
        print(f"{options.command}: {error}", file=sys.stderr)
        return 1
    for path in written:
        print(f"wrote {path}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
