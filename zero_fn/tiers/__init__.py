"""Tensors that rest in another tier than the memory of the device: on the host, or on disks.

tier_tensor       a tensor whose values are in a tier, and that has no memory
record            the tensors of one group in a tier: in memory, on their way, or at rest
parcels           how these lie in one range of bytes
compute_copies    copies in the dtype of computing, beside masters in a tier
offloaded_state   all that a module has in tiers, and gradients on their way there
side_stream       copies between host and accelerator, on streams beside the one that computes
"""
