"""What a checkpoint is written from and read into: tensors of a running model and its optimizer.

leaves   their names, and how they are read and written
passing  states of streamed optimizers, a chunk at a time
fit      how files fit a model, an optimizer and `extra`
"""
