"""zero_fn below the libraries that people train with; `import zero_fn` imports none of them.

placing        models take the place of plain ones, and optimizers follow
states         whole values for files that others read; states on the ranks that own them
accelerate     `ZeroAccelerator`
transformers   `ZeroTrainer`, `ZeroTrainerMixin` for any other Trainer, `placed` for `from_pretrained`
"""
