"""Lightning's own strategy for sharded models takes our transforms in `configure_model`, and trains as a plain loop."""

import os

import torch
import torch.distributed as dist
from torch.utils.data import DataLoader, DistributedSampler

import zero_fn as zf
from tests.outside.examples.programs import skip_without
from tests.outside.integrations.worlds import Counting, llama, on_two_ranks, start

skip_without("lightning", extra="test")

NEEDED = ("lightning",)
ROWS, BATCH = 16, 2


def _module():
    import lightning as L

    class Model(L.LightningModule):
        def __init__(self):
            super().__init__()
            self.model = llama()
            self.losses = []

        def configure_model(self):
            if not zf.inspect.is_transformed(self.model):
                self.model = zf.shard_params(self.model, self.device_mesh["data_parallel"])

        def training_step(self, batch, _):
            loss = self.model(**batch).loss
            self.losses.append(loss.item())
            return loss

        def configure_optimizers(self):
            return torch.optim.AdamW(self.parameters(), lr=1e-2)

    return Model()


def _fit(folder, path=None, **options):
    import lightning as L
    from lightning.pytorch.strategies import ModelParallelStrategy

    start()
    os.environ.update(TORCHELASTIC_RUN_ID="test", GROUP_RANK="0")  # processes are there already
    module = _module()
    trainer = L.Trainer(
        accelerator="cpu", devices=2, strategy=ModelParallelStrategy(2, 1), gradient_clip_val=0.5, logger=False,
        enable_progress_bar=False, enable_model_summary=False, enable_checkpointing=False, default_root_dir=folder,
        **options,
    )  # fmt: skip
    sampler = DistributedSampler(data := Counting(ROWS), shuffle=False)
    trainer.fit(module, DataLoader(data, BATCH, sampler=sampler), ckpt_path=path)
    return trainer, module


def _plain_losses(epochs):
    """Of the batches of this rank, in a loop over those of all ranks."""
    model, data, losses = llama(), Counting(ROWS), []
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    ranks = dist.get_world_size()
    for first in [*range(0, ROWS, BATCH * ranks)] * epochs:
        batches = [data[first + rank : first + BATCH * ranks : ranks] for rank in range(ranks)]
        of_ranks = [model(**batch).loss for batch in batches]
        losses.append(of_ranks[dist.get_rank()].item())
        (sum(of_ranks) / ranks).backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 0.5)
        optimizer.step()
        optimizer.zero_grad()
    return losses, model


@on_two_ranks
def test_a_module_that_is_transformed_in_configure_model_trains_and_resumes_as_a_plain_loop(folder):
    wanted, plain = _plain_losses(epochs=2)
    trainer, half = _fit(folder, max_epochs=1)
    trainer.save_checkpoint(f"{folder}/half.ckpt")
    _, rest = _fit(folder, f"{folder}/half.ckpt", max_epochs=2)
    torch.testing.assert_close(half.losses + rest.losses, wanted, atol=2e-5, rtol=2e-5)
    assert zf.inspect.is_transformed(rest.model)
    found = {name: value.full_tensor() for name, value in rest.model.state_dict().items()}
    torch.testing.assert_close(found, plain.state_dict(), atol=2e-4, rtol=2e-4)
