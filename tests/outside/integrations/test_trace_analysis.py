"""The overlap of communication with computation, beside that of Holistic Trace Analysis on the same trace."""

import json
from pathlib import Path

import pytest
import torch
from torch import nn
from torch.optim import AdamW

import zero_fn as zf
from tests.outside.integrations.worlds import needs
from tests.support.programs import STAGES
from tests.support.ranks import axis


def profiled(folder, transform):
    torch.manual_seed(0)
    model = transform(nn.Sequential(*(nn.Linear(256, 256) for _ in range(6))), axis(), units=nn.Linear)
    optimizer = AdamW(model.parameters())
    with zf.profile(model, optimizer, out=folder) as profile:
        for _ in range(5):
            model(torch.randn(64, 256)).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
    return profile


def as_kernels(events, rank):
    """What a trace of a GPU would have: kernels, each with the call that launched it."""
    tracks = {e["tid"]: e["args"]["name"] for e in events if e["name"] == "thread_name" and e["pid"] == rank}
    found = []
    for event in (event for event in events if event["ph"] == "X" and event["pid"] == rank):
        track, name = tracks[event["tid"]], event["name"]
        if track.startswith("axis"):
            name = f"ncclDevKernel {name}"
        elif track != "computation" or event["cat"] not in ("compute", "optimizer"):
            continue
        if event["args"].get("idle_us", 0.0) >= event["dur"]:
            continue
        number, stream = len(found), 7 + event["tid"]
        times = {"ts": event["ts"], "dur": event["dur"]}
        args = {"stream": stream, "correlation": number, "device": rank}
        found.append({"ph": "X", "cat": "kernel", "name": name, "pid": rank, "tid": stream, **times, "args": args})
        launch = {"ph": "X", "cat": "cuda_runtime", "name": "cudaLaunchKernel", "pid": 100, "tid": 100}
        found.append({**launch, "ts": event["ts"], "dur": 0.1, "args": {"correlation": number}})
    return found


@needs("hta")
@pytest.mark.parametrize("stage", ["zero3", pytest.param("zero1", marks=pytest.mark.nightly)])
def test_overlap_is_that_of_holistic_trace_analysis(ranks, tmp_path, stage):
    from hta.trace_analysis import TraceAnalysis

    profile, _ = ranks(2).run(profiled, str(tmp_path / "out"), STAGES[stage])
    events = json.loads((tmp_path / "out" / "trace.json").read_text())["traceEvents"]
    files = {rank: str(tmp_path / f"{rank}.json") for rank in range(2)}
    for rank, path in files.items():
        about = {"schemaVersion": 1, "distributedInfo": {"backend": "nccl", "rank": rank, "world_size": 2}}
        Path(path).write_text(json.dumps({**about, "traceEvents": as_kernels(events, rank)}))
    theirs = TraceAnalysis(trace_files=files, trace_dir=str(tmp_path)).get_comm_comp_overlap(visualize=False)
    wanted = dict(zip(theirs["rank"], theirs["comp_comm_overlap_pctg"], strict=True))
    for rank, share in enumerate(profile.overlap):
        assert share is not None and 0 < share < 1
        assert abs(100 * share - wanted[rank]) < 1
