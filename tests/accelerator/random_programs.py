"""Programs of `property_tests/streamed_programs.py` on an accelerator, in tiers and beside themselves with everything on the
device: one with each action that there is, then random ones.

All ranks draw the same programs, and none shrinks one: they would do that apart.
"""

import traceback
from itertools import product

import torch
from hypothesis import HealthCheck, Phase, given, seed, settings

from property_tests.streamed_programs import ACTIONS, Placed, Training, places, programs, trained
from tests.accelerator import device

# Over one axis, and not by torch's fused kernels, which are not those of the host.
_places = places.filter(lambda placed: placed.outer is None and "fused" not in placed.optimizer)

EACH_ACTION = [("backward", 0)]
for _number, _action in enumerate(ACTIONS):
    EACH_ACTION += [(_action, _number), *([("step", 0), ("backward", _number)] if _number % 3 == 2 else [])]
ALL = frozenset(["params", "grads", "optim"])
WAYS = (
    Placed("zero3", "adamw", ALL, compute=torch.bfloat16, recomputes="parked"),
    Placed("zero1", "adam", ALL, tier="cpu", finish="forward"),
    Placed("zero2", "adamw", frozenset(), groups="late"),
)

# Each stage with nothing away, one kind, or all: in turn on the host and on a disk, in float32 and in bfloat16.
SHORT = [("backward", 0), ("clip", 1), ("step", 0), ("zero_grad", 1), ("backward", 1), ("step", 0), ("evaluate", 2)]
KINDS = (frozenset(), *(frozenset([kind]) for kind in sorted(ALL)), ALL)
FORMS = [
    Placed(
        stage,
        ("adamw", "sgd", "adam")[number % 3],
        kinds,
        tier=("cpu", "nvme")[number % 2],
        compute=(None, torch.bfloat16)[number // 2 % 2],
        fraction=(1.0, 0.5)[number // 4 % 2],
        is_tiled=number % 3 == 2,
    )
    for number, (stage, kinds) in enumerate(product(("plain", "zero1", "zero2", "zero3"), KINDS))
]


def compare(placed, program, folder):
    expected, found = trained(placed, program, None), trained(placed, program, folder)
    for number, (one, other) in enumerate(zip(found, expected, strict=True)):
        done = program[number] if number < len(program) else "the end"
        assert len(one) == len(other), done
        assert device.same(one, other), done


def result(mesh, folder, examples, seeded=0):
    """What became of them: "right", or the program that was not."""
    is_long = examples > 3
    Training.device_type = device.NAME
    Training.axis = staticmethod(lambda: mesh)

    @seed(seeded)
    @settings(
        max_examples=examples,
        database=None,
        deadline=None,
        suppress_health_check=list(HealthCheck),
        phases=(Phase.generate,),
    )
    @given(_places.filter(lambda placed: mesh.size() == 1 or placed.stage != "plain"), programs)
    def law(placed, program):
        compare(placed, program, folder)

    try:
        for placed in WAYS if is_long and mesh.size() == 1 else ():  # the time of two ranks is for what is drawn
            compare(placed, EACH_ACTION, folder)
        for placed in FORMS[:: mesh.size() if is_long else 7]:
            if mesh.size() == 1 or placed.stage != "plain":
                compare(placed, SHORT, folder)
        law()
    except Exception as error:
        return "\n".join([*getattr(error, "__notes__", ()), traceback.format_exc()[-3000:]])
    return "right"
