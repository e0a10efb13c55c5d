"""Lightning over transformed modules: the numbers of DDP, one reduction, files that load anywhere."""

import os
from functools import partial
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

import zero_fn as zf
from tests.outside.integrations.worlds import Counting, llama, on_two_ranks, place, start

pytest.importorskip("lightning", reason="lightning is not installed")


NEEDED = ("zero_fn.integrations.lightning",)


def _module(stage, *, extra=False, make=torch.optim.AdamW):
    """A LightningModule that transforms its model, or leaves it."""
    import lightning as L

    class Model(L.LightningModule):
        def __init__(self):
            super().__init__()
            self.model = llama()
            self.losses = []
            if extra:
                self.scale = nn.Parameter(torch.ones(()))

        def configure_model(self):
            if stage is not None and not zf.is_transformed(self.model):
                self.model = place(stage)(self.model)

        def training_step(self, batch, _):
            loss = self.model(**batch).loss
            self.losses.append(loss.item())
            return loss

        def validation_step(self, batch, _):
            self.log("validated", self.model(**batch).loss, sync_dist=True)

        def configure_optimizers(self):
            optimizer = make(self.parameters(), lr=1e-2)
            return [optimizer], [torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.9)]

    return Model()


def _trainer(folder, strategy, **options):
    import lightning as L

    os.environ.update(TORCHELASTIC_RUN_ID="test", GROUP_RANK="0")  # processes are there already
    common = {
        "accelerator": "cpu", "devices": 2, "logger": False, "enable_progress_bar": False, "enable_model_summary": False,
        "gradient_clip_val": 0.5, "default_root_dir": folder, "enable_checkpointing": False,
    }  # fmt: skip
    return L.Trainer(strategy=strategy, **(common | options))


def _fit(
    folder,
    stage,
    strategy=None,
    *,
    path=None,
    rows=32,
    make=torch.optim.AdamW,
    **options,
):
    from lightning.pytorch.strategies import DDPStrategy

    from zero_fn.integrations.lightning import ZeroStrategy

    start()
    trainer = _trainer(folder, strategy or (DDPStrategy() if stage is None else ZeroStrategy()), **options)
    module = _module(stage, make=make)
    loader = torch.utils.data.DataLoader(Counting(rows), batch_size=2)
    trainer.fit(module, loader, ckpt_path=path)
    return trainer, module


@on_two_ranks
def test_a_fit_has_the_numbers_of_replicas(folder):
    calls = []
    for microbatches in (1, 2):
        options = {"max_steps": 3, "accumulate_grad_batches": microbatches}
        _, wanted = _fit(folder, None, **options)
        with zf.traffic() as sent:
            trainer, found = _fit(folder, "zero3", **options)
        assert zf.is_transformed(found.model)
        assert trainer.global_step == 3
        torch.testing.assert_close(found.losses, wanted.losses, atol=2e-5, rtol=2e-5)
        calls.append(sent.calls["reduce-scatter"])
        loader = torch.utils.data.DataLoader(Counting(8), batch_size=2)
        assert 0 < trainer.validate(found, loader, verbose=False)[0]["validated"] < 5
    assert calls[0] == calls[1] > 0, "a step reduces once"


@on_two_ranks
def test_a_checkpoint_is_resumed_at_any_stage(folder):
    """From the folder of each rank's own, from one file, and under Lightning's own strategy for shards."""
    from lightning.pytorch.strategies import ModelParallelStrategy

    from zero_fn.integrations.lightning import ZeroStrategy

    _, wanted = _fit(folder, "zero3", max_epochs=4, rows=4)  # an epoch is a step

    def shards():
        return ModelParallelStrategy(data_parallel_size=2, tensor_parallel_size=1)

    strategies = {
        "folder": ZeroStrategy,
        "file": partial(ZeroStrategy, save_distributed_checkpoint=False),
        "shards": shards,
    }
    for name, strategy in strategies.items():
        path = f"{folder}/{name}.ckpt"
        trainer, _ = _fit(folder, "zero3", strategy(), max_epochs=2, rows=4)
        trainer.save_checkpoint(path)
        if name == "folder":
            trainer.save_checkpoint(path, weights_only=True)  # what is there is replaced, as `save_last=True` does
            trainer.save_checkpoint(path)
            assert [found.name for found in Path(path).iterdir()] == ["save-3"]
        _, found = _fit(folder, "zero3", strategy(), max_epochs=4, rows=4, path=path)
        assert found.losses == wanted.losses[2:], name
        if name != "shards":
            _, other = _fit(folder, "zero1", max_epochs=4, rows=4, path=path)
            torch.testing.assert_close(other.losses, wanted.losses[2:], atol=2e-5, rtol=2e-5)
    saved = torch.load(f"{folder}/file.ckpt", weights_only=True)
    assert not any(type(value) is not Tensor for value in saved["state_dict"].values())
    plain, other = _module(None), _module(None)
    plain.load_state_dict(saved["state_dict"])
    zf.load(f"{folder}/folder.ckpt/save-3/optimizer-0", other, only="model")
    assert all(map(torch.equal, plain.state_dict().values(), other.state_dict().values()))
    trainer, module = _fit(folder, "zero3", max_epochs=1, rows=4)
    trainer.save_checkpoint(f"{folder}/weights.ckpt", weights_only=True)
    loader = torch.utils.data.DataLoader(Counting(8), batch_size=2)
    loss = trainer.validate(module, loader, verbose=False)
    assert trainer.validate(_module("zero2"), loader, f"{folder}/weights.ckpt", verbose=False) == loss
    with pytest.raises(zf.ConfigError, match="storage_options are those of a plugin"):
        trainer.save_checkpoint(f"{folder}/elsewhere.ckpt", storage_options={"anon": True})


@on_two_ranks
def test_an_optimizer_of_whole_tensors_is_returned_wrapped(folder):
    """It trains as on replicas, and goes on from a folder or a file at any stage; a bare one is refused."""
    from zero_fn.integrations.lightning import ZeroStrategy

    def owned(*args, **options):
        return zf.by_owner(torch.optim.Adafactor(*args, **options))

    _, wanted = _fit(folder, None, max_epochs=4, rows=4, make=torch.optim.Adafactor)
    with pytest.raises(zf.PlacementError, match=r"zf\.by_owner\(Adafactor"):
        _fit(folder, "zero3", max_steps=1, make=torch.optim.Adafactor)
    for kind in (True, False):
        path, strategy = f"{folder}/{kind}.ckpt", partial(ZeroStrategy, save_distributed_checkpoint=kind)
        trainer, found = _fit(folder, "zero3", strategy(), max_epochs=2, rows=4, make=owned)
        torch.testing.assert_close(found.losses, wanted.losses[:2], atol=2e-5, rtol=2e-5)
        trainer.save_checkpoint(path)
        for stage in ("zero3", "zero1"):
            _, found = _fit(folder, stage, strategy(), max_epochs=4, rows=4, make=owned, path=path)
            torch.testing.assert_close(found.losses, wanted.losses[2:], atol=2e-5, rtol=2e-5)


@on_two_ranks
def test_what_nobody_would_reduce_is_refused(folder):
    from zero_fn.integrations.lightning import ZeroStrategy

    start()
    loader = torch.utils.data.DataLoader(Counting(), batch_size=2)
    with pytest.raises(zf.StateError, match="1 trained parameters belong to no"):
        _trainer(folder, ZeroStrategy(), max_steps=1).fit(_module("zero3", extra=True), loader)
    with pytest.raises(zf.StateError, match="belong to no transformed module"):
        _trainer(folder, ZeroStrategy(), max_steps=1).fit(_module(None), loader)
    with pytest.raises(zf.ConfigError, match="sync_batchnorm"):
        _trainer(folder, ZeroStrategy(), max_steps=1, sync_batchnorm=True).fit(_module("zero3"), loader)
