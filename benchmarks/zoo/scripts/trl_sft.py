"""TRL: supervised fine-tuning of a small Llama with packing.

library: trl
"""

import random

from _digest import finish
from _text import sentence, tokenizer
from datasets import Dataset
from transformers import LlamaConfig, LlamaForCausalLM, set_seed
from transformers.trainer_callback import PrinterCallback
from trl import SFTConfig, SFTTrainer

set_seed(0)
words = tokenizer()
source = random.Random(0)
data = Dataset.from_dict({"text": [sentence(source, 14) for _ in range(400)]})
model = LlamaForCausalLM(
    LlamaConfig(
        vocab_size=len(words),
        hidden_size=48,
        intermediate_size=96,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=64,
        pad_token_id=0,
        bos_token_id=2,
        eos_token_id=3,
    )
)
settings = SFTConfig(
    output_dir="output",
    max_steps=30,
    per_device_train_batch_size=8,
    learning_rate=2e-3,
    logging_steps=1,
    bf16=False,
    save_strategy="no",
    report_to=[],
    disable_tqdm=True,
    use_cpu=True,
    max_length=32,
    packing=True,
    seed=0,
    packing_strategy="wrapped",
    gradient_checkpointing=False,
)
trainer = SFTTrainer(model=model, args=settings, train_dataset=data, processing_class=words)
trainer.remove_callback(PrinterCallback)
trainer.train()
finish([entry["loss"] for entry in trainer.state.log_history if "loss" in entry], model)
