"""Loops that were written for DeepSpeed's engine train as loops of our own do, and their checkpoints are read."""

from pathlib import Path
from unittest.mock import patch

import pytest

import zero_fn as zf
from tests.support.messages import refused
from tests.support.on_ranks import on_ranks
from tests.support.ranks import axis
from tests.units.checkpoint.made_by_deepspeed import HERE, STEPS, adamw, batch
from tests.units.checkpoint.made_by_deepspeed import built as built_by_deepspeed
from tests.units.checkpoint.made_by_deepspeed import loss_of as loss_of_deepspeed
from tests.units.deepspeed.programs import MICROBATCHES, built, furthest, loss_of, trained, values, zero
from zero_fn.checkpoint import load
from zero_fn.deepspeed import backward, engine_methods, is_boundary, load_checkpoint, save_checkpoint, step


def run(setup, steps):
    """A loop as it was: forward, backward and step of each microbatch."""
    for number in (MICROBATCHES * each + micro for each in steps for micro in range(MICROBATCHES)):
        loss = loss_of(setup.model, *divmod(number, MICROBATCHES))
        assert is_boundary(setup) == (number % MICROBATCHES == MICROBATCHES - 1)
        backward(setup, loss)
        step(setup)


@pytest.mark.parametrize("stage", range(4))
@on_ranks(2)
def test_each_microbatch_is_a_backward_and_a_step(stage):
    """Below stage 2 they are reduced once, above each, as by DeepSpeed: there sums are rounded in another order."""
    setup = zf.from_deepspeed(built(), {**zero(stage), "gradient_clipping": 1.0}, axis())
    with zf.traffic() as sent:
        run(setup, range(4))
    with zf.traffic() as once:
        other = trained(zf.from_deepspeed(built(), {**zero(stage), "gradient_clipping": 1.0}, axis()))
    assert furthest(values(setup.model), other) <= (0 if stage < 2 else 1e-6)
    assert (setup.steps, setup.micro_steps, setup.skipped_steps) == (4, 4 * MICROBATCHES, 0)
    assert setup.norm is not None
    assert sent.calls["reduce-scatter"] == (1 if stage < 2 else MICROBATCHES) * once.calls["reduce-scatter"]


@on_ranks(2)
def test_a_backward_that_raises_leaves_nothing_behind():
    def fail(_):
        raise RuntimeError("of the program")

    setup = zf.from_deepspeed(built(), zero(1), axis())
    loss = loss_of(setup.model, 0, 0)
    loss.register_hook(fail)
    with pytest.raises(RuntimeError, match="of the program"):
        backward(setup, loss)
    assert not setup.window.modules
    run(setup, range(4))
    assert furthest(values(setup.model), trained(zf.from_deepspeed(built(), zero(1), axis()))) == 0


@on_ranks(2)
def test_a_run_goes_on_from_its_checkpoint_with_the_state_of_the_program(folder):
    config = {**zero(3), "checkpoint": {"writer": {"type": "FAST", "decoupled": True}}}
    setup = zf.from_deepspeed(built(), config, axis())
    run(setup, range(2))
    save_checkpoint(setup, folder, client_state={"epoch": 7})
    saved = values(setup.model)
    run(setup, range(2, 4))
    again = zf.from_deepspeed(built(), config, axis())
    path, state = load_checkpoint(again, folder)
    assert (path, state) == (folder, {"epoch": 7})
    assert (again.steps, again.micro_steps) == (2, 2 * MICROBATCHES)
    assert furthest(values(again.model), saved) == 0
    save_checkpoint(setup, folder, "mine")
    assert load_checkpoint(again, folder, "mine") == (str(Path(folder, "mine")), {})
    backward(setup, loss_of(setup.model, 0, 0))
    step(setup)
    with refused("config_saves_in_the_middle_of_a_step"):
        save_checkpoint(setup, folder)


@on_ranks(2)
def test_a_run_of_deepspeed_goes_on_here():
    config = {"train_micro_batch_size_per_gpu": 2, "gradient_clipping": 0.0, "zero_optimization": {"stage": 3}}
    config["scheduler"] = {"type": "WarmupLR", "params": {}}
    setup = zf.from_deepspeed(built_by_deepspeed(), config, axis(), optimizer=adamw)
    saved = {"lr_scheduler": {"last_batch_iteration": STEPS - 1}}  # what its engine writes for any of its schedulers
    with patch.object(engine_methods, "load", lambda *args: {**load(*args), **saved}):
        path, state = load_checkpoint(setup, HERE / "zero2")
    assert setup.scheduler is not None and setup.scheduler.last_epoch == STEPS
    assert (setup.steps, setup.skipped_steps, state["epoch"]) == (STEPS, 0, 3)
    backward(setup, loss_of_deepspeed(setup.model, batch(STEPS)))
    step(setup)
    assert setup.steps == STEPS + 1
    assert path == str(HERE / "zero2")
