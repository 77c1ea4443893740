"""First use of the ops: compiling, loading, importing: `python -m benchmarks.bench_build`."""

import argparse
import os
import subprocess
import sys
import tempfile

from tqdm import tqdm

from benchmarks.harness import ROUNDS
from benchmarks.results import Result, Timing, add_option, introduced, keep, show

COMPILE_ROUNDS = 3
TIMED = "import time, torch; start = time.perf_counter(); {}; print(time.perf_counter() - start)"
LOAD = TIMED.format("from deepspeed_ext.op_builder import load; load('cpu_adam')")
BUILD = TIMED.format(
    "from deepspeed_ext.op_builder import jit, registry, wanted;"
    "jit.compile_into_cache(wanted.Wanted.of(registry.spec_of('{}')))"
)
IMPORT = TIMED.format("import deepspeed_ext")
IMPORT_OPTIM = TIMED.format("import deepspeed_ext.optim")


def seconds(program: str, cache: str, target: str) -> float:
    """Run a program in a fresh process and return the seconds that it prints."""
    environ = os.environ | {"DS_EXT_CACHE": cache, "TORCH_CUDA_ARCH_LIST": target}
    run = subprocess.run(
        [sys.executable, "-c", program], env=environ, text=True, capture_output=True
    )
    if run.returncode != 0:
        raise RuntimeError(run.stderr)
    return float(run.stdout)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--target", default="9.0", help="the CUDA target of fused_adam")
    parser.add_argument("--rounds", type=int, default=ROUNDS, help="of what takes no compiler")
    add_option(parser)
    options = parser.parse_args()
    described = introduced("cpu")
    cold = {
        "cpu_adam, compiled from nothing": BUILD.format("cpu_adam"),
        f"fused_adam for {options.target}, from nothing": BUILD.format("fused_adam"),
    }
    warm = {
        "cpu_adam, loaded from the cache": LOAD,
        "import deepspeed_ext, after torch": IMPORT,
        "import deepspeed_ext.optim, after torch": IMPORT_OPTIM,
    }
    taken: dict[str, list[float]] = {name: [] for name in (*cold, *warm)}
    with (
        tempfile.TemporaryDirectory() as cache,
        tqdm(total=COMPILE_ROUNDS * len(cold) + options.rounds * len(warm)) as progress,
    ):
        for i in range(COMPILE_ROUNDS):
            for name, program in cold.items():
                taken[name].append(seconds(program, f"{cache}/{i}", options.target))
                progress.update()
        for _ in range(options.rounds):
            for name, program in warm.items():
                taken[name].append(seconds(program, f"{cache}/0", options.target))
                progress.update()
    results = [Result(name, 0, 0, 0, {name: Timing.of(each)}) for name, each in taken.items()]
    for result in results:
        show(result)
    keep(options.save, results, described)


if __name__ == "__main__":
    main()
