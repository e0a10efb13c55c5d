"""Tensors that rest in another tier than the memory of the device: on the host, or on disks."""
