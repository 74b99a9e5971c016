"""Hugging Face's Trainer, with the penalty on embeddings: a sentence's tokens are no tensor that a
loss can be differentiated in, their embeddings are. `python -m examples.integrations.hf_trainer`.
"""

import tempfile

import torch
import torch.nn.functional as F
from transformers import BertConfig, BertForSequenceClassification, Trainer, TrainingArguments

import doubleback as db


class PenalisedTrainer(Trainer):
    """∇ of the loss in the embeddings, beside the loss."""

    weight = 0.1

    def compute_loss(self, model, inputs, return_outputs=False, **_):
        embeddings = model.get_input_embeddings()(inputs["input_ids"])
        out, penalty = self.penalised(
            inputs["labels"], inputs_embeds=embeddings, attention_mask=inputs["attention_mask"]
        )
        loss = F.cross_entropy(out.logits, inputs["labels"]) + self.weight * penalty
        return (loss, out) if return_outputs else loss

    @property
    def penalised(self) -> db.Penalised:
        if not hasattr(self, "_penalised"):
            penalty = db.LossGradient("cross_entropy")
            self._penalised = db.Penalised(
                self.model, penalty, wrt="inputs_embeds", output="logits"
            )
        return self._penalised


def main(steps: int = 20) -> float:
    torch.manual_seed(0)
    sizes = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2}
    config = BertConfig(vocab_size=100, intermediate_size=64, num_labels=3, **sizes)
    tokens = torch.randint(100, (64, 12))
    rows = [
        {"input_ids": t, "attention_mask": torch.ones_like(t), "labels": int(t[0]) % 3}
        for t in tokens
    ]
    with tempfile.TemporaryDirectory() as folder:
        arguments = TrainingArguments(
            folder, max_steps=steps, learning_rate=3e-3, report_to=[], save_strategy="no",
            disable_tqdm=True,
        )  # fmt: skip
        trainer = PenalisedTrainer(
            BertForSequenceClassification(config), arguments, train_dataset=rows
        )
        return trainer.train().training_loss


if __name__ == "__main__":
    print(f"loss {main():.3f}")
