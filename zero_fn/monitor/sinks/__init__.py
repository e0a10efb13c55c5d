"""Where the numbers of a run go.

sink         the protocol of sinks, and a sink by a word of a command line
outlet       what our sinks have in common: flat names, a full disk, a server that is away
print        a line of text
line_files   CSV, and lines of JSON
prometheus   a port, or a file for node_exporter; what each number means
tensorboard, wandb, mlflow, comet   the library of that name
"""
