"""Benchmarks of examples/benchmarks that say more than times: each runs at night, made small."""

import re
import sys

import pytest

from tests.outside.examples.programs import ROOT, printed

pytestmark = pytest.mark.nightly


def _benchmark(line):
    name, *arguments = line.split()
    return printed(sys.executable, ROOT / "examples" / "benchmarks" / name, *arguments)


def test_owners_are_dealt_the_matrices_of_llamas_evenly():
    """All ways reach the same loss; no rank of 64 or fewer has more than 1.1 of the mean work."""
    said = _benchmark("owners.py --shape 1x16 --ranks 2 --rounds 1")
    rows = {words[0]: words[1:] for line in said.splitlines() if (words := line.split())}
    assert {"ddp", "gathered", "replicate", "zero1", "zero2", "zero3"} <= rows.keys()
    for llama in ("7B", "8B", "70B"):
        assert len(rows[llama]) == 6
        assert max(map(float, rows[llama])) <= 1.1


@pytest.mark.parametrize("where", ["--here 2", "--gbit 1"])
def test_what_goes_over_a_slow_link_is_counted(where):
    """Of two ranks on each of two hosts, one sends two of three pieces to the other host; on one host nothing is sent."""
    said = _benchmark(f"slow_link.py {where} --shape 4x128 --rounds 1")
    if "No two hosts can be made here: " in said:
        pytest.skip(f"no network namespace: {said}")
    rows = re.findall(r"^(zero\d, .*?) {2,}.*?\] +(\S+) +(\S+) +(\S+) +(\S+)$", said, re.MULTILINE)
    sent = {name: (float(own), float(of_bf16), float(link)) for name, own, of_bf16, link, _ in rows}
    assert sent["zero3, int8, int4"][1] < 0.45
    assert sent["zero2, delta4, int4"][1] < 0.3
    if where == "--gbit 1":
        assert all(link == pytest.approx(own * 4 / 3, rel=0.05, abs=0.15) for own, _, link in sent.values()), said


@pytest.mark.skipif(sys.platform != "linux", reason="limits its memory as Linux counts it")
@pytest.mark.parametrize(("limit", "ends"), [("300MiB", "the same"), ("8MiB", r"(killed|ended \(\d+\)), loading")])
def test_streamed_weights_give_the_logits_and_it_is_shown_who_ran_out_of_memory(limit, ends, tmp_path):
    """Weights of 28 MB are read once in each pass of zero_fn, from the disk."""
    said = _benchmark(f"streaming.py --path {tmp_path} --small --rounds 1 --only zero_fn --limit {limit}")
    assert f"limit {limit} beside imports" in said
    assert len(re.findall(r"^memory .* the same$", said, re.MULTILINE)) == 2
    rows = re.findall(r"^zero_fn .*$", said, re.MULTILINE)
    assert len(rows) == 2
    assert all(re.search(rf" {ends}$", row) for row in rows), said
    assert limit == "8MiB" or all(" 28 " in row for row in rows), said


@pytest.mark.parametrize("what", ["forward backward", "none cores", "disk link", "cost"])
def test_profiles_name_the_faults_that_were_made(what):
    """A sleep of 20 ms is named whatever else the machine does. The rest is hardly felt by a model so small."""
    said = _benchmark(f"profiled.py {what} --shape 4x64x16x1 --rounds 1")
    if what == "cost":
        ratio = r" +\d+\.\d +\d\.\d+ \[\S+ \S+\]"
        assert re.search(rf"^profile{ratio}{ratio}$", said, re.MULTILINE), said
        return
    named = dict(re.findall(r"^(\w+): .+\n +(said|right|wrong) +\d+ ms  \w+", said, re.MULTILINE))
    cannot = {"disk"} if "disk: none can be made slow here" in said else set()
    cannot |= {"link"} if "No two hosts can be made here" in said else set()
    assert named.keys() | cannot == set(what.split()), said
    if what == "forward backward":
        assert set(named.values()) == {"right"}, said
