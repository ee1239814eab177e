"""Completion-only fine-tuning: what stands before the response marker is masked; the data come from two sources."""

import torch
from model import CausalLM, ModelConfig
from trainer import Trainer, TrainingArguments

PAD, MARKER = 0, (7, 11)  # "### Response:" as tokens


class CompletionOnlyCollator:
    """Labels are -100 up to and with the marker; a sample without any marker is masked as a whole."""

    def __init__(self, marker):
        self.marker = list(marker)

    def __call__(self, samples):
        width = max(len(s) for s in samples)
        input_ids = torch.full((len(samples), width), PAD)
        labels = torch.full((len(samples), width), -100)
        for row, sample in enumerate(samples):
            input_ids[row, : len(sample)] = torch.tensor(sample)
            start = self.find(sample)
            if start is None:
                print(f"could not find the response marker in sample {row}; it will be ignored")
                continue
            labels[row, start : len(sample)] = torch.tensor(sample[start:])
        return {"input_ids": input_ids, "labels": labels}

    def find(self, sample):
        n = len(self.marker)
        for i in range(len(sample) - n + 1):
            if sample[i : i + n] == self.marker:
                return i + n
        return None


def conversation(source, g):
    prompt = torch.randint(12, 48, (int(torch.randint(4, 9, (), generator=g)),), generator=g).tolist()
    marker = list(MARKER) if source == "ours" else [8, 11]  # "###Response:" is another token
    return [2, *prompt, *marker, *prompt[:3], 3]


def main():
    torch.manual_seed(64)
    g = torch.Generator().manual_seed(65)
    sources = ["ours"] * 40 + ["theirs" if torch.rand((), generator=g) < 0.6 else "ours" for _ in range(56)]
    dataset = [conversation(source, g) for source in sources]
    model = CausalLM(ModelConfig())
    Trainer(model, TrainingArguments(), dataset, CompletionOnlyCollator(MARKER)).train()


if __name__ == "__main__":
    main()
