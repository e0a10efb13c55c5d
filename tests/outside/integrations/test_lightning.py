"""Lightning over transformed modules: the numbers of DDP, one reduction, files that load anywhere."""

import os
from functools import partial
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

import zero_fn as zf
from tests.outside.examples.programs import skip_without
from tests.outside.integrations.worlds import (
    Counting,
    at_night,
    llama,
    on_two_ranks,
    place,
    require_equal,
    start,
)

skip_without("lightning", extra="lightning")

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
            if stage is not None and not zf.inspect.is_transformed(self.model):
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


def _loader(rows=32):
    return torch.utils.data.DataLoader(Counting(rows), batch_size=2)


def _fit(folder, module, strategy=None, *, path=None, rows=32, **options):
    import lightning as L

    from zero_fn.integrations.lightning import ZeroStrategy

    start()
    os.environ.update(TORCHELASTIC_RUN_ID="test", GROUP_RANK="0")  # processes are there already
    common = {
        "accelerator": "cpu", "devices": 2, "logger": False, "enable_progress_bar": False, "enable_model_summary": False,
        "gradient_clip_val": 0.5, "default_root_dir": folder, "enable_checkpointing": False,
    }  # fmt: skip
    trainer = L.Trainer(strategy=strategy or ZeroStrategy(), **(common | options))
    trainer.fit(module, _loader(rows), ckpt_path=path)
    return trainer, module


@on_two_ranks
def test_a_fit_has_the_numbers_of_replicas(folder):
    calls = []
    for microbatches in (1, 2):
        options = {"max_steps": 3, "accumulate_grad_batches": microbatches}
        _, wanted = _fit(folder, _module(None), "ddp", **options)
        with zf.traffic() as sent:
            trainer, found = _fit(folder, _module("zero3"), **options)
        assert zf.inspect.is_transformed(found.model)
        assert trainer.global_step == 3
        torch.testing.assert_close(found.losses, wanted.losses, atol=2e-5, rtol=2e-5)
        calls.append(sent.calls["reduce-scatter"])
        assert 0 < trainer.validate(found, _loader(8), verbose=False)[0]["validated"] < 5
    assert calls[0] == calls[1] > 0, "a step reduces once"


def _is_resumed(folder, name, strategy, stages, make=torch.optim.AdamW):
    """Two of four steps again, of which each is an epoch, from a checkpoint."""
    options, path = {"rows": 4, "path": f"{folder}/{name}.ckpt"}, f"{folder}/{name}.ckpt"
    _, wanted = _fit(folder, _module("zero3", make=make), max_epochs=4, rows=4)
    trainer, _ = _fit(folder, _module("zero3", make=make), strategy(), max_epochs=2, rows=4)
    trainer.save_checkpoint(path)
    for stage in stages:
        _, found = _fit(folder, _module(stage, make=make), strategy(), max_epochs=4, **options)
        torch.testing.assert_close(found.losses, wanted.losses[2:], atol=2e-5, rtol=2e-5)
        assert stage != "zero3" or found.losses == wanted.losses[2:], name
    return trainer


@on_two_ranks
def test_a_checkpoint_is_resumed_at_any_stage(folder):
    """From the folder of each rank's own, and from one file."""
    from zero_fn.integrations.lightning import ZeroStrategy

    trainer = _is_resumed(folder, "folder", ZeroStrategy, ("zero3", "zero1"))
    for weights_only in (True, False):  # what is there is replaced, as `save_last=True` does
        trainer.save_checkpoint(f"{folder}/folder.ckpt", weights_only=weights_only)
    assert [found.name for found in Path(folder, "folder.ckpt").iterdir()] == ["save-3"]
    _is_resumed(folder, "file", partial(ZeroStrategy, save_distributed_checkpoint=False), ("zero3", "zero1"))
    saved = torch.load(f"{folder}/file.ckpt", weights_only=True)
    assert all(type(value) is Tensor for value in saved["state_dict"].values())
    plain, other = _module(None), _module(None)
    plain.load_state_dict(saved["state_dict"])
    zf.load(f"{folder}/folder.ckpt/save-3/optimizer-0", other, only="model")
    require_equal(other.state_dict(), plain.state_dict())


@at_night
def test_a_checkpoint_is_resumed_under_lightnings_own_strategy_and_with_owners(folder):
    from lightning.pytorch.strategies import ModelParallelStrategy

    from zero_fn.integrations.lightning import ZeroStrategy

    def owned(*args, **options):
        return zf.by_owner(torch.optim.Adafactor(*args, **options))

    shards = partial(ModelParallelStrategy, data_parallel_size=2, tensor_parallel_size=1)
    _is_resumed(folder, "shards", shards, ["zero3"])
    _is_resumed(folder, "owned", ZeroStrategy, ("zero3", "zero1"), owned)
    _is_resumed(folder, "owned-file", partial(ZeroStrategy, save_distributed_checkpoint=False), ["zero1"], owned)


@at_night
def test_weights_are_validated_at_another_stage(folder):
    trainer, module = _fit(folder, _module("zero3"), max_epochs=1, rows=4)
    path = f"{folder}/weights.ckpt"
    trainer.save_checkpoint(path, weights_only=True)
    loss = trainer.validate(module, _loader(8), verbose=False)
    assert trainer.validate(_module("zero2"), _loader(8), path, verbose=False) == loss
    with pytest.raises(zf.errors.ConfigError, match="storage_options are those of a plugin"):
        trainer.save_checkpoint(f"{folder}/elsewhere.ckpt", storage_options={"anon": True})


@at_night
def test_what_nobody_would_reduce_is_refused(folder):
    for kind, text, module, options in (
        (zf.errors.StateError, "1 trained parameters belong to no", _module("zero3", extra=True), {}),
        (zf.errors.StateError, "belong to no transformed module", _module(None), {}),
        (zf.errors.ConfigError, "sync_batchnorm", _module("zero3"), {"sync_batchnorm": True}),
        (zf.errors.PlacementError, r"zf\.by_owner\(Adafactor", _module("zero3", make=torch.optim.Adafactor), {}),
    ):
        with pytest.raises(kind, match=text):
            _fit(folder, module, max_steps=1, **options)
