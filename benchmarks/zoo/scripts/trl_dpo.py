"""TRL: direct preference optimisation of a small Llama against its frozen copy.

library: trl
"""

import random

from _digest import finish
from _text import WORDS, sentence, tokenizer
from datasets import Dataset
from transformers import LlamaConfig, LlamaForCausalLM, set_seed
from transformers.trainer_callback import PrinterCallback
from trl import DPOConfig, DPOTrainer

set_seed(0)
words = tokenizer()
source = random.Random(0)
prompts = [sentence(source, 6) for _ in range(120)]
data = Dataset.from_dict(
    {
        "prompt": prompts,
        "chosen": [" " + sentence(source, 5) for _ in prompts],
        "rejected": [" " + " ".join(source.choices(WORDS, k=5)) for _ in prompts],
    }
)
config = LlamaConfig(
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
model = LlamaForCausalLM(config)
frozen = LlamaForCausalLM(config)
frozen.load_state_dict(model.state_dict())
settings = DPOConfig(
    output_dir="output",
    max_steps=25,
    per_device_train_batch_size=8,
    learning_rate=5e-4,
    logging_steps=1,
    bf16=False,
    save_strategy="no",
    report_to=[],
    disable_tqdm=True,
    use_cpu=True,
    max_length=32,
    seed=0,
    beta=0.1,
    gradient_checkpointing=False,
)
trainer = DPOTrainer(model=model, ref_model=frozen, args=settings, train_dataset=data, processing_class=words)
trainer.remove_callback(PrinterCallback)
trainer.train()
finish([entry["loss"] for entry in trainer.state.log_history if "loss" in entry], model)
