set -x
python -m pytest -q -x tests/offload/test_saved_tensors.py tests/offload/test_saved_tensors_memory.py tests/offload/test_checkpoint_inputs.py -k "cuda or streams or peak or capture" 2>&1 | tail -15
python -m benchmarks.bench_saved_tensors --rounds 7 2>&1 | grep -v "it/s"
