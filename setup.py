"""Say what the package holds, and compile the op libraries into it when DS_BUILD_* asks for them.

Nothing here needs a compiler or torch unless DS_BUILD_OPS or a DS_BUILD_<OP> is set; see
op_builder/aot.py for what they mean. The rest of the description is in pyproject.toml.
"""

import os
import shutil
import sys
from pathlib import Path
from typing import Any, ClassVar

import setuptools
from setuptools import Command, Distribution, find_packages, setup
from setuptools.command.build import build

try:
    from setuptools.command.bdist_wheel import bdist_wheel
except ImportError:  # setuptools below 70.1, where it is part of another package
    try:
        from wheel.bdist_wheel import bdist_wheel
    except ImportError:
        raise SystemExit(
            f"setup.py: setuptools is {setuptools.__version__}, expected 70.1 or newer;"
            " run: pip install --upgrade setuptools"
        ) from None

ROOT = Path(__file__).parent.resolve()


class OurDistribution(Distribution):
    """A distribution that is for one platform when it holds compiled op libraries."""

    compiled = False
    for_one_python = False

    def has_ext_modules(self) -> bool:
        return self.compiled


class Build(build):
    """The usual build, from an empty folder, so that a wheel never holds what an older one did."""

    sub_commands: ClassVar[list[tuple[str, Any]]] = [
        *build.sub_commands,
        ("build_ops", lambda _: _ops_are_asked_for()),
    ]

    def run(self) -> None:
        shutil.rmtree(Path(self.build_lib) / "deepspeed_ext", ignore_errors=True)
        super().run()


class BuildOps(Command):
    """Compile the op libraries that the environment asks for into the package."""

    description = "compile op libraries"
    user_options: ClassVar[list[tuple[str, str, str]]] = []

    def initialize_options(self) -> None:
        self.build_lib: str | None = None
        self.editable_mode = False  # set by setuptools; op_builder then looks beside itself
        self.libraries: list[Path] = []

    def finalize_options(self) -> None:
        self.set_undefined_options("build", ("build_lib", "build_lib"))

    def run(self) -> None:
        sys.path.insert(0, str(ROOT))
        from op_builder import BuildError, aot

        package = ROOT if self.editable_mode else Path(str(self.build_lib)) / "deepspeed_ext"
        try:
            self.libraries = aot.compile_into_package(package / "prebuilt", ROOT / "build" / "ops")
        except BuildError as error:
            raise SystemExit(str(error)) from None  # no traceback, so its text is the last line
        self.distribution.compiled = bool(self.libraries)
        self.distribution.for_one_python = aot.is_for_one_python(self.libraries)

    def get_source_files(self) -> list[str]:
        return []

    def get_outputs(self) -> list[str]:
        return [str(library) for library in self.libraries]

    def get_output_mapping(self) -> dict[str, str]:
        return {}


class BdistWheel(bdist_wheel):
    """A wheel whose tag says what is inside.

    A compiled op depends on the platform only, one that is a Python module on the Python too.
    """

    def run(self) -> None:
        self.run_command("build")  # which of the ops could be compiled decides what the wheel is
        self.root_is_pure = not self.distribution.has_ext_modules()
        super().run()

    def get_tag(self) -> tuple[str, str, str]:
        python, abi, platform = super().get_tag()
        if not self.distribution.for_one_python:
            python, abi = "py3", "none"
        return (python, abi, platform)


def _ops_are_asked_for() -> bool:
    return any(name.startswith("DS_BUILD_") for name in os.environ)


setup(
    license="Apache-2.0",
    packages=[
        *find_packages(include=["deepspeed_ext", "deepspeed_ext.*"]),
        "deepspeed_ext.csrc",
        "deepspeed_ext.op_builder",
    ],
    package_dir={"deepspeed_ext.csrc": "csrc", "deepspeed_ext.op_builder": "op_builder"},
    package_data={
        "deepspeed_ext": ["py.typed"],
        "deepspeed_ext.ops": ["__init__.pyi"],
        "deepspeed_ext.inference.model.policies": ["README.md"],
        "deepspeed_ext.csrc": [f"**/*.{kind}" for kind in ("h", "inl", "cuh", "cpp", "cu", "md")],
    },
    include_package_data=False,
    distclass=OurDistribution,
    cmdclass={"build": Build, "build_ops": BuildOps, "bdist_wheel": BdistWheel},
)
