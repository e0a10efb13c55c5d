"""What a checkpoint is written from and read into: tensors of a running model and its optimizer.

held_tensors     their names, and how they are read and written
streamed_states  those of streamed optimizers, a chunk at a time
load_plan        what of the files goes where, and what does not fit
"""
