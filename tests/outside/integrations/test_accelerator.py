"""The Accelerator of accelerate over transformed models: the numbers of DDP, one reduction, states that come back."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

import zero_fn as zf
from tests.outside.integrations.worlds import Counting, llama, on_two_ranks, place, start
from tests.support.ranks import Ranks
from tests.units.checkpoint.test_atomic import left_by_a_kill

pytest.importorskip("accelerate", reason="the extra [transformers] is not installed")
pytest.importorskip("transformers", reason="the extra [transformers] is not installed")

Parts = tuple[Any, nn.Module, Any, Any, Any]


def _parts(accelerator: Any, model: nn.Module) -> Parts:
    """What a script prepares, in its order: the optimizer is built before, for the plain model."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 16)
    loader = torch.utils.data.DataLoader(Counting(), batch_size=2)
    return (accelerator, *accelerator.prepare(model, optimizer, loader, scheduler))


def _accelerator(ours: bool, **options: Any) -> Any:
    from accelerate import Accelerator

    from zero_fn.integrations.accelerate import ZeroAccelerator

    start()
    return ZeroAccelerator(cpu=True, place=place(), **options) if ours else Accelerator(cpu=True, **options)


def _train(parts: Parts, steps: int) -> list[float]:
    """Microbatches as accelerate teaches them; loss and norm of each step."""
    accelerator, model, optimizer, loader, scheduler = parts
    found = []
    for _, batch in zip(range(steps), loader, strict=False):
        with accelerator.accumulate(model):
            loss = model(**batch).loss
            accelerator.backward(loss)
            found.append(loss.item())
            if accelerator.sync_gradients:
                found.append(float(accelerator.clip_grad_norm_(model.parameters(), 0.5)))
            optimizer.step()
            scheduler.step()
            optimizer.zero_grad()
    return found


@on_two_ranks
def test_prepared_models_have_the_numbers_of_replicas() -> None:
    calls = []
    for microbatches in (1, 2):
        options = {"gradient_accumulation_steps": microbatches}
        wanted = _train(_parts(_accelerator(False, **options), llama()), 4)
        parts = _parts(_accelerator(True, **options), llama())
        assert zf.is_transformed(parts[1])
        with zf.traffic() as sent:
            found = _train(parts, 4)
        torch.testing.assert_close(found, wanted, atol=2e-5, rtol=2e-5)
        calls.append(sent.calls["reduce-scatter"])
    assert calls[0] == 2 * calls[1] > 0, "two microbatches are reduced once"


@on_two_ranks
def test_float16_that_accelerate_would_leave_out_is_refused(folder: str) -> None:
    from tests.outside.integrations.worlds import arguments
    from zero_fn.integrations.transformers import ZeroTrainer

    with pytest.raises(zf.ConfigError, match=r'compute in float32, and scale no loss(.|\n)*mixed_precision="bf16"'):
        _accelerator(True, mixed_precision="fp16")
    start()
    args = arguments(folder, fp16=True)
    with pytest.raises(zf.ConfigError, match=r"compute in float32, and scale no loss(.|\n)*bf16=True"):
        ZeroTrainer(model=llama(), args=args, train_dataset=Counting(), place=place())


@on_two_ranks
def test_a_model_and_its_optimizer_may_be_prepared_in_two_calls() -> None:
    """The optimizer is built for the plain model, and prepared after it, as accelerate allows."""

    def trained(ours: bool) -> list[float]:
        accelerator, model = _accelerator(ours), llama()
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
        scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 16)
        loader = torch.utils.data.DataLoader(Counting(), batch_size=2)
        model = accelerator.prepare(model)
        return _train((accelerator, model, *accelerator.prepare(optimizer, loader, scheduler)), 3)

    torch.testing.assert_close(trained(True), trained(False), atol=2e-5, rtol=2e-5)


@on_two_ranks
def test_a_state_is_loaded_to_the_bit(folder: str) -> None:
    parts = _parts(_accelerator(True), llama())
    _train(parts, 2)
    for _ in range(2):  # the second takes the place of the first
        parts[0].save_state(folder)
    dist.barrier()  # rank 0 has removed the first
    assert [path.name for path in Path(folder, "zero_fn").glob("*-*")] == ["save-2"]
    wanted = _train(parts, 2)
    parts = _parts(_accelerator(True), llama(seed=5))
    parts[0].load_state(folder)
    assert _train(parts, 2) == wanted
    with pytest.raises(zf.CheckpointError, match="holds no states"):
        dist.barrier()
        shutil.rmtree(Path(folder, "zero_fn"), ignore_errors=True)
        dist.barrier()
        parts[0].load_state(folder)


@on_two_ranks
def test_folders_that_accelerate_names_are_loaded(folder: str) -> None:
    from accelerate.utils import ProjectConfiguration

    named = ProjectConfiguration(project_dir=folder, automatic_checkpoint_naming=True)
    parts = _parts(_accelerator(True, project_config=named), llama())
    _train(parts, 1)
    parts[0].save_state()
    values = [p.full_tensor() for p in parts[1].parameters()]
    _train(parts, 1)
    parts[0].load_state()
    assert all(torch.equal(p.full_tensor(), value) for p, value in zip(parts[1].parameters(), values, strict=True))
    assert sorted(path.name for path in Path(folder, "checkpoints", "checkpoint_0", "zero_fn").iterdir())


@on_two_ranks
def test_plain_models_are_saved_beside_transformed_ones(folder: str) -> None:
    """A transformed model and a plain one, each with its optimizer, saved and loaded together."""
    accelerator = _accelerator(True)
    plain = nn.Linear(3, 3)
    with torch.no_grad():
        plain.weight.fill_(2.0)
    frozen = nn.Linear(3, 3).requires_grad_(False)
    ours = accelerator.prepare(llama())
    assert zf.is_transformed(ours)
    accelerator.place = None
    theirs = accelerator.prepare(plain)
    optimizers = [torch.optim.AdamW(model.parameters(), lr=0.1) for model in (theirs, ours)]
    optimizers = list(accelerator.prepare(*optimizers))
    tokens = Counting().tokens[:2]
    for _ in range(2):
        accelerator.backward(ours(input_ids=tokens, labels=tokens).loss + theirs(torch.ones(1, 3)).sum())
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
    accelerator.save_state(folder)
    values = [p.full_tensor() for p in ours.parameters()], plain.weight.detach().clone()
    accelerator.backward(ours(input_ids=tokens, labels=tokens).loss + theirs(torch.ones(1, 3)).sum())
    for optimizer in optimizers:
        optimizer.step()
    assert not torch.equal(plain.weight, values[1])
    accelerator.load_state(folder)
    assert torch.equal(plain.weight, values[1])
    assert all(torch.equal(p.full_tensor(), value) for p, value in zip(ours.parameters(), values[0], strict=True))
    assert accelerator.prepare_model(frozen, evaluation_mode=True) is frozen


def _killed(folder: str) -> list[int | str]:
    """What is loaded of a save that is killed before each call of the system: all of one step, or nothing."""
    accelerator = _accelerator(True)
    models = [accelerator.prepare(nn.Linear(2, 2)) for _ in range(2)]
    optimizers = [accelerator.prepare(torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)) for model in models]
    schedule = accelerator.prepare(torch.optim.lr_scheduler.LambdaLR(optimizers[0].optimizer, lambda step: float(step)))

    def at(step: int) -> None:
        for model in models:
            for parameter in model.parameters():
                parameter.data.fill_(step)
        schedule.scheduler.last_epoch = step

    def loaded(left: Path) -> int | str:
        at(0)
        try:
            accelerator.load_state(str(left / "last"))
        except zf.CheckpointError as error:
            assert {float(p.full_tensor().mean()) for model in models for p in model.parameters()} == {0.0}
            return str(error).partition(":")[0]
        steps = {float(p.full_tensor().unique()) for model in models for p in model.parameters()}
        assert steps == {schedule.scheduler.last_epoch}
        return int(schedule.scheduler.last_epoch)

    at(1)
    accelerator.save_state(f"{folder}/runs/last")
    at(2)
    lefts = left_by_a_kill(
        Path(folder, "runs"), Path(folder, "kept"), lambda: accelerator.save_state(f"{folder}/runs/last")
    )
    return [loaded(left) for left in lefts[::2]]


def test_a_save_that_is_killed_leaves_one_step_or_is_refused(prepared: Ranks, tmp_path: Path) -> None:
    (found,) = prepared(1).run(_killed, str(tmp_path))
    assert list(dict.fromkeys(found)) == [1, "A save into this folder was killed", 2]


@on_two_ranks
def test_the_state_dict_of_a_model_is_whole_on_the_main_process(folder: str) -> None:
    accelerator, model, *_ = parts = _parts(_accelerator(True), llama(tie_word_embeddings=True))
    _train(parts, 2)
    state = accelerator.get_state_dict(model)
    assert bool(state) == accelerator.is_main_process
    accelerator.unwrap_model(model).save_pretrained(
        folder, is_main_process=accelerator.is_main_process, save_function=accelerator.save, state_dict=state
    )
    accelerator.wait_for_everyone()
    loaded = type(llama()).from_pretrained(folder)
    tokens = Counting().tokens[:2]
    with torch.no_grad():
        assert torch.equal(loaded(input_ids=tokens).logits, model.eval()(input_ids=tokens).logits)


@on_two_ranks
def test_gradients_that_are_given_up_are_in_no_step() -> None:
    """What was accumulated before an exception, or before `free_memory`, is in no later step."""
    accelerator, model, _, loader, _ = _parts(_accelerator(True, gradient_accumulation_steps=2), llama())
    batch = next(iter(loader))
    with pytest.raises(RuntimeError, match="of the user"), accelerator.accumulate(model):
        accelerator.backward(model(**batch).loss)
        raise RuntimeError("of the user")
    assert all(p.grad is None for p in model.parameters())
    with accelerator.no_sync(model):
        accelerator.backward(model(**batch).loss)
    accelerator.free_memory()
    assert all(p.grad is None for p in model.parameters())
    accelerator.gradient_state._set_sync_gradients(True)
    accelerator.backward(model(**batch).loss)
    alone = [p.grad.full_tensor() for p in model.parameters()]
    other = place()(llama())
    (other(**batch).loss / 2).backward()
    assert all(torch.equal(grad, p.grad.full_tensor()) for grad, p in zip(alone, other.parameters(), strict=True))


@on_two_ranks
def test_optimizers_that_do_not_fit_are_refused(folder: str) -> None:
    accelerator = _accelerator(True)
    model = llama()
    optimizer = torch.optim.AdamW(model.parameters())
    with pytest.raises(zf.StaleError, match="built before its model was transformed"):
        accelerator.prepare(place()(model), optimizer)
    model(input_ids=Counting().tokens[:2], labels=Counting().tokens[:2]).loss.backward()
    optimizer.step()
    with pytest.raises(zf.StateError, match="took steps before its model was transformed"):
        accelerator.prepare(model, optimizer)
    for place_of, message in ((lambda _: None, "returned nothing"), (lambda m: m, "that no transform has made")):
        accelerator.place = place_of
        with pytest.raises(zf.StateError, match=message):
            accelerator.prepare(llama())
    accelerator = _accelerator(True)
    one, other = accelerator.prepare(nn.Linear(8, 8), nn.Linear(8, 8))
    accelerator.prepare(torch.optim.SGD([*one.parameters(), *other.parameters()], lr=0.1))
    with pytest.raises(zf.StateError, match="steps several models"):
        accelerator.save_state(folder)


def _threads_beside_accelerate() -> int:
    from accelerate import PartialState

    start()
    PartialState(cpu=True)
    return torch.get_num_threads()


def test_a_rank_keeps_its_threads_when_accelerate_comes(ranks: Ranks) -> None:
    """It gives a rank all cores unless it is told otherwise, and sums of two threads are not those of one."""
    assert ranks(1, deadline_s=240).run(_threads_beside_accelerate) == [1]
