"""A DeepSpeed config as a value: what it becomes, and the error for every way in which it can be wrong."""

import base64
import json
import math
import tomllib
from collections.abc import Mapping
from functools import partial
from pathlib import Path

import pytest

from tests.support.messages import assert_says, refused
from tests.units.deepspeed.configs import BASES, CONFIGS, changed, leaves, lost_entries, merged
from zero_fn.deepspeed.entries import Entries, config_of
from zero_fn.deepspeed.keys import KEYS, OTHER_NAMES
from zero_fn.deepspeed.settings import settings_of
from zero_fn.errors import ConfigError

STAGE_3, SMALL = BASES["stage 3"], BASES["small"]


def became(config, ranks=1):
    """What became of each entry."""
    return {outcome.entry: outcome.became for outcome in settings_of(config, ranks).outcomes}


def refusal(config, ranks=1):
    """The error of a config that cannot be followed, with its fix."""
    with pytest.raises(ConfigError) as caught:
        settings_of(config, ranks)
    assert caught.value.fix
    return str(caught.value)


# -- tables ------------------------------------------------------------------------------------------------------------


def rows_of(name):
    rows = tomllib.loads(Path(__file__).with_name(f"{name}.toml").read_text())[name]
    return [pytest.param(row, id=f"{row.get('over', '')} {row.get('config', row.get('auto', ''))}") for row in rows]


def config_of_row(row):
    return merged(BASES[row.get("over", "small")], row.get("config", {}))


def differences(found, said, path="settings"):
    """Where settings are not what a row says of them."""
    if isinstance(said, dict):
        read = found.__getitem__ if isinstance(found, Mapping) else partial(getattr, found)
        return [line for name, value in said.items() for line in differences(read(name), value, f"{path}.{name}")]
    is_right = str(found) == said or found == (tuple(said) if isinstance(said, list) else said)
    return [] if is_right else [f"{path} is {found}, not {said}"]


@pytest.mark.parametrize("row", rows_of("taken"))
def test_a_config_becomes_what_it_says_and_nothing_of_it_is_forgotten(row):
    config = config_of_row(row)
    before = json.dumps(config)
    settings = settings_of(config, row.get("ranks", 1), row.get("auto"), others=row.get("beside"))
    assert json.dumps(config) == before
    assert differences(settings, row.get("settings", {})) == []
    words = {outcome.entry: outcome.became for outcome in settings.outcomes}
    assert {entry: words[entry] for entry in row.get("became", {})} == row.get("became", {})
    assert len(words) == len(settings.outcomes)
    assert lost_entries(config, words) == []


@pytest.mark.parametrize("row", rows_of("refused"))
def test_a_config_that_cannot_be_followed_is_refused_by_the_entry_with_a_fix(row):
    with pytest.raises(ConfigError) as caught:
        settings_of(config_of_row(row), row.get("ranks", 1), row.get("auto"), others=row.get("beside"))
    error = caught.value
    assert error.fix
    assert row.get("entry", error.facts.get("entry")) == error.facts.get("entry")
    assert row.get("fix", error.fix) == error.fix
    says = row.get("says", [])
    assert [words for words in ([says] if isinstance(says, str) else says) if words not in str(error)] == []
    assert "lacks" not in row or row["lacks"] not in str(error)
    if "snapshot" in row:
        assert_says(row["snapshot"], error)


# -- every entry -------------------------------------------------------------------------------------------------------

_WRONG = {
    bool: ("true", 1, 0.0, [], {"a": 1}),
    int: ("8", True, [8], {"a": 1}, math.nan, math.inf, -3),
    float: ("0.1", True, [0.1, 0.2, 0.3], {"a": 1}, math.nan, math.inf),
    str: (7, True, [], "", "other"),
    list: ("0.9", [0.9, "0.95"], {"a": 1}, [math.nan, 0.9]),
}


def test_null_says_nothing_whatever_the_name_is():
    """Of an option of an optimizer it was a KeyError."""
    config = {**SMALL, "optimizer": {"type": "AdamW", "params": {"lr": 0.1, "nonsense": None}}}
    assert settings_of(config, 1).stock.options["lr"] == 0.1


def test_an_entry_of_another_kind_is_named():
    """Each entry of each config with values of other kinds."""
    unnamed, tried = [], 0
    for config in CONFIGS.values():
        words = became(config, 2)
        for path, value in leaves(config):
            wrong = _WRONG[type(value)] if value != "auto" else ("other", True, -1, math.nan)
            if words[".".join(path)].startswith(("no", "always")):
                wrong = tuple(bad for bad in wrong if bad != math.inf)  # no limit, which is no less than any
            if path[-1] in ("tag_validation", "nvme_path", "output_path"):  # any text
                wrong = (7, True)
            unnamed += [(path, bad) for bad in wrong if path[-1] not in refusal(changed(config, path, bad), 2)]
            tried += len(wrong)
    assert not unnamed
    assert tried >= 300


def _with(path, value):
    """A config with one more entry."""
    config = {**SMALL, "scheduler": {"type": "WarmupLR", "params": {}}}
    for name in reversed(path.split(".")):
        value = {name: value}
    return merged(config, value)


def _other(key):
    """A value of the kind of an entry that is not its default."""
    if key.kind.name == "off":
        return {"enabled": True}
    if key.kind.name == "flag":
        return not key.default
    return (*key.kind.choices, key.kind.least + 7)[0] if key.kind.name != "text" or key.kind.choices else "x"


def test_each_row_of_the_table_does_what_it_says():
    """A hint changes nothing and says why; of what is refused the default is taken, and another told what to write; a value
    beyond the bounds is never taken, nor is a word that is none of the choices."""
    for key in KEYS.values():
        assert key.became, key
        assert key.kind.name in ("flag", "text", "whole", "number", "off", "any"), key
        if key.default is not None:
            assert key.default == "" or key.kind.taken(key.default) == key.default, key
        if isinstance(key.became, dict):
            assert set(key.became) >= set(key.kind.choices), key
        if key.kind.name == "flag" and isinstance(key.became, dict):
            for value in (True, False):
                said = key.became.get(str(value).lower(), key.became.get("else"))
                outcomes = Entries(_with(key.path, value)).outcomes
                assert said and {each.became for each in outcomes if each.entry == key.path} == {said}, key
        if key.role == "hint":
            for value in (_other(key), "auto"):
                assert became(_with(key.path, value))[key.path] == key.became
        least, most = key.kind.least, key.kind.most
        beyond = [least - 1] if key.kind.name in ("whole", "number") else []
        beyond += [least + 0.5] if key.kind.name == "whole" else []
        beyond += [most + 1] if most < math.inf else ["other"] if key.kind.choices else []
        for value in beyond:
            assert key.path in refusal(_with(key.path, value)), (key, value)
        if key.role == "refused":
            found = refusal(_with(key.path, _other(key)))
            assert key.path in found and str(key.became) in found, key
            if key.default is not None and not key.path.startswith("scheduler"):
                assert became(_with(key.path, key.default))[key.path] in ("as here", "off, as here")


def test_entries_of_stage_3_may_be_written_without_it():
    """DeepSpeed reads both names; configs of axolotl have the shorter ones."""
    names = [path.rpartition(".")[2] for path in OTHER_NAMES if path.startswith("zero_optimization.")]
    assert len(names) >= 9
    for name in names:
        value = KEYS[f"zero_optimization.stage3_{name}"].default
        short, long = (settings_of(_with(f"zero_optimization.{each}", value), 1) for each in (name, f"stage3_{name}"))
        assert short.sharding == long.sharding
        assert [each.became for each in short.outcomes] == [each.became for each in long.outcomes]


# -- files -------------------------------------------------------------------------------------------------------------


def test_text_is_read_as_the_dict_in_it(tmp_path, monkeypatch):
    """As Hugging Face does: JSON, in base64 too. A file of that name is read first."""
    text = json.dumps(STAGE_3, indent=1)
    encoded = base64.urlsafe_b64encode(text.encode()).decode()
    assert config_of(f"\n {text}") == config_of(encoded) == STAGE_3
    for path in ("nowhere.json", "e30", "eyJ" * 300):  # the last two begin as base64 of an object does
        with pytest.raises(ConfigError, match=r"OSError|FileNotFoundError"):
            config_of(path)
    monkeypatch.chdir(tmp_path)
    Path("e30=").write_text(text)
    assert config_of("e30=") == config_of(tmp_path / "e30=") == STAGE_3


FILES = {  # what is wrong -> a file
    "JSONDecodeError: Expecting property name": b'{"bf16": {"enabled": true},}',
    "JSONDecodeError: Expecting value": b"",
    "RecursionError": b"[" * 100_000,
    "UnicodeDecodeError": b'{"a": "\xff"}',
    "ValueError: it is not an object, but [1, 2]": b"[1, 2]",
    "ValueError: 'enabled' is there twice": b'{"bf16": {"enabled": true, "enabled": false}}',
    "ValueError: NaN is not finite": b'{"gradient_clipping": NaN}',
    "ValueError: -Infinity is not finite": b'{"gradient_clipping": -Infinity}',
}


def test_what_is_no_config_is_refused(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    Path("ds_config.json").write_text('{"bf16": {"enabled": true}} // on')
    with refused("config_has_a_comment"):
        config_of("ds_config.json")
    with refused("config_of_no_kind"):
        config_of(7)
    for number, (complaint, content) in enumerate(FILES.items()):
        file = tmp_path / f"{number}.json"
        file.write_bytes(content)
        with pytest.raises(ConfigError) as caught:
            config_of(file)
        assert complaint in str(caught.value.facts["error"])
    for path in (tmp_path, "nowhere.json", "\0", '{"a": 1', '{"a": 1} x'):
        with pytest.raises(ConfigError, match="cannot be read"):
            config_of(path)
