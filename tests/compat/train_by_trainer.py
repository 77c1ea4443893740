"""Train by Hugging Face's Trainer with configs of DeepSpeed's, each in processes of its own.

    python tests/compat/train_by_trainer.py FOLDER CASE ...

prints what came of each case, as JSON. Where a real deepspeed is installed it is what trains, else
this library stands in for it. In an environment with transformers, accelerate and DeepSpeed
(`DS_BUILD_OPS=0 pip install --no-deps deepspeed`, and the pure Python packages that it imports),

    DS_ACCELERATOR=cpu python tests/compat/train_by_trainer.py --record FOLDER

writes recorded_trainer.json, which test_trainer compares with.
"""

import importlib
import importlib.metadata
import json
import os
import socket
import subprocess
import sys
import traceback
from pathlib import Path

LORA = ("1-float32-none-lora-1", "2-bf16-none-lora-2", "3-bf16-none-lora-2", "3-float32-cpu-lora-1")
FILE = Path(__file__).with_name("recorded_trainer.json")
# stage, precision, where the state is, whose optimizer and schedule, processes; "lora" is Trainer's
# optimizer of an adapter by PEFT
CASES = (
    "0-float32-none-config-1",
    "1-bf16-none-config-2",
    "1-float32-cpu-trainer-1",
    "2-fp16-none-config-2",
    "2-fp16-none-trainer-2",
    "2-bf16-cpu-config-1",
    "2-float32-none-trainer-2",
    "3-bf16-none-config-2",
    "3-fp16-cpu-config-1",
    "3-float32-none-trainer-2",
    *LORA,
)
# Those whose parameters rest in host memory, of which DeepSpeed's numbers are those of others.
RESTING = ("3-bf16-params-config-2", "3-float32-params-trainer-2", "3-fp16-params-config-1")
LAUNCHED = "accelerate"
SIZES = {"vocab_size": 32, "hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 2}
HEADS = {"num_attention_heads": 2, "num_key_value_heads": 2}


def config(stage, precision, device, owner):
    rests, device = device == "params", "cpu" if device == "params" else device
    given = {
        "train_micro_batch_size_per_gpu": "auto",
        "gradient_accumulation_steps": "auto",
        "gradient_clipping": "auto",
        "bf16": {"enabled": "auto"},
        "fp16": {"enabled": "auto", "initial_scale_power": 8},
        "zero_optimization": {
            "stage": stage,
            "offload_optimizer": {"device": device},
            "offload_param": {"device": "cpu" if rests else "none", "pin_memory": rests},
            "stage3_gather_16bit_weights_on_model_save": True,
            "stage3_prefetch_bucket_size": "auto",
            "reduce_bucket_size": "auto",
        },
    }
    if owner == "config":
        names = ("lr", "betas", "eps", "weight_decay")
        given["optimizer"] = {"type": "AdamW", "params": dict.fromkeys(names, "auto")}
        names = ("warmup_min_lr", "warmup_max_lr", "warmup_num_steps", "total_num_steps")
        given["scheduler"] = {"type": "WarmupDecayLR", "params": dict.fromkeys(names, "auto")}
    if sys.argv[1] == "--record":  # torch's steps: those of DeepSpeed take minutes to compile
        given["zero_force_ds_cpu_optimizer"] = False
        if owner == "config":
            given["optimizer"]["params"]["torch_adam"] = True
    return given


def data(count):
    import torch

    draws = torch.Generator().manual_seed(1)
    rows = torch.randint(SIZES["vocab_size"], (count, 8), generator=draws)
    return [{"input_ids": row, "labels": row} for row in rows]


def with_adapter(model):
    from peft import LoraConfig, get_peft_model

    options = LoraConfig(r=2, target_modules=["q_proj", "v_proj"], task_type="CAUSAL_LM")
    return get_peft_model(model, options)


def reloaded(folder, owner):
    """What save_model wrote, read by from_pretrained; of an adapter, on what it was made for."""
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    if owner != "lora":
        return LlamaForCausalLM.from_pretrained(folder, dtype=torch.float32)
    from peft import PeftModel

    torch.manual_seed(0)
    return PeftModel.from_pretrained(LlamaForCausalLM(LlamaConfig(**SIZES, **HEADS)), folder)


def trained(case, folder):
    """The last group of an epoch has one micro-batch of two."""
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM, Trainer, TrainingArguments
    from transformers.integrations.deepspeed import unset_hf_deepspeed_config

    stage, precision, device, owner, world = case.split("-")

    def trainer():
        torch.manual_seed(0)
        model = LlamaForCausalLM(LlamaConfig(**SIZES, **HEADS))
        if owner == "lora":
            model = with_adapter(model)
        arguments = TrainingArguments(
            folder / "run",
            per_device_train_batch_size=2,
            gradient_accumulation_steps=2,
            num_train_epochs=2,
            logging_steps=1,
            save_steps=3,
            learning_rate=1e-2,
            weight_decay=0.1,
            max_grad_norm=0.5,
            warmup_steps=2,
            bf16=precision == "bf16",
            fp16=precision == "fp16",
            deepspeed=config(int(stage), precision, device, owner),
            report_to=[],
            disable_tqdm=True,
        )
        rows = data(10 * int(world))
        return Trainer(model, arguments, train_dataset=rows, eval_dataset=rows[:4])

    first = trainer()
    first.train()
    found = {name: [] for name in ("loss", "grad_norm", "learning_rate")}
    for row in first.state.log_history:
        for name in found:
            if name in row:
                found[name].append(row[name])
    found["eval_loss"] = first.evaluate()["eval_loss"]
    first.save_model(folder / "model")
    second = trainer()
    second.train(resume_from_checkpoint=folder / "run" / "checkpoint-3")
    rows = second.state.log_history
    found["resumed_loss"] = [row["loss"] for row in rows if "loss" in row and row["step"] > 3]
    unset_hf_deepspeed_config()  # so that anybody may read it
    model = reloaded(folder / "model", owner)
    ids = torch.stack([row["input_ids"] for row in data(4)])
    with torch.no_grad():
        found["reloaded_loss"] = model(ids, labels=ids).loss.item()
    return found


def free_port():
    with socket.socket() as opened:
        opened.bind(("localhost", 0))
        return str(opened.getsockname()[1])


def run(trained, case, folder):
    """Return what the first of the processes of a case found."""
    import torch

    folder.mkdir(parents=True)
    os.environ |= {"MASTER_ADDR": "localhost", "MASTER_PORT": free_port()}
    world = int(case.rpartition("-")[2])
    children = []
    for rank in range(world):
        child = os.fork()
        if child == 0:
            variables = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": world}
            os.environ |= {name: str(value) for name, value in variables.items()}
            status = 1
            try:
                torch.set_num_threads(1)  # anew, before other threads would do it all at once
                found = trained(case, folder)
                if rank == 0:
                    (folder / "found.json").write_text(json.dumps(found))
                status = 0
            except BaseException:
                traceback.print_exc()
            finally:
                sys.stdout.flush()
                sys.stderr.flush()
                os._exit(status)
        children.append(child)
    statuses = [os.waitpid(child, 0)[1] for child in children]
    return json.loads((folder / "found.json").read_text()) if not any(statuses) else None


def launched(folder, variables):
    """Return what the script of accelerate found in two processes of `accelerate launch`."""
    (folder / LAUNCHED).mkdir(parents=True)
    options = "--use_deepspeed --num_processes 2 --num_machines 1 --zero_stage 3"
    options += " --gradient_accumulation_steps 2 --gradient_clipping 0.5 --mixed_precision no"
    options += " --offload_optimizer_device none --offload_param_device none"
    options += " --zero3_init_flag false --zero3_save_16bit_model true --main_process_port "
    options += free_port()
    script = Path(__file__).with_name("accelerate_script.py")
    command = [sys.executable, "-m", "accelerate.commands.launch", *options.split(), script]
    env = os.environ | {"OMP_NUM_THREADS": "1"} | variables
    subprocess.run([*command, folder / LAUNCHED], env=env, check=True)
    return json.loads((folder / LAUNCHED / "found.json").read_text())


def main(trained, all_cases, file):
    """Record all cases, or print what comes of some, as `trained` does them."""
    is_recording = sys.argv[1] == "--record"
    folder, cases = (
        (Path(sys.argv[2]), all_cases) if is_recording else (Path(sys.argv[1]), sys.argv[2:])
    )
    if not is_recording:
        from deepspeed_ext import compat

        compat.install()
        # Once here, and not in each child: also what fully_shard imports when it is called.
        for name in ("deepspeed_ext.engine", "torch._dynamo", "torch.distributed.checkpoint"):
            importlib.import_module(name)
    import no_gpu
    import torch
    from transformers import LlamaForCausalLM, Trainer

    assert LlamaForCausalLM and Trainer
    torch.set_num_threads(1)
    no_gpu.pretend()
    found = {}
    for case in cases:
        found[case] = run(trained, case, folder / case)
    if is_recording:
        if file == FILE:
            found[LAUNCHED] = launched(folder, {})
        versions = {n: importlib.metadata.version(n) for n in ("deepspeed", "transformers")}
        rows = ",\n".join(f"{json.dumps(case)}: {json.dumps(row)}" for case, row in found.items())
        file.write_text(f'{{"versions": {json.dumps(versions)}, "cases": {{\n{rows}\n}}}}\n')
    else:
        print(json.dumps(found))


if __name__ == "__main__":
    main(trained, CASES, FILE)
