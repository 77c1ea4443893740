"""The command deepspeed: its arguments for one host as those of torchrun, which it runs."""

import argparse
import os
import runpy
import shlex
import sys
from collections.abc import Sequence
from pathlib import Path

DEEPSPEED_ENVIRONMENT_NAME = ".deepspeed_env"  # a file that DeepSpeed's launcher reads
_OWN = "deepspeed_ext.compat.launch"
_ONE_HOST = "expected one host; start torchrun on each, as there is no launcher for several"


def main(arguments: Sequence[str] | None = None) -> int:
    """Print the command of torchrun that a command of deepspeed's asks for, and become it.

    Returns:
        2, if the arguments are refused.
    """
    try:
        command, variables = torchrun_command(arguments)
    except ValueError as error:
        sys.stderr.write(f"{error}\n")
        return 2
    shown = [f"{name}={value}" for name, value in variables.items()]
    sys.stderr.write(" ".join([*shown, shlex.join(command)]) + "\n")
    sys.stderr.flush()
    os.execve(command[0], command, {**os.environ, **variables})


def torchrun_command(arguments: Sequence[str] | None = None) -> tuple[list[str], dict[str, str]]:
    """Return torchrun's command, and the variables that it needs.

    Args:
        arguments: of the command deepspeed; None: of this process.

    Raises:
        ValueError: they ask for several hosts, or for GPUs that are not there.
    """
    options = _parser().parse_args(arguments)
    _refuse_hosts(options)
    devices = _devices(options)
    command = [sys.executable, "-m", "torch.distributed.run", "--nnodes=1"]
    command += [f"--nproc-per-node={_processes(options, devices)}"]
    command += [f"--master-addr={options.master_addr}", f"--master-port={options.master_port}"]
    if options.no_python:
        command += ["--no-python"]
    elif options.no_local_rank:
        command += ["--module"] * options.module
    else:  # DeepSpeed's launcher gives each script its --local_rank
        command += ["--module", _OWN, "module" if options.module else "path"]
    variables = {} if devices is None else {"CUDA_VISIBLE_DEVICES": ",".join(map(str, devices))}
    return [*command, options.user_script, *options.user_args], variables


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="deepspeed", allow_abbrev=False)
    how_many = parser.add_mutually_exclusive_group()
    names = ("--num_gpus", "--num_accelerators")
    how_many.add_argument(*names, type=int, default=-1, help="processes; default: one for each GPU")
    how_many.add_argument("-i", "--include", default="", help="GPUs, such as localhost:0,2")
    how_many.add_argument("-e", "--exclude", default="", help="GPUs that are not used")
    parser.add_argument("--master_addr", default="127.0.0.1")
    parser.add_argument("--master_port", type=int, default=29500)
    parser.add_argument("--module", action="store_true", help="SCRIPT is one, as for python -m")
    parser.add_argument("--no_python", action="store_true", help="SCRIPT is a program")
    text = "do not give SCRIPT --local_rank; it is in the environment"
    parser.add_argument("--no_local_rank", action="store_true", help=text)
    parser.add_argument("-H", "--hostfile", default="/job/hostfile", help="refused with several")
    parser.add_argument("--num_nodes", type=int, default=-1, help="refused if it is not 1")
    parser.add_argument("user_script", metavar="SCRIPT")
    parser.add_argument("user_args", nargs=argparse.REMAINDER, metavar="ARGUMENTS")
    return parser


def _refuse_hosts(options: argparse.Namespace) -> None:
    if options.num_nodes > 1:
        raise ValueError(f"deepspeed: --num_nodes is {options.num_nodes}, {_ONE_HOST}")
    for name in ("include", "exclude"):
        if "@" in getattr(options, name):
            raise ValueError(f"deepspeed: --{name} is {getattr(options, name)}, {_ONE_HOST}")
    file = Path(options.hostfile)
    lines = file.read_text().splitlines() if file.is_file() else []
    hosts = {line.split()[0] for line in lines if line.strip() and not line.startswith("#")}
    if len(hosts) > 1 and not options.include and options.num_nodes != 1:
        raise ValueError(f"deepspeed: {file} has {len(hosts)} hosts, {_ONE_HOST}")


def _devices(options: argparse.Namespace) -> list[int] | None:
    """Return the GPUs that are named; None: whichever there are."""
    text = options.include or options.exclude
    if not text:
        return None
    _, _, numbers = text.partition(":")
    try:
        named = [int(number) for number in numbers.split(",") if number]
    except ValueError:
        raise ValueError(f"deepspeed: GPUs are {text!r}, expected such as localhost:0,2") from None
    there = list(range(_gpus()))
    wrong = sorted(set(named) - set(there)) if there else []
    if wrong:
        raise ValueError(f"deepspeed: GPUs are {text!r}, expected some of 0 to {there[-1]}")
    if options.include:
        return named or there
    return [number for number in there if named and number not in named]


def _processes(options: argparse.Namespace, devices: list[int] | None) -> int:
    if devices is not None:
        if not devices:
            raise ValueError("deepspeed: --include and --exclude leave no GPU, expected some")
        return len(devices)
    there = _gpus()
    if there and options.num_gpus > there:
        raise ValueError(f"deepspeed: --num_gpus is {options.num_gpus}, expected at most {there}")
    return options.num_gpus if options.num_gpus > 0 else there or 1


def _gpus() -> int:
    import torch

    return torch.cuda.device_count()


def _run_script(kind: str, script: str, arguments: list[str]) -> None:
    """Run a script in a process that torchrun has started, with its --local_rank."""
    sys.argv = [script, f"--local_rank={os.environ['LOCAL_RANK']}", *arguments]
    if kind == "module":
        runpy.run_module(script, run_name="__main__", alter_sys=True)
    else:
        sys.path[0] = str(Path(script).resolve().parent)
        runpy.run_path(script, run_name="__main__")


if __name__ == "__main__":
    _run_script(sys.argv[1], sys.argv[2], sys.argv[3:])
