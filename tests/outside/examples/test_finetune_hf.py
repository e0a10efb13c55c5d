"""`examples/finetune_hf.py` as a user runs it: a folder of transformers and some texts become another such folder."""

import json
import re
import runpy
import shutil

import pytest
import torch

from tests.outside.examples.programs import ROOT, said_on_ranks
from tests.outside.integrations.worlds import VOCABULARY, import_all, llama, tokenizer

HOST = {"device": "cpu"}
CONFIG = {
    "train_micro_batch_size_per_gpu": "auto",
    "bf16": {"enabled": "auto"},
    "gradient_clipping": "auto",
    "optimizer": {"type": "AdamW", "params": {"lr": "auto", "weight_decay": "auto"}},
    "zero_optimization": {
        "stage": 3,
        "offload_optimizer": HOST,
        "offload_param": HOST,
        "stage3_gather_16bit_weights_on_model_save": True,
    },
}
RUN = (
    "finetune_hf.py --model model --data texts.jsonl --output_dir out --length 16 --bf16 --use_cpu"
    " --per_device_train_batch_size 4 --report_to none --max_steps 8"
)


def _text(first):
    return " ".join(str(3 + (first + i) % (VOCABULARY - 3)) for i in range(30))


@pytest.fixture
def folder(tmp_path):
    """A model in 16 bits with its tokenizer, texts of numbers that count, and a config."""
    llama(initializer_range=0.2).bfloat16().save_pretrained(tmp_path / "model")
    tokenizer().save_pretrained(tmp_path / "model")
    (tmp_path / "texts.jsonl").write_text("\n".join(json.dumps({"text": _text(7 * row)}) for row in range(40)))
    (tmp_path / "ds.json").write_text(json.dumps(CONFIG))
    return tmp_path


def loss_of(folder):
    """The loss of a model that plain transformers load, which must be in 16 bits, on a text."""
    from transformers import AutoModelForCausalLM, AutoTokenizer

    model = AutoModelForCausalLM.from_pretrained(folder)
    assert {parameter.dtype for parameter in model.parameters()} == {torch.bfloat16}
    tokens = AutoTokenizer.from_pretrained(folder)(_text(5), return_tensors="pt")["input_ids"]
    with torch.no_grad():
        return float(model(input_ids=tokens, labels=tokens).loss)


def _said(ranks, folder, options):
    case = ranks(2, deadline_s=240)
    case.run(import_all)
    return said_on_ranks(case, folder, f"{RUN} {options}")


def test_all_weights_are_trained_as_a_config_says(ranks, folder):
    said = _said(ranks, folder, "--config ds.json --learning_rate 1e-2 --sample '5 6 7'")
    assert "sent" in said and "eval_loss" in said, said
    assert re.search(r"^5 6 7( \d+)+$", said, re.MULTILINE), said
    assert loss_of(folder / "out") < loss_of(folder / "model") - 0.5


def test_only_responses_have_a_loss(tmp_path):
    """Rows lie one after the other; a sequence that would train nothing is left out."""
    rows = [{"prompt": "4 5 6", "response": "7 8"}, {"text": "9 10"}, {"prompt": "11 " * 8, "response": "12"}]
    data = tmp_path / "pairs.jsonl"
    data.write_text("\n".join(map(json.dumps, rows)))
    program = runpy.run_path(str(ROOT / "examples" / "finetune_hf.py"))
    found = program["sequences"](program["Options"](model="", data=str(data), length=4), tokenizer())
    assert found == [
        {"input_ids": [4, 5, 6, 7], "labels": [-100, -100, -100, 7]},
        {"input_ids": [8, 2, 9, 10], "labels": [8, 2, 9, 10]},
    ]


@pytest.mark.nightly
def test_adapters_are_trained_merged_and_taken_up_again(ranks, folder):
    pytest.importorskip("peft")
    lora = "--lora 8 --merge --offload --gradient_checkpointing --save_steps 4"
    options = f"{lora} --learning_rate 0.1 --lr_scheduler_type constant"
    _said(ranks, folder, options)
    out = folder / "out"
    half_way = out / "checkpoint-4" / "trainer_state.json"
    written_ns = half_way.stat().st_mtime_ns
    wanted = (out / "adapter_model.safetensors").read_bytes()
    assert loss_of(out / "merged") < loss_of(folder / "model") - 0.5
    for path in [*out.glob("checkpoint-8"), *out.glob("adapter*"), out / "merged"]:
        shutil.rmtree(path) if path.is_dir() else path.unlink()
    _said(ranks, folder, options)
    assert (out / "adapter_model.safetensors").read_bytes() == wanted
    assert half_way.stat().st_mtime_ns == written_ns, "the run began anew"
