"""Ranks on this machine, and what every launcher of ranks needs.

launcher           starts ranks: processes forked from a server that has imported torch
rank               what runs in the process of a rank
pickling           functions, values and exceptions as bytes for another process
first_failure      which of several failures of ranks explains the others
from_environment   which rank this process is, from what its launcher has set
rendezvous         where ranks meet before there is a process group
gloo               process groups of gloo with one thread each
preemption         saves and leaves when SIGTERM comes
shared_folder      a folder in shared memory that outlives its processes;
                   `folder_keeper` removes it once nobody needs it
"""
