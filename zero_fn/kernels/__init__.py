"""Loops in C, compiled by the machine's compiler when they are first needed.

compiler    finds the compiler, keeps the compiled library, and loads it or says why there is none
adam        a step of Adam and AdamW in one pass
codes       tensors in eight bits, with a scale for each block
wire_codes  rows of tensors as they travel, in four or eight bits, and means of them
stochastic_rounding
            float32 to bfloat16 by chance, or to two of them, and back
threads     how many threads do it
nontemporal copies and means that are written past the caches

Without a kernel, torch computes the same result: a machine without a compiler is slower, and its
bits are the same. `library()` says which of the two is the case.

[Note: why not a library for this] `torch.utils.cpp_extension.load` needs ninja and a C++ compiler
and takes 20 to 40 s for the headers of torch; numba and triton's CPU backend bring LLVM along; cffi
in API mode needs Python's headers and a compiler at the same time; wheels with compiled code would
have to be built for every system. These loops need no header but C's own, so the compiler is called
directly (0.5 s, once) and ctypes calls what it made without holding the interpreter.
"""

from zero_fn.kernels.compiler import Library, library

__all__ = ["Library", "library"]
