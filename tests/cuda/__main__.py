"""Runs the tests of this folder where stand-ins are the GPU: `python tests/cuda [pytest ...]`."""

import os
import sys

from install import HERE, PROJECT, install, lay_out

there = install()
source = lay_out(PROJECT / "build/cuda")
os.chdir(source)  # processes that Python starts look for modules here first
command = [str(there.python), "-m", "pytest", str(HERE), *sys.argv[1:]]
os.execve(there.python, command, there.environment(source))
