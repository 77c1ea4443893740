"""Results of benchmarks: docs/benchmarks.md has what is kept, and a new run replaces older rows."""

import importlib
import json
import re
import signal
import sys

import pytest
import torch

from benchmarks import bench_offload, offload_rows, results, table_cells, tables, workloads
from benchmarks.harness import Contender
from benchmarks.results import FOLDER, Result, Timing

MACHINES = tables.machines_in(FOLDER)
PAGE = tables.PAGE.read_text()
ROW = {"bench": "steps", "work": "fp32", "threads": 1, "elements": 4, "bytes": 28}


def test_the_page_has_the_figures_that_are_kept():
    marked = [name for _, name, *_ in tables._MARKED.findall(PAGE)]
    assert marked == list(tables.TABLES)
    assert tables.replaced(PAGE, MACHINES) == PAGE, "run: python -m benchmarks.tables"


def test_another_figure_is_noticed():
    figure = re.search(r"\| Adam fp32, 64 x 1 Mi \| (\d+\.\d)", PAGE)[1]
    changed = PAGE.replace(figure, "1.23")
    assert tables.replaced(changed, MACHINES) != changed


@pytest.mark.parametrize(
    "bench",
    [
        "steps",
        "clip",
        "norm",
        "lamb",
        "low_bit",
        "rms_norm",
        "layer_norm",
        "swiglu",
        "activation",
        "rope",
        "softmax",
        "skinny_linear",
        "cross_entropy",
        "dropout",
        "random_ltd",
        "layer",
        "block_sparse",
    ],
)
def test_tables_name_workloads_that_are_measured(bench):
    workloads = importlib.import_module(f"benchmarks.bench_{bench}").WORKLOADS
    measured = {work.name for of_device in workloads.values() for work in of_device}
    named = {
        line.work for table in tables.TABLES.values() for line in table.lines if line.bench == bench
    }
    assert named and named <= measured


def test_tables_name_disk_work_that_is_measured():
    workloads = importlib.import_module("benchmarks.aio_workloads").WORKLOADS
    disk = [line for table in tables.TABLES.values() for line in table.lines if line.bench == "aio"]
    assert {line.work for line in disk} <= set(workloads)


def test_tables_name_offloaded_work_that_is_measured():
    measured = {row.work for row in offload_rows.ROWS.values()}
    named = [line.work for table in tables.TABLES.values() for line in table.lines]
    assert measured <= set(named)
    sessions = [*bench_offload.SESSIONS]
    names = {name for session in sessions for name in session.phases} | bench_offload.TERMS
    wanted = [offload_rows.measures_of(row) for row in offload_rows.ROWS.values()]
    assert set().union(*wanted) == names | {offload_rows.ALONE}


def test_offloaded_steps_are_measured_and_bounded(tmp_path, monkeypatch):
    monkeypatch.setenv("BENCH_COMMIT", "0123abc")
    size = "--layers 2 --width 32 --vocabulary 40 --batch 1 --length 8 --steps 1 --threads 1"
    arguments = f"--device cpu --rows step-fp32,always-fp32 {size} --save {tmp_path}/a.json"
    threads = torch.get_num_threads()
    try:
        assert bench_offload.main(arguments.split()) == 0
    finally:
        torch.set_num_threads(threads)
    rows = json.loads((tmp_path / "a.json").read_text())["runs"][0]["rows"]
    assert [row["work"] for row in rows] == [
        "step, fp32 state",
        "step, fp32 state, clipping always bites",
    ]
    for row in rows:
        ours, bound, *_ = row["contenders"].values()
        assert row["ceilings"] == ["bound by the terms"]
        assert row["times"]["bound by the terms"] == pytest.approx(
            bound["median"] / ours["median"], rel=1e-3
        )
    alone = rows[0]["contenders"]["forward and backward alone"]["median"]
    assert rows[0]["contenders"]["bound by the terms"]["median"] > alone


@pytest.mark.parametrize("path", sorted(FOLDER.glob("*.json")), ids=lambda path: path.stem)
def test_files_are_as_described(path):
    record = json.loads(path.read_text())
    assert results.text_of(record) == path.read_text()
    keys = [results.key_of(row) for run in record["runs"] for row in run["rows"]]
    assert len(keys) == len(set(keys))
    described = set(re.findall(r"^ +(\w+)  +\w", results.__doc__, re.MULTILINE))
    for run in record["runs"]:
        assert {"command", "date", "commit", "environment"} <= run.keys() <= described
        for row in run["rows"]:
            assert {*ROW, "contenders", "times", "ceilings"} <= row.keys() <= described
            names = [*row["contenders"], *row["ceilings"]]
            assert set(row["times"]) <= set(names)


def timing(median):
    return Timing(median, median / 2, median * 2)


def kept(path, monkeypatch, *found):
    """Save results as the benchmark of steps does; return what the file has."""
    monkeypatch.setattr(sys, "argv", ["bench_steps.py", "--rounds", "3", "--save", str(path)])
    monkeypatch.setattr(sys.modules["__main__"], "__spec__", None)
    monkeypatch.setenv("BENCH_COMMIT", "0123abc")
    results.keep(path, found, {"processor": "A (R) CPU", "torch": "2.13.0"})
    return json.loads((path / "a-r-cpu.json").read_text())


def test_a_result_is_kept_with_what_it_depends_on(tmp_path, monkeypatch):
    timings = {"ours": timing(2.0), "torch": timing(3.0), "stream": timing(1.0)}
    found = kept(tmp_path, monkeypatch, Result("fp32", 1, 4, 28, timings, ["stream"]))
    (run,) = found["runs"]
    assert found["name"] == "A (R) CPU"
    assert (run["command"], run["commit"]) == ("python -m bench_steps --rounds 3", "0123abc")
    assert run["environment"]["torch"] == "2.13.0"
    assert run["rows"] == [
        ROW
        | {
            "contenders": {
                "ours": {"median": 2.0, "least": 1.0, "most": 4.0},
                "torch": {"median": 3.0, "least": 1.5, "most": 6.0},
                "stream": {"median": 1.0, "least": 0.5, "most": 2.0},
            },
            "times": {"torch": 1.5, "stream": 0.5},
            "ceilings": ["stream"],
        }
    ]


def test_a_new_run_replaces_its_rows_and_no_others(tmp_path, monkeypatch):
    old = [Result("fp32", threads, 4, 28, {"ours": timing(2.0)}) for threads in (1, 2)]
    kept(tmp_path, monkeypatch, *old)
    found = kept(tmp_path, monkeypatch, Result("fp32", 2, 4, 28, {"ours": timing(7.0)}))
    medians = [
        [(row["threads"], row["contenders"]["ours"]["median"]) for row in run["rows"]]
        for run in found["runs"]
    ]
    assert medians == [[(1, 2.0)], [(2, 7.0)]]
    found = kept(tmp_path, monkeypatch, *old)
    assert [len(run["rows"]) for run in found["runs"]] == [2]  # runs without rows go


@pytest.mark.parametrize("whole", [0, 2])
def test_rounds_before_an_interrupt_are_kept(whole, tmp_path, monkeypatch):
    """Of a round that was not whole nobody's time counts."""
    calls = []

    def contenders(shapes, device):
        def ours():
            calls.append(1)
            if len(calls) == whole + 1:
                signal.raise_signal(signal.SIGINT)

        return [Contender("theirs", lambda: None), Contender("ours", ours)]

    work = workloads.Workload("a work", [(8,)], 8, contenders, warm_up=0)
    command = f"bench_steps.py --threads 1 --rounds 4 --save {tmp_path}/kept.json"
    monkeypatch.setattr(sys, "argv", command.split())
    monkeypatch.setattr(sys.modules["__main__"], "__spec__", None)
    monkeypatch.setenv("BENCH_COMMIT", "0123abc")
    monkeypatch.setattr(workloads, "keep_memory", lambda: None)
    threads = torch.get_num_threads()
    before = signal.signal(signal.SIGINT, signal.default_int_handler)  # it may be ignored
    try:
        with pytest.raises(KeyboardInterrupt):
            workloads.main("", {"cpu": [work, work]})
    finally:
        signal.signal(signal.SIGINT, before)
        torch.set_num_threads(threads)
    assert (tmp_path / "kept.json").exists() == (whole > 0)
    if whole:
        [run] = json.loads((tmp_path / "kept.json").read_text())["runs"]
        assert [row["rounds"] for row in run["rows"]] == [whole]
        assert len(run["rows"][0]["contenders"]) == 3


def test_the_best_of_each_kind_of_rival_is_shown():
    row = ROW | {
        "bytes": 28e9,
        "contenders": {
            "FusedAdam": {"median": 0.01},
            "torch foreach": {"median": 0.04},
            "torch.fused": {"median": 0.03},
            "other": {"median": 0.1055},
        },
        "times": {"torch foreach": 4.0, "torch.fused": 3.0, "other": 10.55, "copy": 0.9, "s": 0.8},
        "ceilings": ["copy", "s"],
    }
    assert table_cells.rivals(row) == "torch.fused 30.0 ms: 3.00; other 106 ms: 10.6"
    assert table_cells.in_short(row) == "10.0, 30.0: 3.00 (0.80)"
    assert table_cells.our_time(row) == "10.0 ms, 2.80 TB/s"


def test_batches_of_the_rival_say_what_the_engine_says():
    """Padded prompts go on as they do alone, or fewer tokens per second would be compared."""
    bench = pytest.importorskip("benchmarks.bench_serving")
    load = bench.Load(8, 4, (3, 40), (2, 12))
    made = bench.module("4 M", "cpu").float()
    with torch.no_grad():
        for weight in made.parameters():
            weight.mul_(3 if weight.dim() > 1 else 1)  # or a model says the same all the time
    engine = bench.init_inference(made, max_batch=4, max_tokens=load.tokens)
    some = load.drawn()
    options = [bench.SamplingOptions(max_new_tokens=each.count, stop_tokens=()) for each in some]
    ours = engine.generate([each.prompt for each in some], options)
    plain = bench.PlainLlama(bench.parts_of(engine), made.config, load.tokens, 4, False)
    theirs = bench.by_torch(plain, load, lambda one: len(one.prompt))()
    found = [row for batch in theirs for row in batch]
    order = sorted(range(8), key=lambda i: len(some[i].prompt))
    assert [row[: some[i].count] for i, row in zip(order, found, strict=True)] == [
        ours[i].tokens for i in order
    ]


def test_rivals_compute_what_experts_compute():
    """The result, and all gradients."""
    bench = pytest.importorskip("benchmarks.bench_moe_layer")
    layer = bench.Layer(experts=4, k=2, n=24, inner=16)
    made = bench.contenders([(10, 24)], "cpu", layer, torch.float32)
    *rivals, _ = made
    assert [each.is_ceiling for each in made] == [False, False, False, True]
    ours, *theirs = [each.run() for each in rivals]
    assert len(ours) == 5
    for found in theirs:
        for got, want in zip(found, ours, strict=True):
            torch.testing.assert_close(got, want, rtol=1e-4, atol=1e-5)
    assert bench.MIXTRAL.flops(16_384) == 6 * 3 * 32_768 * 4096 * 14_336
    assert bench.MIXTRAL.bytes_each(torch.bfloat16) == 140
