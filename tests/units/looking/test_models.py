"""What a plan is asked of: a model by its name, config or function, and the ranks that are pretended for it."""

import json
import sys
from unittest import mock

import torch

import zero_fn as zf
from tests.support.messages import Headed, refusals
from zero_fn.planning import configurations, plan_command
from zero_fn.planning.models import model_of


def _of_config(folder, **entries):
    (folder / "config.json").write_text(json.dumps(entries))
    with mock.patch.dict(sys.modules, transformers=None):
        return model_of(str(folder), 4096, 1)


def _of_two_optimizers(two):
    model = zf.shard_optimizer(Headed(), two)
    zf.plan(model, torch.optim.AdamW(model.parameters()), optimizer_nbytes_per_element=4)


test_refusals = refusals(
    {
        "planned_model_is_unknown": lambda: model_of("lama-7b", 4096, 1),
        "planned_function_raises": lambda: model_of("json:loads", 4096, 1),
        "planned_function_makes_no_module": lambda: model_of("collections:Counter", 4096, 1),
        "planned_config_has_no_type": lambda folder: _of_config(folder, vocab_size=32000),
        "planned_config_without_transformers": lambda folder: _of_config(folder, model_type="llama"),
        "planned_nodes_are_not_full": lambda: plan_command.planned(["70B", "--ranks", "12"]),
        "planned_count_is_none": lambda: plan_command.planned(["70B", "--sequence", "0"]),
        "planned_ranks_beside_a_group": lambda one: configurations.pretended(2).__enter__(),
        "planned_with_two_optimizers": _of_two_optimizers,
    }
)
