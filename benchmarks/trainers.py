"""The matrix of trainers: {trainer} x {what is trained} x {setting}, each with and without retape, compared bit for bit.

    python -m benchmarks.trainers [--only sft/lora] [--out FILE]

A cell trains ten optimizer steps twice. It is right if losses and weights are equal bit for bit, if every step's peak, counted by a
meter that knows nothing of the plan, is inside the budget, and if trainer and model are afterwards as they were.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
import traceback
import warnings
from collections.abc import Callable
from contextlib import contextmanager
from dataclasses import dataclass, field
from itertools import product
from pathlib import Path
from typing import Any

import torch
from torch import nn

from benchmarks.records import record

TRAINERS = ("trainer", "sft", "dpo", "grpo", "reward", "lightning", "accelerate")
TUNED = ("full", "lora", "prefix")
SETTINGS = ("defaults", "bf16+accumulation", "torch_compile", "dynamic padding", "two processes")
STEPS, ROWS, LENGTH, VOCABULARY = 10, 4, 48, 64

# Cells that cannot exist, and why.
IMPOSSIBLE: dict[tuple[str, str, str], str] = {}
