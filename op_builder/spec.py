"""What one op library is: a row of data that the compiler, the loader and the report all read."""

from dataclasses import dataclass
from typing import Literal


@dataclass(frozen=True)
class OpSpec:
    """One library: its sources, what they need to compile, and how to try it.

    Args:
        name: the op's public name; also the file name of its library.
        device: where its kernels run.
        sources: files to compile, relative to csrc.
        needs: what compiling takes besides a C++ compiler: "torch", "cuda", or "pybind11", which
            makes the library a Python module of the op's name.
        links: further libraries for the link line, without the "-l".
        defines: macros that every source is compiled with, name and value; a value may be the name
            of a header, in quotes. So one source serves several libraries.
        self_check: "module:function", called with device=device; raises when the op is wrong.
        modules: the Python modules whose functions it does the work of.
        fused_multiply_add: lets nvcc fuse a*b+c; False gives the same bits on every device.
    """

    name: str
    device: Literal["cpu", "cuda"]
    sources: tuple[str, ...]
    needs: tuple[Literal["torch", "cuda", "pybind11"], ...] = ("torch",)
    links: tuple[str, ...] = ()
    defines: tuple[tuple[str, str], ...] = ()
    self_check: str = ""
    modules: tuple[str, ...] = ()
    fused_multiply_add: bool = False
