"""What torch.distributed.checkpoint has saved on a mesh loads on any other: values and optimizer states to the bit.

`zf.save` and `zf.load` between meshes: `tests/promises/test_resume.py`.
"""

import pytest
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict

from tests.support.on_ranks import on_ranks
from tests.units.checkpoint.worlds import differing, everything, made, stepped


def _state(model, optimizer):
    return dict(zip(("model", "optimizer"), get_state_dict(model, optimizer), strict=True))


@pytest.mark.parametrize(
    ("saved_on", "loaded_on"),
    [("tensor parallel", ("tensor parallel", "hybrid")), ("hpz", ("sequence parallel", "zero3 on 4"))],
)
@on_ranks(4)
def test_a_checkpoint_loads_on_other_meshes(folder, saved_on, loaded_on):
    model, optimizer = made(saved_on, folder, seed=0)
    stepped(model, optimizer, 0)
    dcp.save(_state(model, optimizer), checkpoint_id=f"{folder}/checkpoint")
    expected = everything(model, optimizer)
    for name in loaded_on:
        other, its_optimizer = made(name, folder, seed=7)
        stepped(other, its_optimizer, 1)
        state = _state(other, its_optimizer)
        dcp.load(state, checkpoint_id=f"{folder}/checkpoint")
        states = {"model_state_dict": state["model"], "optim_state_dict": state["optimizer"]}
        set_state_dict(other, its_optimizer, **states)
        assert differing(expected, everything(other, its_optimizer)) == []
        stepped(other, its_optimizer, 2)  # it goes on
        if name == saved_on:
            stepped(model, optimizer, 2)
            assert differing(everything(model, optimizer), everything(other, its_optimizer)) == []
