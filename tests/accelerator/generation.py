"""Text from a Llama whose parameters rest on the device, on the host and on a disk.

    python -m tests.accelerator.generation cuda FOLDER --shape 1.2B --seconds 40

The model is made on the device in bfloat16, with random values, once for each way. Prints for each way and number of prompts
the tokens that came in its share of the time, their rate, the bytes of parameters that were read for them, the most memory
of the device, and whether the tokens are those of the plain model. The first tokens, for which units are recorded and memory
is pinned, are not timed.
"""

import argparse
import gc
import json
import math
import os
import shutil
import time
from pathlib import Path

import torch

import zero_fn as zf
from tests.accelerator import device

__all__ = ["main"]

SHAPES = {"1.2B": (2048, 18, 32_000), "small": (64, 2, 1024)}  # width, layers, vocabulary
PROMPT = 16  # tokens


def llama(shape):
    """On the device, in bfloat16. Its values are large enough that tokens differ from one another."""
    from transformers import LlamaConfig, LlamaForCausalLM

    width, layers, vocabulary = SHAPES[shape]
    config = LlamaConfig(
        vocab_size=vocabulary, hidden_size=width, intermediate_size=4 * width, num_hidden_layers=layers,
        num_attention_heads=width // 64, num_key_value_heads=math.gcd(width // 64, 8), max_position_embeddings=512,
        initializer_range=0.05, bos_token_id=1, eos_token_id=None, pad_token_id=0, dtype="bfloat16",
    )  # fmt: skip
    torch.manual_seed(0)
    with torch.device(device.NAME):
        model = LlamaForCausalLM._from_config(config, dtype=torch.bfloat16)
    assert {parameter.dtype for parameter in model.parameters()} == {torch.bfloat16}
    return model.requires_grad_(False).eval()


def generated(model, prompt, tokens, seconds):
    """The tokens that came, and the seconds they took. The one under way when the time is up still comes."""
    torch.accelerator.synchronize()
    start = time.perf_counter()
    found = model.generate(prompt, max_new_tokens=tokens, do_sample=False, max_time=seconds)
    torch.accelerator.synchronize()
    return found[:, prompt.shape[1] :].cpu(), time.perf_counter() - start


def room(way, folder):
    """Bytes that are free where the parameters of a way rest."""
    if way == "disk":
        return shutil.disk_usage(folder).free
    if way == "host":
        return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_AVPHYS_PAGES")
    return torch.cuda.mem_get_info()[0] if device.NAME == "cuda" else math.inf


def age():
    """Seconds since this process began: torch is imported by then."""
    began = int(Path("/proc/self/stat").read_text().rpartition(")")[2].split()[19])
    return time.clock_gettime(time.CLOCK_BOOTTIME) - began / os.sysconf("SC_CLK_TCK")


def main(arguments=None):
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("device", help="cuda, or the compiled device that pretends")
    parser.add_argument("folder", help="of the fastest local disk")
    parser.add_argument("--shape", choices=SHAPES, default="1.2B")
    parser.add_argument("--tokens", type=int, default=32, help="to generate")
    parser.add_argument("--prompts", type=int, nargs="+", default=[1, 8], help="how many at once")
    parser.add_argument("--seconds", type=float, default=40, help="of the whole program")
    options = parser.parse_args(arguments)
    device.choose(options.device)
    torch.use_deterministic_algorithms(False)
    os.environ["HF_HUB_OFFLINE"] = "1"
    ways = {
        "device": lambda model: model,
        "host": lambda model: zf.offload(model, params=device.host(), donate=True),
        "disk": lambda model: zf.offload(model, params=zf.nvme(options.folder), donate=True),
    }
    plain = {}
    found = {}
    end = time.monotonic() + 0.9 * options.seconds - age()

    def run(way):
        started = time.perf_counter()
        if time.monotonic() > end:
            raise device.Unmeasured("no time is left")
        model = llama(options.shape)
        nbytes = sum(parameter.nbytes for parameter in model.parameters())
        if way != "device" and 1.1 * nbytes > room(way, options.folder):
            raise device.Unmeasured(f"{nbytes / 1e9:.1f} GB of parameters have no room on the {way}")
        model = ways[way](model)
        gc.collect()
        print(f"{way}: {nbytes / 1e9:.2f} GB, made in {time.perf_counter() - started:.1f} s", flush=True)
        for number, count in enumerate(options.prompts):
            generator = torch.Generator().manual_seed(1)
            prompt = torch.randint(2, model.config.vocab_size, (count, PROMPT), generator=generator).to(device.NAME)
            share = (end - time.monotonic()) / ((len(ways) - [*ways].index(way)) * len(options.prompts) - number)
            if share < 0:
                raise device.Unmeasured("no time is left")
            generated(model, prompt, 2, share / 4)
            device.used()
            tokens, seconds = generated(model, prompt, options.tokens, share * 3 / 4)
            passes, (_, most) = tokens.shape[1], device.used()
            expected = plain.setdefault(count, tokens)
            both = min(passes, expected.shape[1])
            alike = (tokens[:, :both] == expected[:, :both]).double().mean().item()
            print(
                f"{way}, {count} at once: {passes} tokens each in {seconds:.2f} s, {count * passes / seconds:.1f} tokens/s, "
                f"{nbytes * passes / seconds / 1e9:.2f} GB/s of parameters, {most / 1e9:.2f} GB of the device, "
                f"{alike:.1%} of the tokens are those of the device",
                flush=True,
            )
            assert both > 0
            assert torch.equal(tokens[:, :both], expected[:, :both]), "other tokens than on the device"

    for way in ways:
        found[way] = device.outcome(way, lambda way=way: run(way))
        gc.collect()
        if device.NAME == "cuda":
            torch.cuda.empty_cache()
    print(json.dumps(found), flush=True)


if __name__ == "__main__":
    main()
