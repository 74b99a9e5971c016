"""A Lightning module: `python -m examples.integrations.lightning_module`."""

import lightning
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import doubleback as db


class Classifier(lightning.LightningModule):
    def __init__(self, weight: float = 0.1) -> None:
        super().__init__()
        self.save_hyperparameters()
        net = nn.Sequential(nn.Linear(10, 32), nn.SiLU(), nn.Linear(32, 3))
        self.model = db.Penalised(net, db.LossGradient("cross_entropy"))

    def forward(self, x):
        return self.model.net(x)

    def training_step(self, batch, _):
        x, y = batch
        out, penalty = self.model(x, y)
        loss = F.cross_entropy(out, y)
        self.log_dict({"loss": loss, "penalty": penalty}, prog_bar=True)
        return loss + self.hparams["weight"] * penalty

    def validation_step(self, batch, _):  # under no_grad: two sweeps, no backward
        x, y = batch
        out, penalty = self.model(x, y)
        self.log_dict({"val_loss": F.cross_entropy(out, y), "val_penalty": penalty})

    def configure_optimizers(self):
        return torch.optim.Adam(self.parameters(), lr=1e-2)


def main(epochs: int = 5) -> float:
    torch.manual_seed(0)
    data = TensorDataset(torch.randn(256, 10), torch.randint(3, (256,)))
    loader = DataLoader(data, batch_size=32)
    trainer = lightning.Trainer(
        max_epochs=epochs, logger=False, enable_checkpointing=False, accelerator="auto",
        enable_model_summary=False, enable_progress_bar=False,
    )  # fmt: skip
    trainer.fit(Classifier(), loader, loader)
    return float(trainer.callback_metrics["val_loss"])


if __name__ == "__main__":
    print(f"validation loss {main():.3f}")
