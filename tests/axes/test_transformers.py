"""Models of Hugging Face as they come: what their training, generation, adapters and files need of a transform."""

from __future__ import annotations

import functools
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict

import zero_fn as zf
from tests.support.programs import STAGES
from tests.support.ranks import Ranks, axis
from tests.support.wholes import named_fulls
from tests.support.worlds import World, differences

VOCABULARY = 61
_SIZES = {"hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 2, "num_attention_heads": 2}


def _transformers() -> Any:
    """The package, imported where it is used: it takes seconds, and must not ask the network."""
    os.environ["HF_HUB_OFFLINE"] = "1"
    import transformers

    transformers.logging.set_verbosity_error()
    return transformers


def _import_all() -> None:
    _transformers()
    import peft  # noqa: F401


@pytest.fixture
def prepared(ranks: Ranks) -> Ranks:
    """Ranks that have imported the packages, which may take longer than a collective may wait for a peer."""
    ranks(2, deadline_s=240).run(_import_all)
    return ranks


def _gpt2() -> nn.Module:
    """Convolutions of one dim in place of linears, dropout, a head tied to the embedding."""
    t = _transformers()
    return t.GPT2LMHeadModel(t.GPT2Config(vocab_size=VOCABULARY, n_positions=16, n_embd=16, n_layer=2, n_head=2))


def _llama() -> nn.Module:
    """Rotary buffers that no state_dict holds, grouped keys and values."""
    t = _transformers()
    return t.LlamaForCausalLM(
        t.LlamaConfig(
            vocab_size=VOCABULARY,
            num_key_value_heads=1,
            tie_word_embeddings=True,
            max_position_embeddings=32,
            **_SIZES,
        )
    )


def _mixtral() -> nn.Module:
    """Experts in stacked parameters, an auxiliary loss from all layers."""
    t = _transformers()
    return t.MixtralForCausalLM(
        t.MixtralConfig(
            vocab_size=VOCABULARY, num_key_value_heads=1, num_local_experts=4, output_router_logits=True, **_SIZES
        )
    )


def _t5() -> nn.Module:
    """An embedding that encoder, decoder and head share; a bias table of the first layer that all read."""
    t = _transformers()
    return t.T5ForConditionalGeneration(
        t.T5Config(
            vocab_size=VOCABULARY, d_model=16, d_kv=8, d_ff=24, num_layers=2, num_heads=2, decoder_start_token_id=0
        )
    )


def _bart() -> nn.Module:
    """Layers that are skipped at random."""
    t = _transformers()
    sides = {
        f"{side}_{name}": 2 for side in ("encoder", "decoder") for name in ("layers", "attention_heads", "ffn_dim")
    }
    drops = {f"{side}_layerdrop": 0.4 for side in ("encoder", "decoder")}
    return t.BartForConditionalGeneration(t.BartConfig(vocab_size=VOCABULARY, d_model=16, **sides, **drops))


def _tokens(length: int, *, seed: int, batch: int = 2) -> Tensor:
    generator = torch.Generator().manual_seed(1000 * seed + dist.get_rank())
    return torch.randint(3, VOCABULARY, (batch, length), generator=generator)


def _continued(model: nn.Module, seed: int) -> Tensor:
    tokens = _tokens(7, seed=seed)
    loss: Tensor = model(input_ids=tokens, labels=tokens).loss
    return loss


def _translated(model: nn.Module, seed: int) -> Tensor:
    loss: Tensor = model(input_ids=_tokens(7, seed=seed), labels=_tokens(5, seed=seed + 50)).loss
    return loss


def _qwen() -> nn.Module:
    """Biases in the projections of queries, keys and values only."""
    t = _transformers()
    return t.Qwen2ForCausalLM(
        t.Qwen2Config(vocab_size=VOCABULARY, num_key_value_heads=1, max_position_embeddings=32, **_SIZES)
    )


def _vit() -> nn.Module:
    """Pictures: a convolution cuts them into patches; positions and the first token are parameters of the embedding."""
    t = _transformers()
    return t.ViTForImageClassification(t.ViTConfig(image_size=8, patch_size=4, num_labels=5, **_SIZES))


def _seen(model: nn.Module, seed: int) -> Tensor:
    generator = torch.Generator().manual_seed(1000 * seed + dist.get_rank())
    pictures = torch.randn(2, 3, 8, 8, generator=generator)
    return model(pixel_values=pictures, labels=torch.tensor([seed % 5, 3])).loss


def _whisper() -> nn.Module:
    """Sound: convolutions of one dim, positions that are never trained, an encoder of other inputs than the decoder."""
    t = _transformers()
    sizes = {f"{side}_{name}": value for side in ("encoder", "decoder") for name, value in _SIDE.items()}
    tokens = {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2, "decoder_start_token_id": 1}
    return t.WhisperForConditionalGeneration(
        t.WhisperConfig(
            vocab_size=VOCABULARY, num_mel_bins=6, d_model=16, max_source_positions=8, max_target_positions=16,
            suppress_tokens=[], begin_suppress_tokens=[], **sizes, **tokens,
        )
    )  # fmt: skip


_SIDE = {"layers": 2, "attention_heads": 2, "ffn_dim": 24}


def _heard(model: nn.Module, seed: int) -> Tensor:
    generator = torch.Generator().manual_seed(1000 * seed + dist.get_rank())
    sound = torch.randn(2, 6, 16, generator=generator)
    return model(input_features=sound, labels=_tokens(5, seed=seed)).loss


FAMILIES: dict[str, tuple[Callable[[], nn.Module], Callable[[nn.Module, int], Tensor]]] = {
    "gpt2": (_gpt2, _continued),
    "llama": (_llama, _continued),
    "mixtral": (_mixtral, _continued),
    "t5": (_t5, _translated),
    "bart": (_bart, _translated),
    "qwen": (_qwen, _continued),
    "vit": (_vit, _seen),
    "whisper": (_whisper, _heard),
}


def _train(world: World, build: Callable[[], nn.Module], loss_of: Callable[[nn.Module, int], Tensor]) -> None:
    model = world.build(build)
    model.train()
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=1e-2)
    for seed in range(2):
        torch.manual_seed(seed)  # dropout, and which layers are skipped
        world.step(model, optimizer, loss_of(model, seed))


def _padded() -> nn.Module:
    """A row of zeros in an embedding that the head shares."""
    t = _transformers()
    return t.LlamaForCausalLM(
        t.LlamaConfig(vocab_size=VOCABULARY, num_key_value_heads=1, tie_word_embeddings=True, pad_token_id=2, **_SIZES)
    )


def _materialized(build: Callable[[], nn.Module]) -> list[dict[str, Tensor]]:
    runs = []
    for stage in ("replicate", "zero1", "zero3"):
        with torch.device("meta"):
            model = STAGES[stage](build(), axis())
        torch.manual_seed(0)
        zf.materialize(model, "cpu")
        runs.append({**named_fulls(dict(model.named_parameters())), **dict(model.named_buffers())})
        tokens = _tokens(5, seed=0)
        inputs = {"labels": tokens} if hasattr(model, "encoder") else {}
        assert model(input_ids=tokens, **inputs).logits.isfinite().all()
    torch.manual_seed(1)
    return [dict([*(built := build()).named_parameters(), *built.named_buffers()]), *runs]


def _as_built(build: Callable[[], nn.Module]) -> None:
    """Of the model as it is built: the same names and constants, all buffers, and draws of the same spread."""
    built, *runs = _materialized(build)
    for run in runs:
        assert list(run) == list(built)
        for name, value in run.items():
            assert torch.equal(value, runs[0][name]), name
            expected = built[name]
            if not isinstance(expected, nn.Parameter) or expected.unique().numel() == 1:
                assert torch.equal(value, expected), name
                continue
            assert value.mean().abs() < 0.35 * expected.std(), name
            assert 0.8 < value.std() / expected.std() < 1.25 or value.numel() < 200, name
            is_zero = (expected == 0).all(-1) if expected.ndim > 1 else expected == 0
            assert torch.equal((value == 0).all(-1) if value.ndim > 1 else value == 0, is_zero), name


@pytest.mark.parametrize(
    ("n", "build"), [(1, _llama), *((2, build) for build in (_llama, _gpt2, _mixtral, _qwen, _t5, _bart, _padded))]
)
def test_a_model_on_meta_is_materialized_as_it_is_built(
    prepared: Ranks, n: int, build: Callable[[], nn.Module]
) -> None:
    """Their norms, convolutions and routers have no reset_parameters(); and RoPE's frequencies are in no file."""
    prepared(n, deadline_s=240).run(_as_built, build)


def _loaded_from_meta() -> None:
    torch.manual_seed(0)
    plain = _llama()
    with torch.device("meta"):
        model = zf.zero3(_llama(), axis())
    zf.materialize(model, "cpu").load_state_dict(plain.state_dict())
    tokens = _tokens(5, seed=0)
    assert torch.equal(model(input_ids=tokens).logits, plain(input_ids=tokens).logits)


def test_a_model_on_meta_that_was_materialized_and_loaded_is_the_one_that_was_saved(prepared: Ranks) -> None:
    prepared(2, deadline_s=240).run(_loaded_from_meta)


def _adapters_on_meta() -> None:
    import peft

    with torch.device("meta"):
        adapted = peft.get_peft_model(_llama(), peft.LoraConfig(target_modules=["q_proj"]))
        model = zf.zero3(adapted, axis())
    with pytest.raises(zf.StateError, match=r"module +: Linear \(base_model.*lora_B"):
        zf.materialize(model, "cpu")
    assert all(parameter.is_meta for parameter in model.parameters())


def test_adapters_on_meta_are_not_drawn_as_the_model_would_draw_them(prepared: Ranks) -> None:
    """Theirs begin at 0."""
    prepared(2, deadline_s=240).run(_adapters_on_meta)


def _checkpointed(build: Callable[[], nn.Module]) -> nn.Module:
    model: Any = build()
    model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    return model  # type: ignore[no-any-return]


@pytest.mark.parametrize(
    ("family", "is_checkpointed"),
    [("llama", False), *((family, number % 2 == 0) for number, family in enumerate(FAMILIES))],
)
def test_models_train_as_replicas(prepared: Ranks, family: str, is_checkpointed: bool) -> None:
    build, loss_of = FAMILIES[family]
    if is_checkpointed:
        build = functools.partial(_checkpointed, build)
    trial = functools.partial(_train, build=build, loss_of=loss_of)
    for found in prepared(2).run(differences, trial, stages=["zero1", "zero3"]):
        assert found == []


def _adapted() -> nn.Module:
    import peft

    config = peft.LoraConfig(r=2, target_modules=["q_proj", "v_proj"], init_lora_weights=False)
    adapted: nn.Module = peft.get_peft_model(_llama(), config)
    return adapted


def test_adapters_train_as_replicas(prepared: Ranks) -> None:
    trial = functools.partial(_train, build=_adapted, loss_of=_continued)
    for found in prepared(2).run(differences, trial):
        assert found == []


def _generated() -> None:
    """Ranks stop after different numbers of tokens: those that are done take part until all are."""
    torch.manual_seed(0)
    plain: Any = _llama().eval()
    sharded = zf.zero3(plain, axis())
    prompt = _tokens(4, seed=0, batch=1)
    options = {"max_new_tokens": 3 + 2 * dist.get_rank(), "do_sample": False, "eos_token_id": None, "pad_token_id": 0}
    expected = plain.generate(prompt, **options)
    assert torch.equal(sharded.generate(prompt, synced_gpus=True, **options), expected)
    with zf.unsharded(sharded):
        assert torch.equal(sharded.generate(prompt, **options), expected)


def test_text_is_generated_as_by_a_plain_model(prepared: Ranks) -> None:
    prepared(2).run(_generated)


def _saved(path: str) -> None:
    torch.manual_seed(0)
    plain: Any = _llama()
    sharded: Any = zf.zero3(plain, axis())
    state = get_model_state_dict(sharded, options=StateDictOptions(full_state_dict=True))
    if dist.get_rank() == 0:
        sharded.save_pretrained(path, state_dict=state)
    dist.barrier()
    loaded = type(plain).from_pretrained(path)
    assert all(torch.equal(one, other) for one, other in zip(plain.parameters(), loaded.parameters(), strict=True))
    tokens = _tokens(5, seed=1)
    assert torch.equal(zf.zero3(loaded, axis())(tokens).logits, plain(tokens).logits)


def test_a_saved_model_is_loaded_by_anyone(prepared: Ranks, tmp_path: Path) -> None:
    prepared(2).run(_saved, str(tmp_path))
