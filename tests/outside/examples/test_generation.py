"""`examples/generate_tensor_parallel.py`: the tokens of one process, on every mesh, also with transformers' own plan."""

import pytest
import torch

from tests.outside.examples.programs import said_on_ranks
from tests.outside.integrations.worlds import VOCABULARY, import_all, llama


def _said(ranks, n, folder, options):
    ranks(n, deadline_s=300).run(import_all)
    said = said_on_ranks(ranks(n, deadline_s=120), folder, f"generate_tensor_parallel.py --tokens 6 {options}")
    first, *rows = said.splitlines()
    return first, rows


@pytest.mark.parametrize(
    ("n", "mesh", "rows"),
    [(2, "dp 1, tp 2", 4), pytest.param(4, "dp 2, tp 2", 2, marks=pytest.mark.nightly)],
)
def test_a_model_that_is_cut_by_its_own_plan_writes_the_tokens_of_one_process(ranks, tmp_path, n, mesh, rows):
    model = llama(initializer_range=0.3, eos_token_id=None).eval()
    model.save_pretrained(tmp_path / "model")
    prompts = torch.randint(3, VOCABULARY, (4, 8), generator=torch.Generator().manual_seed(0))
    tokens = model.generate(prompts, max_new_tokens=6, do_sample=False)[:, 8:].tolist()
    assert len({token for row in tokens for token in row}) > 8, "the tokens tell nothing"
    first, found = _said(ranks, n, tmp_path, f"--folder {tmp_path}/model --rows {rows}")
    assert first.startswith(mesh)
    assert first.endswith("tokens/s")
    assert found == [" ".join(map(str, ["tokens:", *row])) for row in tokens]


@pytest.mark.nightly
def test_transformers_alone_writes_the_same(ranks, tmp_path):
    _, ours = _said(ranks, 2, tmp_path, "")
    _, plain = _said(ranks, 2, tmp_path, "--plain")
    assert len(ours) == 2
    assert ours == plain
