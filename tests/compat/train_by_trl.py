"""Train by TRL with configs of DeepSpeed's; as train_by_trainer, whose way of running it has.

    DS_ACCELERATOR=cpu python tests/compat/train_by_trl.py --record FOLDER

writes recorded_trl.json where a real deepspeed is installed.
"""

import os
from pathlib import Path

from train_by_trainer import HEADS, SIZES, config, main

FILE = Path(__file__).with_name("recorded_trl.json")
# kind of training, stage, precision, processes
CASES = ("sft-2-bf16-1", "sft-3-float32-2", "grpo-2-float32-2", "grpo-3-float32-1", "grpo-3-bf16-2")


def tokenizer():
    """A token for each of so many characters."""
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    letters = "abcdefghijklmnopqrstuvwxyz .,"
    vocabulary = {letter: number for number, letter in enumerate(["<pad>", "<eos>", *letters])}
    made = Tokenizer(models.WordLevel(vocabulary, unk_token="<pad>"))
    made.pre_tokenizer = pre_tokenizers.Split("", "isolated")
    return PreTrainedTokenizerFast(
        tokenizer_object=made, pad_token="<pad>", eos_token="<eos>", padding_side="left"
    )


def reward(completions, **_):
    """As many as there are of one letter."""
    return [float(text.count("a")) for text in completions]


def trained(case, folder):
    import torch
    from datasets import Dataset
    from transformers import LlamaConfig, LlamaForCausalLM
    from trl import GRPOConfig, GRPOTrainer, SFTConfig, SFTTrainer

    kind, stage, precision, world = case.split("-")
    torch.manual_seed(0)
    model = LlamaForCausalLM(LlamaConfig(**SIZES, **HEADS, pad_token_id=0, eos_token_id=1))
    base = folder / f"base-{os.environ['RANK']}"  # of which the reference model is made anew
    model.save_pretrained(base)
    model = LlamaForCausalLM.from_pretrained(base)
    texts = [f"{chr(97 + i % 26)} cat, a dog." for i in range(8 * int(world))]
    options = {
        "output_dir": str(folder / "run"),
        "per_device_train_batch_size": 2,
        "gradient_accumulation_steps": 2,
        "max_steps": 4,
        "logging_steps": 1,
        "learning_rate": 1e-2,
        "max_grad_norm": 0.5,
        "bf16": precision == "bf16",
        "deepspeed": config(int(stage), precision, "none", "trainer"),
        "report_to": [],
        "disable_tqdm": True,
        "gradient_checkpointing": False,
        "save_strategy": "no",
    }
    if kind == "sft":
        rows = Dataset.from_dict({"text": texts})
        made = SFTTrainer(
            model,
            args=SFTConfig(max_length=16, **options),
            train_dataset=rows,
            processing_class=tokenizer(),
        )
    else:
        rows = Dataset.from_dict({"prompt": texts})
        options |= {"num_generations": 2, "max_completion_length": 6, "beta": 0.04}
        made = GRPOTrainer(
            model,
            reward,
            args=GRPOConfig(temperature=1.0, **options),
            train_dataset=rows,
            processing_class=tokenizer(),
        )
    made.train()
    names = ("loss", "grad_norm", "learning_rate", "reward", "kl")
    return {name: [r[name] for r in made.state.log_history if name in r] for name in names}


if __name__ == "__main__":
    main(trained, CASES, FILE)
