"""What a checkpoint is written from and read into: tensors of a running model and its optimizer.

tensors          their names, and how they are read and written
streamed_states  those of streamed optimizers, a chunk at a time
inventory        what a rank has to save
load_plan        what a rank loads, checked and put where it rests
match            finds by name what of the files goes where, and what does not fit
"""
