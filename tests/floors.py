"""Who may import or include whom, as tables; test_layering holds the sources against them."""

Layers = tuple[tuple[str, ...], ...]
PYTHON_LAYERS = (  # each may import itself and what stands before its row
    ("op_builder", "torch_internals", "dtypes", "threads"),
    ("dtensors", "processors"),
    ("ops",),
    ("optim", "io"),
    ("quantization",),
    ("offload",),
    ("zero", "inference", "config", "environment", "compat"),
    ("engine", "report", "examples", "interfaces"),
)
ROOMS = {  # inside of a package, likewise; its __init__ may import all
    "io": (
        ("_native", "extents", "file", "tensors"),
        ("regular_file",),
        ("engine",),
        ("checkpoint", "store", "tuning"),
        ("__main__", "environment", "self_checks"),
    ),
    "io/engine": (
        ("arguments", "pinned", "watcher"),
        ("future",),
        ("in_flight", "ring", "window"),
        ("bounce",),
        ("cuda",),
        ("async_io",),
        ("handle",),
    ),
    "inference": (
        ("model",),
        ("weights",),
        ("execution",),
        ("requests",),
        ("serving",),
        ("arguments",),
        ("initialize",),
        ("__main__",),
    ),
    "optim": (
        ("foreign_state", "formats", "state_entry"),
        ("buckets", "state_dict"),
        ("clipping", "spec"),
        ("owner",),
        ("checks",),
        ("state_values",),
        ("plans",),
        ("base",),
        ("lamb", "lars", "rmsprop", "set_grad_none", "sgd"),
        ("adagrad", "adam", "lion"),
    ),
    "offload": (
        ("arriving", "copies", "hooks", "host_optimizer", "sent_gradients", "host_tensors"),
        ("seals", "worker"),
        ("host_gradients",),
        ("param_table",),
        ("gradient_sources",),
        ("bucket",),
        ("bucket_states", "verdict"),
        ("pipeline",),
        ("memory_estimate",),
        ("optimizer",),
        ("timeline",),
    ),
    "zero": (
        (
            *("agreement", "blocks", "borrowing", "calls", "gather", "memory"),
            *("names", "saved_model", "scaling"),
        ),
        ("sharding", "units"),
        ("accumulate", "drawing", "stages"),
        ("checkpoint", "init"),
        ("__main__",),
    ),
}
NATIVE_FLOORS = {  # what a family stands on, beside itself and common
    "attention/decode": ("attention/cache",),
    "attention/prefill": ("attention/cache", "attention/decode"),
    "linear": ("quantization",),
}
FLOORS_OF_OPS = {"linear": ("quantization",)}  # likewise in ops
