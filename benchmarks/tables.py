"""The tables of docs/benchmarks.md, from what was kept: `python -m benchmarks.tables`.

Each stands between `<!-- table NAME -->` and `<!-- end -->`. Below it stand the commands that have
measured it, on what and when. `--check` writes nothing, and fails if the page has other figures.
"""

import argparse
import itertools
import json
import re
import sys
from collections.abc import Mapping
from pathlib import Path

from benchmarks.offload_contenders import FORMATS
from benchmarks.offload_rows import ROWS
from benchmarks.results import FOLDER
from benchmarks.table_cells import (
    Column,
    Line,
    Machine,
    Table,
    _name_of_ours,
    all_others,
    beside_ceiling,
    cpu_functional,
    cpu_per_gib,
    in_short,
    milliseconds,
    our_time,
    rates,
    rendered,
    rivals,
    seconds,
    terabytes,
)

PAGE = Path(__file__).parent.parent / "docs" / "benchmarks.md"
_MARKED = re.compile(r"(<!-- table ([\w-]+) -->\n)(.*?)(<!-- end -->)", re.DOTALL)

ZEN_5, ZEN_3 = "amd-epyc-zen-5", "amd-epyc-family-25-model-1"
ZEN_4 = "amd-epyc-family-25-model-17"
XEON, H200, H200_X2 = "intel-xeon", "nvidia-h200", "nvidia-h200-x2"
_OFFLOADED = "a step of stage 3, state in host memory"


def _cpu_steps() -> Table:
    names = [("Zen 5", ZEN_5, 1), ("Zen 5", ZEN_5, 2), ("Xeon", XEON, 1), ("Xeon", XEON, 2)]
    columns = [
        Column(f"{title}, {n} thread{'s' * (n > 1)}", machine, n, in_short)
        for title, machine, n in names
    ]
    lines = [
        Line("Adam fp32, 64 x 1 Mi", "steps", "fp32, 64 x 1,048,576"),
        Line("Adam fp32, 16,384 x 4,096", "steps", "fp32, 16,384 x 4,096"),
        Line("Adam fp32, 16,384 x 256", "steps", "fp32, 16,384 x 256"),
        Line(
            "bf16 gradients, fp32 master weights, bf16 weights (1)",
            "steps",
            "mixed: bf16 gradients, fp32 originals, bf16 weights",
        ),
        Line("all in bf16, 64 x 1 Mi", "steps", "all bf16, 64 x 1,048,576"),
        Line("Lion fp32, 64 x 1 Mi", "steps", "Lion, fp32, 64 x 1,048,576"),
        Line("Adagrad fp32, 64 x 1 Mi", "steps", "Adagrad, fp32, 64 x 1,048,576"),
        Line(
            "SGD with momentum, fp32, 64 x 1 Mi", "steps", "SGD with momentum, fp32, 64 x 1,048,576"
        ),
        Line("`clip_and_step` (2), 64 x 1 Mi", "clip", "clipped step, 64 x 1,048,576"),
        Line(
            "8-bit moments and split weights, beside our fp32",
            "clip",
            "compact step, 64 x 1,048,576",
        ),
        Line("`l2_norm` of bf16, 64 x 1 Mi", "norm", "bf16, 64 x 1,048,576"),
    ]
    return Table("CPU", columns, lines)


def _cuda_steps() -> Table:
    columns = [
        Column("ours", H200, 0, our_time),
        Column("others: how many times as fast ours is", H200, 0, rivals),
        Column("beside the ceiling", H200, 0, beside_ceiling),
    ]
    lines = [
        Line("Adam fp32, 2.27 B parameters in Llama shapes", "steps", "fp32, Llama shapes"),
        Line("Adam fp32, 10,000 x 1,024 (3)", "steps", "fp32, 10,000 x 1,024"),
        Line("the same, replayed as a CUDA graph", "steps", "fp32, 10,000 x 1,024, CUDA graph"),
        Line(
            "bf16 gradients, fp32 master weights, bf16 weights, 0.87 B",
            "steps",
            "mixed, Llama shapes",
        ),
        Line("all in bf16, 0.87 B", "steps", "all bf16, Llama shapes"),
        Line("Lion fp32, 0.87 B", "steps", "Lion, fp32, Llama shapes"),
        Line("Adagrad fp32, 0.87 B", "steps", "Adagrad, fp32, Llama shapes"),
        Line("SGD with momentum, fp32, 0.87 B", "steps", "SGD with momentum, fp32, Llama shapes"),
        Line("`clip_and_step` (2), 2.27 B", "clip", "clipped step, Llama shapes"),
        Line("8-bit moments, bf16 weights (4), 3.49 B", "low_bit", "bf16 weights, 8-bit moments"),
        Line("8-bit moments, fp32 weights (4), 3.49 B", "low_bit", "fp32 weights, 8-bit moments"),
        Line("8-bit moments, split weights, 3.49 B", "low_bit", "split weights, 8-bit moments"),
        Line("LAMB, BERT-large shapes, 336 M", "lamb", "fp32, BERT-large shapes"),
        Line("LAMB, one tensor of 1 Gi", "lamb", "fp32, one tensor of 1,073,741,824"),
        Line("`l2_norm` of bf16, 2.27 B", "norm", "bf16, Llama shapes"),
    ]
    return Table("H200", columns, lines)


SOFTMAX_SIZES = ("16,384 x 4,096", "4,096 x 16,384", "512 x 131,072", "262,144 x 128")
LINEAR_SIZES = ("14,336 x 4,096", "4,096 x 14,336", "4,096 x 4,096", "1,024 x 4,096")
LTD_SIZES = tuple(
    f"{kept} tokens of {size}"
    for kept, size in (
        ("1,024", "32 x 2,048 x 1,024"),
        ("512", "8 x 2,048 x 4,096"),
        ("1,024", "32 x 2,048 x 1,001"),
    )
)
LAYER_SHAPES = ("32 x 128 x 1,024, 0.316 TFLOP", "8 x 512 x 1,024, 0.335 TFLOP")
NORM_SIZES = ("16,384 x 4,096", "262,144 x 128", "4,096 x 16,384", "512 x 131,072")


GELU_FORMS = ("gelu", "gelu, bias", "gelu, gated")
DECODE_WORKS = (
    *(("bfloat16", size) for size in ("1 x 4,096", "8 x 4,096", "32 x 4,096", "64 x 8,192")),
    *((kind, "32 x 4,096") for kind in ("int8", "fp8")),
)
PREFILL_WORKS = (
    ("bfloat16, 1 x 512 against 8,192", 20),
    ("bfloat16, 4 x 512 against 8,192", 5),
    ("int8, 1 x 512 against 8,192", 20),
    ("bfloat16, 1 x 512 against 8,192, window", 20),
    ("bfloat16, 1 x 512 against 8,192, softcap", 20),
)


def _cuda_functional() -> Table:
    columns = [
        Column("ours", H200, 0, terabytes),
        Column("others: how many times as fast ours is", H200, 0, rivals),
        Column("beside copying", H200, 0, beside_ceiling),
    ]
    lines = []
    for bench, forms, dtype, sizes, calls in (
        ("rms_norm", ("", "with residual"), "bfloat16", NORM_SIZES, 10),
        ("rms_norm", ("", "with residual"), "float32", ("16,384 x 4,096",), 10),
        ("layer_norm", ("", "with residual"), "bfloat16", NORM_SIZES, 10),
        ("layer_norm", ("", "with residual"), "float32", ("16,384 x 4,096",), 10),
        ("swiglu", ("", "packed"), "bfloat16", ("8,192 x 14,336",), 10),
        ("swiglu", ("", "packed"), "float32", ("8,192 x 14,336",), 10),
        ("activation", GELU_FORMS, "bfloat16", ("16,384 x 4,096",), 20),
        ("rope", ("", "interleaved"), "bfloat16", ("16,384 x 40 x 128",), 20),
    ):
        for size, direction, form in itertools.product(sizes, ("forward", "backward"), forms):
            which = f"{direction}{form and ' '}{form}"
            label = f"`{bench}` {dtype}, {size}, {which}"
            lines.append(Line(label, bench, f"{which}, {dtype}, {size}, {calls} times"))
    for size, direction, form in itertools.product(
        ("32,768 x 1,024", "4,096 x 1,024"), ("forward", "backward"), ("", "gelu_tanh")
    ):
        which, op = f"{direction}{form and ' '}{form}", "dropout_activation"
        label = f"`{op if form else 'bias_dropout_residual'}` bfloat16, {size}, {direction}"
        lines.append(Line(label, "dropout", f"{which}, bfloat16, {size}, 20 times"))
    for what, way in itertools.product(LTD_SIZES, ("gather", "scatter in place", "scatter")):
        work = f"{way}, {what}, bfloat16, 20 times"
        lines.append(Line(f"`token_{way.split()[0]}` {what}, {way}", "random_ltd", work))
    for size, direction in itertools.product(SOFTMAX_SIZES, ("forward", "backward")):
        label = f"`softmax` bfloat16, {size}, {direction}"
        lines.append(Line(label, "softmax", f"{direction}, bfloat16, {size}, 20 times"))
    for direction in ("forward causal", "backward causal"):
        what = "bfloat16, 32 x 4,096 x 4,096"
        lines.append(
            Line(f"`softmax` {what}, {direction}", "softmax", f"{direction}, {what}, 20 times")
        )
    for what in ("bfloat16, 8,192 x 128,256", "float32, 4,096 x 128,256"):
        label = f"`cross_entropy` {what}, loss and gradient in place"
        lines.append(Line(label, "cross_entropy", f"loss and gradient, {what}, 5 times"))
    return Table("H200", columns, lines)


def _cuda_training() -> Table:
    columns = [
        Column("ours, ms", H200, 0, lambda row: milliseconds(row, _name_of_ours(row))),
        Column("others: how many times as fast ours is", H200, 0, rivals),
    ]
    lines = []
    for shape, p, way in itertools.product(LAYER_SHAPES, ("0.1", "0.0"), (", as graphs", "")):
        size = shape.rsplit(", ", 1)[0]
        label = f"`DeepSpeedTransformerLayer` {size}, dropout {p}{way}"
        work = f"bfloat16, {size}, dropout {p}, {shape.rsplit(', ', 1)[1]}{way}"
        lines.append(Line(label, "layer", work))
    for block, density, way in itertools.product(
        (128, 64, 32, 16), (0.125, 0.5), ("forward", "forward and backward")
    ):
        what = f"block {block}, density {density}"
        work = f"{way}, bfloat16, 1 x 16 x 16,384 x 64, {what}"
        label = f"`block_sparse_attention` 16,384 x 16 x 64, {what}, {way}"
        lines.append(Line(label, "block_sparse", work))
    return Table("H200, bfloat16", columns, lines)


def _rows(count: int) -> str:
    return "1 row" if count == 1 else f"{count} rows"


def _cuda_inference() -> Table:
    columns = [
        Column("ours", H200, 0, our_time),
        Column("others: how many times as fast ours is", H200, 0, rivals),
        Column("beside reading", H200, 0, beside_ceiling),
    ]
    lines = []
    for size, rows in itertools.product(LINEAR_SIZES, (1, 4, 16, 64)):
        work = f"{rows} rows, bfloat16, {size}, 20 times"
        lines.append(Line(f"`skinny_linear` {size}, {_rows(rows)}", "skinny_linear", work))
    for rows in (1, 16):
        work = f"chain of 8, {rows} rows, bfloat16, 4,096 x 4,096, 5 times"
        label = f"`skinny_linear` 4,096 x 4,096, chain of 8, {_rows(rows)}"
        lines.append(Line(label, "skinny_linear", work))
    for kind, size in DECODE_WORKS:
        label = f"`decode_attention` {kind}, {size}"
        lines.append(Line(label, "decode", f"{kind}, {size}, 20 times"))
    for what, calls in PREFILL_WORKS:
        lines.append(Line(f"`prefill_attention` {what}", "prefill", f"{what}, {calls} times"))
    return Table("H200", columns, lines)


def _cpu_inference() -> Table:
    columns = [
        Column("Zen 4, 1 thread", ZEN_4, 1, cpu_functional),
        Column("Zen 4, 2 threads", ZEN_4, 2, cpu_functional),
    ]
    lines = []
    for rows, dtype in itertools.product((1, 8), ("bfloat16", "float32")):
        label = f"`skinny_linear` {dtype}, 14,336 x 4,096, {_rows(rows)}"
        lines.append(Line(label, "skinny_linear", f"{rows} rows, {dtype}, 14,336 x 4,096"))
    for what in ("bfloat16, 1 x 4,096", "bfloat16, 8 x 4,096", "int8, 8 x 4,096"):
        lines.append(Line(f"`decode_attention` {what}", "decode", what))
    return Table("GB/s; beside torch; reading", columns, lines)


def _cuda_quantization() -> Table:
    columns = [
        Column("ours", H200, 0, our_time),
        Column("others: how many times as fast ours is", H200, 0, rivals),
        Column("beside copying, or reading", H200, 0, beside_ceiling),
    ]
    lines = []
    for form, op in itertools.product(("int8", "int4", "fp8_e4m3"), ("quantize", "dequantize")):
        what = f"{op} {form}, groups of 128, bfloat16, 65,536 x 4,096"
        label = f"`{op}` {form}, 65,536 x 4,096, 4 times"
        lines.append(Line(label, "quantize", f"{what}, 4 times"))
    for kind, size, rows in itertools.product(
        ("W4A16", "W8A16"), ("14,336 x 4,096", "4,096 x 4,096"), (1, 4, 16, 64, 256)
    ):
        work = f"{rows} rows, {kind}, {size}, 20 times"
        label = f"`quantized_linear` {kind}, {size}, {_rows(rows)}"
        lines.append(Line(label, "quantized_linear", work))
    return Table("H200, bfloat16, groups of 128", columns, lines)


def _cpu_quantization() -> Table:
    columns = [
        Column("Zen 4, 1 thread", ZEN_4, 1, cpu_functional),
        Column("Zen 4, 2 threads", ZEN_4, 2, cpu_functional),
    ]
    lines = []
    for form, dtype in itertools.product(("int8", "int4", "fp8_e4m3"), ("float32", "bfloat16")):
        for op in ("quantize", "dequantize"):
            work = f"{op} {form}, groups of 128, {dtype}, 4,096 x 4,096"
            lines.append(Line(f"`{op}` {form}, {dtype}, 4,096 x 4,096", "quantize", work))
    for kind in ("W4A16", "W4A8", "W8A16", "W8A8"):
        what = f"{kind}, 4,096 x 14,336"
        lines.append(
            Line(f"`quantized_linear` {what}, 1 row", "quantized_linear", f"1 rows, {what}")
        )
    return Table("GB/s; beside torch; a copy; the stream (layers: reading)", columns, lines)


def _cpu_functional() -> Table:
    columns = [
        Column("Zen 4, 1 thread", ZEN_4, 1, cpu_functional),
        Column("Zen 4, 2 threads", ZEN_4, 2, cpu_functional),
    ]
    lines = []
    for bench, form, size in (
        ("rms_norm", "", "4,096 x 4,096"),
        ("layer_norm", "", "4,096 x 4,096"),
        ("swiglu", "", "4,096 x 4,096"),
        ("activation", "gelu", "4,096 x 4,096"),
        ("softmax", "", "4,096 x 4,096"),
        ("rope", "", "4,096 x 40 x 128"),
    ):
        for dtype, direction in itertools.product(("float32", "bfloat16"), ("forward", "backward")):
            which = f"{direction}{form and ' '}{form}"
            label = f"`{form or bench}` {dtype}, {size}, {direction}"
            lines.append(Line(label, bench, f"{which}, {dtype}, {size}"))
    return Table("GB/s; beside torch; a copy; the stream", columns, lines)


def _disk() -> Table:
    machines = (("Zen 5", ZEN_5), ("Zen 3", ZEN_3), ("Xeon", XEON))
    columns = [Column(title, machine, 0, rates) for title, machine in machines]
    workloads = ["large-read", "large-write", "pageable-read", "pageable-write", "medium-read"]
    workloads += ["medium-write", "small-read", "small-write", "state-save", "state-load"]
    workloads += ["state-touch", "cuda-write", "cuda-read"]
    return Table("GB/s", columns, [Line("", "aio", work) for work in workloads])


def _disk_cpu() -> Table:
    columns = [
        Column("io_uring, registered memory", ZEN_5, 0, lambda row: cpu_per_gib(row, 0)),
        Column("libaio", ZEN_5, 0, lambda row: cpu_per_gib(row, 1)),
    ]
    lines = [Line("small pages", "aio", "cpu"), Line("huge pages", "aio", "cpu-huge")]
    return Table("seconds of the CPU to read a GiB", columns, lines)


def _first_use() -> Table:
    columns = [Column("Zen 5", ZEN_5, 0, seconds), Column("Xeon", XEON, 0, seconds)]
    workloads = ["cpu_adam, compiled from nothing", "fused_adam for 9.0, from nothing"]
    workloads += ["cpu_adam, loaded from the cache", "import deepspeed_ext.optim, after torch"]
    return Table("first use, 2 cores", columns, [Line(work, "build", work) for work in workloads])


def _offload() -> Table:
    threads = 16
    columns = [
        Column("ours", H200, threads, lambda row: f"{milliseconds(row, _name_of_ours(row))} ms"),
        Column("others: how many times as fast ours is", H200, threads, all_others),
        Column("beside the bound", H200, threads, beside_ceiling),
    ]
    uses = (
        "step",
        "never",
        "always",
        "freed",
        "streamed",
        "accumulate",
        "others",
        "only",
        "only-streamed",
        "only-streamed-nvme",
        "nvme",
        "all-nvme",
        "only-nvme",
        "host",
    )
    workloads = [ROWS[f"{use}-{form}"].work for form in FORMATS for use in uses]
    return Table("H200, 16 cores", columns, [Line("", "offload", work) for work in workloads])


def _zero() -> Table:
    threads = 16  # of each process
    columns = [
        Column("ours", H200_X2, threads, lambda row: f"{milliseconds(row, _name_of_ours(row))} ms"),
        Column("others: how many times as fast ours is", H200_X2, threads, all_others),
        Column("beside the disk", H200_X2, threads, beside_ceiling),
    ]
    workloads = [
        (f"step, stage {stage}{clips}{beside}", f"a step of stage {stage}{clips}{beside}")
        for beside in ("", ", beside DeepSpeed")
        for stage in (2, 3)
        for clips in ("", ", clips")
    ]
    workloads += [
        (f"step, stage 3, {shards} shards, state in host memory", f"{_OFFLOADED}, {shards} shards")
        for shards in ("float32", "bfloat16")
    ]
    workloads += [
        (f"3.48 B parameters, {what}", what)
        for what in ("stall of a save", "save, to the disk", "load")
    ]
    workloads.append(("3.48 B bfloat16 weights, `zero.Init`", "zero.Init from a safetensors file"))
    lines = [Line(label, "zero", work) for label, work in workloads]
    return Table("two H200s, 1.51 B parameters in Llama shapes", columns, lines)


TABLES = {
    "cpu-steps": _cpu_steps(),
    "cuda-steps": _cuda_steps(),
    "offload": _offload(),
    "zero": _zero(),
    "cuda-training": _cuda_training(),
    "cuda-functional": _cuda_functional(),
    "cpu-functional": _cpu_functional(),
    "cuda-inference": _cuda_inference(),
    "cpu-inference": _cpu_inference(),
    "cuda-quantization": _cuda_quantization(),
    "cpu-quantization": _cpu_quantization(),
    "disk": _disk(),
    "disk-cpu": _disk_cpu(),
    "first-use": _first_use(),
}


def machines_in(folder: Path) -> dict[str, Machine]:
    """Return all machines whose results are kept, by the names of their files."""
    return {path.stem: Machine(json.loads(path.read_text())) for path in folder.glob("*.json")}


def replaced(text: str, machines: Mapping[str, Machine]) -> str:
    """Return a document with the tables that belong between its marks."""

    def fill(match: "re.Match[str]") -> str:
        return f"{match[1]}\n{rendered(TABLES[match[2]], machines)}\n{match[4]}"

    return _MARKED.sub(fill, text)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--check", action="store_true", help="write nothing, fail if it would")
    options = parser.parse_args()
    old = PAGE.read_text()
    new = replaced(old, machines_in(FOLDER))
    if options.check and new != old:
        print(f"{PAGE} has other figures; run: python -m benchmarks.tables", file=sys.stderr)
        return 1
    PAGE.write_text(new)
    return 0


if __name__ == "__main__":
    sys.exit(main())
