"""The command line: python -m deepspeed_ext.compat enable, disable and status."""

import argparse
import sys

from deepspeed_ext.compat.environment import Environment
from deepspeed_ext.compat.stand_in import NAME, __version__, real_deepspeed
from deepspeed_ext.op_builder import program

_HELP = {
    "enable": "write a package deepspeed into this environment that is deepspeed_ext, for"
    " libraries that look for an installed one, and the command deepspeed",
    "disable": "remove it; pip uninstall deepspeed does too",
    "status": "say whether it is there; the exit status is 0 if it is",
}


@program
def main(arguments: list[str] | None = None) -> int:
    """Do what the command line asks for and return the exit status."""
    parser = argparse.ArgumentParser(prog="python -m deepspeed_ext.compat")
    commands = parser.add_subparsers(dest="command", required=True, metavar="|".join(_HELP))
    for name, text in _HELP.items():
        commands.add_parser(name, help=text, description=text)
    command = parser.parse_args(arguments).command
    environment = Environment()
    where = f"{NAME} {__version__} in {environment.packages}"
    try:
        if command == "enable":
            print(f"wrote {where}" if environment.enable() else f"{where} is there already")
        elif command == "disable":
            print(f"removed {where}" if environment.disable() else f"there is no {where}")
        else:
            return _status(environment, where)
    except (ValueError, OSError) as error:
        print(error, file=sys.stderr)
        return 1
    return 0


def _status(environment: Environment, where: str) -> int:
    real = real_deepspeed()
    if real is not None:
        print(f"{real} is there, which is not deepspeed_ext")
    elif environment.is_whole():
        print(f"enabled: {where}")
        return 0
    elif environment.has_parts():
        print(f"half written, or of another version: {where}; run enable, or disable")
    else:
        print("not enabled")
    return 1


if __name__ == "__main__":
    sys.exit(main())
