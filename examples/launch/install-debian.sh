#!/bin/sh
# What the tests of launchers start, on Debian 12 or newer: Slurm with munge, Open MPI, MPICH, and ip and tc for two hosts on one.
set -eu
apt-get update
DEBIAN_FRONTEND=noninteractive apt-get install --yes --no-install-recommends slurm-wlm munge openmpi-bin mpich iproute2 util-linux
