"""A DeepSpeed config is read whole: each entry has an outcome, is refused by its name, or is none; whatever stands in it."""

import copy

from hypothesis import given
from hypothesis import strategies as st

from tests.support.profiles import examples
from tests.units.deepspeed.configs import CONFIGS, changed, leaves, shifted
from zero_fn.deepspeed.settings import settings_of
from zero_fn.errors import ConfigError

many = examples(dev=100, ci=2_000, deep=50_000)

numbers = st.integers() | st.floats() | st.sampled_from([0, 1, 2, 3, -1, 0.5, 1e9, 2**70])
texts = st.text(max_size=5) | st.sampled_from(
    ["auto", "cpu", "nvme", "none", "AdamW", "WarmupLR", "bf16", "fp32", "SGD"]
)
values = st.recursive(
    st.none() | st.booleans() | numbers | texts,
    lambda inside: st.lists(inside, max_size=3) | st.dictionaries(texts | st.just("enabled"), inside, max_size=3),
    max_leaves=5,
)
configs = st.sampled_from(list(CONFIGS.values()))


@st.composite
def paths(draw, config):
    """Where an entry of a config is, an object or not."""
    path = draw(st.sampled_from([path for path, _ in leaves(config)]))
    return path[: draw(st.integers(1, len(path)))]


def read(config, ranks=2):
    """What a config is read as; any other error fails the test."""
    before = copy.deepcopy(config)
    try:
        found = settings_of(config, ranks)
    except ConfigError as error:
        found = error
    assert repr(config) == repr(before)
    return found


@many
@given(st.data())
def test_whatever_an_entry_holds_it_is_taken_or_refused(data):
    config = data.draw(configs)
    for _ in range(data.draw(st.integers(1, 3))):
        path = data.draw(paths(config))
        config = changed(config, path, data.draw(values))
        config = config if any(True for _ in leaves(config)) else {"train_batch_size": 2}
    found = read(config, data.draw(st.integers(1, 8)))
    if isinstance(found, ConfigError):
        assert found.fix
        return
    outcomes = {outcome.entry for outcome in found.outcomes}
    for path, value in leaves(config):
        is_read = any(".".join(path[: n + 1]) in outcomes for n in range(len(path)))
        assert is_read or value in ({}, None), path


@many
@given(st.data())
def test_a_misspelt_entry_is_refused_by_its_name(data):
    """Wherever it is, but in a section that is switched off."""
    config = data.draw(configs)
    path = data.draw(paths(config).filter(lambda path: path[0] != "tensorboard" or len(path) == 1))
    letter = data.draw(st.sampled_from("xyz0_"))
    at = data.draw(st.integers(letter == "_", len(path[-1])))  # a name that begins with "_" is a comment
    name = path[-1][:at] + letter + path[-1][at:]
    found = read(shifted(config, path, name))
    assert isinstance(found, ConfigError)
    needed = {
        "train_batch_size",
        "train_micro_batch_size_per_gpu",
        "total_num_steps",
        "nvme_path",
        "device",
        "stage",
        "type",
    }
    assert name in str(found) or path[-1] in needed or path[-1] in str(found), str(found)


def _numbers_of(settings):
    return [settings.micro_batch_size, settings.accumulation_steps, settings.max_norm, settings.sharding.tiers.fraction]


@many
@given(configs, st.integers(1, 64))
def test_samples_of_a_step_are_those_of_all_microbatches(config, ranks):
    found = read(config, ranks)
    if isinstance(found, ConfigError):
        assert "batch" in str(found)
        return
    whole = found.micro_batch_size * found.accumulation_steps * ranks
    assert whole == config.get("train_batch_size", whole)
    assert all(number >= 0 for number in _numbers_of(found))
