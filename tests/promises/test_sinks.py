"""Numbers of a run arrive where they are sent, and what goes wrong on the way costs neither the training nor what is there.

Sinks over libraries that the tests of every day lack are in `tests/outside/integrations/test_monitoring.py`.
"""

import csv
import json
import math
import re
import resource
import urllib.request
from pathlib import Path
from unittest import mock

import pytest
from prometheus_client.parser import text_string_to_metric_families

from tests.support.messages import refusals, refused
from tests.units.storage.disks import limited
from zero_fn import errors
from zero_fn.errors import ConfigError
from zero_fn.monitor import Csv, JsonLines, Print, Prometheus, sink_of
from zero_fn.monitor.sinks.outlet import split
from zero_fn.monitor.sinks.prometheus import BUCKETS, NAMES

NUMBERS = {
    "zero_fn_steps_total": 3,
    "zero_fn_loss": 2.5,
    'zero_fn_sent_bytes_total{axis="dp"}': 1e9,
    'zero_fn_sent_bytes_total{axis="tp"}': 5.0,
    "zero_fn_step_seconds": [0.25, 0.75],
    "zero_fn_gather_seconds": [],
}
FLAT = {
    "zero_fn/steps_total": 3.0,
    "zero_fn/loss": 2.5,
    "zero_fn/sent_bytes_total/dp": 1e9,
    "zero_fn/sent_bytes_total/tp": 5.0,
    "zero_fn/step_seconds/mean": 0.5,
    "zero_fn/step_seconds/max": 0.75,
}
FILES = [Csv, JsonLines]


@pytest.fixture(autouse=True)
def _nothing_was_said(monkeypatch):
    monkeypatch.setattr(errors, "_said", set())


def _refuse(text):
    raise AssertionError(f"{text} is not JSON")


def _rows(path):
    """What a reader finds: numbers by name."""
    text = path.read_text()
    assert text.endswith("\n"), "a torn line"
    if path.suffix == ".jsonl":
        rows = [json.loads(line, parse_constant=_refuse) for line in text.splitlines()]
    else:
        rows = csv.DictReader(text.splitlines())
    return [{name: float(x) for name, x in row.items() if x not in ("", None)} for row in rows]


def _path(make, folder):
    return folder / ("run.csv" if make is Csv else "run.jsonl")


def _scraped(text):
    """Values by name and one label, of what Prometheus is shown."""
    return {
        (sample.name, ",".join(sample.labels.values())): sample.value
        for family in text_string_to_metric_families(text)
        for sample in family.samples
    }


def _answer(sink):
    with urllib.request.urlopen(f"http://127.0.0.1:{sink.port}/metrics", timeout=10) as answer:
        text = answer.read().decode()
    return text


# -- names -----------------------------------------------------------------------------------------------------------


def _kinds():
    """The kind of each number, as the guide has it."""
    guide = (Path(__file__).parents[2] / "docs" / "guides" / "monitoring.md").read_text()
    return dict(re.findall(r"^\| `(zero_fn_\w+).*?` \| (counter|histogram|gauge) \|", guide, re.MULTILINE))


def test_the_guide_has_each_name_and_its_kind():
    kinds = _kinds()
    assert sorted(kinds) == sorted(NAMES)
    assert all(name.startswith("zero_fn_") and split(name) == (name, {}) for name in NAMES)
    assert all(name.endswith("_total") == (kind == "counter") for name, kind in kinds.items())


def test_rules_and_the_dashboard_ask_for_these_names_alone():
    histograms = [name for name, kind in _kinds().items() if kind == "histogram"]
    for name in ("rules.yml", "dashboard.json"):
        text = (Path(__file__).parents[2] / "examples" / "monitoring" / name).read_text()
        asked = {re.sub("(_seconds)_(bucket|sum|count)$", r"\1", each) for each in re.findall(r"\bzero_fn_\w+", text)}
        assert len(asked) > 15
        assert asked <= NAMES.keys()
        assert not [each for each in histograms if re.search(rf"\b{each}\b", text)], (
            "a histogram has no number of its own"
        )
    assert {1.0, 5.0} <= set(BUCKETS), "the bounds of alerts"


def test_a_key_is_a_name_and_labels():
    assert split('a_total{tier="nvme",x="1, 2"}') == ("a_total", {"tier": "nvme", "x": "1, 2"})
    for wrong in ("", "a b", "1a", "a{", "a{b}", 'a{b="c"', 'a{b="c" }', 'a{b="c";d="e"}', 'a{b="\\""}', "a\n"):
        with pytest.raises(ConfigError):
            split(wrong)


# -- files -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("make", FILES)
def test_a_file_has_a_row_for_each_step(make, tmp_path):
    path = _path(make, tmp_path / "new" / "folder")
    with make(path) as sink:
        sink.log(10, NUMBERS)
        assert len(_rows(path)) == 1, "rows are there at once"
        for value in (math.inf, -math.inf, math.nan):
            sink.log(20, NUMBERS | {"zero_fn_loss": value})
    first, *others = _rows(path)
    assert {name: value for name, value in first.items() if name != "time"} == {"step": 10, **FLAT}
    assert [str(row["zero_fn/loss"]) for row in others] == ["inf", "-inf", "nan"]
    assert others[0]["time"] >= first["time"] > 1.7e9


def test_a_column_that_appears_later_leaves_the_rows_before(tmp_path):
    path = tmp_path / "run.csv"
    with Csv(path) as sink:
        sink.log(1, {"zero_fn_loss": 3.0})
        sink.log(2, {"zero_fn_loss": 2.0, "zero_fn_checkpoint_age_seconds": 5.0})
        sink.log(3, {"zero_fn_checkpoint_age_seconds": 6.0})
    assert [{name: x for name, x in row.items() if name != "time"} for row in _rows(path)] == [
        {"step": 1, "zero_fn/loss": 3.0},
        {"step": 2, "zero_fn/loss": 2.0, "zero_fn/checkpoint_age_seconds": 5.0},
        {"step": 3, "zero_fn/checkpoint_age_seconds": 6.0},
    ]
    assert [found.name for found in tmp_path.iterdir()] == ["run.csv"]


@pytest.mark.parametrize("make", FILES)
@pytest.mark.parametrize(("end", "steps"), [(None, [1, 2, 3]), (-1, [1, 3]), (-7, [1, 3]), (7, [3])])
def test_a_line_that_a_crash_tore_hides_no_other(make, end, steps, tmp_path):
    """A file that is torn in its first line begins anew."""
    path = _path(make, tmp_path)
    with make(path) as sink:
        sink.log(1, NUMBERS)
        sink.log(2, NUMBERS)
    path.write_bytes(path.read_bytes()[:end])
    with make(path) as sink:
        sink.log(3, NUMBERS)
    assert [row["step"] for row in _rows(path)] == steps


@pytest.mark.parametrize("make", FILES)
def test_a_full_disk_costs_rows_and_one_warning(make, tmp_path):
    path = _path(make, tmp_path)
    with make(path) as sink:
        sink.log(1, NUMBERS)
        before = path.read_bytes()
        with limited(resource.RLIMIT_FSIZE, len(before) + 20):  # the kernel takes 20 bytes of the next row
            with pytest.warns(UserWarning, match=rf"{make.__name__} lost numbers on their way to .*run") as said:
                sink.log(2, NUMBERS)
            assert path.read_bytes() == before
            sink.log(3, NUMBERS | {"zero_fn_checkpoint_age_seconds": 1.0})  # a new column, in a CSV
            assert path.read_bytes() == before
        assert (len(said), sink.lost) == (1, 2)
        assert "step  : 2" in str(said[0].message)
        sink.log(4, NUMBERS | {"zero_fn_checkpoint_age_seconds": 1.0})
    assert [row["step"] for row in _rows(path)] == [1, 4]
    assert [found.name for found in tmp_path.iterdir()] == [path.name]


# -- Prometheus ------------------------------------------------------------------------------------------------------


def test_prometheus_is_shown_counters_gauges_and_histograms():
    with Prometheus(0, address="127.0.0.1", labels={"job_name": "llama"}) as sink:
        sink.log(3, NUMBERS)
        sink.log(4, NUMBERS | {"zero_fn_steps_total": 4, "zero_fn_loss": math.nan})
        sink.log(4, {"eval_loss": 7.0})  # what is not logged now keeps its value
        text = _answer(sink)
    assert "# TYPE zero_fn_steps_total counter" in text
    assert "# TYPE zero_fn_loss gauge" in text
    assert "# TYPE zero_fn_step_seconds histogram" in text
    assert f"# HELP zero_fn_loss {NAMES['zero_fn_loss']}" in text
    found = _scraped(text)
    assert found["zero_fn_steps_total", "llama"] == 4
    assert found["eval_loss", "llama"] == 7
    assert math.isnan(found["zero_fn_loss", "llama"])
    assert found["zero_fn_sent_bytes_total", "dp,llama"] == 1e9
    assert found["zero_fn_sent_bytes_total", "tp,llama"] == 5
    assert found["zero_fn_step_seconds_sum", "llama"] == 2
    assert [found["zero_fn_step_seconds_bucket", f"llama,{le}"] for le in ("0.2", "0.5", "1.0", "+Inf")] == [0, 2, 4, 4]


def test_a_counter_of_another_run_begins_at_nothing():
    with Prometheus(0, address="127.0.0.1") as sink:
        for steps in (5, 9, 2, 3):
            sink.log(steps, {"zero_fn_steps_total": steps})
        assert _scraped(_answer(sink))["zero_fn_steps_total", ""] == 3


def test_a_port_is_in_use_until_its_sink_is_closed():
    with Prometheus(0) as sink, pytest.raises(ConfigError):
        Prometheus(sink.port)
    with Prometheus(sink.port):
        pass


def test_a_text_file_is_whole_at_every_moment(tmp_path):
    with Prometheus(textfile=tmp_path / "zero_fn.prom", labels={"rank": "1"}) as sink:
        sink.log(3, NUMBERS)
        before = (tmp_path / "zero_fn.prom").read_text()
        assert _scraped(before)["zero_fn_loss", "1"] == 2.5
        with limited(resource.RLIMIT_FSIZE, 50), pytest.warns(UserWarning, match="Prometheus lost numbers"):
            sink.log(4, NUMBERS)
        assert (tmp_path / "zero_fn.prom").read_text() == before
        sink.log(5, {"zero_fn_loss": 1.5})
    assert _scraped((tmp_path / "zero_fn.prom").read_text())["zero_fn_loss", "1"] == 1.5
    assert [found.name for found in tmp_path.iterdir()] == ["zero_fn.prom"]


# -- lines of text ---------------------------------------------------------------------------------------------------


def test_a_line_has_what_is_known(capsys):
    numbers = NUMBERS | {
        "zero_fn_skipped_steps_total": 1,
        'zero_fn_learning_rate{group="0"}': 0.02,
        'zero_fn_learning_rate{group="1"}': 0.1,
        "zero_fn_grad_norm": 0.8,
        "zero_fn_loss_scale": 65536.0,
        "zero_fn_samples_per_second": 12.0,
        "zero_fn_forward_seconds": [0.25, 0.75],
        'zero_fn_memory_bytes{tier="host"}': 1e6,
    }
    with Print(every=2, memory=True, more=lambda: "and more") as sink:
        sink.log(1, numbers)
        sink.log(2, numbers)
    with Print() as sink:
        sink.log(3, {})
    line, bare = capsys.readouterr().out.splitlines()
    assert line == (
        "step 2: 1 skipped, learning rate 0.02, 0.1, loss 2.5, gradient norm 0.8, loss scale 65536, 12.0 samples/s, "
        "forward 500.00 ms, memory_bytes/host 1000000, and more"
    )
    assert bare == "step 3: 0 skipped"


# -- any sink --------------------------------------------------------------------------------------------------------


def test_a_name_that_cannot_be_one_raises_and_writes_nothing(tmp_path):
    with JsonLines(tmp_path / "run.jsonl") as sink, refused("sink_of_a_name_that_is_none"):
        sink.log(1, NUMBERS | {"eval/loss": 1.0})
    assert (tmp_path / "run.jsonl").read_text() == ""


def test_words_of_a_command_line_are_sinks(tmp_path):
    with sink_of(f"csv:{tmp_path}/a.csv") as made:
        assert isinstance(made, Csv)
    with sink_of(f"jsonl:{tmp_path}/a.jsonl") as made:
        assert isinstance(made, JsonLines)
    with sink_of("prometheus:0") as shown, sink_of(f"prometheus:{tmp_path}/a.prom") as written:
        for sink in (shown, written):
            assert isinstance(sink, Prometheus)
            sink.log(1, {"zero_fn_loss": 1.0})
    assert "zero_fn_loss 1.0" in (tmp_path / "a.prom").read_text()
    with pytest.raises(ConfigError):
        sink_of("prometheus:http://gateway:9091")


# -- what is refused -------------------------------------------------------------------------------------------------


def _at_a_port_in_use():
    with mock.patch("prometheus_client.start_http_server", side_effect=OSError(98, "Address already in use")):
        sink_of("prometheus:9400")


def _in_the_file_of_another(folder):
    (folder / "run.csv").write_text("name,age\n")
    sink_of(f"csv:{folder}/run.csv")


test_refusals = refusals(
    {
        "sink_of_another_word": lambda: sink_of("visdom:8097"),
        "sink_in_no_folder": lambda: Csv("/dev/null/run.csv"),
        "sink_in_the_file_of_another": _in_the_file_of_another,
        "sink_of_two_ways": lambda: Prometheus(9400, textfile="run.prom"),
        "sink_that_node_exporter_does_not_read": lambda: Prometheus(textfile="run.txt"),
        "sink_at_a_port_in_use": _at_a_port_in_use,
    }
)
