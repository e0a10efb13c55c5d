"""A forked process leaves what its parent has on a disk alone: an error there, and its parent goes on."""

import os

import pytest
import torch
from torch import nn

import zero_fn as zf
from tests.support.messages import refused


def _trained(path):
    model = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8))
    model = zf.offload(model, params=zf.nvme(str(path)), grads=zf.nvme(str(path)))
    held = {"model": model, "optimizer": zf.streamed(torch.optim.Adam(model.parameters()), zf.nvme(str(path)))}
    _step(held)
    return held


def _step(held):
    held["model"](torch.ones(2, 8)).square().sum().backward()
    held["optimizer"].step()
    held["optimizer"].zero_grad()


def _in_a_fork(act):
    """What a child says that does this."""
    end, begin = os.pipe()
    child = os.fork()
    if not child:
        said = "nothing"
        try:
            act()
        except BaseException as error:
            said = f"{type(error).__name__}: {error}"
        os.write(begin, said.encode())
        os._exit(0)
    os.close(begin)
    with open(end, "rb") as pipe:
        said = pipe.read().decode()
    assert os.waitpid(child, 0)[1] == 0
    return said


USES = {
    "a forward": lambda held: held["model"](torch.ones(2, 8)),
    "a read": lambda held: [p.sum().item() for p in held["model"].parameters()],
    "a step": _step,
    "the states": lambda held: held["optimizer"].state_dict(),
}


@pytest.mark.parametrize("use", USES)
def test_a_fork_that_uses_what_is_on_a_disk_is_told(tmp_path, use):
    """It ended with SIGSEGV: buffers are not copied into children."""
    held = _trained(tmp_path)

    def uses():
        with refused("values_in_a_tier_are_read_in_a_fork"):
            USES[use](held)

    assert _in_a_fork(uses) == "nothing"
    _step(held)


def test_what_a_fork_gives_up_stays_with_its_parent(tmp_path):
    """Its buffers were taken from the ring that both share, and the next forward of the parent blamed the disk."""
    held, replica = _trained(tmp_path), _trained(tmp_path)
    with torch.no_grad():
        for mine, its in zip(held["model"].parameters(), replica["model"].parameters(), strict=True):
            mine.copy_(its.clone())
    held["optimizer"].load_state_dict(replica["optimizer"].state_dict())
    assert _in_a_fork(held.clear) == "nothing"
    for each in (held, replica):
        for _ in range(2):
            _step(each)
    for mine, its in zip(held["model"].parameters(), replica["model"].parameters(), strict=True):
        assert torch.equal(mine.clone(), its.clone())


def test_a_fork_may_use_what_is_in_memory_of_the_host():
    model = nn.Linear(8, 8)
    held = {"model": model, "optimizer": zf.streamed(torch.optim.Adam(model.parameters()), zf.cpu())}
    _step(held)
    assert _in_a_fork(lambda: held["optimizer"].state_dict()) == "nothing"
